"""A teacher spec's plain values become its method's spec, with the labeler's own options in it; and the JSON Schema of
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.teachers.methods import METHODS, method_of
from distill.teachers.res_rag_spec import GeneratorSpec
from distill.teachers.specs import TeacherSpec
from labelers.engines.registry import engine_class, engine_names, engine_schemas
from labelers.registry import labeler_class, labeler_names
from manifests.errors import ConfigError
from manifests.registered import imported
from manifests.specs import validate_spec


def spec_class(method: object) -> type[TeacherSpec]:
    """The spec of a method.

    Raises:
        ConfigError: there is no such method.
    """
    found: type[TeacherSpec] = imported(method_of(method).spec)
    return found


def teacher_keys() -> tuple[str, ...]:
    """The first keys of all methods' specs."""
    return tuple(dict.fromkeys(key for name in METHODS for key in spec_class(name).model_fields))


def read_teacher_spec(values: Mapping[str, Any], *, where: str) -> TeacherSpec:
    """Check plain values.

    Args:
        where: what to call their source in an error.
    Raises:
        ConfigError: a key or value is off; one sentence a fault.
    """
    held = dict(values)
    if "method" not in held:
        raise ConfigError(f"{where}: `method` is missing; want one of {', '.join(METHODS)}")
    try:
        model = spec_class(held["method"])
        labeler = held.get("labeler")
        if isinstance(labeler, str):
            labeler = {"name": labeler}
        if isinstance(labeler, dict):
            if not isinstance(labeler.get("name"), str):
                raise ConfigError(f"`labeler.name` is missing; there are {', '.join(labeler_names())}")
            options = labeler_class(labeler["name"]).Options
            held["labeler"] = validate_spec(options, labeler, where=f"{where}, labeler")
        if isinstance(held.get("generator"), dict):
            held["generator"] = _with_engine_options(held["generator"], where=f"{where}, generator")
    except ConfigError as exc:
        raise exc if str(exc).startswith(where) else ConfigError(f"{where}: {exc}") from exc
    return validate_spec(model, held, where=where)


def _with_engine_options(section: dict[str, Any], *, where: str) -> GeneratorSpec:
    """A section that names an engine, with the engine's own options in it."""
    name = section.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: `name` is missing; there are {', '.join(engine_names())}")
    args = section.get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"{where}: `args` = {args!r}: want a mapping of options")
    options = validate_spec(engine_class(name).Args, args, where=f"{where}.args")
    return validate_spec(GeneratorSpec, {**section, "args": options}, where=where)


def teacher_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) that accepts the keys and short forms that `read_teacher_spec` accepts."""
    template = "#/$defs/{model}"
    definitions: dict[str, Any] = {}
    labelers: list[dict[str, Any]] = [{"enum": labeler_names()}]
    for name in labeler_names():
        model = labeler_class(name).Options.model_json_schema(ref_template=template)
        definitions |= model.pop("$defs", {})
        model["properties"]["name"] = {"const": name}
        definitions[f"labeler-{name}"] = model
        labelers.append({"$ref": f"#/$defs/labeler-{name}"})
    methods = []
    for name in METHODS:
        whole = spec_class(name).model_json_schema(ref_template=template)
        definitions |= whole.pop("$defs", {})
        whole["properties"]["labeler"] = {
            "description": whole["properties"]["labeler"]["description"],
            "anyOf": [*labelers, {"type": "null"}],
        }
        whole["properties"]["method"] = {"const": name}
        if "generator" in whole["properties"]:
            about = whole["properties"]["generator"]["description"]
            whole["properties"]["generator"] = {"description": about, "oneOf": _generators(definitions)}
        whole["required"] = sorted({*whole["required"], "method"})
        methods.append(whole)
    for unused in ("LabelerOptions", "GeneratorSpec", "EngineArgs"):
        definitions.pop(unused, None)
    _take_short_forms(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "relabel teacher",
        "oneOf": methods,
        "$defs": definitions,
    }


def _generators(definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """One alternative for each engine; their definitions go beside the others."""
    models = engine_schemas(GeneratorSpec, definitions)
    definitions |= {f"generator-{name}": model for name, model in models.items()}
    return [{"$ref": f"#/$defs/generator-{name}"} for name in models]


def _take_short_forms(definitions: dict[str, Any]) -> None:
    """A path stands for a source, a source for a list of one; a column's name for a list of one."""
    for model in definitions.values():
        runs = model.get("properties", {}).get("runs")
        if runs is not None:
            source = {"anyOf": [{"type": "string"}, runs["items"]]}
            runs.update(anyOf=[*source["anyOf"], {"type": "array", "items": source}])
            del runs["type"], runs["items"]
    field = definitions["Columns"]["properties"]["document"]
    field["anyOf"] = [{"type": "string"}, {name: field.pop(name) for name in ("type", "items")}]

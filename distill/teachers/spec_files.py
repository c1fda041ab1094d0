"""A teacher spec's plain values become its method's spec, with the labeler's own options in it; and the JSON Schema of
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relabel.distill.teachers.methods import METHODS, method_of
from relabel.distill.teachers.res_rag_spec import GeneratorSpec
from relabel.distill.teachers.specs import TeacherSpec
from relabel.labelers.engines.registry import engine_class, engine_names, engine_schemas
from relabel.labelers.registry import labeler_class, labeler_names, labeler_schemas
from relabel.manifests.errors import ConfigError
from relabel.manifests.json_schemas import DRAFT, ObjectSchema, Schema, of_model, one_or_many, path_or_each, referred
from relabel.manifests.registered import imported
from relabel.manifests.spec_faults import validate_spec
from relabel.manifests.specs import Columns


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
    if "method" not in values:
        raise ConfigError(f"{where}: `method` is missing; want one of {', '.join(METHODS)}")
    found: dict[str, object] = {}
    try:
        model = spec_class(values.get("method"))
        labeler: Any = values.get("labeler")
        if isinstance(labeler, str):
            labeler = {"name": labeler}
        match labeler:
            case {"name": str(name)} as section:
                found |= {"labeler": validate_spec(labeler_class(name).Options, section, where=f"{where}, labeler")}
            case dict():
                raise ConfigError(f"`labeler.name` is missing; there are {', '.join(labeler_names())}")
        if isinstance(generator := values.get("generator"), dict):
            found |= {"generator": _with_engine_options(generator, where=f"{where}, generator")}
    except ConfigError as exc:
        raise exc if str(exc).startswith(where) else ConfigError(f"{where}: {exc}") from exc
    return validate_spec(model, {**values, **found}, where=where)


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


def teacher_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts the keys and short forms that `read_teacher_spec` accepts."""
    definitions: dict[str, Schema] = {}
    labelers = [{"enum": labeler_names()}, *referred(definitions, "labeler", labeler_schemas(definitions))]
    methods = []
    for name in METHODS:
        spec = ObjectSchema(spec_class(name), definitions)
        spec.offer("labeler", anyOf=[*labelers, {"type": "null"}])
        spec.fix("method", name)
        if "generator" in spec.keys:
            generators = engine_schemas(GeneratorSpec, definitions)
            spec.offer("generator", oneOf=referred(definitions, "generator", generators))
        spec.require("method")
        methods.append(spec.values)
    for unused in ("LabelerOptions", "GeneratorSpec", "EngineArgs"):
        definitions.pop(unused, None)
    for runs in (model["properties"].get("runs") for model in definitions.values() if "properties" in model):
        if runs is not None:  # a source stands for a list of one
            source = path_or_each(runs)
            runs.update(anyOf=[*source["anyOf"], {name: runs.pop(name) for name in ("type", "items")}])
    one_or_many(of_model(definitions, Columns, "document"))
    return {"$schema": DRAFT, "title": "relabel teacher", "oneOf": methods, "$defs": definitions}

"""The JSON Schema of a job file: the spec models' own schemas, with one alternative for each registered labeler and
engine.
"""

from __future__ import annotations

from typing import Any

from labelers.engines.registry import engine_schemas
from labelers.registry import labeler_class, labeler_names
from manifests.specs import EngineSpec, JobSpec

TEMPLATE = "#/$defs/{model}"


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) that accepts exactly the keys that `load_job` accepts."""
    whole = JobSpec.model_json_schema(ref_template=TEMPLATE)
    definitions: dict[str, Any] = whole.setdefault("$defs", {})
    for unused in ("LabelerOptions", "EngineSpec", "EngineArgs"):
        definitions.pop(unused, None)
    labelers = []
    for name in labeler_names():
        model = labeler_class(name).Options.model_json_schema(ref_template=TEMPLATE)
        definitions.update(model.pop("$defs", {}))
        definitions[f"labeler-{name}"] = _named(model, name)
        labelers.append({"$ref": f"#/$defs/labeler-{name}"})
    engines = []
    for name, model in engine_schemas(EngineSpec, definitions).items():
        definitions[f"engine-{name}"] = model
        engines.append({"$ref": f"#/$defs/engine-{name}"})
    whole["properties"]["labeler"] = {"description": "What is asked, and how answers are read.", "oneOf": labelers}
    whole["properties"]["engine"] = {"description": "What runs the teacher.", "oneOf": engines}
    _one_or_many(definitions["InputSpec"]["properties"]["path"])
    _one_or_many(whole["properties"]["reuse"])
    _one_or_many(definitions["Columns"]["properties"]["document"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "relabel job", **whole}


def _named(model: dict[str, Any], name: str) -> dict[str, Any]:
    model["properties"]["name"] = {"const": name}
    return model


def _one_or_many(field: dict[str, Any]) -> None:
    """A single string stands for a list of one."""
    many = {key: field.pop(key) for key in ("type", "items") if key in field}
    field["anyOf"] = [{"type": "string"}, many]

"""The JSON Schema of a job file: the spec models' own schemas, with one alternative for each registered labeler and
engine.
"""

from __future__ import annotations

from labelers.engines.registry import engine_schemas
from labelers.registry import labeler_schemas
from manifests.json_schemas import DRAFT, ObjectSchema, Schema, of_model, one_or_many, referred
from manifests.specs import Columns, EngineSpec, InputSpec, JobSpec


def job_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts exactly the keys that `load_job` accepts."""
    definitions: dict[str, Schema] = {}
    job = ObjectSchema(JobSpec, definitions)
    for unused in ("LabelerOptions", "EngineSpec", "EngineArgs"):
        definitions.pop(unused, None)
    job.offer("labeler", oneOf=referred(definitions, "labeler", labeler_schemas(definitions)))
    job.offer("engine", oneOf=referred(definitions, "engine", engine_schemas(EngineSpec, definitions)))
    one_or_many(of_model(definitions, InputSpec, "path"))
    one_or_many(job.keys["reuse"])
    one_or_many(of_model(definitions, Columns, "document"))
    return {"$schema": DRAFT, "title": "relabel job", "$defs": definitions, **job.values}

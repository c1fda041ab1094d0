"""The JSON Schema of a job file: the spec models' own schemas, with one alternative for each registered labeler and
engine; and which keys spec files have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from relabel.labelers.engines.registry import engine_class, engine_names, engine_schemas
from relabel.labelers.registry import labeler_schemas
from relabel.manifests.json_schemas import DRAFT, ObjectSchema, Schema, of_model, one_or_many, referred
from relabel.manifests.specs import Columns, EngineSpec, InputSpec, JobSpec


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


def schemas() -> dict[str, Callable[[], Schema]]:
    """By kind of spec file, what makes its schema."""
    from relabel.distill.students.specs import student_schema
    from relabel.distill.teachers.spec_files import teacher_schema
    from relabel.export.bench.specs import bench_schema

    return {"job": job_schema, "student": student_schema, "teacher": teacher_schema, "bench": bench_schema}


@functools.cache
def plain_keys() -> frozenset[str]:
    """All keys of spec files, but for those that say where a secret is: what stands there is none, whatever the key
    sounds like (`max_tokens_field`).
    """
    options = (engine_class(name).Args for name in engine_names())
    secret = {option for args in options for option in getattr(args, "secret_variables", ())}  # `TakesSecrets`
    return frozenset(key for make in schemas().values() for key in _keys(make())) - secret


def _keys(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _keys(inner)

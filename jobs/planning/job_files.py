"""A job file becomes a checked job: YAML, `RELABEL_*` variables and `--set` flags, resolved through the registries of
labelers and engines.

Precedence: flag, variable, job file, default. `RELABEL_ENGINE__SEED=3` sets `engine.seed`; a value is read as YAML.
Then `${date}` and `${env.NAME}` are resolved in whatever string is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from relabel.jobs.fetching.templates import local_templates
from relabel.jobs.planning.jobs import Job
from relabel.jobs.planning.settings import read_secrets, read_settings
from relabel.jobs.planning.spec_places import Places, path_of, placed, resolved
from relabel.labelers.engines.registry import engine_class
from relabel.labelers.registry import labeler_class
from relabel.manifests.engine_options import PaidByToken, names_prices
from relabel.manifests.errors import ConfigError, RelabelError
from relabel.manifests.secrets.secret_names import STORAGE_KEY
from relabel.manifests.spec_faults import validate_spec
from relabel.manifests.specs import EngineArgs, EngineSpec, JobSpec, PathMark
from relabel.manifests.storage.context import Storage

CACHE_VARIABLE = "RELABEL_CACHE"
"""Folder for fetched models; default `~/.cache/relabel`."""


def load_job(
    spec: str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    day: str | None = None,
) -> Job:
    """Read and check a job file, or values as one would hold them.

    Args:
        spec: path or URL of the file, or its values; then relative paths count from the working directory.
        overrides: `key.path=value` strings from the command line.
        day: what `${date}` means, as 2026-11-19; today if nothing says.
    Raises:
        ConfigError: the file can't be read, or a key, value or variable is off; one sentence a fault.
        UsageError: an override without `=`, or a day that is none.
    """
    settings = read_settings(spec, overrides=overrides, environment=environment, day=day)
    path = settings.places.where
    try:
        job = build_job(settings.values, where=path, cache_dir=environment.get(CACHE_VARIABLE), places=settings.places)
    except ConfigError as exc:
        if not settings.beside:
            raise
        raise ConfigError(f"{exc} (set beside the file: {', '.join(settings.beside)})") from exc
    return replace(job, secrets=read_secrets(job.spec.engine, environment), variables=settings.variables)


class JobPlace(NamedTuple):
    """Where a job lives, how that is reached, and the plain values of its engine."""

    output: str
    storage: Storage
    engine: Any


def output_of(path: str, *, day: str | None = None) -> JobPlace:
    """What commands need that look at a job's output alone.

    Raises:
        ConfigError, UsageError: see `load_job`.
    """
    settings = read_settings(path, day=day)
    storage = storage_of(settings.values, where=path)
    output = settings.values.get("output", "")
    if not isinstance(output, str) or not output:
        raise ConfigError(f"{path}: `output` is missing")
    where = path_of(output, PathMark.PATH, settings.places, ("output",))
    return JobPlace(where, storage, settings.values.get("engine"))


def priced_args(engine: Any) -> EngineArgs | None:
    """An engine's options by its plain values, of a job file or a manifest; None where they do not name both prices, or
    can't be read here.
    """
    with contextlib.suppress(RelabelError, AttributeError, KeyError, TypeError):
        if all(engine["args"].get(name) is not None for name in PaidByToken.__annotations__):
            return validate_spec(engine_class(engine["name"]).Args, engine["args"], where="engine.args")
    return None


def storage_of(values: Mapping[str, Any], *, where: str) -> Storage:
    """How a job's plain values say that storage is reached, for commands that need no more of the job than where things
    lie.

    Raises:
        ConfigError: they are not options by scheme.
    """
    options = values.get(STORAGE_KEY) or {}
    if not isinstance(options, dict) or not all(isinstance(inner, dict) for inner in options.values()):
        raise ConfigError(f"{where}: `{STORAGE_KEY}`: want a mapping of options for each URL scheme")
    return Storage.of(options)


def build_job(values: dict[str, Any], *, where: str, cache_dir: str | None = None, places: Places | None = None) -> Job:
    """Check plain values and resolve the labeler and engine that they name, and where relative paths lead.

    Args:
        where: what to call the values' source in an error.
        cache_dir: where engines keep fetched models, unless the values say.
        places: what relative paths count from; the working directory by default.
    """
    values, here = dict(values), str(Path.cwd())
    places = places or Places(where, here, here)
    labeler = _section(values, "labeler", where)
    engine = _section(values, "engine", where)
    try:
        found_labeler = labeler_class(_name(labeler, "labeler", where))
        found_engine = engine_class(_name(engine, "engine", where))
    except ConfigError as exc:
        raise exc if str(exc).startswith(where) else ConfigError(f"{where}: {exc}") from exc
    values["labeler"] = validate_spec(found_labeler.Options, labeler, where=f"{where}, labeler")
    args = engine.get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"{where}: `engine.args` = {args!r}: want a mapping of options")
    if cache_dir and "cache_dir" in found_engine.Args.model_fields:
        args = {"cache_dir": placed(cache_dir, places.here), **args}
    args = validate_spec(found_engine.Args, args, where=f"{where}, engine.args")
    values["engine"] = validate_spec(EngineSpec, {**engine, "args": args}, where=f"{where}, engine")
    spec = resolved(validate_spec(JobSpec, values, where=where), places)
    if spec.run.max_cost is not None and not names_prices(spec.engine.args):
        raise ConfigError(
            f"{where}: `run.max_cost` = {spec.run.max_cost:g}: what an ask costs is known of an engine that is paid by "
            "the token alone. Set engine.args.price_per_million_input and price_per_million_output (engine openai), or "
            "limit run.max_tokens, or the time by --for."
        )
    storage = Storage.of(spec.storage_options, retry_s=spec.run.store_retry_s, lease_s=spec.run.lease_s)
    with local_templates(spec.labeler, storage) as options:
        return Job(spec, found_labeler(options), found_engine, where, storage)


def _section(values: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    section = values.get(key)
    if section is None:
        raise ConfigError(f"{where}: `{key}` is missing; it needs at least `{key}: {{name: …}}`")
    if not isinstance(section, dict):
        example = section if isinstance(section, str) else "…"
        raise ConfigError(f"{where}: `{key}` = {section!r}: want a mapping, at least `{key}: {{name: {example}}}`")
    return section


def _name(section: dict[str, Any], key: str, where: str) -> str:
    name = section.get("name")
    if name is None:
        raise ConfigError(f"{where}: `{key}.name` is missing")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: `{key}.name` = {name!r}: want the name of a registered {key}")
    return name

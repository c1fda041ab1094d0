"""A job file becomes a checked job: YAML, `RELABEL_*` variables and `--set` flags, resolved through the registries of
labelers and engines.

Precedence: flag, variable, job file, default. `RELABEL_ENGINE__SEED=3` sets `engine.seed`; a value is read as YAML.
Then `${date}` and `${env.NAME}` are resolved in whatever string is there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import SecretStr

from jobs.fetching.models import fetch_model
from jobs.fetching.templates import local_templates
from jobs.planning.old_places import old_place, where_it_lives
from jobs.planning.spec_places import Places, mark_of, path_of, placed, places_of, resolved
from jobs.planning.spec_variables import spec_variables
from jobs.planning.spec_yaml import parse_yaml, read_spec_file, yaml_fault
from labelers.engines.registry import EngineClass, engine_class
from labelers.registry import Labeler, declared_columns, declared_reads, labeler_class
from manifests.engine_options import KeepsModels, secret_variables
from manifests.errors import ConfigError, UsageError
from manifests.inputs.dataset import Dataset, Known, open_dataset
from manifests.labels import Reads
from manifests.runs.fingerprints import fingerprint_parts, is_plan_of
from manifests.runs.label_keys import BY_CONTENT, stage_digests
from manifests.runs.plans import PLAN_NAME, load_plan
from manifests.secrets.redaction import keep_secret, secret_in
from manifests.secrets.secret_names import STORAGE_KEY, names_secret
from manifests.spec_faults import validate_spec
from manifests.specs import EngineSpec, JobSpec, PathMark
from manifests.storage.context import Storage
from manifests.storage.filesystems import is_url, place_of
from manifests.storage.run_stores import open_run_store

ENVIRONMENT_PREFIX = "RELABEL_"
CACHE_VARIABLE = "RELABEL_CACHE"
"""Folder for fetched models; default `~/.cache/relabel`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked spec with what it names."""

    spec: JobSpec
    labeler: Labeler
    engine_class: EngineClass
    where: str
    storage: Storage
    """How input, output, templates and models are reached."""
    secrets: Mapping[str, SecretStr] = field(default_factory=dict, repr=False, compare=False)
    """What the engine alone is given: by option, the value of the variable that the option names.
    No part of the spec.
    """
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the spec's variables were resolved to, by name as written (`date`, `env.REGION`)."""

    @property
    def reads(self) -> Reads:
        """What its labeler looks at."""
        return declared_reads(self.labeler, name=self.spec.labeler.name)

    def open_dataset(self, known: Known | None = None) -> Dataset:
        """Find the input and check its columns.

        Args:
            known: see `open_dataset`.
        Raises:
            ConfigError: the output lies inside the input, where the labels would be read as more input.
            InputError: see `open_dataset`.
        """
        for path in self.spec.input.path:
            self.refuse_output_inside(path, "input.path")
        return open_dataset(self.spec.input, self.storage, reads=self.reads, known=known)

    def refuse_output_inside(self, path: str, key: str) -> None:
        """Raise where the labels would be read as input.

        Raises:
            ConfigError: the output is inside this path.
        """
        inside = _steps_below(path, self.spec.output)
        if inside is not None and not any(step.startswith((".", "_")) for step in inside):
            raise ConfigError(
                f"{self.where}: `output` {self.spec.output} is inside {key} {path}, where its labels would be read as "
                "input. Give an output elsewhere."
            )

    def model_digest(self) -> str:
        """The digest of the engine's model, which is fetched before if an engine that keeps a cache names one
        elsewhere.

        Raises:
            ModelError: there is no such model, or it can't be fetched.
        """
        engine = self.spec.engine
        if engine.model is not None and isinstance(engine.args, KeepsModels):
            cache = engine.args.cache_dir
            fetch_model(engine.model, self.storage, cache_dir=Path(cache) if cache else None)
        return self.engine_class.model_digest(engine)

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of. May fetch a model, never loads one."""
        engine = self.spec.engine
        args = engine.args.model_dump(mode="json")
        args |= {
            key: BY_CONTENT
            for key, info in type(engine.args).model_fields.items()
            if mark_of(info) and args[key] is not None
        }
        return fingerprint_parts(
            dataset,
            limit=self.spec.input.limit,
            overlong=self.spec.input.overlong,
            labeler=self.spec.labeler.model_dump(mode="json", exclude={"templates"}),
            label_columns={
                column.name: column.kind for column in declared_columns(self.labeler, name=self.spec.labeler.name)
            },
            templates=self.labeler.template_digests,
            stages=stage_digests(self.labeler.probe()),
            engine={
                "name": engine.name,
                "seed": engine.seed,
                "max_prompt_tokens": engine.max_prompt_tokens,
                "args": {key: value for key, value in args.items() if key not in engine.args.speed_only},
                "chat_template_kwargs": engine.chat_template_kwargs,
            },
            model_digest=self.model_digest(),
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )


def _steps_below(folder: str, path: str) -> tuple[str, ...] | None:
    """The steps from a folder down to a path, local or by URL; None if the path is not below it."""
    folder, path = place_of(folder), place_of(path)
    if is_url(folder) or is_url(path):
        outer, inner = f"{folder}/", f"{path}/"
        return tuple(inner[len(outer) :].strip("/").split("/")) if inner.startswith(outer) else None
    outer_path, inner_path = Path(folder), Path(path)
    return (
        inner_path.relative_to(outer_path).parts
        if outer_path.is_dir() and inner_path.is_relative_to(outer_path)
        else None
    )


class SpecKind(NamedTuple):
    """A kind of spec file.

    Args:
        name: what it is a spec of, for errors.
        fields: its first keys; a variable that names another is some other spec's, or has nothing to do with us.
        example: of a `--set` flag.
        beginning: where to get one to start from, for errors.
    """

    name: str
    fields: tuple[str, ...]
    example: str
    beginning: str


JOB = SpecKind("job", tuple(JobSpec.model_fields), "engine.seed=3", "`relabel init` writes a job file to start from")


class Settings(NamedTuple):
    """A spec file's plain values, unchecked.

    Args:
        beside: which variables and flags set some of them.
        variables: what the values' variables (`date`, `env.REGION`) were resolved to.
        places: what relative paths among them count from.
    """

    values: dict[str, Any]
    beside: list[str]
    variables: dict[str, str]
    places: Places


def load_job(
    path: str, *, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ, day: str | None = None
) -> Job:
    """Read and check a job file.

    Args:
        overrides: `key.path=value` strings from the command line.
        day: what `${date}` means, as 2026-11-19; today if nothing says.
    Raises:
        ConfigError: the file can't be read, or a key, value or variable is off; one sentence a fault.
        UsageError: an override without `=`, or a day that is none.
    """
    settings = read_settings(path, overrides=overrides, environment=environment, day=day)

    def build(places: Places) -> Job:
        try:
            job = build_job(settings.values, where=path, cache_dir=environment.get(CACHE_VARIABLE), places=places)
        except ConfigError as exc:
            if not settings.beside:
                raise
            raise ConfigError(f"{exc} (set beside the file: {', '.join(settings.beside)})") from exc
        return replace(job, secrets=read_secrets(job.spec.engine, environment), variables=settings.variables)

    before = old_place(settings.values, settings.places, marks=(PLAN_NAME,))
    return (
        build(settings.places)
        if before is None
        else where_it_lives(before, build, settings.places, holds=_holds_its_plan)
    )


def output_of(path: str, *, day: str | None = None) -> tuple[str, Storage]:
    """Where a job lives and how that is reached, for commands that need no more of it.

    Raises:
        ConfigError, UsageError: see `load_job`.
    """
    settings = read_settings(path, day=day)
    if old_place(settings.values, settings.places, marks=(PLAN_NAME,)) is not None:
        job = load_job(path, day=day)
        return job.spec.output, job.storage
    storage = storage_of(settings.values, where=path)
    output = settings.values.get("output", "")
    if not isinstance(output, str) or not output:
        raise ConfigError(f"{path}: `output` is missing")
    return path_of(output, PathMark.PATH, settings.places, ("output",)), storage


def _holds_its_plan(job: Job) -> bool:
    plan = load_plan(open_run_store(job.spec.output, job.storage, single_writer=job.spec.run.single_writer))
    return plan is not None and is_plan_of(plan, job.parts(job.open_dataset()))


def read_secrets(engine: EngineSpec, environment: Mapping[str, str]) -> dict[str, SecretStr]:
    """Values of the variables that the engine's options name, by option; wrapped, so that no repr, dump or log shows
    them.

    Which options name one, an engine's option model says in `secret_variables`.
    """
    held = {option: name for option, name in secret_variables(engine.args).items() if name in environment}
    for name in held.values():
        keep_secret(environment[name], f"the variable {name}")
    return {option: SecretStr(environment[name]) for option, name in held.items()}


def read_settings(
    path: str,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    day: str | None = None,
    kind: SpecKind = JOB,
) -> Settings:
    """A spec file's plain values with variables and flags laid over them and the variables in their strings resolved.

    Args:
        kind: whose keys variables may set.
    Raises:
        ConfigError: the file can't be read, a variable or flag sets a key below what is not a mapping, a string
            names a variable that there is not, or holds a secret.
        UsageError: a flag without `=`, a day that is none, or one that the spec has no use for.
    """
    values = read_spec_file(path, beginning=kind.beginning, keys=kind.fields)
    beside = []
    outside = {tuple(override.partition("=")[0].split(".")) for override in overrides}
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and keys[0] in kind.fields:
            _set(values, keys, text, where=f"variable {name}")
            beside.append(f"variable {name}")
            outside.add(tuple(keys))
        elif name.startswith(ENVIRONMENT_PREFIX):
            # only what looks like a key with a slip in it: a cluster may set names of its own (RELABEL_SERVICE_HOST,
            # for a service)
            meant = difflib.get_close_matches(keys[0], kind.fields, n=1, cutoff=0.8)
            if meant:
                raise ConfigError(
                    f"variable {name}: no key of a {kind.name} is called `{keys[0]}`; did you mean "
                    f"{ENVIRONMENT_PREFIX}{meant[0].upper()}?"
                )
    lay_over(values, overrides, example=kind.example)
    beside += map(_shown, overrides)
    variables = spec_variables(environment, day)
    storage = values.pop(STORAGE_KEY, None)
    plain = variables.resolved(values, where=path)
    refuse_secrets(plain, where=path)
    if storage is not None:
        plain[STORAGE_KEY] = _resolved_secrets(storage, environment, where=path)
    if day is not None and not any(name.partition(":")[0] == "date" for name in variables.used):
        raise UsageError(f"--date {day}: {path} does not use ${{date}}, so that no day changes what it does.")
    return Settings(plain, beside, variables.used, places_of(path, environment=environment, outside=frozenset(outside)))


def lay_over(values: dict[str, Any], overrides: Sequence[str], *, example: str = JOB.example) -> dict[str, Any]:
    """Plain values with `KEY=VALUE` flags laid over them, in place.

    Args:
        example: of a flag, for the error.
    Raises:
        ConfigError: a flag sets a key below something that is not a mapping, or its value is not YAML.
        UsageError: a flag without `=`.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(
                f"--set {override}: want KEY=VALUE, for instance --set {example}. A value with > or < stands in "
                "quotes, else the shell takes it for the name of a file: --set 'require.kappa=>=0.4'."
            )
        _set(values, key.split("."), text, where=_shown(override))
    return values


def _shown(override: str) -> str:
    """A flag as errors show it: without the value of a key that holds secrets, or may have been meant to."""
    key = override.partition("=")[0]
    return f"--set {key}=…" if _is_secret(key.split(".")) else f"--set {override}"


def _is_secret(keys: list[str]) -> bool:
    """Whether what a key holds is not to be shown."""
    return bool(difflib.get_close_matches(keys[0].strip().lower(), [STORAGE_KEY])) or names_secret(keys[-1])


def refuse_secrets(value: Any, *, where: str, key: str = "") -> None:
    """Refuse a spec that holds a secret: what it says is written into plans, manifests and pages.

    Raises:
        ConfigError: names the key, and never shows what it holds.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            refuse_secrets(inner, where=where, key=f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            refuse_secrets(inner, where=where, key=key)
    elif isinstance(value, str) and (found := secret_in(value)) is not None:
        raise ConfigError(
            f"{where}: `{key}` holds {found}, and a spec's values are written to the manifest. Engines read keys from "
            "the environment (engine.args.api_key_env), stores by the usual variables and profiles, or "
            "storage_options."
        )


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


def _resolved_secrets(value: Any, environment: Mapping[str, str], *, where: str) -> Any:
    """Storage options with `${env.NAME}` in their strings replaced; unlike other variables these are neither recorded
    nor shown.
    """
    if isinstance(value, dict):
        return {name: _resolved_secrets(inner, environment, where=where) for name, inner in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value

    def found(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise ConfigError(f"{where}: `{STORAGE_KEY}`: the variable {match[1]} is not set")
        return environment[match[1]]

    return re.sub(r"\$\{env\.(\w+)\}", found, value)


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


def _set(values: dict[str, Any], keys: list[str], text: str, *, where: str) -> None:
    inner = values
    for key in keys[:-1]:
        held = inner.setdefault(key, {})
        if not isinstance(held, dict):
            shown = "a text" if _is_secret(keys) else repr(held)
            raise ConfigError(f"{where}: `{key}` is {shown}, not a mapping")
        inner = held
    try:
        inner[keys[-1]] = parse_yaml(text)
    except yaml.YAMLError as exc:
        what = "its value is not YAML" if _is_secret(keys) else f"{text!r} is not YAML: {yaml_fault(exc)}"
        raise ConfigError(f"{where}: {what}.") from exc

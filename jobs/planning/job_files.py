"""A job file becomes a checked job: YAML, `RELABEL_*` variables and `--set` flags, resolved through the registries of labelers and engines.

Precedence: flag, variable, job file, default. `RELABEL_ENGINE__SEED=3` sets `engine.seed`; a value is read as YAML. Then `${date}` and
`${env.NAME}` are resolved in whatever string is there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import SecretStr

from jobs.planning.spec_variables import spec_variables
from labelers.engines.registry import EngineClass, engine_class
from labelers.registry import Labeler, labeler_class
from manifests.dataset import Dataset, Known, open_dataset
from manifests.errors import ConfigError, RelabelError, UsageError
from manifests.filesystems import is_url, place_of, use_storage_options
from manifests.label_keys import stage_digests
from manifests.plans import fingerprint_parts
from manifests.retries import use_limit
from manifests.specs import EngineSpec, JobSpec, validate_spec
from manifests.url_files import read_url

ENVIRONMENT_PREFIX = "RELABEL_"
STORAGE_KEY = "storage_options"
CACHE_VARIABLE = "RELABEL_CACHE"
"""Folder for fetched models; default `~/.cache/relabel`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked spec with what it names."""

    spec: JobSpec
    labeler: Labeler
    engine_class: EngineClass
    where: str
    secrets: Mapping[str, SecretStr] = field(default_factory=dict, repr=False, compare=False)
    """What the engine alone is given: by option, the value of the variable that the option names. No part of the spec."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the spec's variables were resolved to, by name as written (`date`, `env.REGION`)."""

    def open_dataset(self, known: Known | None = None) -> Dataset:
        """Find the input and check its columns.

        Args:
            known: see `open_dataset`.
        Raises:
            ConfigError: the output lies inside the input, where the labels would be read as more input.
            InputError: see `open_dataset`.
        """
        for path in self.spec.input.path:
            inside = _steps_below(path, self.spec.output)
            if inside is not None and not any(step.startswith((".", "_")) for step in inside):
                raise ConfigError(
                    f"{self.where}: `output` {self.spec.output} lies inside input.path {path}, where its labels would be read as input. "
                    "Give an output elsewhere."
                )
        return open_dataset(self.spec.input, reads_context=self.labeler.uses_context, known=known)

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of. May resolve a model reference, never loads a model."""
        engine = self.spec.engine
        args = engine.args.model_dump(mode="json")
        return fingerprint_parts(
            dataset,
            limit=self.spec.input.limit,
            overlong=self.spec.input.overlong,
            labeler=self.spec.labeler.model_dump(mode="json", exclude={"templates"}),
            templates=self.labeler.template_digests,
            stages=stage_digests(self.labeler.probe()),
            engine={
                "name": engine.name,
                "seed": engine.seed,
                "max_prompt_tokens": engine.max_prompt_tokens,
                "args": {key: value for key, value in args.items() if key not in engine.args.speed_only},
                "chat_template_kwargs": engine.chat_template_kwargs,
            },
            model_digest=self.engine_class.model_digest(engine),
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )


def _steps_below(folder: str, path: str) -> tuple[str, ...] | None:
    """The steps from a folder down to a path, local or by URL; None if the path is not below it."""
    folder, path = place_of(folder), place_of(path)
    if is_url(folder) or is_url(path):
        outer, inner = f"{folder}/", f"{path}/"
        return tuple(inner[len(outer) :].strip("/").split("/")) if inner.startswith(outer) else None
    outer_path, inner_path = Path(folder), Path(path)
    return inner_path.relative_to(outer_path).parts if outer_path.is_dir() and inner_path.is_relative_to(outer_path) else None


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
    """

    values: dict[str, Any]
    beside: list[str]
    variables: dict[str, str]


def load_job(path: str, *, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ, day: str | None = None) -> Job:
    """Read and check a job file.

    Args:
        overrides: `key.path=value` strings from the command line.
        day: what `${date}` means, as 2026-11-19; today if nothing says.
    Raises:
        ConfigError: the file can't be read, or a key, value or variable is off; one sentence a fault.
        UsageError: an override without `=`, or a day that is none.
    """
    values, beside, variables = read_settings(path, overrides=overrides, environment=environment, day=day)
    try:
        job = build_job(values, where=path, cache_dir=environment.get(CACHE_VARIABLE))
        return replace(job, secrets=read_secrets(job.spec.engine, environment), variables=variables)
    except ConfigError as exc:
        if not beside:
            raise
        raise ConfigError(f"{exc} (set beside the file: {', '.join(beside)})") from exc


def read_secrets(engine: EngineSpec, environment: Mapping[str, str]) -> dict[str, SecretStr]:
    """Values of the variables that the engine's options name, by option; wrapped, so that no repr, dump or log shows them.

    Which options name one, an engine's option model says in `secret_variables`.
    """
    names = {option: getattr(engine.args, option) for option in sorted(getattr(engine.args, "secret_variables", ()))}
    return {option: SecretStr(environment[name]) for option, name in names.items() if name in environment}


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
        ConfigError: the file can't be read, a variable or flag sets a key below something that is no mapping, or a string names a variable
            that there is not.
        UsageError: a flag without `=`, a day that is none, or one that the spec has no use for.
    """
    values = read_yaml(path, kind=kind)
    beside = []
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and keys[0] in kind.fields:
            _set(values, keys, text, where=f"variable {name}")
            beside.append(f"variable {name}")
        elif name.startswith(ENVIRONMENT_PREFIX):
            # only what looks like a key with a slip in it: a cluster may set names of its own (RELABEL_SERVICE_HOST, for a service)
            meant = difflib.get_close_matches(keys[0], kind.fields, n=1, cutoff=0.8)
            if meant:
                raise ConfigError(
                    f"variable {name}: no key of a {kind.name} is called `{keys[0]}`; did you mean {ENVIRONMENT_PREFIX}{meant[0].upper()}?"
                )
    lay_over(values, overrides, example=kind.example)
    beside += map(_shown, overrides)
    variables = spec_variables(environment, day)
    storage = values.pop(STORAGE_KEY, None)
    resolved = variables.resolved(values, where=path)
    if storage is not None:
        resolved[STORAGE_KEY] = _resolved_secrets(storage, environment, where=path)
    if day is not None and not any(name.partition(":")[0] == "date" for name in variables.used):
        raise UsageError(f"--date {day}: {path} does not use ${{date}}, so that no day changes what it does.")
    return Settings(resolved, beside, variables.used)


def lay_over(values: dict[str, Any], overrides: Sequence[str], *, example: str = JOB.example) -> dict[str, Any]:
    """Plain values with `KEY=VALUE` flags laid over them, in place.

    Args:
        example: of a flag, for the error.
    Raises:
        ConfigError: a flag sets a key below something that is no mapping, or its value is not YAML.
        UsageError: a flag without `=`.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {override}: want KEY=VALUE, for instance --set {example}")
        _set(values, key.split("."), text, where=_shown(override))
    return values


def _shown(override: str) -> str:
    """A flag as errors show it: without the value of a key that holds secrets, or may have been meant to."""
    key = override.partition("=")[0]
    section = key.partition(".")[0].strip().lower()
    return f"--set {key}=…" if difflib.get_close_matches(section, [STORAGE_KEY]) else f"--set {override}"


def use_storage(values: Mapping[str, Any], *, where: str) -> None:
    """Set this process's storage options from a job's plain values, for commands that need no more of the job than where things lie.

    Raises:
        ConfigError: they are not options by scheme.
    """
    options = values.get(STORAGE_KEY) or {}
    if not isinstance(options, dict) or not all(isinstance(inner, dict) for inner in options.values()):
        raise ConfigError(f"{where}: `{STORAGE_KEY}`: want a mapping of options for each URL scheme")
    use_storage_options(options)


def _resolved_secrets(value: Any, environment: Mapping[str, str], *, where: str) -> Any:
    """Storage options with `${env.NAME}` in their strings replaced; unlike other variables these are neither recorded nor shown."""
    if isinstance(value, dict):
        return {name: _resolved_secrets(inner, environment, where=where) for name, inner in value.items()}
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise ConfigError(f"{where}: `{STORAGE_KEY}`: the variable {match[1]} is not set")
        return environment[match[1]]

    return re.sub(r"\$\{env\.(\w+)\}", found, value)


def build_job(values: dict[str, Any], *, where: str, cache_dir: str | None = None) -> Job:
    """Check plain values and resolve the labeler and engine that they name.

    Args:
        where: what to call the values' source in an error.
        cache_dir: where engines keep fetched models, unless the values say.
    """
    values = dict(values)
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
        args = {"cache_dir": cache_dir, **args}
    args = validate_spec(found_engine.Args, args, where=f"{where}, engine.args")
    values["engine"] = validate_spec(EngineSpec, {**engine, "args": args}, where=f"{where}, engine")
    spec = validate_spec(JobSpec, values, where=where)
    use_storage_options(spec.storage_options)  # before the labeler, whose templates may lie at a URL
    use_limit(spec.run.store_retry_s)
    return Job(spec, found_labeler(spec.labeler), found_engine, where)


def read_yaml(path: str, *, kind: SpecKind = JOB) -> dict[str, Any]:
    """A YAML mapping; a key that stands twice is an error, not a silent last-one-wins.

    Raises:
        ConfigError: there is none, it is no YAML, or no mapping; says where, and what belongs there.
    """
    try:
        text = read_url(path).decode() if is_url(path) else Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file. {kind.beginning}.") from exc
    except RelabelError:
        raise
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: can't be read ({exc}).") from exc
    try:
        values = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ", ".join(filter(None, (getattr(exc, "context", None), getattr(exc, "problem", None)))) or str(exc).replace("\n", " ")
        raise ConfigError(f"{path}{place}: not YAML: {what}.") from exc
    except (ValueError, RecursionError) as exc:  # `!!int x`, or brackets a thousand deep
        raise ConfigError(f"{path}: holds a value that can't be read as YAML ({exc}).") from exc
    if values is None:
        raise ConfigError(f"{path}: is empty. {kind.beginning}.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a mapping with the keys {', '.join(kind.fields)}; got {type(values).__name__}.")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, and reads dates as the text they are: a job has no dates, but it may be named by one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, or refuse a key that stands twice or can't be one."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key} can't be a key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key}` stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


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
            shown = "a text" if keys[0] == STORAGE_KEY else repr(held)
            raise ConfigError(f"{where}: `{key}` is {shown}, not a mapping")
        inner = held
    try:
        inner[keys[-1]] = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        shown = "its value" if keys[0] == STORAGE_KEY else repr(text)
        raise ConfigError(f"{where}: {shown} is not YAML.") from exc

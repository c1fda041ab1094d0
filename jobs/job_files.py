"""A job file becomes a checked job: YAML, `RELABEL_*` variables and `--set` flags, resolved through the registries of labelers and engines.

Precedence: flag, variable, job file, default. `RELABEL_ENGINE__SEED=3` sets `engine.seed`; a value is read as YAML.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from labelers.engines.registry import EngineClass, engine_class
from labelers.registry import Labeler, labeler_class
from manifests.dataset import Dataset, open_dataset
from manifests.errors import ConfigError, UsageError
from manifests.plans import fingerprint_parts
from manifests.specs import EngineSpec, JobSpec, validate_spec

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
    secrets: Mapping[str, SecretStr] = field(default_factory=dict, repr=False, compare=False)
    """What the engine alone is given: by option, the value of the variable that the option names. No part of the spec."""

    def open_dataset(self) -> Dataset:
        """Find the input and check its columns.

        Raises:
            ConfigError: the output lies inside the input, where the labels would be read as more input.
            InputError: see `open_dataset`.
        """
        output = Path(self.spec.output).resolve()
        for path in self.spec.input.path:
            folder = Path(path).resolve()
            inside = output.relative_to(folder).parts if folder.is_dir() and output.is_relative_to(folder) else ("_",)
            if not any(step.startswith((".", "_")) for step in inside):
                raise ConfigError(
                    f"{self.where}: `output` {self.spec.output} lies inside input.path {path}, where its labels would be read as input. "
                    "Give an output elsewhere."
                )
        return open_dataset(self.spec.input, reads_context=self.labeler.uses_context)

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


def load_job(path: str, *, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> Job:
    """Read and check a job file.

    Args:
        overrides: `key.path=value` strings from the command line.
    Raises:
        ConfigError: the file can't be read, or a key or value is off; one sentence a fault.
        UsageError: an override without `=`.
    """
    values, beside = read_settings(path, overrides=overrides, environment=environment)
    try:
        job = build_job(values, where=path, cache_dir=environment.get(CACHE_VARIABLE))
        return replace(job, secrets=read_secrets(job.spec.engine, environment))
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
    path: str, *, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, Any], list[str]]:
    """A job file's plain values with variables and flags laid over them, unchecked; and where each of those came from.

    Raises:
        ConfigError: the file can't be read, or a variable or flag sets a key below something that is no mapping.
        UsageError: a flag without `=`.
    """
    values = read_yaml(path)
    beside = []
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and keys[0] in JobSpec.model_fields:
            _set(values, keys, text, where=f"variable {name}")
            beside.append(f"variable {name}")
        elif name.startswith(ENVIRONMENT_PREFIX):
            # only what looks like a key with a slip in it: a cluster may set names of its own (RELABEL_SERVICE_HOST, for a service)
            meant = difflib.get_close_matches(keys[0], JobSpec.model_fields, n=1, cutoff=0.8)
            if meant:
                raise ConfigError(
                    f"variable {name}: no key of a job is called `{keys[0]}`; did you mean {ENVIRONMENT_PREFIX}{meant[0].upper()}?"
                )
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(f"--set {override}: want KEY=VALUE, for instance --set engine.seed=3")
        _set(values, key.split("."), text, where=f"--set {override}")
        beside.append(f"--set {override}")
    return values, beside


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
    for key, text in (("output", spec.output), *(("input.path", path) for path in spec.input.path)):
        if key == "output" and "://" in text:
            raise ConfigError(f"{where}: `output` = {text}: this version writes to local folders alone; give a path")
        if "${" in text:
            raise ConfigError(f"{where}: `{key}` = {text}: variables in braces are not known to this version; write the path out")
    return Job(spec, found_labeler(spec.labeler), found_engine, where)


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML mapping; a key that stands twice is an error, not a silent last-one-wins."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file. `relabel init` writes a job file to start from.") from exc
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
        raise ConfigError(f"{path}: is empty. `relabel init` writes a job file to start from.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a mapping with the keys {', '.join(JobSpec.model_fields)}; got {type(values).__name__}.")
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
            raise ConfigError(f"{where}: `{key}` is {held!r}, not a mapping")
        inner = held
    try:
        inner[keys[-1]] = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: {text!r} is not YAML.") from exc

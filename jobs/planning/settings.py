"""What a spec's file, the environment and `--set` say together, with the secrets that they name."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from pydantic import SecretStr

from relabel.jobs.planning.job_schema import plain_keys
from relabel.jobs.planning.spec_places import Places, places_of
from relabel.jobs.planning.spec_variables import spec_variables
from relabel.jobs.planning.spec_yaml import parse_yaml, read_spec_file, yaml_fault
from relabel.manifests.engine_options import secret_variables
from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.secrets.redaction import keep_secret, secret_in
from relabel.manifests.secrets.secret_names import STORAGE_KEY, names_secret
from relabel.manifests.specs import EngineSpec, JobSpec

ENVIRONMENT_PREFIX = "RELABEL_"


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
    spec: str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    day: str | None = None,
    kind: SpecKind = JOB,
) -> Settings:
    """A spec file's plain values with variables and flags laid over them and the variables in their strings resolved.

    Args:
        spec: path or URL of the file, or the values that one would hold; then paths count from the working directory.
        kind: whose keys variables may set.
    Raises:
        ConfigError: the file can't be read, a variable or flag sets a key below what is not a mapping, a string
            names a variable that there is not, or holds a secret.
        UsageError: a flag without `=`, a day that is none, or one that the spec has no use for.
    """
    if isinstance(spec, str):
        path, values = spec, read_spec_file(spec, beginning=kind.beginning, keys=kind.fields)
    else:
        path, values = f"the {kind.name}'s spec", copy.deepcopy(dict(spec))
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
    if difflib.get_close_matches(keys[0].strip().lower(), [STORAGE_KEY]):
        return True
    return names_secret(keys[-1]) and keys[-1] not in plain_keys()


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

"""Settings of a spec: its file, `RELABEL_*` variables and `--set` flags, with JSON Schemas, path resolution, variables
and secrets."""

from __future__ import annotations

import contextlib
import copy
import difflib
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from relabel.labelers.registry import engine_schemas, labeler_schemas
from relabel.manifests.errors import ConfigError, RelabelError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.secrets import STORAGE_KEY, keep_secret, names_secret, secret_in, texts_in
from relabel.manifests.specs import (
    DRAFT,
    DisputedText,
    EngineSpec,
    JobSpec,
    ObjectSchema,
    PathMark,
    Schema,
    Spec,
    nearest,
    referred,
    secret_variables,
)
from relabel.manifests.store import read_url

# ------------------------------------------------------------------------------
# YAML's loader for specs: the core schema of YAML 1.2.


_TAG = "tag:yaml.org,2002:"
_DISPUTED_TAG = "!disputed"
_PLAIN: tuple[tuple[str, str, str], ...] = (  # kind, first letters, form
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    ("merge", "<", r"<<"),
)
_DISPUTED = (
    r"(?i:yes|no|on|off)"  # truth in YAML 1.1
    r"|[-+]?0[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0b[01_]+"  # octal and binary
    r"|[-+]?[0-9][0-9.]*_[0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0x[0-9a-fA-F_]+"  # thousands set off
    r"|[-+]?[0-9][0-9_]*(?::[0-9]{1,2})+(?:\.[0-9_]*)?"  # base 60
)


class SpecLoader(yaml.SafeLoader):
    """Takes the kinds of values that JSON has, and refuses tags of others."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, or refuse a key that occurs twice or can't be one; here, before `<<` brings keys that may
        be overridden.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or mapping can't be a key", key_node.start_mark
                )
            line = key_node.start_mark.line + 1
            key = key_node.value if key_node.tag == f"{_TAG}merge" else self.construct_object(key_node)
            if key in lines:
                problem = f"the key `{key}` is given twice, in lines {lines[key]} and {line}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            lines[key] = line
        return node

    def plain_value(self, node: yaml.ScalarNode) -> Any:
        """A null, truth or number of the core schema, by its tag."""
        text = self.construct_scalar(node)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if kind == "float":
                return float(re.sub(r"\.(?=[iInN])", "", text))
        except ValueError as exc:  # a tag on another word, or thousands of digits
            raise yaml.constructor.ConstructorError(
                None, None, f"{text[:40]!r} is not of type {kind}", node.start_mark
            ) from exc
        return None if kind == "null" else text.lower() == "true"

    def disputed(self, node: yaml.ScalarNode) -> DisputedText:
        """A text that might have been meant as something else."""
        return DisputedText(self.construct_scalar(node))


SpecLoader.yaml_implicit_resolvers = {}
SpecLoader.yaml_constructors = {
    **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)},
    _DISPUTED_TAG: SpecLoader.disputed,
}
for _kind, _firsts, _form in _PLAIN:
    SpecLoader.add_implicit_resolver(
        f"{_TAG}{_kind}", re.compile(rf"(?:{_form})\Z"), [*_firsts, *([""] if _kind == "null" else [])]
    )
    if _kind != "merge":
        SpecLoader.add_constructor(f"{_TAG}{_kind}", SpecLoader.plain_value)
SpecLoader.add_implicit_resolver(_DISPUTED_TAG, re.compile(rf"(?:{_DISPUTED})\Z"), "yYnNoO-+0123456789")


# ------------------------------------------------------------------------------
# YAML as specs and `--set` values are written in: the core schema of YAML 1.2, within bounds, and nothing that could
# surprise.
#
# PyYAML reads YAML 1.1, in which `no` is false, `010` is 8 and `1:30` is 90. Here a plain word is true, false, null, a
# number or a text, as YAML 1.2 has it. A word on which the two versions differ is kept as a `DisputedText`: the type of
# the key that it is given to decides (`columns: {query: no}` is a text, `calibrate: no` is false, `shards: 010` is
# ten), and a key that takes anything refuses it.


MAX_BYTES = 1 << 20
"""Of a spec file; a larger one is some other file, given by mistake."""


def read_spec_file(path: str, *, beginning: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The mapping in a spec file.

    Args:
        path: local or a URL.
        beginning: where to get one to start from, for errors.
        keys: that belong there, for errors.
    Raises:
        ConfigError: there is none, it is too large, no UTF-8, no YAML or no mapping; says where, and what belongs
            there.
    """
    try:
        data = read_url(path, Storage()) if is_url(path) else _read_file(path)
        text = data.decode()
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file. {beginning}.") from exc
    except IsADirectoryError as exc:
        raise ConfigError(
            f"{path}: can't be read: a folder, and a file is wanted. For an output, give its job file."
        ) from exc
    except RelabelError:
        raise
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: can't be read: byte {exc.start} is not UTF-8. Save the file as UTF-8.") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: can't be read ({exc}).") from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, so it is not a spec. {beginning}.")
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}{_place(exc)}: not YAML: {yaml_fault(exc)}.") from exc
    if values is None:
        raise ConfigError(f"{path}: is empty. {beginning}.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a mapping with the keys {', '.join(keys)}; got {type(values).__name__}.")
    return values


def parse_yaml(text: str) -> Any:
    """The one value in a text.

    Raises:
        yaml.YAMLError: it is no YAML, or one that is refused here; `yaml_fault` says what about it.
    """
    return yaml.load(text, Loader=SpecLoader)


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is off, on one line, without the place."""
    said = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    return (", ".join(said) or str(error)).replace("\n", " ")


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)


# ------------------------------------------------------------------------------
# What a spec's relative paths count from: in the file, the folder of the file; in `--set` and `RELABEL_*`, the
# working directory.
#
# Which keys are paths, the models say themselves (`PathText`, `PatternText`, `ModelText` in `manifests/specs.py`). What
# is written down of a spec holds absolute paths, so that it means the same elsewhere.


AnySpec = TypeVar("AnySpec", bound=Spec)

Change = Callable[[str, PathMark, tuple[str, ...]], str]
_SCHEME = re.compile(r"[a-z][a-z0-9+]+:")
_DEVICES = ("/dev/fd/", "/dev/std", "/proc/")
"""Where a shell finds `/dev/stdin` and `<(…)`: such a spec has no folder of its own."""


class Places(NamedTuple):
    """What relative paths of a spec count from.

    Args:
        where: the spec file, for errors.
        folder: what those in the file count from, absolute; None where the file lies at a URL.
        here: what those from outside the file count from, absolute.
        outside: keys that a variable or flag has set.
    """

    where: str
    folder: str | None
    here: str
    outside: frozenset[tuple[str, ...]] = frozenset()

    def base_of(self, key: tuple[str, ...]) -> str | None:
        """The folder that a key's path counts from."""
        is_from_outside = any(key[: len(one)] == one for one in self.outside)
        return self.here if is_from_outside else self.folder


def places_of(
    spec_file: str, *, environment: Mapping[str, str], outside: frozenset[tuple[str, ...]] = frozenset()
) -> Places:
    """What the paths in a spec file count from: its folder as the call names it, whatever links lie there."""
    here = working_directory(environment)
    if is_url(spec_file):
        return Places(spec_file, None, here, outside)
    is_device = spec_file.startswith(_DEVICES)
    return Places(spec_file, here if is_device else str(Path(placed(spec_file, here)).parent), here, outside)


def working_directory(environment: Mapping[str, str]) -> str:
    """The working directory by the name under which the shell went there, which a deployment's `current` keeps from day
    to day.

    Raises:
        ConfigError: there is none any more.
    """
    try:
        physical, named = Path.cwd(), Path(environment.get("PWD", ""))
    except FileNotFoundError as exc:
        raise ConfigError("the working directory is gone (removed, or remounted). Change to one that exists.") from exc
    with contextlib.suppress(OSError):
        if named.is_absolute() and named.samefile(physical):
            return os.path.normpath(named)
    return str(physical)


def resolved(spec: AnySpec, places: Places) -> AnySpec:
    """A spec whose paths all lead where they should from the working directory: relative below it, absolute elsewhere.

    Raises:
        ConfigError: a relative path in a file at a URL, or the home of a user that there is not.
    """
    return _mapped(spec, lambda text, mark, key: path_of(text, mark, places, key), ())


def absolute(spec: AnySpec) -> AnySpec:
    """A resolved spec whose paths are all absolute: for what is written down, or read by a process with another working
    directory.
    """
    here = str(Path.cwd())
    return _mapped(spec, lambda text, mark, _: placed(text, here, mark), ())


def _mapped(spec: AnySpec, change: Change, at: tuple[str, ...]) -> AnySpec:
    def mapped(value: Any, mark: PathMark | None, key: tuple[str, ...]) -> Any:
        if isinstance(value, Spec):
            return _mapped(value, change, key)
        if isinstance(value, tuple):
            return tuple(mapped(one, mark, key) for one in value)
        return change(value, mark, key) if mark is not None and isinstance(value, str) else value

    changes = {}
    for name, info in type(spec).model_fields.items():
        value = getattr(spec, name)
        found = mapped(value, mark_of(info), (*at, name))
        if found != value:
            changes[name] = found
    return spec.model_copy(update=changes) if changes else spec


def path_of(text: str, mark: PathMark, places: Places, key: tuple[str, ...]) -> str:
    """One path of a spec; see `resolved`."""
    try:
        path = placed(text, places.base_of(key), mark)
    except ValueError as exc:
        raise ConfigError(f"{places.where}: `{'.'.join(key)}` = {text}: {exc}") from exc
    if path == text or text.startswith("~"):
        return path
    here = glob.escape(places.here) if mark is PathMark.PATTERN and glob.has_magic(text) else places.here
    below = path.removeprefix(f"{here}/")
    # what would be read as a home or a scheme stays as it is
    return path if not below or below.startswith(("/", "~")) or ":" in below else below


def placed(text: str, folder: str | None, mark: PathMark = PathMark.PATH) -> str:
    """The absolute path, URL or model reference that a text means.

    `..` takes away a step as it is written, as `cd` and `make` have it; a folder's name is never a pattern.

    Args:
        folder: what a relative path counts from, absolute; None if it counts from nowhere.
    Raises:
        ValueError: a relative path that counts from nowhere, or the home of a user that there is not.
    """
    if not text or is_url(text) or (mark is PathMark.MODEL and _SCHEME.match(text)):
        return text
    if text.startswith("~"):
        try:
            return str(Path(text).expanduser())
        except RuntimeError as exc:
            raise ValueError(
                f"there is no home folder of {text.partition('/')[0]}; write ./{text} if the name begins with `~`"
            ) from exc
    if Path(text).is_absolute():
        return text
    if folder is None:
        raise ValueError(
            "a relative path in a spec that is read from a URL counts from nowhere; write a whole path or URL"
        )
    is_pattern = mark is PathMark.PATTERN and glob.has_magic(text)
    return os.path.normpath(Path(glob.escape(folder) if is_pattern else folder, text))


def mark_of(info: FieldInfo) -> PathMark | None:
    """What kind of path a field holds, alone or in a list; None if none."""

    def found(part: Any) -> PathMark | None:
        marks = [one for one in getattr(part, "__metadata__", ()) if isinstance(one, PathMark)]
        return next(iter(marks), None) or next(filter(None, map(found, get_args(part))), None)

    return next((one for one in info.metadata if isinstance(one, PathMark)), None) or found(info.annotation)


# ------------------------------------------------------------------------------
# `${date}` and `${env.NAME}` in a job file: resolved once when the file is read, so that one run has one answer, and
# recorded.
#
# `${date}` is the UTC day (`2026-11-20`), the same on every node whatever its zone; `${date:%Y/%m/%d}` formats it.
# `--date` or `RELABEL_DATE` name another day. `$${` is a literal `${`.


DATE_VARIABLE = "RELABEL_DATE"
"""The day that `${date}` means, as 2026-11-19; for the tasks of an array that may start on both sides of midnight."""
KNOWN = ("date", "date:FORMAT", "env.NAME")
DATE_DIRECTIVES = frozenset("YymdjGVu%")
"""Of strftime, those that a day has; an hour would be 00 whenever the run starts."""
_MARK = re.compile(r"\$\$\{|\$\{([^{}]*)(\})?")


@dataclass(slots=True)
class SpecVariables:
    """What the variables of a spec mean, and which of them it used.

    Args:
        environment: where `${env.NAME}` looks.
        day: what `${date}` means.
        used: by name as written (`date`, `env.REGION`), the value; what the manifest records.
    """

    environment: Mapping[str, str]
    day: date
    used: dict[str, str] = field(default_factory=dict)

    def resolved(self, value: Any, *, where: str, key: str = "") -> Any:
        """A value with the variables in all its strings replaced; keys of mappings are left as they are.

        Raises:
            ConfigError: names the key, the variable and what is known.
        """
        if isinstance(value, dict):
            return {
                name: self.resolved(inner, where=where, key=f"{key}.{name}" if key else str(name))
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self.resolved(inner, where=where, key=key) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value

        def replaced(found: re.Match[str]) -> str:
            if found[0] == "$${":
                return "${"
            try:
                if found[2] is None:
                    raise ConfigError("a variable's brace is not closed; write `$${` for a literal `${`")
                return self._value(found[1].strip())
            except ConfigError as exc:
                raise ConfigError(f"{where}: `{key}` = {value}: {exc}") from exc

        return _MARK.sub(replaced, value)

    def _value(self, name: str) -> str:
        kind, colon, form = name.partition(":")
        if kind == "date":
            if colon and not form:
                raise ConfigError(f"${{{name}}} has no format after the colon, for instance ${{date:%Y/%m/%d}}")
            for directive in re.findall(r"%(.?)", form):
                if directive not in DATE_DIRECTIVES or not directive:
                    known = " ".join(f"%{one}" for one in sorted(DATE_DIRECTIVES))
                    raise ConfigError(f"%{directive} is not a date format: known are {known}")
            value = self.day.strftime(form) if form else self.day.isoformat()
        elif name.startswith("env.") and name != "env.":
            value = self._from_environment(name.removeprefix("env."))
        else:
            meant = {None: "", "date": ". Did you mean ${date}?", "env": ". Did you mean ${env.NAME}?"}[
                nearest(kind, ["date", "env"])
            ]
            raise ConfigError(f"no variable ${{{name}}}: known are {', '.join(f'${{{one}}}' for one in KNOWN)}{meant}")
        self.used[name] = value
        return value

    def _from_environment(self, name: str) -> str:
        value = self.environment.get(name)
        if names_secret(name, value or "") or (value is not None and secret_in(value)):
            raise ConfigError(
                f"${{env.{name}}} looks like a secret, and a spec's values are written to the manifest. Engines read "
                "keys from the environment themselves (engine.args.api_key_env), stores by the usual AWS variables "
                "or storage_options"
            )
        if value is None:
            raise ConfigError(f"${{env.{name}}}: the variable {name} is not set")
        return value


def spec_variables(environment: Mapping[str, str], day: str | None = None) -> SpecVariables:
    """The variables as this run sees them.

    Args:
        day: `--date`; wins over `RELABEL_DATE`, which wins over today in UTC.
    Raises:
        UsageError: an invalid day.
    """
    source, text = ("--date", day) if day is not None else (DATE_VARIABLE, environment.get(DATE_VARIABLE))
    if text is None:
        return SpecVariables(environment, today())
    try:
        return SpecVariables(environment, datetime.strptime(text.strip(), "%Y-%m-%d").date())
    except ValueError as exc:
        raise UsageError(f"{source} {text}: want a day as YYYY-MM-DD, for instance 2026-11-19.") from exc


def today() -> date:
    """The UTC day."""
    return datetime.now(UTC).date()


# ------------------------------------------------------------------------------
# The JSON Schema of a job file: the spec models' own schemas, with one alternative for each registered labeler and
# engine; and which keys spec files have.


def job_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts exactly the keys that `load_job` accepts."""
    definitions: dict[str, Schema] = {}
    job = ObjectSchema(JobSpec, definitions)
    for unused in ("LabelerOptions", "EngineSpec", "EngineArgs"):
        definitions.pop(unused, None)
    job.offer("labeler", oneOf=referred(definitions, "labeler", labeler_schemas(definitions)))
    job.offer("engine", oneOf=referred(definitions, "engine", engine_schemas(EngineSpec, definitions)))
    return {"$schema": DRAFT, "title": "relabel job", "$defs": definitions, **job.values}


def schemas() -> dict[str, Callable[[], Schema]]:
    """By kind of spec file, what makes its schema."""
    from relabel.distill.students.spec import student_schema
    from relabel.distill.teachers.spec import teacher_schema

    return {"job": job_schema, "student": student_schema, "teacher": teacher_schema}


# ------------------------------------------------------------------------------
# What a spec's file, the environment and `--set` say together, with the secrets that they name.


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
        overrides: which variables and flags set some of them.
        variables: what the values' variables (`date`, `env.REGION`) were resolved to.
        places: what relative paths among them count from.
    """

    values: dict[str, Any]
    overrides: list[str]
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
        UsageError: a flag without `=`, an invalid day, or one that the spec has no use for.
    """
    if isinstance(spec, str):
        path, values = spec, read_spec_file(spec, beginning=kind.beginning, keys=kind.fields)
    else:
        path, values = f"the {kind.name}'s spec", copy.deepcopy(dict(spec))
    laid_over = []
    outside = {tuple(override.partition("=")[0].split(".")) for override in overrides}
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and keys[0] in kind.fields:
            _set(values, keys, text, where=f"variable {name}")
            laid_over.append(f"variable {name}")
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
    laid_over += map(_shown, overrides)
    variables = spec_variables(environment, day)
    storage = values.pop(STORAGE_KEY, None)
    plain = variables.resolved(values, where=path)
    refuse_secrets(plain, where=path)
    if storage is not None:
        plain[STORAGE_KEY] = _resolved_secrets(storage, environment, where=path)
    if day is not None and not any(name.partition(":")[0] == "date" for name in variables.used):
        raise UsageError(f"--date {day}: {path} does not use ${{date}}, so that no day changes what it does.")
    return Settings(
        plain, laid_over, variables.used, places_of(path, environment=environment, outside=frozenset(outside))
    )


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
                f"--set {override}: want KEY=VALUE, for instance --set {example}. Quote values that contain > or <, "
                "which the shell takes for a redirection: --set 'require.kappa=>=0.4'."
            )
        _set(values, key.split("."), text, where=_shown(override))
    return values


def _shown(override: str) -> str:
    """A flag as errors show it: without the value of a key that holds secrets, or may have been meant to."""
    key, _, text = override.partition("=")
    return f"--set {key}=…" if _is_secret(key.split("."), text) else f"--set {override}"


def _is_secret(keys: list[str], text: str) -> bool:
    """Whether what a key is set to is not to be shown."""
    return bool(difflib.get_close_matches(keys[0].strip().lower(), [STORAGE_KEY])) or names_secret(keys[-1], text)


def refuse_secrets(values: Any, *, where: str) -> None:
    """Refuse a spec that holds a secret: what it says is written into plans, manifests and pages.

    Raises:
        ConfigError: names the key, and never shows what it holds.
    """
    for key, text in texts_in(values):
        if (found := secret_in(text)) is not None:
            raise ConfigError(
                f"{where}: `{key}` holds {found}, and a spec's values are written to the manifest. Engines read keys "
                "from the environment (engine.args.api_key_env), stores by the usual variables and profiles, or "
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
            shown = "a text" if _is_secret(keys, text) else repr(held)
            raise ConfigError(f"{where}: `{key}` is {shown}, not a mapping")
        inner = held
    try:
        inner[keys[-1]] = parse_yaml(text)
    except yaml.YAMLError as exc:
        what = "its value is not YAML" if _is_secret(keys, text) else f"{text!r} is not YAML: {yaml_fault(exc)}"
        raise ConfigError(f"{where}: {what}.") from exc

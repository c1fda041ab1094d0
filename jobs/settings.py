"""Settings of a spec: its file, `RELABEL_*` variables and `--set` flags, with JSON Schemas, path resolution, variables
and secrets."""

import contextlib
import copy
import difflib
import glob
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, get_args

import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from relabel.labelers.registry import engine_class, engine_schemas, labeler_schemas
from relabel.manifests.errors import ConfigError, RelabelError, UsageError
from relabel.manifests.files import Storage, is_url, path_hint
from relabel.manifests.secrets import STORAGE_KEY, keep_secret, names_secret, secret_in, texts_in
from relabel.manifests.specs import (
    DRAFT,
    DisputedText,
    EngineArgs,
    EngineSpec,
    JobSpec,
    ObjectSchema,
    PaidByToken,
    PathMark,
    Schema,
    Spec,
    referred,
    secret_variables,
    validate_spec,
)
from relabel.manifests.store import read_whole

# ------------------------------------------------------------------------------
# YAML as specs and `--set` values are written in: the core schema of YAML 1.2, within bounds, and nothing that could
# surprise.
#
# PyYAML reads YAML 1.1, in which `no` is false, `010` is 8 and `1:30` is 90. Here a plain word is true, false, null, a
# number or a text, as YAML 1.2 has it. A word on which the two versions differ is kept as a `DisputedText`: the type of
# the key that it is given to decides (`columns: {query: no}` is a text, `calibrate: no` is false, `shards: 010` is
# ten), and a key that takes anything refuses it.

_TAG = "tag:yaml.org,2002:"
_PLAIN = {  # by tag, the form of its plain words
    f"{_TAG}null": r"~|null|Null|NULL|",
    f"{_TAG}bool": r"true|True|TRUE|false|False|FALSE",
    f"{_TAG}int": r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    f"{_TAG}float": r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    f"{_TAG}merge": r"<<",
    "!disputed": r"(?i:yes|no|on|off)"  # truth in YAML 1.1
    r"|[-+]?0[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0b[01_]+"  # octal and binary
    r"|[-+]?[0-9][0-9.]*_[0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0x[0-9a-fA-F_]+"  # thousands set off
    r"|[-+]?[0-9][0-9_]*(?::[0-9]{1,2})+(?:\.[0-9_]*)?",  # base 60
}


class SpecLoader(yaml.SafeLoader):
    """Takes the kinds of values that JSON has, and refuses tags of others."""

    yaml_constructors: ClassVar = {
        **{f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"] for kind in ("str", "seq", "map")},
        **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _PLAIN if tag in yaml.SafeLoader.yaml_constructors},
        None: yaml.SafeLoader.yaml_constructors[None],
        "!disputed": lambda loader, node: DisputedText(loader.construct_scalar(node)),
    }
    yaml_implicit_resolvers = {None: [(tag, re.compile(rf"(?:{form})\Z")) for tag, form in _PLAIN.items()]}  # noqa: RUF012
    """By a word's first letter, None for any."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, or refuse a key that occurs twice or can't be one; here, before `<<` brings keys that may
        be overridden.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a list or mapping can't be a key", mark)
            if key in lines:
                problem = f"the key `{key}` is given twice, in lines {lines[key]} and {mark.line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, mark)
            lines[key] = mark.line + 1
        return node


MAX_BYTES = 1 << 20
"""Of a spec file; a larger one is some other file, given by mistake."""
PARQUET_MARK = b"PAR1"
"""What a Parquet file begins with."""


def read_spec_file(path: str, kind: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The mapping in a spec file, which is local or at a URL.

    Args:
        kind, keys: as `read_settings`, for errors.
    Raises:
        ConfigError: there is none, it is too large, no UTF-8, no YAML or no mapping; says where, and what belongs
            there.
    """
    beginning = f"`relabel init --kind {kind}` writes one to start from"
    try:
        if is_url(path):
            data = read_whole(path, Storage())
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        if data.startswith(PARQUET_MARK):
            raise ConfigError(f"{path}: a Parquet file, and a {kind} file in YAML is wanted. {beginning}.")
        values = parse_yaml(data.decode()) if len(data) <= MAX_BYTES else None
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file.{path_hint(path)} {beginning}.") from exc
    except IsADirectoryError as exc:
        raise ConfigError(f"{path}: a folder, and a file is wanted. For an output, give its job file.") from exc
    except RelabelError:
        raise
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: byte {exc.start} is not UTF-8. Save the file as UTF-8.") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: can't be read ({exc}).") from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not YAML: {yaml_fault(exc)}.") from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, so it is not a spec. {beginning}.")
    if not isinstance(values, dict):
        content = "is empty" if values is None else f"holds a {type(values).__name__}"
        raise ConfigError(f"{path}: {content}; want a mapping with the keys {', '.join(keys)}. {beginning}.")
    return values


def parse_yaml(text: str) -> Any:
    """The one value in a text.

    Raises:
        yaml.YAMLError: it is no YAML, or one that is refused here; `yaml_fault` says what about it.
    """
    try:
        return yaml.load(text, Loader=SpecLoader)
    except (ValueError, LookupError) as exc:  # a tag on another word, or thousands of digits
        raise yaml.YAMLError(f"{str(exc)[:80]}: not a value of that type") from exc


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is off, on one line, without the place."""
    said = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    return (", ".join(said) or str(error)).replace("\n", " ")


# ------------------------------------------------------------------------------
# What a spec's relative paths count from: in the file, the folder of the file; in `--set` and `RELABEL_*`, the
# working directory.
#
# Which keys are paths, the models say themselves (`PathText`, `PatternText`, `ModelText` in `manifests/specs.py`). What
# is written down of a spec holds absolute paths, so that it means the same elsewhere.


AnySpec = TypeVar("AnySpec", bound=Spec)

_SCHEME = re.compile(r"[a-z][a-z0-9+]+:")


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


def working_directory(environment: Mapping[str, str]) -> str:
    """The working directory by the name under which the shell went there, which a deployment's `current` keeps from day
    to day.

    Raises:
        ConfigError: there is none any more.
    """
    try:
        physical = Path.cwd()
        named = Path(environment.get("PWD", ""))
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
    return cast("AnySpec", _mapped(spec, lambda text, mark, key: path_of(text, mark, places, key)))


def absolute(spec: AnySpec) -> AnySpec:
    """A resolved spec whose paths are all absolute: for what is written down, or read by a process with another working
    directory.
    """
    here = str(Path.cwd())
    return cast("AnySpec", _mapped(spec, lambda text, mark, _: placed(text, here, mark)))


def _mapped(
    value: Any,
    change: Callable[[str, PathMark, tuple[str, ...]], str],
    key: tuple[str, ...] = (),
    mark: PathMark | None = None,
) -> Any:
    """A spec, or the value of one at a key, with its paths changed."""
    if isinstance(value, Spec):
        held = [(name, getattr(value, name), mark_of(info)) for name, info in type(value).model_fields.items()]
        found = [(name, one, _mapped(one, change, (*key, name), marked)) for name, one, marked in held]
        changes = {name: new for name, one, new in found if new != one}
        return value.model_copy(update=changes) if changes else value
    if isinstance(value, tuple):
        return tuple(_mapped(one, change, key, mark) for one in value)
    return change(value, mark, key) if mark is not None and isinstance(value, str) else value


def path_of(text: str, mark: PathMark, places: Places, key: tuple[str, ...]) -> str:
    """One path of a spec; see `resolved`."""
    is_from_outside = any(key[: len(one)] == one for one in places.outside)
    try:
        path = placed(text, places.here if is_from_outside else places.folder, mark)
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
    if not text or is_url(text) or Path(text).is_absolute() or (mark is PathMark.MODEL and _SCHEME.match(text)):
        return text
    if text.startswith("~"):
        try:
            return str(Path(text).expanduser())
        except RuntimeError as exc:
            raise ValueError(
                f"there is no home folder of {text.partition('/')[0]}; write ./{text} if the name begins with `~`"
            ) from exc
    if folder is None:
        raise ValueError(
            "a relative path in a spec that is read from a URL counts from nowhere; write a whole path or URL"
        )
    if mark is PathMark.PATTERN and glob.has_magic(text):
        folder = glob.escape(folder)
    return os.path.normpath(Path(folder, text))


def mark_of(info: FieldInfo | Any) -> PathMark | None:
    """What kind of path a field holds, or a part of its annotation, alone or in a list; None if none."""
    is_field = isinstance(info, FieldInfo)
    held = info.metadata if is_field else getattr(info, "__metadata__", ())
    inner = map(mark_of, (info.annotation,) if is_field else get_args(info))
    return next((one for one in (*held, *inner) if isinstance(one, PathMark)), None)


# ------------------------------------------------------------------------------
# `${date}` and `${env.NAME}` in a job file: resolved once when the file is read, so that one run has one answer, and
# recorded.
#
# `${date}` is the UTC day (`2026-11-20`), the same on every node whatever its zone; `${date:%Y/%m/%d}` formats it.
# `--date` or `RELABEL_DATE` name another day. `$${` is a literal `${`.


DATE_VARIABLE = "RELABEL_DATE"
"""The day that `${date}` means, as 2026-11-19; for the tasks of an array that may start on both sides of midnight."""
DATE_DIRECTIVES = "%GVYdjmuy"
"""Of strftime, those that a day has; an hour would be 00 whenever the run starts."""


def today() -> date:
    """The UTC day."""
    return datetime.now(UTC).date()


def _day(environment: Mapping[str, str], day: str | None) -> date:
    """What `${date}` means: `--date` wins over `RELABEL_DATE`, which wins over today."""
    source, text = ("--date", day) if day is not None else (DATE_VARIABLE, environment.get(DATE_VARIABLE))
    try:
        return today() if text is None else datetime.strptime(text.strip(), "%Y-%m-%d").date()
    except ValueError as exc:
        raise UsageError(f"{source} {text}: want a day as YYYY-MM-DD, for instance 2026-11-19.") from exc


def _variable(name: str, environment: Mapping[str, str], day: date) -> str:
    """What a variable means, by its name as written: `date`, `date:%Y`, `env.REGION`."""
    kind, colon, form = name.partition(":")
    if kind == "date":
        directives = re.findall(r"%(.?)", form)
        if colon and not (directives and set(DATE_DIRECTIVES).issuperset(directives)):
            raise ConfigError(
                "want a format of a day after the colon, say ${date:%Y/%m/%d}; known are %" + " %".join(DATE_DIRECTIVES)
            )
        return day.strftime(form) if form else day.isoformat()
    variable = name.removeprefix("env.")
    if variable in ("", name):
        raise ConfigError(f"no variable ${{{name}}}: known are ${{date}}, ${{date:FORMAT}} and ${{env.NAME}}")
    value = environment.get(variable)
    if names_secret(variable, value or "") or (value is not None and secret_in(value)):
        raise ConfigError(
            f"${{{name}}} looks like a secret, and a spec's values are written to the manifest. Engines read keys from "
            "the environment themselves (engine.args.api_key_env), stores by the usual AWS variables or storage_options"
        )
    if value is None:
        raise ConfigError(f"${{{name}}}: the variable {variable} is not set")
    return value


def _replaced(value: Any, form: re.Pattern[str], change: Callable[[re.Match[str], str], str], key: str = "") -> Any:
    """A value with what `form` matches replaced in all its strings; keys of mappings are left as they are.

    Args:
        change: of a match, in the string at this key.
    """
    if isinstance(value, dict):
        return {
            name: _replaced(inner, form, change, f"{key}.{name}" if key else str(name)) for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_replaced(inner, form, change, key) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value  # as it is: a word may be disputed
    return form.sub(lambda found: change(found, key), value)


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


JOB_KEYS = tuple(JobSpec.model_fields)
TELLING_KEYS = {
    "job": ("engine", "relabel run"),
    "student": ("labels", "relabel distill"),
    "teacher": ("method", "relabel train"),
}
"""For each kind of spec, a key that it must have and no other kind knows, and the command that takes its file."""


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
    kind: str = "job",
    fields: tuple[str, ...] = JOB_KEYS,
) -> Settings:
    """A spec file's plain values with variables and flags laid over them and the variables in their strings resolved.

    Args:
        spec: path or URL of the file, or the values that one would hold; then paths count from the working directory.
        kind: what it is a spec of.
        fields: its first keys; a variable that names another is some other spec's, or has nothing to do with us.
    Raises:
        ConfigError: the file can't be read, a variable or flag sets a key below what is not a mapping, a string
            names a variable that there is not, or holds a secret.
        UsageError: a flag without `=`, an invalid day, or one that the spec has no use for.
    """
    if isinstance(spec, str):
        path = spec
        values = read_spec_file(spec, kind, fields)
        _refuse_other_kind(path, values, kind)
    else:
        path = f"the {kind}'s spec"
        values = copy.deepcopy(dict(spec))
    outside = {tuple(override.partition("=")[0].split(".")) for override in overrides}
    laid_over = []
    for name, keys in _keys_in(environment, kind, fields):
        _set(values, keys, environment[name], where=f"variable {name}")
        laid_over.append(f"variable {name}")
        outside.add(tuple(keys))
    lay_over(values, overrides)
    laid_over += map(_shown, overrides)
    storage = values.pop(STORAGE_KEY, None)
    plain, used = _resolved(values, environment, _day(environment, day), where=path)
    if storage is not None:
        plain[STORAGE_KEY] = _with_secrets(storage, environment, where=path)
    if day is not None and not any(name.partition(":")[0] == "date" for name in used):
        raise UsageError(f"--date {day}: {path} does not use ${{date}}, so that no day changes what it does.")
    here = working_directory(environment)
    # that of the file as the call names it, whatever links lie there
    parent = None if is_url(path) else str(Path(placed(path, here)).parent)
    # where a shell finds `/dev/stdin` and `<(…)`; such a spec has no folder of its own
    folder = here if path.startswith(("/dev/fd/", "/dev/std", "/proc/")) else parent
    return Settings(plain, laid_over, used, Places(path, folder, here, frozenset(outside)))


def _refuse_other_kind(path: str, values: Mapping[str, Any], kind: str) -> None:
    """
    Raises:
        ConfigError: the values are those of another kind of spec.
    """
    if TELLING_KEYS[kind][0] in values:
        return
    for other, (key, command) in TELLING_KEYS.items():
        if key in values:
            raise ConfigError(f"{path}: this is a {other}'s spec, not a {kind}'s: {command} {shlex.quote(path)}")


def output_of(path: str, *, day: str | None = None) -> tuple[str, Storage, dict[str, Any]]:
    """Where a job's output is, how that is reached, and the job's plain values.

    Raises:
        ConfigError, UsageError: see `read_settings`.
    """
    settings = read_settings(path, day=day)
    storage = storage_of(settings.values, where=path)
    output = settings.values.get("output", "")
    if not isinstance(output, str) or not output:
        raise ConfigError(f"{path}: `output` is missing")
    return path_of(output, PathMark.PATH, settings.places, ("output",)), storage, settings.values


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


def _keys_in(environment: Mapping[str, str], kind: str, fields: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """The variables that set keys of a spec, by name, each with the key's parts.

    Raises:
        ConfigError: one that looks like a key with a slip in it; a cluster may set names of its own
            (RELABEL_SERVICE_HOST).
    """
    variables = []
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if keys[0] in fields:
            variables.append((name, keys))
            continue
        meant = difflib.get_close_matches(keys[0], fields, n=1, cutoff=0.8)
        if meant:
            raise ConfigError(
                f"variable {name}: no key of a {kind} is called `{keys[0]}`; did you mean "
                f"{ENVIRONMENT_PREFIX}{meant[0].upper()}?"
            )
    return variables


def _resolved(
    values: dict[str, Any], environment: Mapping[str, str], day: date, *, where: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values with the variables in their strings resolved, and those variables.

    Raises:
        ConfigError: a string names a variable that there is not, or holds a secret.
    """
    used = dict[str, str]()

    def variable(found: re.Match[str], key: str) -> str:
        if found[0] == "$${":
            return "${"
        name = found[1].strip()
        try:
            if found[2] is None:
                raise ConfigError("a variable's brace is not closed; write `$${` for a literal `${`")
            used[name] = _variable(name, environment, day)
        except ConfigError as exc:
            raise ConfigError(f"{where}: `{key}` = {found.string}: {exc}") from exc
        return used[name]

    plain = _replaced(values, re.compile(r"\$\$\{|\$\{([^{}]*)(\})?"), variable)
    for key, text in texts_in(plain):
        secret = secret_in(text)
        if secret is not None:
            raise ConfigError(
                f"{where}: `{key}` holds {secret}, and a spec's values are written to the manifest. Engines read keys "
                "from the environment (engine.args.api_key_env), stores by the usual variables and profiles, or "
                "storage_options."
            )
    return plain, used


def _with_secrets(storage: Any, environment: Mapping[str, str], *, where: str) -> Any:
    """Storage options with `${env.NAME}` resolved, which are neither recorded nor shown.

    Raises:
        ConfigError: a variable is not set.
    """

    def secret(found: re.Match[str], _key: str) -> str:
        if found[1] not in environment:
            raise ConfigError(f"{where}: `{STORAGE_KEY}`: the variable {found[1]} is not set")
        return environment[found[1]]

    return _replaced(storage, re.compile(r"\$\{env\.(\w+)\}"), secret)


def lay_over(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values with `KEY=VALUE` flags laid over them, in place.

    Raises:
        ConfigError: a flag sets a key below something that is not a mapping, or its value is not YAML.
        UsageError: a flag without `=`.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(
                f"--set {override}: want KEY=VALUE, for instance --set output=out/b. Quote values that contain > or <, "
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


def _set(values: dict[str, Any], keys: list[str], text: str, *, where: str) -> None:
    inner = values
    for key in keys[:-1]:
        held = inner.setdefault(key, {})
        if not isinstance(held, dict):
            raise ConfigError(
                f"{where}: `{key}` is {'a text' if _is_secret(keys, text) else repr(held)}, not a mapping"
            )
        inner = held
    try:
        inner[keys[-1]] = parse_yaml(text)
    except yaml.YAMLError as exc:
        what = "its value is not YAML" if _is_secret(keys, text) else f"{text!r} is not YAML: {yaml_fault(exc)}"
        raise ConfigError(f"{where}: {what}.") from exc

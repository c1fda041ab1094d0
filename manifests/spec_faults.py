"""What is off with a spec that somebody wrote: where, what was given, what is allowed; a sentence a fault."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import (
    BaseModel,
    ValidationError,
)

from relabel.manifests.errors import ConfigError
from relabel.manifests.odd_text import odd_values, shown
from relabel.manifests.secrets.redaction import redacted
from relabel.manifests.secrets.secret_names import STORAGE_KEY

SpecT = TypeVar("SpecT", bound=BaseModel)


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that looks most like `word`, if any looks like it at all."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return close[0] if close else None


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """The sentence for a name that is not registered: `No labeler "r3": known are … Did you mean r3a?`"""
    hint = nearest(name, known)
    return f'No {kind} "{name}": known are {", ".join(sorted(known))}.' + (f" Did you mean {hint}?" if hint else "")


def validate_spec(model: type[SpecT], values: Mapping[str, Any], *, where: str) -> SpecT:
    """Build `model` from plain values, or say what is off.

    Args:
        values: parsed YAML; may hold ready-made model instances.
        where: what to call the source in an error, usually the spec's path.
    Raises:
        ConfigError: one line per fault: the field's path, what was got, what is allowed, and the nearest key for a
            typo.
    """
    odd = next(odd_values(values), None)
    if odd is not None:
        raise ConfigError(f"{where}: `{shown(odd[0])}` {odd[1]}. Write it in letters that a file can hold.")
    try:
        return model.model_validate(dict(values))
    except ValidationError as exc:
        raise ConfigError(f"{where}: " + "; ".join(_fault_text(model, fault) for fault in _faults_in(exc))) from exc


_YAML_HINTS = {
    "string_type": " (in YAML, put it in quotes)",
    "tuple_type": " (a list, in brackets)",
    "list_type": " (a list, in brackets)",
}


class _Fault(NamedTuple):
    """What pydantic says of one fault."""

    type: str
    loc: tuple[int | str, ...]
    msg: str
    input: Any


def _faults_in(error: ValidationError) -> list[_Fault]:
    faults: list[Any] = error.errors(include_url=False, include_context=False)
    return [_Fault(**fault) for fault in faults]


def _fault_text(model: type[BaseModel], fault: _Fault) -> str:
    path = ".".join(str(step) for step in fault.loc) or "the spec"
    if fault.loc[:1] == (STORAGE_KEY,) and fault.type != "value_error":
        return (
            f"`{path}`: want a mapping of options for each URL scheme, for instance storage_options: {{s3: {{profile: "
            f"prod}}}}"
        )
    if fault.type in ("extra_forbidden", "invalid_key"):
        known = _known_keys(model, fault.loc[:-1])
        key = str(fault.loc[-1])
        hint = nearest(key, known)
        allowed = f"did you mean `{hint}`?" if hint else f"known keys are {', '.join(known)}"
        return f"unknown key `{path}`: {allowed}"
    if fault.type == "missing":
        return f"`{path}` is missing"
    if fault.type == "model_type":
        return (
            f"`{path}` = {_shown(fault.input)}: want a mapping with the keys {', '.join(_known_keys(model, fault.loc))}"
        )
    hint = _YAML_HINTS.get(fault.type, "")
    message = re.sub(r"^(Value error|Assertion failed), ", "", fault.msg)
    said = f"{message[:1].lower()}{message[1:]}{hint}"
    if not fault.loc:  # keys of several sections don't go together; they are named in what is said
        return said
    shown = "" if fault.loc[:1] == (STORAGE_KEY,) else f" = {_shown(fault.input)}"
    return f"`{path}`{shown}: {said}"


def _known_keys(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    inner = model
    for step in loc:
        if isinstance(step, int):  # a place in a list, whose entries were looked up with the list
            continue
        if step not in inner.model_fields:
            break
        models = _models_in(inner.model_fields[step].annotation)
        if len(models) != 1:
            break
        inner = models[0]
    return list(inner.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models of a field, or of the entries of a list, or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _shown(value: Any) -> str:
    text = redacted(repr(value))  # first: a part of a secret would go unnoticed
    return text if len(text) <= 80 else text[:77] + "..."

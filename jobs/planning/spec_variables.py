"""`${date}` and `${env.NAME}` in a job file: resolved once when the file is read, so that one run has one answer, and
recorded.

`${date}` is the UTC day (`2026-11-20`), the same on every node whatever its zone; `${date:%Y/%m/%d}` formats it.
`--date` or `RELABEL_DATE` name another day. `$${` stands for a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.secrets.redaction import secret_in
from relabel.manifests.secrets.secret_names import names_secret
from relabel.manifests.spec_faults import nearest

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
            _check_format(form)
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
        UsageError: a day that is none.
    """
    source, text = ("--date", day) if day is not None else (DATE_VARIABLE, environment.get(DATE_VARIABLE))
    if text is None:
        return SpecVariables(environment, today())
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text.strip()):
        raise UsageError(f"{source} {text}: want a day as YYYY-MM-DD, for instance 2026-11-19.")
    try:
        return SpecVariables(environment, date.fromisoformat(text.strip()))
    except ValueError as exc:
        raise UsageError(f"{source} {text}: there is no such day.") from exc


def today() -> date:
    """The UTC day."""
    return datetime.now(UTC).date()


def _check_format(form: str) -> None:
    for directive in re.findall(r"%(.?)", form):
        if directive not in DATE_DIRECTIVES or not directive:
            known = " ".join(f"%{one}" for one in sorted(DATE_DIRECTIVES))
            raise ConfigError(f"%{directive} is not a date format: known are {known}")

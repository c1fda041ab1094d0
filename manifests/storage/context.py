"""How storage is reached: one value, built where a job or a command begins and handed to whatever opens anything.

A job's `storage_options` hold for all its paths, and for no other job in the process. Their values are secrets: they
are kept wrapped, are handed to fsspec alone, and no text shows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relabel.manifests.secrets.redaction import keep_secret

RETRY_S = 120.0
"""Default of `run.store_retry_s`."""
LEASE_S = 60.0
"""Default of `run.lease_s`."""
_OPEN = re.compile(
    r"(?:.*_)?(?:url|endpoint|override|profile|region|name|project|host|port|user|username|style|version|proxy)",
    re.IGNORECASE,
)
"""Storage options whose values may be shown: where a store is, and who asks. All others may be secrets."""


class _Secret:
    """Options of one scheme; shows nothing of itself."""

    __slots__ = ("options",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)


@dataclass(frozen=True, slots=True)
class Storage:
    """How storage is reached. `Storage()` knows what the environment says: the usual variables and profiles of each
    scheme.

    Args:
        retry_s: after this long without a good answer a call fails, seconds.
        lease_s: a lease that was not renewed for so long is dead, seconds.
    """

    retry_s: float = RETRY_S
    lease_s: float = LEASE_S
    _schemes: Mapping[str, _Secret] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, options: Mapping[str, Mapping[str, Any]], *, retry_s: float = RETRY_S, lease_s: float = LEASE_S
    ) -> Storage:
        """Storage with options of its own; from now on their values are shown nowhere.

        Args:
            options: fsspec's, by scheme.
        """
        _keep(options, "an option")
        return cls(retry_s, lease_s, {family(scheme): _Secret(values) for scheme, values in options.items()})

    def options_of(self, scheme: str) -> dict[str, Any]:
        """What fsspec is given beside the URL. Not to be shown."""
        held = self._schemes.get(scheme)
        return dict(held.options) if held else {}


def family(scheme: str) -> str:
    """The name under which a scheme's options are kept: `s3a` and `s3` are one."""
    return "s3" if scheme.lower() == "s3a" else scheme.lower()


def _keep(value: Any, name: str) -> None:
    """Keep every text among storage options that may be a secret."""
    if isinstance(value, Mapping):
        for inner_name, inner in value.items():
            _keep(inner, str(inner_name))
    elif isinstance(value, list | tuple):
        for inner in value:
            _keep(inner, name)
    elif isinstance(value, str) and not _OPEN.fullmatch(name):
        keep_secret(value, f"the storage option {name}")

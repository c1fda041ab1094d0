"""From a URL to its filesystem: the one place that knows fsspec, storage options, and which package a scheme needs.

Credentials come from the usual variables and profiles of each scheme, or from a job's `storage_options`. Those hold for
the whole process (a process does one job), so that input, output, templates and models all reach their storage in the
same way. Their values are secrets: they are kept wrapped, are handed to fsspec alone, and no message shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import ConfigError, MissingExtraError, StoreError
from manifests.secrets.redaction import keep_secret
from manifests.secrets.url_secrets import secret_in_url

EXTRAS = {"s3": "s3", "s3a": "s3"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OPEN = re.compile(
    r"(?:.*_)?(?:url|endpoint|override|profile|region|name|project|host|port|user|username|style|version|proxy)",
    re.IGNORECASE,
)
"""Storage options whose values may be shown: where a store is, and who asks. All others may be secrets."""
_S3_DEFAULTS: dict[str, Any] = {
    # ours is the one retry policy (`retries.py`), so that what is stated there is what happens
    "config_kwargs": {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 64,
    },
}


class _Secret:
    """Options of one scheme; shows nothing of itself."""

    __slots__ = ("options",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)


_options: dict[str, _Secret] = {}


def use_storage_options(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the options of every scheme for this process, in place of those set before."""
    _options.clear()
    _keep(options, "an option")
    _options.update({_family(scheme): _Secret(values) for scheme, values in options.items()})


def is_url(path: str) -> bool:
    """Whether a path is meant for fsspec."""
    return _SCHEME.match(path) is not None


def place_of(path: str) -> str:
    """One text for one place, however it is spelled: a local path without links, steps back or `file://`, or a URL."""
    scheme, _, rest = path.partition("://")
    if is_url(path) and scheme.lower() not in ("file", "local"):
        return f"{scheme_of(path)}://{rest.strip('/')}"
    return os.path.realpath(rest if is_url(path) else path)


def absolute_path(path: str) -> str:
    """A local path as it reads from any working directory, or a URL."""
    return path if is_url(path) else os.path.normpath(Path.cwd() / path)


def scheme_of(url: str) -> str:
    """`s3` of `s3://bucket/key`; `s3a` and `s3` are one."""
    return _family(url.partition("://")[0])


def filesystem_of(url: str) -> tuple[Any, str]:
    """The filesystem behind a URL, and the path in it.

    Raises:
        ConfigError: the URL holds a secret, the scheme is unknown, or an option is off.
        MissingExtraError: its package is not here.
        StoreError: it can't be set up (a profile that does not exist, for instance).
    """
    if secret_in_url(url):
        raise ConfigError(
            f"a {scheme_of(url)}:// URL holds a password, token or signature, which would be written into plans and "
            "logs. Use storage_options."
        )
    import fsspec

    scheme = scheme_of(url)
    held = _options.get(scheme)
    options = dict(held.options) if held else {}
    if scheme == "s3":
        options = _with_s3_defaults(options)
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as exc:
        extra = (
            f"run `pip install 'relabel[{EXTRAS[scheme]}]'`"
            if scheme in EXTRAS
            else f"install the package of {scheme}:// for fsspec"
        )
        raise MissingExtraError(f"{url}: reading {scheme}:// needs a package that is not here: {extra}.") from exc
    except ValueError as exc:
        if "rotocol not known" in str(exc):
            raise ConfigError(
                f"{url}: no filesystem is called {scheme}. Use a local path, s3:// or another that fsspec knows."
            ) from exc
        raise ConfigError(
            f"{url}: {type(exc).__name__} while setting up {scheme}://. Check the URL and storage_options."
        ) from None
    except TypeError:
        raise ConfigError(f"{url}: storage_options.{scheme} holds a key that {scheme}:// does not take.") from None
    except Exception as exc:  # noqa: BLE001 (whatever a filesystem's constructor raises; its text may hold an option's value)
        raise StoreError(
            f"{url}: {scheme}:// can't be set up ({type(exc).__name__}). Check credentials and storage_options."
        ) from None
    if scheme == "s3":
        filesystem.retries = 1
    return filesystem, str(path)


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


def _with_s3_defaults(options: dict[str, Any]) -> dict[str, Any]:
    merged = {**_S3_DEFAULTS, **options}
    merged["config_kwargs"] = {**_S3_DEFAULTS["config_kwargs"], **options.get("config_kwargs", {})}
    merged.setdefault("use_listings_cache", False)  # others write while we look
    return merged


def _family(scheme: str) -> str:
    return "s3" if scheme == "s3a" else scheme.lower()

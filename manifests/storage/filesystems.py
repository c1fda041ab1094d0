"""From a URL to its filesystem: the one place that knows fsspec, and which package a scheme needs.

Credentials come from the usual variables and profiles of each scheme, or from the options that `Storage` holds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ConfigError, MissingExtraError, StoreError
from relabel.manifests.secrets.url_secrets import secret_in_url
from relabel.manifests.storage.context import Storage, family

EXTRAS = {"s3": "s3", "s3a": "s3"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_S3_DEFAULTS: dict[str, Any] = {
    # ours is the one retry policy (`retries.py`), so that what is stated there is what happens
    "config_kwargs": {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 64,
    },
}


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
    return family(url.partition("://")[0])


def filesystem_of(url: str, storage: Storage) -> tuple[Any, str]:
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
    options = storage.options_of(scheme)
    if scheme == "s3":
        options = _with_s3_defaults(options)
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as exc:
        extra = (
            f"run `pip install 'relabel-ir[{EXTRAS[scheme]}]'`"
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


def _with_s3_defaults(options: dict[str, Any]) -> dict[str, Any]:
    merged = {**_S3_DEFAULTS, **options}
    merged["config_kwargs"] = {**_S3_DEFAULTS["config_kwargs"], **options.get("config_kwargs", {})}
    merged.setdefault("use_listings_cache", False)  # others write while we look
    return merged

"""Environment variables and command-line arguments: defaults for regions and users, and the secrets in them."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from relabel.manifests.errors import ConfigError
from relabel.manifests.secrets import MIN_CHARS, STORAGE_KEY, keep_secret, names_secret, secret_in, secret_in_url


def fill_in_region(environment: MutableMapping[str, str]) -> None:
    """Let `AWS_REGION` count where `AWS_DEFAULT_REGION` is not set, the only one of the two that botocore reads."""
    if region := environment.get("AWS_REGION"):
        environment.setdefault("AWS_DEFAULT_REGION", region)


def fill_in_user(environment: MutableMapping[str, str]) -> None:
    """Name the user where nothing does, as in a container under a uid without a passwd entry: torch asks for the name,
    for a folder of its own, and ends without one.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["LOGNAME"] = f"uid-{os.getuid()}"


_KEY_OPTIONS = ("RELABEL_SIGN_KEY", "RELABEL_TRUST_KEY", "--sign-key", "--key")
"""What may hold the path of a key as well as the key."""
_NAMES_A_PLACE = re.compile(
    r"(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|NAME|HOST|PORT|PREFIX|TYPE|ENV|UR[IL]|ENDPOINT)S?$", re.IGNORECASE
)
_HOLDS_ITSELF = re.compile(r"PASS|PWD|SECRET|TOKEN|JWT|PAT", re.IGNORECASE)
"""The value of such a name is the secret, even where a file is called so."""
_FILE_SUFFIX = re.compile(
    r"[\w./~ @+-]*\.(?:pem|key|pub|crt|cer|p12|pfx|jks|asc|gpg|json|ya?ml|txt|toml|ini|cfg|conf|sock)"
)
_KEY_OR_OPTION = re.compile(r"(?:--)?[a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*)*")
"""What is shown of what was typed; any other name may hold a secret itself."""
_SHORT_PATH = re.compile(r"[\w./~-]{1,39}")


def keep_environment(environment: Mapping[str, str]) -> None:
    """Keep the values of variables that name a secret, unless they name a file of one, or a service; and what is secret
    in a URL.
    """
    for name, value in environment.items():
        _keep_named(name, value, f"the variable {name}")
        _keep_url(value, f"the variable {name}")


def keep_arguments(arguments: Sequence[str]) -> None:
    """Keep what was typed after the name of a secret, and what is secret in a URL."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        for typed in (argument, argument.partition("=")[2]):  # `KEY=VALUE`, and `--set=KEY=VALUE`
            name, _, value = typed.partition("=")
            _keep_named(name.rpartition(".")[2], value, _typed_at(name))
        if before.startswith("--") and "=" not in before:
            _keep_named(before, argument, _typed_at(before))
        _keep_url(argument, "a URL on the command line")


def _typed_at(name: str) -> str:
    return f"{name if _KEY_OR_OPTION.fullmatch(name) else 'a secret'} on the command line"


def _keep_named(name: str, value: str, what: str) -> None:
    """Keep a value under the name of a secret."""
    if len(value) < MIN_CHARS or not names_secret(name, value) or _NAMES_A_PLACE.search(name):
        return
    if _HOLDS_ITSELF.search(name) or not (is_path(value) or (name in _KEY_OPTIONS and _SHORT_PATH.fullmatch(value))):
        keep_secret(value, what)


def _keep_url(text: str, what: str) -> None:
    """Keep user, password and query of a URL, which may have blanks and quotes in them where one was typed."""
    if "://" in text and secret_in_url(text):
        for userinfo, query in re.findall(r"://(?:(.*)@)?[^?]*(?:\?(.*))?", text, re.DOTALL):
            for part in (userinfo, userinfo.partition(":")[2], *(pair.partition("=")[2] for pair in query.split("&"))):
                keep_secret(part, what)


def refuse_secret_arguments(arguments: Sequence[str]) -> None:
    """Refuse an argument with a secret in it before any command sees it: it would be written into plans, pages and
    logs.

    What belongs there passes: a key that was given as such, and storage options.

    Raises:
        ConfigError: names the argument by its place, or the option.
    """
    for place, (before, argument) in enumerate(zip(("", *arguments), arguments, strict=False), start=1):
        option, equals, value = argument.partition("=")
        if not (argument.startswith("--") and equals):
            option, value = before, argument
        if option in _KEY_OPTIONS or value.startswith(STORAGE_KEY):
            continue
        found = secret_in(value)
        if found is not None:
            where = option if option.startswith("--") else f"argument {place}"
            raise ConfigError(
                f"{where}: holds {found}, which would be written into plans and logs. Use the usual variables and "
                "profiles of the store, or storage_options."
            )


def is_path(text: str) -> bool:
    """Whether a text is taken for the path of a file: there is one, or it ends as a key file's name does."""
    try:
        return _FILE_SUFFIX.fullmatch(text) is not None or (("/" in text or "." in text) and Path(text).exists())
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return False

"""Keys are read from files or text, are never shown, and only an ed25519 signature by a trusted one counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.export import puller
from relabel.export.signatures import SigningKey, trusted_keys
from relabel.manifests.errors import ConfigError, ManifestError, StoreError

BODY = {"name": "ecom", "files": [1, "ä"]}


def believed(public: str, kind: str, body: Any, signature: dict[str, str]) -> bool:
    """Whether a puller with this key takes a record."""
    record = puller.Record(kind, "here", body, [signature])
    try:
        trusted_keys([public]).check(record)
    except puller.Refused:
        return False
    return True


def test_what_a_key_signed_its_public_half_believes_whatever_form_the_keys_come_in(keys: dict[str, Path]) -> None:
    for private in (str(keys["ours"]), keys["ours"].read_text()):
        signature = SigningKey(private).sign("version", BODY)
        for public in (str(keys["ours.pub"]), keys["ours.pub"].read_text()):
            assert believed(public, "version", dict(reversed(BODY.items())), signature)


@pytest.mark.parametrize("change", [{"name": "other"}, {"files": []}, {"more": 1}])
def test_a_signature_is_of_one_body_and_one_kind(keys: dict[str, Path], change: dict[str, object]) -> None:
    signature = SigningKey(str(keys["ours"])).sign("version", BODY)
    assert not believed(str(keys["ours.pub"]), "version", {**BODY, **change}, signature)
    assert not believed(str(keys["ours.pub"]), "channel", BODY, signature)


@settings(max_examples=30)
@given(raw=st.binary(max_size=80), how=st.sampled_from(["signature", "algorithm", "key_id"]))
def test_no_made_up_signature_is_believed(keys: dict[str, Path], raw: bytes, how: str) -> None:
    import base64

    signature = {**SigningKey(str(keys["ours"])).sign("version", BODY), how: base64.b64encode(raw).decode()}
    assert not believed(str(keys["ours.pub"]), "version", BODY, signature)


def test_a_stranger_who_takes_our_key_id_is_found_out(keys: dict[str, Path]) -> None:
    ours, theirs = (SigningKey(str(keys[name])) for name in ("ours", "theirs"))
    signature = {**theirs.sign("version", BODY), "key_id": ours.key_id}
    assert not believed(str(keys["ours.pub"]), "version", BODY, signature)


def test_what_is_no_key_is_reported_and_not_shown(tmp_path: Path, keys: dict[str, Path]) -> None:
    broken, path = keys["ours"].read_text().replace("M", "N"), tmp_path / "key"
    for text in (broken, "nothing", keys["ours.pub"].read_text()):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            SigningKey(str(path))
        assert str(path) in str(caught.value)
        secret = [line for line in text.splitlines() if "---" not in line]
        assert not any(line in str(caught.value) for line in secret if len(line) > 20)
    with pytest.raises(ManifestError, match="no PEM public key"):
        trusted_keys([str(keys["ours"])])
    with pytest.raises(StoreError, match="absent"):
        SigningKey("absent")


@pytest.mark.parametrize("form", ["{}", "\ufeff '{}' ", "\n{}\n\n", "written out with \\r"])
def test_what_variables_put_around_a_key_does_no_harm(keys: dict[str, Path], tmp_path: Path, form: str) -> None:
    for name, kind in (("ours", SigningKey), ("ours.pub", lambda source: trusted_keys([source]))):
        text = keys[name].read_text()
        if form.startswith("written out"):
            given = text.replace("\n", "\\r\\n")
        else:
            given = form.format(text)
            (tmp_path / "key").write_text(given.strip("'\"` "), encoding="utf-8")
            assert kind(form.format(tmp_path / "key").strip("\n"))
        assert kind(given)


def test_a_key_in_a_form_that_is_none_is_refused_and_not_shown(keys: dict[str, Path]) -> None:
    import base64

    from cryptography.hazmat.primitives import serialization

    text = keys["ours"].read_text()
    body = "".join(line for line in text.splitlines() if "---" not in line)
    key = serialization.load_pem_private_key(text.encode(), None)
    assert hasattr(key, "private_bytes_raw")
    seed = key.private_bytes_raw()
    forms = [
        body,
        f"'{body}'",
        f"\ufeff{body}",
        base64.b64encode(seed).decode(),
        base64.urlsafe_b64encode(seed).decode().rstrip("="),
        seed.hex(),
    ]
    forms += [
        f"{body}\n{body}",
        text.replace("-----", ""),
        text.replace("BEGIN ", ""),
        f"/{body}",
        f"{body[:30]}\n" * 2,
        f"{body}\0",
    ]
    for form in forms:
        for kind in (SigningKey, lambda source: trusted_keys([source])):
            with pytest.raises(ConfigError) as caught:
                kind(form)
            assert not any(
                part in str(caught.value) for part in (body[-20:], body[24:40], seed.hex()[10:20], form[:30])
            )
            assert "key: n" in str(caught.value)


def test_without_cryptography_an_unsigned_bundle_goes_all_the_way_and_a_key_says_what_is_missing(
    relabel: Callable[..., Any],
    tmp_path: Path,
    bundle: Callable[..., Path],
    keys: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    store = str(tmp_path / "store")
    assert relabel("publish", str(bundle("one")), store, "--channel", "stable").code == 0
    assert relabel("pull", f"{store}/ecom", str(tmp_path / "dest")).code == 0
    sign = ("--sign-key", str(keys["ours"]))
    relabel("publish", str(bundle("one")), store, *sign).refused(4, "relabel-ir[sign]")
    relabel("pull", f"{store}/ecom", str(tmp_path / "d"), "--key", "x").refused(4, "relabel-ir[sign]")


def test_an_empty_key_is_refused_and_not_taken_for_none(
    relabel: Callable[..., Any], tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    """`--sign-key "$KEY"` where nobody set KEY: what should be signed goes nowhere unsigned."""
    relabel("publish", str(bundle("one")), str(tmp_path / "store"), "--sign-key", "").refused(
        3, "the signing key: is empty"
    )
    assert not (tmp_path / "store").exists()
    relabel("pull", f"{tmp_path}/store/ecom", str(tmp_path / "dest"), "--key", "").refused(
        3, "the public key: is empty"
    )

"""A folder is a bundle only if every name, size and digest is what its manifest says, and no name can do harm."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.export import puller
from relabel.export.bundles import open_bundle, read_manifest, seal_bundle
from relabel.export.publishing import SigningKey, trusted_keys
from relabel.manifests.errors import ConfigError, InputError, ManifestError, StoreError
from relabel.manifests.files import Storage
from relabel.manifests.store import S3_BLOCK_BYTES as BLOCK_BYTES
from relabel.manifests.store import Held, Store, open_bundle_store
from tests import seaweed
from tests.publish.conftest import change_json, write_bundle

FACTS: dict[str, Any] = {"name": "ecom", "lineage": {}}


def check_names(names: list[str], where: str) -> None:
    """A manifest that lists files of these names is read, or refused."""
    files = [{"path": name, "size_bytes": 1, "sha256": "0" * 64} for name in names]
    read_manifest(json.dumps({"kind": "bundle", "format": 1, **FACTS, "files": files}).encode(), where)


def test_the_same_files_and_facts_are_the_same_version_wherever_and_whenever_they_are_sealed(tmp_path: Path) -> None:
    folders = [write_bundle(tmp_path / name) for name in ("a", "b")]
    assert len({seal_bundle(folder, FACTS).version for folder in (*folders, *folders)}) == 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"x" * 40), "model.onnx: is not what its manifest says"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"x" * 39), "model.onnx: is not what its manifest says"),
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx: is missing"),
        (lambda folder: (folder / "extra.py").write_text("import os"), "extra.py: is not in the manifest"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "link: is not in the manifest"),
        (
            lambda folder: ((folder / "model.onnx").unlink(), (folder / "model.onnx").symlink_to("README.md")),
            "model.onnx: is not what its manifest says",
        ),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is not in the manifest"),
        (lambda folder: (folder / "empty").mkdir(), "empty: is not in the manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "not readable as JSON"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{}"), "not readable as JSON"),
    ],
)
def test_a_folder_that_is_not_its_manifest_is_refused(
    bundle: Callable[..., Path], harm: Callable[[Path], Any], said: str
) -> None:
    folder = bundle("one")
    harm(folder)
    with pytest.raises(ManifestError, match=said):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "run"}, "no bundle's manifest"),
        ({"format": 2}, "no bundle's manifest of format 1"),
        ({"kind": "student"}, "a student, and no bundle. Make one of it: relabel export .* --to BUNDLE"),
        ({"kind": "teacher"}, "a teacher, of which there is no bundle"),
        ({"name": ""}, "no bundle's manifest"),
        ({"lineage": None}, "no bundle's manifest"),
        ({"files": None}, "no bundle's manifest"),
        ({"files": [{"path": "a", "size_bytes": 1}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": True, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": -1, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 2**80, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 1, "sha256": "A" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 1, "sha256": "../" + "0" * 61}]}, "`files` is no list of files"),
        ({"files": [{"path": "manifest.json", "size_bytes": 1, "sha256": "0" * 64}]}, "refuses the file name"),
        ({"files": [{"path": "../a", "size_bytes": 1, "sha256": "0" * 64}]}, "refuses the file name"),
        ({"note": "\ud800"}, "not readable as JSON"),
    ],
)
def test_a_hostile_manifest_is_refused(bundle: Callable[..., Path], change: dict[str, Any], said: str) -> None:
    folder = bundle("one")
    change_json(folder / "manifest.json", lambda held: {**held, **change})
    with pytest.raises(ManifestError, match=said):
        open_bundle(folder)


def test_a_folder_for_sentence_transformers_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "relabel.json").write_text("{}")
    with pytest.raises(ManifestError, match="a folder for sentence-transformers or"):
        open_bundle(tmp_path)


HOSTILE = [
    "",
    "/etc/passwd",
    "../up",
    "a/../../up",
    "a/..",
    ".",
    "./a",
    "a//b",
    "a/",
    "a/./b",
    "C:/windows",
    "c:evil",
    "a\\b",
    "..\\up",
    "\\\\host\\share",
    "a\0b",
    "a\nb",
    "a\x1b[2Jb",
    "a\u202eb",
    "a\u200bb",
    "a\ufeff",
    "file:stream",
    "con",
    "aux.txt",
    "a/NUL",
    "com1.onnx",
    "lpt9",
    "a.",
    "a ",
    " a",
    "a/b./c",
    "a" * 201,
    "/".join("a" * 17),
    "é" * 300,
    "e\u0301",
    "\ud800",
    "a*",
    "a?",
    'a"b',
    "<a>",
    "a|b",
    "\u2028",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:40])
def test_a_name_that_could_do_harm_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match=r"refuses the file name|not readable as JSON"):
        check_names([name], "here")


@pytest.mark.parametrize(
    "names",
    [
        ["a", "a"],
        ["Model.onnx", "model.onnx"],
        ["straße", "STRASSE"],
        ["ﬁle", "file"],
        ["a", "a/b"],
        ["A/x", "a/y"],
        ["dir/Ä", "DIR/ä"],
        ["K", "\u212a"],
    ],
)
def test_names_that_fall_together_on_some_disk_are_refused(names: list[str]) -> None:
    with pytest.raises(ManifestError, match="refuses the file name"):
        check_names(names, "here")
    with pytest.raises(ManifestError, match="refuses the file name"):
        check_names(names[::-1], "here")


def test_ordinary_names_are_taken() -> None:
    check_names(
        [
            "model.onnx",
            "model.onnx.data",
            "a/b/c.json",
            ".gitattributes",
            "1/config.pbtxt",
            "a b.txt",
            "console",
        ],
        "here",
    )


@given(st.lists(st.text(max_size=12) | st.text("ab/.", max_size=5), max_size=6))
def test_names_that_are_taken_stay_inside_and_apart(names: list[str]) -> None:
    try:
        check_names(names, "here")
    except ManifestError:
        return
    root = Path("/root-of-all")
    places = {os.path.normpath(root / name).casefold() for name in names}
    assert len(places) == len(names)
    assert all(place.startswith("/root-of-all/") for place in places)


# What publishing asks of a place to publish to, tested with a folder and with S3.


def quiet(_count: int) -> None:
    return


def held(data: bytes) -> Held:
    return Held(len(data), hashlib.sha256(data).hexdigest())


def test_a_record_is_created_once_and_replaced_only_as_it_was_read(bundle_store: Store) -> None:
    assert bundle_store.create("a/b.json", b"one")
    assert not bundle_store.create("a/b.json", b"two")
    read = bundle_store.read_tagged("a/b.json")
    assert read.data == b"one"
    assert bundle_store.replace("a/b.json", b"two", read.tag)
    assert not bundle_store.replace("a/b.json", b"three", read.tag)
    assert bundle_store.read_tagged("a/b.json").data == b"two"
    assert not bundle_store.replace("a/absent.json", b"one", read.tag)
    bundle_store.remove("a/b.json")
    bundle_store.remove("a/b.json")
    with pytest.raises(FileNotFoundError):
        bundle_store.read_tagged("a/b.json")
    assert bundle_store.size("a/b.json") is None


def test_of_sixteen_that_replace_at_once_one_wins(bundle_store: Store) -> None:
    bundle_store.create("pointer", b"0")
    tag = bundle_store.read_tagged("pointer").tag
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda number: bundle_store.replace("pointer", f"by {number}".encode(), tag), range(16)))
    assert won.count(True) == 1
    assert bundle_store.read_tagged("pointer").data == f"by {won.index(True)}".encode()


@pytest.mark.parametrize("size", [0, BLOCK_BYTES + 1])
def test_a_file_comes_out_as_it_went_in_from_any_offset(bundle_store: Store, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    bundle_store.put_file("objects/x", tmp_path / "file", held(data), seen.append)
    assert sum(seen) == size
    assert bundle_store.size("objects/x") == size
    other = bytes([1]) * size if size else b"more"
    for rereads in (False, True):
        assert bundle_store.holds("objects/x", held(data), quiet, rereads=rereads)
        assert not bundle_store.holds("objects/x", held(other), quiet, rereads=rereads)
    for start in {0, size // 2, size}:
        assert b"".join(bundle_store.blocks("objects/x", start)) == data[start:]


def test_a_file_that_is_not_what_was_promised_is_not_taken(bundle_store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(InputError, match="changed while"):
        bundle_store.put_file("objects/x", tmp_path / "file", held(b"these"), quiet)
    assert bundle_store.size("objects/x") is None


def test_listings_show_files_with_sizes_and_the_stores_own_times(bundle_store: Store) -> None:
    assert list(bundle_store.entries("")) == []
    for name in ("a/one", "a/b/two", "c/three"):
        bundle_store.create(name, name.encode())
    assert sorted(entry.name for entry in bundle_store.entries("")) == ["a/b/two", "a/one", "c/three"]
    assert sorted((entry.name, entry.size_bytes) for entry in bundle_store.entries("a")) == [
        ("a/b/two", 7),
        ("a/one", 5),
    ]
    assert all(abs(bundle_store.now_s() - entry.written_s) < 60 for entry in bundle_store.entries(""))


@pytest.mark.s3
def test_a_bucket_that_is_not_there_and_a_wrong_secret_are_reported(
    s3_server: seaweed.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed.lead_to(s3_server.environment, monkeypatch)
    with pytest.raises(StoreError, match="no such bucket"):
        list(open_bundle_store("s3://not-there-at-all/x", Storage()).entries("a"))
    seaweed.lead_to(seaweed.environment(s3_server.url, secret="wrong"), monkeypatch)
    with pytest.raises(StoreError, match="secret key") as caught:
        open_bundle_store(f"s3://{seaweed.BUCKET}/x", Storage()).create("a", b"x")
    assert "wrong" not in str(caught.value)


# Keys are read from files or text, are never shown, and only an ed25519 signature by a trusted one counts.


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
    with pytest.raises(ManifestError, match="nor the path of a file"):
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
            with pytest.raises((ConfigError, ManifestError)) as caught:
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
        3, "the signing key: neither a PEM text", "is a variable not set?"
    )
    assert not (tmp_path / "store").exists()
    relabel("pull", f"{tmp_path}/store/ecom", str(tmp_path / "dest"), "--key", "").refused(
        3, "the public key: neither a PEM text"
    )

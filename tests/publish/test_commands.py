"""The commands: exit codes of the one table, one JSON object, and a watch that goes on until it is asked to stop."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.export.publishing import Channel, SigningKey, Version, check_whole
from relabel.manifests.errors import StoreError
from relabel.manifests.files import Storage
from relabel.manifests.store import Store, open_bundle_store
from tests import seaweed
from tests.publish.conftest import publish_to, pull_from, served_text

Relabel = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path, bundle: Callable[..., Path]) -> str:
    """A folder with one version of `ecom`, at `stable`."""
    publish_to(open_bundle_store(str(tmp_path / "store"), Storage()), bundle("one"))
    return str(tmp_path / "store")


def test_where_bundles_are_pulled_to_is_no_bundle_and_says_which_is(
    relabel: Callable[..., Any], bundle: Callable[..., Path], url: str, bundle_store: Store, tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    pull_from(bundle_store, tmp_path / "served")
    relabel("bench", str(tmp_path / "served")).refused(3, f"Name the active one: {tmp_path}/served/current")


def test_a_bundle_is_verified_where_it_lies(relabel: Callable[..., Any], bundle: Callable[..., Path]) -> None:
    folder = bundle("one")
    found = relabel("verify", str(folder), "--output", "json")
    assert (found.code, found.json["name"]) == (0, "ecom")
    (folder / "README.md").write_text("# A MODEL CARD\n")
    relabel("verify", str(folder)).refused(3, f"{folder}/README.md: is not what its manifest says")


def test_a_bundle_goes_from_publish_to_pull_to_rollback_with_the_codes_of_the_table(
    relabel: Relabel, url: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    def call(code: int, *arguments: str) -> dict[str, Any]:
        done = relabel(*arguments, "--output", "json")
        assert done.code == code, done
        found: dict[str, Any] = done.json
        assert found.get("exit_code", code) == code
        return found

    target = str(tmp_path / "dest")
    first = call(0, "publish", str(bundle("one")), url, "--channel", "candidate")
    assert (first["uploaded"], first["channel"], first["sequence"]) == (4, "candidate", 1)
    assert call(10, "publish", str(bundle("one")), url, "--channel", "candidate")["uploaded"] == 0
    assert call(0, "channel", "set", f"{url}/ecom", "stable", first["version"])["sequence"] == 1
    assert call(10, "channel", "set", f"{url}/ecom", "stable", first["version"])["sequence"] == 1
    pulled = call(0, "pull", f"{url}/ecom", target)
    assert (pulled["version"], pulled["channel"]) == (first["version"], "stable")
    assert call(10, "pull", f"{url}/ecom", target)["fetched_bytes"] == 0
    second = call(0, "publish", str(bundle("two")), url, "--channel", "stable")
    call(0, "pull", f"{url}/ecom@stable", target)
    back = call(0, "pull", "--rollback", target)
    assert (back["version"], served_text(tmp_path / "dest")) == (first["version"], "one")
    kept = relabel("show", target).out
    assert re.search(
        rf"^  kept +{first['version']}, {second['version']} \(this machine left it by a rollback\)$", kept, re.MULTILINE
    )
    assert call(10, "pull", f"{url}/ecom", target)["is_held"]
    unheld = call(0, "pull", f"{url}/ecom", target, "--unhold")
    assert (unheld["version"], unheld["fetched_bytes"]) == (second["version"], 0)
    assert call(0, "rollback", f"{url}/ecom", "stable")["version"] == first["version"]
    call(0, "pull", f"{url}/ecom", target)
    assert served_text(tmp_path / "dest") == "one"
    call(5, "rollback", f"{url}/ecom", "stable")
    listed = call(0, "list", url)["bundles"]
    assert [(one["name"], one["versions"], len(one["channels"])) for one in listed] == [("ecom", 2, 2)]
    shown = call(0, "show", f"{url}/ecom")
    assert [move["sequence"] for move in shown["channels"][1]["moves"]] == [1, 2, 3]
    version = call(0, "show", f"{url}/ecom@stable")
    assert version["facts"]["lineage"]["student"] == "one"
    assert len(version["list"]) == 4
    assert call(0, "gc", url)["dry_run"]
    assert call(10, "gc", url, "--delete")["deleted"] == []


def test_verify_names_the_channel_that_a_damaged_version_came_by(
    relabel: Relabel, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    store, dest = str(tmp_path / "store"), tmp_path / "dest"
    assert relabel("publish", str(bundle("one")), store, "--channel", "candidate").code == 0
    assert relabel("pull", f"{store}/ecom@candidate", str(dest)).code == 0
    (dest / "current/manifest.json").write_bytes(b"{")
    said = f"To repair it: relabel pull URL/ecom@candidate {dest}."
    relabel("verify", str(dest)).refused(3, said)


def test_the_first_gc_says_when_what_it_marked_is_deleted(
    relabel: Relabel, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    for text in ("one", "two"):
        assert relabel("publish", str(bundle(text)), store, "--channel", "stable").code == 0
    time.sleep(1.1)
    gc = ("gc", store, "--keep", "1", "--grace", "1s", "--delete")
    marked = relabel(*gc)
    assert marked.out.startswith(f"{store}: done. What is marked is deleted by the same command, 1s or more after")
    time.sleep(1.1)
    assert relabel(*gc).out.startswith(f"{store}: done\n")


def test_what_a_store_holds_is_printed_golden_down_to_the_order_of_keys(
    relabel: Relabel, store: str, bundle: Callable[..., Path], golden: Callable[[str, str], None]
) -> None:
    publish_to(open_bundle_store(store, Storage()), bundle("two"))
    said = []
    for arguments in (("list", store), ("show", f"{store}/ecom"), ("show", f"{store}/ecom@stable")):
        said += [
            relabel(*arguments).out,
            json.dumps(relabel(*arguments, "--output", "json").json, indent=1, ensure_ascii=False) + "\n",
        ]
    text = re.sub(r"\b[0-9a-f]{12,64}\b|\d{4}-\d\d-\d\dT[\d:.+]+", "…", "\n".join(said).replace(store, "STORE"))
    golden("publish/store.txt", text)


@pytest.mark.s3
def test_every_command_finds_its_store_by_a_profile_and_shows_no_secret(
    relabel: Relabel,
    s3_server: seaweed.Server,
    bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seaweed.lead_to(s3_server.environment, monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile prod]\nregion = us-east-1\nendpoint_url = {s3_server.url}\n")
    keys = f"aws_access_key_id = {seaweed.KEY}\naws_secret_access_key = {seaweed.SECRET}\n"
    (tmp_path / "credentials").write_text(
        f"[prod]\n{keys}[other]\naws_access_key_id = no\naws_secret_access_key = no\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "prod")
    url, target = f"s3://{seaweed.BUCKET}/{tmp_path.name}", str(tmp_path / "dest")
    said = []

    def call(code: int, *arguments: str) -> Any:
        done = relabel(*arguments, "--output", "json")
        assert done.code == code, done
        said.append(done.out + done.err)
        return done.json

    for text in ("one", "two"):
        call(0, "publish", str(bundle(text)), url, "--channel", "stable")
    call(0, "pull", f"{url}/ecom", target)
    call(0, "rollback", f"{url}/ecom", "stable")
    assert call(0, "list", url)["bundles"][0]["versions"] == 2
    call(10, "gc", url, "--delete")
    assert seaweed.SECRET not in "".join(said)
    written = [path.read_bytes() for path in (tmp_path / "dest").rglob("*") if path.is_file()]
    bundle_store = open_bundle_store(url, Storage())
    stored = [b"".join(bundle_store.blocks(entry.name, 0)) for entry in bundle_store.entries("")]
    assert not any(seaweed.SECRET.encode() in data for data in written + stored)


def test_a_new_channel_is_called_one(relabel: Relabel, folder: Path, store: str) -> None:
    version = relabel("show", "store/ecom", "--output", "json").json["versions"][0]["version"]

    def said(channel: str) -> str:
        return str(relabel("channel", "set", "store/ecom", channel, version).err)

    assert "new channel" not in said("stable")
    assert "note: stabel is a new channel, next to stable" in said("stabel")
    assert "new channel" not in said("stabel")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("pull store/ecom", 2, "and DEST"),
        ("pull store/ecom dest more", 2, "and DEST"),
        ("pull --rollback", 2, "one argument, DEST"),
        ("pull --rollback dest --watch 5", 2, "no other option"),
        ("pull --rollback dest", 3, "no version was pulled here"),
        ("pull store/ecom dest --to one", 2, "--to goes with --rollback"),
        ("pull store/absent dest", 3, "no such bundle, channel or version. List them: relabel list "),
        ("pull gs://bucket/ecom dest", 2, "local paths and to s3://"),
        ("publish absent store", 3, "absent: no such folder"),
        ("channel set store/ecom@x stable 1", 2, "without @x"),
        ("channel set store/ecom stable absent", 3, "no version absent"),
        ("rollback store/ecom absent", 3, "no channel absent"),
        ("rollback store stable", 3, "if store is a bundle store itself: relabel list ./store"),
        ("channel set store/absent stable 1", 3, "no bundle absent"),
        ("show store/absent", 3, "no bundle absent"),
        ("show store/ecom@absent", 3, "no version absent"),
        ("show store/ecom@stabel", 3, "no version stabel there. Did you mean stable? See what there is: "),
        ("rollback store/ecom stabel", 3, "no channel stabel there. Did you mean stable? See what there is: "),
        ("gc store --grace soon", 2, "want a length"),
        ("gc store --keep 0", 2, "--keep"),
        ("gc stor", 3, "stor: no such folder"),
        ("gc store/ecom", 3, "store/ecom: no store, but a bundle of one. Give the store: "),
        ("list store/ecom", 3, "store/ecom: no store"),
        ("list stor", 3, "stor: no such folder"),
    ],
)
def test_what_can_not_be_done_is_reported(
    relabel: Relabel, folder: Path, store: str, line: str, code: int, said: str
) -> None:
    relabel(*line.split()).refused(code, said)


def test_a_refused_pull_says_whether_a_version_is_active(relabel: Relabel, folder: Path, store: str) -> None:
    relabel("pull", "store/absent", "dest").refused(3, "No version is active there.")
    relabel("pull", "store/ecom", "dest")
    relabel("pull", "store/absent", "dest").refused(3, "The active version is unchanged.")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("plan.json", "out: holds labels or scores, and no bundle. Train a student on labels (`relabel distill`)"),
        ("rounds.json", "make a bundle of it: relabel export STUDENT --to BUNDLE"),
        ("checkpoints/training.json", "and make a bundle of the student: relabel export out --to BUNDLE"),
    ],
)
def test_another_output_is_not_published_and_the_way_to_a_bundle_is_named(
    relabel: Relabel, folder: Path, made: str, said: str
) -> None:
    file = folder / "out" / made
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    relabel("publish", "out", "store").refused(3, said)
    assert not Path("store").exists()


def test_no_key_is_written_anywhere_or_shown(
    relabel: Relabel,
    tmp_path: Path,
    bundle: Callable[..., Path],
    keys: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RELABEL_SIGN_KEY", keys["ours"].read_text())
    done = relabel("publish", str(bundle("one")), str(tmp_path / "store"), "--channel", "stable")
    secret = keys["ours"].read_text().splitlines()[1]
    written = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert secret not in done.out + done.err + relabel("publish", "--help").out
    assert secret.encode() not in written


def watch(url: str, target: Path, *more: str) -> subprocess.Popen[str]:
    call = [
        sys.executable,
        "-m",
        "relabel",
        "pull",
        f"{url}/ecom@stable",
        str(target),
        "--watch",
        "1",
        "--output",
        "json",
        *more,
    ]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def until(serves: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not serves():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serves(target: Path, text: str) -> Callable[[], bool]:
    return lambda: (target / "current").exists() and served_text(target) == text


def test_a_watch_follows_the_channel_and_ends_cleanly(store: str, tmp_path: Path, bundle: Callable[..., Path]) -> None:
    bundle_store, target = open_bundle_store(store, Storage()), tmp_path / "dest"
    process = watch(store, target)
    try:
        until(serves(target, "one"))
        second = publish_to(bundle_store, bundle("two")).version.at
        until(serves(target, "two"))
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert "Traceback" not in err
    found = json.loads(out)
    assert (found["version"], found["refused"], found["exit_code"], process.returncode) == (second, 0, 130, 130)
    assert found["switches"] in (1, 2), "the signal may come before the last one is counted"


def test_a_watch_says_once_what_it_refuses_and_goes_on(
    store: str, tmp_path: Path, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    process = watch(store, tmp_path / "dest", "--key", str(keys["ours.pub"]))
    assert "signed by nobody" in process.stderr.readline()
    time.sleep(1.5)
    publish_to(open_bundle_store(store, Storage()), bundle("two"), key=SigningKey(str(keys["ours"])))
    until(serves(tmp_path / "dest", "two"))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, json.loads(out)["refused"] >= 1, "signed by nobody" in err) == (0, True, False)


def test_a_watch_whose_last_pull_was_refused_ends_in_that_code(
    store: str, tmp_path: Path, keys: dict[str, Path]
) -> None:
    process = watch(store, tmp_path / "dest", "--key", str(keys["ours.pub"]))
    assert "signed by nobody" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    found = json.loads(process.communicate(timeout=20)[0])
    assert (process.returncode, found["exit_code"], found["refused"] >= 1) == (5, 5, True)


def test_a_pull_with_nothing_to_do_loads_no_heavy_library(store: str, tmp_path: Path) -> None:
    pull_from(open_bundle_store(store, Storage()), tmp_path / "dest")
    code = (
        "import sys\nfrom relabel.jobs.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 10, end\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "pull", f"{store}/ecom", str(tmp_path / "dest")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not set(done.stdout.split()) & {
        "torch",
        "transformers",
        "onnxruntime",
        "pyarrow",
        "polars",
        "numpy",
        "s3fs",
        "botocore",
        "cryptography",
    }


# A store that fails: every call in turn raises before it acts, after it acted, or hands over too few bytes; and S3
# over a bad wire. Whatever happens, each channel points to a whole version and the active version is whole; the same
# command afterwards ends the work.


@pytest.fixture
def wire(s3_server: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[seaweed.Proxy]:
    """A proxy in front of S3; this process's variables lead to it."""
    with seaweed.proxying(s3_server) as proxy:
        seaweed.lead_to(proxy.environment, monkeypatch)
        yield proxy


def every(number: int, verdict: str, *methods: str) -> seaweed.Decide:
    """Every so many requests of these methods go wrong."""
    count = itertools.count(1)
    return lambda exchange: verdict if exchange.method in methods and next(count) % number == 0 else "pass"


@pytest.mark.s3
def test_a_bad_wire_to_s3_costs_time_and_nothing_else(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    """The reply of every third request is lost."""
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    wire.decide = every(3, "drop", "GET", "PUT", "POST", "HEAD")
    for text in ("one", "two"):
        publish_to(bundle_store, bundle(text, size=300_000))
        pull_from(bundle_store, tmp_path / "dest")
        assert served_text(tmp_path / "dest") == text
    wire.decide = lambda exchange: "pass"
    assert [move["sequence"] for move in Channel.load(bundle_store, "ecom", "stable").moves] == [1, 2]
    check_whole(
        bundle_store, Version.load(bundle_store, "ecom", Channel.load(bundle_store, "ecom", "stable").head["version"])
    )


@pytest.mark.s3
def test_a_multipart_upload_survives_a_bad_wire_and_is_checked(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    bundle_store._part_bytes = 5 << 20
    wire.decide = every(4, "drop", "PUT", "POST")
    publish_to(bundle_store, bundle("one", size=17 << 20))
    wire.decide = lambda exchange: "pass"
    pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"
    parts = [exchange for exchange in wire.seen if "partNumber" in exchange.path]
    assert len(parts) >= 4
    assert all("x-amz-checksum-sha256" in exchange.headers for exchange in parts)


@pytest.mark.s3
def test_a_checksum_of_an_objects_parts_is_settled_by_reading_the_object_once(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    """Some servers give it for an object that came in parts, without a mark that it is no checksum of the whole."""
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    wire.decide = lambda exchange: "composite" if exchange.method == "HEAD" else "pass"
    published = publish_to(bundle_store, bundle("one", size=300_000))
    assert published.has_changed
    objects = [exchange for exchange in wire.seen if "/objects/" in exchange.path]
    reads = [exchange.path for exchange in objects if exchange.method == "GET"]
    writes = [exchange.path for exchange in objects if exchange.method in ("PUT", "POST")]
    assert sorted(reads) == sorted(set(reads)), "each object is read once"
    assert sorted(writes) == sorted(set(writes)), "each object is uploaded once"
    assert set(reads) == set(writes)
    verdicts = {"HEAD": "composite", "GET": "flip"}
    wire.decide = lambda exchange: verdicts.get(exchange.method, "pass") if "/objects/" in exchange.path else "pass"
    with pytest.raises(StoreError, match="still holds other bytes"):
        publish_to(bundle_store, bundle("two", size=300_000), channel=None)

"""A store that fails: every call in turn raises before it acts, after it acted, or hands over too few bytes; and S3
over a bad wire.

Whatever happens, each channel points to a whole version and the active version is whole; the same command afterwards
ends the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relabel.export.store import check_whole, load_channel, load_version
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.store import open_bundle_store
from tests import seaweed
from tests.publish.conftest import publish_to, pull_from, served_text


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
@pytest.mark.parametrize("verdict", ["drop", "refuse", "503", "500", "cut"])
def test_a_bad_wire_to_s3_costs_time_and_nothing_else(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path], verdict: str
) -> None:
    """Every third request: its reply lost, never sent on, throttled, failed, or cut off."""
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    wire.decide = every(3, verdict, "GET", "PUT", "POST", "HEAD") if verdict != "cut" else every(3, verdict, "GET")
    for text in ("one", "two", "three"):
        publish_to(bundle_store, bundle(text, size=300_000))
        pull_from(bundle_store, tmp_path / "dest")
        assert served_text(tmp_path / "dest") == text
    wire.decide = lambda exchange: "pass"
    assert [move.sequence for move in load_channel(bundle_store, "ecom", "stable").moves] == [1, 2, 3]
    check_whole(
        bundle_store, load_version(bundle_store, "ecom", load_channel(bundle_store, "ecom", "stable").head.version)
    )


@pytest.mark.s3
def test_a_multipart_upload_survives_a_bad_wire_and_is_checked(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    bundle_store._part_bytes = 5 << 20
    for verdict in ("drop", "503"):
        wire.decide = every(4, verdict, "PUT", "POST")
        publish_to(bundle_store, bundle(verdict, size=17 << 20))
        wire.decide = lambda exchange: "pass"
        pull_from(bundle_store, tmp_path / "dest")
        assert served_text(tmp_path / "dest") == verdict
    parts = [exchange for exchange in wire.seen if "partNumber" in exchange.path]
    assert len(parts) >= 8
    assert all("x-amz-checksum-sha256" in exchange.headers for exchange in parts)


@pytest.mark.s3
def test_a_store_that_ignores_conditions_is_refused_before_anything_is_published(
    wire: seaweed.Proxy, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    bundle_store = open_bundle_store(f"s3://{seaweed.BUCKET}/{tmp_path.name}", Storage())
    wire.decide = lambda exchange: "careless"
    with pytest.raises(RelabelError, match="ignores it"):
        publish_to(bundle_store, bundle("one"))
    assert list(bundle_store.entries("")) == []


@pytest.mark.s3
def test_a_big_file_goes_through_memory_in_blocks(s3_server: seaweed.Server, tmp_path: Path) -> None:
    """100 MB up and down in a process that may hold little more than its libraries."""
    import os
    import subprocess
    import sys

    from tests.publish.conftest import write_bundle

    folder = write_bundle(tmp_path / "big", "big", size=100 << 20)
    url = f"s3://{seaweed.BUCKET}/{tmp_path.name}"
    script = (
        "import pathlib, re, sys\nfrom relabel.jobs.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1]) // 1024)"
    )
    for arguments in (
        ["publish", str(folder), url, "--channel", "stable"],
        ["pull", f"{url}/ecom", str(tmp_path / "dest")],
    ):
        environment = {**os.environ, **s3_server.environment}
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) < 230, (
            "MB of memory at most: 90 for the libraries, a few blocks of 16 and 32"
        )
    assert served_text(tmp_path / "dest") == "big"

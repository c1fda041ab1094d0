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
    assert [move.sequence for move in load_channel(bundle_store, "ecom", "stable").moves] == [1, 2]
    check_whole(
        bundle_store, load_version(bundle_store, "ecom", load_channel(bundle_store, "ecom", "stable").head.version)
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

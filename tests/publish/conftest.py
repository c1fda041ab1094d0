"""Small bundles, keys, and places to publish to: a folder, and an S3 server started for these tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.bundles import Bundle, seal_bundle, translate_refusals
from relabel.export.publishing import Published, parse_address, publish
from relabel.export.puller import Pulled, ServingFolder, Trust, roll_back
from relabel.jobs.pulling import pull_version
from relabel.manifests.files import Storage
from relabel.manifests.store import Store, open_bundle_store
from tests import seaweed
from tests.jobs.conftest import folder, no_scheduler, relabel  # noqa: F401


def silent(_what: str, _count: int) -> None:
    """Progress for nobody."""


def write_bundle(folder: Path, text: str = "one", *, name: str = "ecom", size: int = 40) -> Path:  # noqa: F811
    """A bundle of three files: weights that depend on `text`, and a tokenizer and a card that do not."""
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes((text.encode() * (size // len(text) + 1))[:size])
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": "WordPiece"}')
    (folder / "README.md").write_text("# A model card\n")
    seal_bundle(folder, {"name": name, "lineage": {"student": text, "runs": []}, "grades": 3})
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., Path]:
    """`bundle("two")`: the folder of a sealed bundle whose weights depend on the text."""

    def made(text: str = "one", **options: Any) -> Path:
        return write_bundle(tmp_path / f"bundle-{text}", text, **options)

    return made


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to publish: a folder, then a bucket."""
    if request.param == "local":
        return str(tmp_path / "store")
    server: seaweed.Server = request.getfixturevalue("s3_server")
    seaweed.lead_to(server.environment, monkeypatch)
    return f"s3://{seaweed.BUCKET}/{tmp_path.name}"


@pytest.fixture
def bundle_store(url: str) -> Store:
    """The bundle store at the URL."""
    return open_bundle_store(url, Storage())


@pytest.fixture
def local_bundle_store(tmp_path: Path) -> Store:
    """A depot in a folder, for tests whose subject is no storage."""
    return open_bundle_store(str(tmp_path / "store"), Storage())


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two key pairs: `ours`, `ours.pub`, `theirs`, `theirs.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder, found = tmp_path_factory.mktemp("keys"), {}  # noqa: F811
    for name in ("ours", "theirs"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for suffix, pem in (("", private), (".pub", public)):
            found[name + suffix] = folder / (name + suffix)
            found[name + suffix].write_bytes(pem)
    return found


def publish_to(bundle_store: Store, source: Path, channel: str | None = "stable", **options: Any) -> Published:
    from relabel.export.bundles import open_bundle

    return publish(open_bundle(source), bundle_store, silent, channel=channel, **options)


def pull_from(
    bundle_store: Store,
    target: Path,
    at: str = "stable",
    *,
    name: str = "ecom",
    trust: Trust | None = None,
    **options: Any,
) -> Pulled:
    address = parse_address(f"{bundle_store.url}/{name}@{at}")
    return pull_version(bundle_store, address, ServingFolder(target), trust or Trust(), silent, **options)


def roll_back_in(target: Path, to: str | None = None) -> Pulled:
    """`relabel pull --rollback`."""
    with translate_refusals():
        return roll_back(ServingFolder(target), to)


def served_text(target: Path) -> str:
    """The first letters of the weights that serve, after the whole bundle was checked."""
    from relabel.export.bundles import open_bundle

    current: Bundle = open_bundle((target / "current").resolve())
    return str(current.facts["lineage"]["student"])


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Write what `change` makes of a JSON file."""
    held = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(held)))

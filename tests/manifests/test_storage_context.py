"""How storage is reached is a value that is handed in: nothing of it is the process's, and none of its secrets show."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from relabel.manifests.files import LEASE_S, RETRY_S, Storage
from relabel.manifests.secrets import forget_secrets, redacted, secret_in
from relabel.manifests.store import open_run_store, read_url
from tests.vault import Vault


@pytest.fixture(autouse=True)
def own_secrets() -> Iterator[None]:
    yield
    forget_secrets()


@pytest.fixture
def vault() -> Iterator[type[Vault]]:
    with Vault.installed() as found:
        yield found


def test_two_storages_of_one_process_reach_their_own_files_alone(vault: type[Vault]) -> None:
    one, other = (Storage.of({"vault": {"key": f"key-of-{name}"}}) for name in ("one", "other"))
    stores = [open_run_store("vault://data", storage, single_writer=True) for storage in (one, other)]
    for name, store in zip((b"one", b"other"), stores, strict=True):
        store.put("name", name)
    assert [read_url("vault://data/name", storage) for storage in (one, other, one)] == [b"one", b"other", b"one"]
    assert [store.read("name") for store in stores] == [b"one", b"other"]
    with pytest.raises(FileNotFoundError):
        read_url("vault://data/name", Storage())


def test_a_storage_shows_none_of_its_options_and_crosses_to_another_process_with_them() -> None:
    storage = Storage.of({"S3A": {"secret": "hidden-3c1", "client_kwargs": {"token": "hidden-4d2"}, "profile": "prod"}})
    assert redacted("hidden-3c1 hidden-4d2") == redacted("hidden-4d2 hidden-3c1")
    assert "hidden" not in redacted("hidden-3c1 hidden-4d2")
    assert secret_in("see hidden-3c1") == "the value of the storage option secret"
    assert redacted("production") == "production"
    for text in (repr(storage), str(storage), f"{[storage]}"):
        assert "hidden" not in text
        assert "profile" not in text
    again = pickle.loads(pickle.dumps(storage))
    assert again.options_of("s3") == storage.options_of("s3") != {}
    assert (again.retry_s, again.lease_s) == (RETRY_S, LEASE_S)

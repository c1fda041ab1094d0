"""Input that lies in a dataset of the Hugging Face Hub, through its own filesystem for fsspec, from a small server that
speaks the Hub's API.
"""

from __future__ import annotations

import http.server
import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.rows import read_chunks
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import InputSpec

REPO, COMMIT = "somebody/pairs", "c" * 40


def parquet(start: int) -> bytes:
    ids = [str(number) for number in range(start, start + 3)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"query_id": ids, "query": ids, "doc_id": ids, "document": ids}), sink)
    return sink.getvalue()


FILES = {"data/train-0.parquet": parquet(0), "data/train-1.parquet": parquet(3)}


class Hub(http.server.BaseHTTPRequestHandler):
    """What listing and reading one dataset ask of the Hub."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if listed := re.fullmatch(f"/api/datasets/{REPO}/tree/main/?(.*)", path):
            self._say(json.dumps(list(entries_of(listed[1]))).encode())
        elif re.fullmatch(f"/api/datasets/{REPO}(/revision/main)?", path):
            self._say(json.dumps({"id": REPO, "sha": COMMIT}).encode())
        elif (asked := re.fullmatch(f"/datasets/{REPO}/resolve/main/(.*)", path)) and asked[1] in FILES:
            self._say_bytes(FILES[asked[1]])
        else:
            is_here = f"/{REPO}" in path
            self._say(b"{}", 404, {"X-Error-Code": "EntryNotFound" if is_here else "RepoNotFound"})

    def _say_bytes(self, data: bytes) -> None:
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(span[1]), min(int(span[2] or len(data)), len(data) - 1) + 1
            self._say(data[start:stop], 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
        else:
            self._say(data)

    def _say(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"e"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def entries_of(folder: str) -> Iterator[dict[str, Any]]:
    """What lies in a folder of the dataset."""
    inside = {name.removeprefix(f"{folder}/" if folder else ""): data for name, data in FILES.items()}
    for name, data in inside.items():
        path = f"{folder}/{name}" if folder else name
        if path in FILES and "/" not in name:
            yield {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
    for name in {name.partition("/")[0] for name in inside if not folder and "/" in name}:
        yield {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}


@pytest.fixture
def hub() -> Iterator[Storage]:
    """Storage whose Hub is here."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Storage.of({"hf": {"endpoint": f"http://127.0.0.1:{server.server_port}", "skip_instance_cache": True}})
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "rows"),
    [("data/*.parquet", 6), ("@main/data/train-0.parquet", 3)],
)
def test_a_dataset_of_the_hub_reads_like_input_on_disk(hub: Storage, path: str, rows: int) -> None:
    url = f"hf://datasets/{REPO}{path if path.startswith('@') else f'/{path}'}"
    opened = open_dataset(InputSpec(path=(url,)), hub)
    plan, _ = make_plan(opened, {}, name="job", shards=1, chunk_rows=2)
    chunks = read_chunks(opened, plan.shards[0], None, range(len(plan.shards[0].chunks)))
    found = [pair.document for chunk in chunks for pair in chunk.pairs]
    assert found == [str(number) for number in range(rows)]


@pytest.mark.parametrize("path", [f"{REPO}/none.parquet", "nobody/nothing/data"])
def test_what_the_hub_does_not_have_is_named(hub: Storage, path: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"hf://datasets/{path}")):
        open_dataset(InputSpec(path=(f"hf://datasets/{path}",)), hub)

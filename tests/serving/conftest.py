"""The reference server of docs/deploy/serving, in this process, with or without a planted fault."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
from tests.export.conftest import bundle, decoder, decoder_bundle, graded_file, student  # noqa: F401
from tests.jobs.conftest import folder, no_scheduler, relabel  # noqa: F401

FILE = Path(__file__).parents[2] / "docs" / "deploy" / "serving" / "rerank.py"


@pytest.fixture(scope="session")
def rerank() -> Any:
    module = ModuleType("rerank")  # not imported: that would leave its bytecode in docs/
    exec(compile(FILE.read_text(encoding="utf-8"), str(FILE), "exec"), vars(module))
    return module


@pytest.fixture
def serve(rerank: Any) -> Iterator[Callable[..., str]]:
    """`serve(student)`: the server's URL. `student` is one of `load.py`, or anything with `score` and `version`."""
    servers = []

    def start(model: Any) -> str:
        server = rerank.serve(rerank.Served(model, model.version), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()

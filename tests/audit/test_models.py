"""`relabel audit` of a student, of a bundle and of a server; and what a failed audit does to `publish`."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relabel.export.exporting import export_bundle
from relabel.export.parity import PairsFile
from relabel.export.specs import ExportSpec
from relabel.manifests.files import Storage
from tests.score.conftest import write_tiny_student
from tests.score.test_score import write_scattered_pairs

Relabel = Callable[..., Any]
PAIRS = ("--pairs", "pairs.parquet", "--columns", "document=title+body", "--rows", "12")
NEVER = ("--require", "stuffing<0")
"""A gate that no judge passes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny student, and its bundle next to it."""
    folder = tmp_path_factory.mktemp("made")
    student = write_tiny_student(folder / "student")
    source = PairsFile(str(write_scattered_pairs(folder)))
    spec = ExportSpec(precisions="fp32", parity={"min_pairs": 40})  # type: ignore[arg-type]
    export_bundle(student, folder / "bundle", spec, Storage(), pairs=source, provider="cpu")
    return folder


@pytest.mark.parametrize("kind", ["student", "bundle"])
def test_a_model_is_audited_as_it_scores_and_a_failed_audit_wants_anyway(
    relabel: Relabel, write_pairs: Callable[..., Path], made: Path, folder: Path, kind: str
) -> None:
    write_pairs()
    kept = made / "measurements" / kind / "audit"
    outcome = relabel("audit", str(made / kind), *PAIRS, "--device", "cpu", "--output", "json")
    assert outcome.code == 0
    probes = {probe["probe"]: probe for probe in outcome.json["probes"]}
    assert probes["again"]["moved"]["value"] == 0
    assert (outcome.json["rows"], outcome.json["queries"], outcome.json["scale"]) == (12, 6, 2)
    publish = ("publish", str(made / "bundle"), f"store-{kind}", "--channel", "stable")
    assert relabel(*publish, "--version", "one").code == 0
    assert relabel("audit", str(made / kind), *PAIRS, "--device", "cpu", *NEVER).code == 5
    if kind == "bundle":  # the tiny student has no manifest, by which a report knows one
        reported = relabel("report", str(made / kind), "--to", "page.html")
        assert "A gate refuses it: stuffing<0: refused" in reported.out
        assert 'id="audit"' in (folder / "page.html").read_text(encoding="utf-8")
    relabel(*publish, "--version", "two").refused(5, str(kept / "audit.json"), "--anyway")
    assert relabel(*publish[:3], "--version", "two").code == 0  # no channel moves
    assert relabel(*publish, "--version", "two", "--anyway").code == 0
    (published,) = Path(f"store-{kind}").glob("*/channels")
    set_back = relabel("channel", "set", str(published.parent), "stable", "one")
    assert "although" not in set_back.err
    moved = relabel("channel", "set", str(published.parent), "stable", "two")
    assert moved.code == 0, "nothing is refused: going back has to work at night"
    assert "version two was published although this refuses it: stuffing<0: refused" in moved.err
    (kept / "audit.json").unlink()


def test_an_audit_of_another_student_says_nothing_of_a_bundle(
    relabel: Relabel, write_pairs: Callable[..., Path], made: Path
) -> None:
    write_pairs()
    other = write_tiny_student(made / "other", seed=5)
    assert relabel("audit", str(other), *PAIRS, "--device", "cpu", *NEVER).code == 5
    assert relabel("publish", str(made / "bundle"), "store", "--channel", "stable").code == 0


class SharedWords(BaseHTTPRequestHandler):
    """A reranker of Cohere's API: twice the number of words that query and document share."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = set(body["query"].split())
        items = [
            {"index": place, "relevance_score": 2 * len(words & set(document.split()))}
            for place, document in enumerate(body["documents"])
        ]
        data = json.dumps({"results": items}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SharedWords) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/rerank"
        server.shutdown()


def test_a_server_s_scores_have_the_scale_of_their_own_range(
    relabel: Relabel, write_pairs: Callable[..., Path], pairs: list[dict[str, Any]], url: str
) -> None:
    for row in pairs[::2]:
        row["body"] = "a blue lamp"
    write_pairs()
    call = ("audit", url, *PAIRS, "--api", "cohere", "--to", "served", "--require", "stuffing<=0.05")
    outcome = relabel(*call, "--output", "json")
    assert outcome.code == 5
    assert outcome.json["scale"] == pytest.approx(2, abs=2)
    probes = {probe["probe"]: probe for probe in outcome.json["probes"]}
    assert probes["stuffing"]["moved"]["value"] > 0.5
    assert probes["padded"]["moved"]["value"] == probes["again"]["moved"]["value"] == 0
    relabel("audit", url, *PAIRS, "--api", "cohere").refused(2, "want a folder on this machine")

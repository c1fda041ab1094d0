"""What each page takes for granted, made small: pairs, runs, a student, a bundle, an endpoint."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import main
from relabel.jobs.commands.demo import load_pairs
from tests.docs.pages import DOCS
from tests.engines_openai.batch_server import BatchServer
from tests.engines_openai.scripted_server import Call, Json, ScriptedServer, chat
from tests.jobs.test_demo import write_tiny_model
from tests.publish.conftest import write_bundle
from tests.score.conftest import write_tiny_student
from tests.systems.conftest import make_collection
from tests.teachers.models import write_tiny_decoder

Rows = Callable[..., list[dict[str, Any]]]


def call(*arguments: str) -> int:
    """A command of relabel in this process; its exit code."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert isinstance(end.value.code, int)
    return end.value.code


def write_pairs(folder: Path, path: str = "pairs.parquet", first: int = 0, last: int = 192) -> None:
    """Pairs that ship with relabel, with their author's grades."""
    pq.write_table(pa.Table.from_pylist(load_pairs()[first:last]), folder / path)


def first_job(folder: Path) -> None:
    """Pairs, and the job that `relabel init` writes."""
    write_pairs(folder)
    assert call("init", "job.yaml") == 0


def finished_run(folder: Path, name: str, pairs: str, *, seed: int = 7, labeler: str = "graph-grpo") -> None:
    """A run in out/NAME, of the fake engine."""
    job = {
        "name": name,
        "input": {"path": pairs},
        "labeler": {"name": labeler},
        "engine": {"name": "fake", "seed": seed},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(job | {"output": f"out/{name}"}))  # JSON is YAML
    assert call("run", f"{name}.yaml") == 0


def two_days(folder: Path) -> None:
    """Runs over two halves of the pairs."""
    for name, first in (("monday", 0), ("tuesday", 96)):
        write_pairs(folder, f"{name}.parquet", first, first + 96)
        finished_run(folder, name, f"{name}.parquet")


def judged(folder: Path, rows: Rows) -> None:
    """Runs, and files of two judges and of humans (those of tests/score/test_comparison.py)."""
    write_pairs(folder)
    finished_run(folder, "ecom", "pairs.parquet")
    finished_run(folder, "scores", "pairs.parquet")
    teacher = rows(60)
    student = [dict(row, probs=other["probs"]) for row, other in zip(teacher, rows(60, seed=2), strict=True)]
    for row, held in zip(student, teacher, strict=True):
        row["probs"] = [(one + 2 * other) / 3 for one, other in zip(row["probs"], held["probs"], strict=True)]
        row["label"] = int(np.argmax(row["probs"]))
    for path, group in (("teacher.jsonl", teacher), ("student.jsonl", student[::-1]), ("grades.jsonl", teacher)):
        wanted = ("query_id", "doc_id", "grade") if path == "grades.jsonl" else ("query_id", "doc_id", "label", "probs")
        (folder / path).write_text("".join(json.dumps({key: row[key] for key in wanted}) + "\n" for row in group))
    one_judge = [{"llm_label": row["label"], "human_grade": row["grade"], "judge": "gpt-4"} for row in rows(90)]
    pq.write_table(pa.Table.from_pylist(one_judge), folder / "labels.parquet")


def two_prompts(folder: Path) -> None:
    """Two runs over the same pairs, with other seeds."""
    write_pairs(folder)
    finished_run(folder, "ecom", "pairs.parquet")
    finished_run(folder, "other", "pairs.parquet", seed=8)


def labelled_pairs(folder: Path) -> None:
    """Pairs and a finished run over them."""
    write_pairs(folder)
    finished_run(folder, "my-labels", "pairs.parquet", labeler="r3a")


def cited_answers(folder: Path) -> None:
    """Generated answers and the corpus that they cite."""
    answers = [
        {
            "query_id": f"q{query}",
            "query": f"red shoe {query}",
            "answer_id": f"a{answer}",
            "cited": ["d1"],
            "candidates": ["d1", "d2"],
        }
        for query in range(3)
        for answer in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(answers), folder / "answers.parquet")
    kinds = ["leather boots", "garden hose", "wool scarf", "glass bowl", "steel pan"]
    documents = [
        {"doc_id": f"d{number}", "title": kinds[number % 5], "body": f"a red shoe of kind {number}"}
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(documents), folder / "docs.parquet")


def cited_answers_and_encoder(folder: Path) -> None:
    """Those, an encoder of random weights under the name of a real one, and a student."""
    cited_answers(folder)
    write_tiny_student(folder / "out" / "ecom-bert", heads={"relevance": 3})
    write_tiny_model(folder / "models" / "all-MiniLM-L6-v2")


def trained_student(folder: Path) -> None:
    """A student of one head in student/, and pairs."""
    write_pairs(folder)
    write_tiny_student(folder / "student", name="ecom-bert", heads={"relevance": 3})


def real_bundle(folder: Path) -> None:
    """A bundle in out/bundle that answers, with a Triton view."""
    write_pairs(folder)
    write_tiny_student(folder / "student", name="ecom", heads={"relevance": 3})
    assert (
        call("export", "student", "--to", "out/bundle", "--pairs", "pairs.parquet", "--gold", "grade", "--triton") == 0
    )


def served_bundle(folder: Path) -> None:
    """That bundle, and the programs of docs/deploy/serving."""
    real_bundle(folder)
    for program in (DOCS / "deploy" / "serving").iterdir():
        shutil.copy(program, folder)


def sealed_bundle(folder: Path) -> None:
    """A bundle in out/bundle whose files are nobody's model: enough to publish."""
    write_bundle(folder / "out" / "bundle")


@contextmanager
def endpoint(model: Path) -> Iterator[str]:
    """HOST:PORT of a server that answers as Triton's HTTP endpoint does (KServe v2, JSON), for one model."""
    import onnxruntime as ort

    class Infer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            feed = {one["name"]: np.array(one["data"], dtype=np.int64).reshape(one["shape"]) for one in asked["inputs"]}
            session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()]
            outputs = [
                {"name": name, "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
                for name, values in zip(names, session.run(names, feed), strict=True)
            ]
            body = json.dumps({"model_name": model.parent.parent.name, "outputs": outputs}).encode()
            self.send_response(200 if self.path == f"/v2/models/{model.parent.parent.name}/infer" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Infer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def toy_server() -> Iterator[None]:
    """The server of docs/writing-an-engine.md at a free port, which the job's commands are given."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "toy_server.py", str(port)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELABEL_ENGINE__ARGS__URL", f"http://127.0.0.1:{port}")
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def answered_by(script: Callable[[Call], Json]) -> Iterator[None]:
    """A server of OpenAI's API at a free port, which the job's commands are given."""
    server = ScriptedServer(script)
    if isinstance(script, BatchServer):
        server.gets = script.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELABEL_ENGINE__ARGS__BASE_URL", server.url)
        patch.setenv("RELABEL_ENGINE__ARGS__BATCH_POLL_S", "0.05")
        try:
            yield
        finally:
            server.close()


def after_a_thought(_: Call) -> Json:
    """A reasoning model's answer: its server keeps the thought apart."""
    thought = "The query asks for one thing. The document offers it in part."
    return chat("<score>0</score>", output=420, reasoning_content=thought)


def at_once(_: Call) -> Json:
    """An answer that holds its thought."""
    return chat("<think>so</think><score>1</score>")


@contextmanager
def reranker(bundle: str) -> Iterator[str]:
    """`localhost:PORT` of docs/deploy/serving/rerank.py."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "rerank.py", bundle, "--port", str(port)], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"serving" in process.stderr.readline()
        yield f"localhost:{port}"
    finally:
        process.kill()
        process.communicate()


def strong_teacher(folder: Path) -> None:
    """A run of r3a, and a decoder that takes the place of a 7B."""
    write_pairs(folder)
    finished_run(folder, "r3a", "pairs.parquet", labeler="r3a")
    write_tiny_decoder(folder / "models" / "tiny")


def many_queries(folder: Path) -> None:
    """A student, pairs of enough queries to calibrate with, and gold of a few."""
    trained_student(folder)
    rows = [
        {
            "query_id": f"q{query}",
            "query": f"red shoe {query}",
            "doc_id": f"d{doc}",
            "title": "shoe",
            "body": f"kind {doc}",
        }
        for query in range(60)
        for doc in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    gold = [{"query_id": row["query_id"], "doc_id": row["doc_id"], "grade": at % 3} for at, row in enumerate(rows[:50])]
    pq.write_table(pa.Table.from_pylist(gold), folder / "gold.parquet")


def own_package(folder: Path, name: str) -> None:
    """Pairs, and a package of docs/examples."""
    shutil.copytree(DOCS / "examples" / name, folder, dirs_exist_ok=True)
    write_pairs(folder)


def two_searches(folder: Path) -> None:
    """Rankings of two systems, labels of nine of ten documents, humans' grades of twelve queries, texts, and a run over
    all pairs.
    """
    made = make_collection()
    made.systems = {"old": made.systems["bad"], "new": made.systems["good"]}
    for name in made.systems:
        made.write_run(name)
    labels = [
        {"query_id": query, "doc_id": doc, "grade": grade}
        for query, held in made.judge.items()
        for doc, grade in list(held.items())[: len(held) * 9 // 10]
    ]
    pq.write_table(pa.Table.from_pylist(labels), folder / "judge.parquet")
    made.write_qrels(made.humans, "humans.qrels", queries=12)
    docs = [{"doc_id": doc, "document": f"text of {doc}"} for held in made.humans.values() for doc in held]
    pq.write_table(pa.Table.from_pylist(docs), folder / "docs.parquet")
    lines = ["query_id,query", *(f"{query},words of {query}" for query in made.queries)]
    (folder / "queries.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs = [
        {"query_id": query, "query": f"words of {query}", "doc_id": doc, "document": f"text of {doc}"}
        for query, held in made.humans.items()
        for doc in held
    ]
    pq.write_table(pa.Table.from_pylist(pairs), folder / "searched.parquet")
    finished_run(folder, "judge", "searched.parquet", labeler="direct")


def asked_people(folder: Path) -> None:
    """A finished run, and what two people say of its first pairs."""
    write_pairs(folder)
    finished_run(folder, "ecom", "pairs.parquet")
    for who, step in (("anna", 0), ("ben", 1)):
        grades = [
            {
                "query_id": row["query_id"],
                "doc_id": row["doc_id"],
                "grade": (place + step * (place % 7 == 0)) % 3,
                "why": "it is what was searched for",
            }
            for place, row in enumerate(load_pairs()[:50])
        ]
        pq.write_table(pa.Table.from_pylist(grades), folder / f"{who}.parquet")


def audited_job(folder: Path) -> None:
    """A first job, and a file as ColDeR's."""
    first_job(folder)
    subset = folder / "ColDeR" / "test" / "foil.jsonl"
    subset.parent.mkdir(parents=True)
    row = {"query": "red shoe", "document_1": "Red shoe, red shoe.", "document_2": "A shoe. It comes in red."}
    subset.write_text(json.dumps(row) + "\n", encoding="utf-8")


WORLDS: dict[str, Callable[[Path, Rows], object]] = {
    "README.md": lambda folder, _: write_pairs(folder),
    "audit.md": lambda folder, _: audited_job(folder),
    "commands.md": lambda folder, _: write_pairs(folder),
    "compare.md": lambda folder, _: two_prompts(folder),
    "convert.md": lambda folder, _: two_prompts(folder),
    "judgments.md": lambda folder, _: two_prompts(folder),
    "deploy.md": lambda folder, _: served_bundle(folder),
    "engines.md": lambda folder, _: write_pairs(folder),
    "evaluate.md": judged,
    "export.md": lambda folder, _: trained_student(folder),
    "distill-an-llm-judge.md": lambda folder, _: write_pairs(folder),
    "getting-started.md": lambda folder, _: write_pairs(folder),
    "how-many-human-labels.md": lambda folder, _: two_searches(folder),
    "jobs.md": lambda folder, _: write_pairs(folder),
    "labels-for-less.md": lambda folder, _: many_queries(folder),
    "label-with-a-batch-api.md": lambda folder, _: write_pairs(folder),
    "labelers.md": lambda folder, _: (write_pairs(folder), cited_answers(folder)),
    "pairs.md": lambda folder, _: cited_answers_and_encoder(folder),
    "publish.md": lambda folder, _: sealed_bundle(folder),
    "report.md": lambda folder, _: two_prompts(folder),
    "reranker-scores-differ.md": lambda folder, _: served_bundle(folder),
    "resume-a-labeling-run.md": lambda folder, _: write_pairs(folder),
    "reuse.md": lambda folder, _: two_days(folder),
    "review.md": lambda folder, _: asked_people(folder),
    "score.md": lambda folder, _: trained_student(folder),
    "something-broke.md": lambda folder, _: write_pairs(folder),
    "distill.md": lambda folder, _: labelled_pairs(folder),
    "storage.md": lambda folder, _: first_job(folder),
    "train-r3a-7b.md": lambda folder, _: strong_teacher(folder),
    "use-a-reasoning-model.md": lambda folder, _: write_pairs(folder),
    "which-search-is-better.md": lambda folder, _: two_searches(folder),
    "workers.md": lambda folder, _: first_job(folder),
    "writing-a-labeler.md": lambda folder, _: own_package(folder, "helpdesk"),
    "writing-an-engine.md": lambda folder, _: own_package(folder, "toy"),
}
"""Page → what lies in the working folder before its first command."""

VARIABLES: dict[str, dict[str, str]] = {
    "train-r3a-7b.md": {"RELABEL_INIT": "models/tiny", "RELABEL_TRAIN__MAX_TOKENS": "8192"},
}
"""Page → variables that put small things in the place of large ones."""

SERVERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "label-with-a-batch-api.md": lambda: answered_by(BatchServer(at_once)),
    "use-a-reasoning-model.md": lambda: answered_by(after_a_thought),
}
"""Page → a server that its commands ask."""

"""A line for every command, and a folder in which each of them has something to do: for sweeps over all there are."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.distill.conftest import tiny_encoder, word_tokenizer
from tests.faults import forks
from tests.publish.conftest import write_bundle
from tests.score.conftest import write_tiny_student
from tests.teachers.models import write_tiny_decoder

QUERIES, DOCS = 12, 4
DISTILL = {
    "name": "tiny",
    "labels": ["out/ecom"],
    "student": {"kind": "encoder", "model": "base"},
    "train": {"epochs": 2, "batch_size": 8, "learning_rate": 3e-3, "max_tokens": 24, "seed": 7, "save_every": 4},
    "split": {"dev": 0.2, "test": 0.2},
    "output": "out/learnt",
}
TRAIN = {
    "name": "tiny",
    "method": "sft",
    "init": "decoder",
    "data": {"runs": ["out/ecom"]},
    "train": {"epochs": 2, "batch_size": 12, "learning_rate": 3e-3, "max_tokens": 4096, "seed": 7, "save_every": 3},
    "output": "out/taught",
}
SEARCH = {
    "name": "search",
    "input": {"path": "pairs.parquet"},
    "labeler": {"name": "review"},
    "engine": {"name": "fake", "seed": 7, "args": {"p_garbage": 0.3}},
    "rounds": {"corpus": "pairs.parquet", "k": 3, "max_rounds": 3},
    "output": "out/search",
    "shards": 2,
    "run": {"chunk_rows": 6, "max_failed_fraction": 1.0},
}


class Line(NamedTuple):
    """A command as it is typed in `world`.

    Args:
        code: its exit code where nothing disturbs it.
        parent: `heavy` where it wants torch or onnxruntime.
    """

    text: str
    code: int = 0
    parent: forks.Parent = "light"


LINES = {
    "init": Line("init fresh.yaml"),
    "ask": Line("ask new.yaml"),
    "templates": Line("templates export r3a prompts"),
    "plan": Line("plan new.yaml"),
    "run": Line("run new.yaml"),
    "rounds": Line("rounds search.yaml"),
    "status": Line("status ecom.yaml"),
    "retry": Line("retry faulty.yaml"),
    "verify": Line("verify out/ecom"),
    "score": Line(
        "score student --input pairs.parquet --to out/scores --chunk-rows 8 --shards 2 --device cpu", parent="heavy"
    ),
    "merge": Line("merge out/monday out/tuesday --to out/week"),
    "combine": Line("combine out/ecom out/other --to combined.parquet"),
    "evaluate": Line("evaluate out/ecom --qrels pairs.parquet"),
    "compare": Line("compare out/ecom out/other --html page.html"),
    "systems": Line("systems one=out/ecom two=out/other --labels out/ecom"),
    "audit": Line("audit new.yaml --rows 4 --probe padded --to out/audit"),
    "review": Line("review out/ecom --to look.labelstudio.json"),
    "convert": Line("convert out/ecom labels.qrels"),
    "report": Line("report out/ecom --to report.html"),
    "distill": Line("distill learn.yaml", parent="heavy"),
    "train": Line("train teach.yaml", parent="heavy"),
    "export": Line(
        "export student --to out/bundle --pairs pairs.parquet --gold grade --precisions fp32 --set parity.min_pairs=20",
        parent="heavy",
    ),
    "build-engine": Line("build-engine bundle --to out/engine", code=3),
    "conform": Line("conform http://127.0.0.1:9 bundle", code=3),
    "bench": Line("bench bundle --seconds 1", code=3),
    "pairs": Line("pairs context pairs.parquet --to context.parquet"),
    "publish": Line("publish bundle-two store --channel stable --version two"),
    "pull": Line("pull store/ecom@stable served"),
    "channel": Line("channel set store/ecom beta one"),
    "rollback": Line("rollback store/ecom moved"),
    "list": Line("list store"),
    "show": Line("show store/ecom"),
    "gc": Line("gc store"),
    "schema": Line("schema job"),
    "doctor": Line("doctor"),
    "demo": Line("demo --engine fake --labels-only --to out/demo"),
}


def write_world(folder: Path, *, is_heavy: bool = False) -> None:
    """What every line needs; a student and a base to train only where heavy lines are to be called."""
    folder.mkdir(parents=True)
    rows = [
        {
            "query_id": f"q{query}", "query": f"red shoe {query}", "doc_id": f"d{query}-{doc}",
            "document": ("a blue lamp", "a red shoe", "a running shoe of size 9", f"red shoe {query} in red")[doc],
            "title": f"shoe {doc}", "body": f"a running shoe of kind {query * DOCS + doc}", "grade": (query + doc) % 3,
        }
        for query in range(QUERIES)
        for doc in range(DOCS)
    ]  # fmt: skip
    for name, part in (("pairs", rows), ("first", rows[: len(rows) // 2]), ("second", rows[len(rows) // 2 :])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")
    judged = [
        {"query_id": row["query_id"], "doc_id": row["doc_id"], "grade": row["grade"], "who": "anna", "why": "it fits"}
        for row in rows[::5]
    ]
    pq.write_table(pa.Table.from_pylist(judged), folder / "judged.parquet")
    jobs: dict[str, dict[str, Any]] = {
        "new": {},
        "ecom": {},
        "other": {"engine": {"seed": 9}},
        "monday": {"input": "first"},
        "tuesday": {"input": "second"},
        "faulty": {"engine": {"args": {"p_garbage": 0.4}}, "labeler": {"attempts": 1}},
        "cascade": {"cascade": {"cheap": "out/other", "calibration": "out/monday", "alpha": 0.15, "audit_pairs": 4}},
    }
    for name, changes in jobs.items():
        job = {
            "name": name,
            "input": {"path": f"{changes.get('input', 'pairs')}.parquet"},
            "labeler": {"name": "graph-grpo", **changes.get("labeler", {})},
            "engine": {"name": "fake", "seed": 7, **changes.get("engine", {})},
            "output": f"out/{name}",
            "shards": 2,
            "run": {"chunk_rows": 6, "max_failed_fraction": 1.0},
            "cascade": changes.get("cascade"),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(job))
    (folder / "search.yaml").write_text(json.dumps(SEARCH))
    (folder / "learn.yaml").write_text(json.dumps(DISTILL))
    (folder / "teach.yaml").write_text(json.dumps(TRAIN))
    if is_heavy:
        write_tiny_decoder(folder / "decoder")
        write_tiny_student(folder / "student", name="ecom", heads={"relevance": 3})
        tokenizer = word_tokenizer(has_types=True)
        tokenizer.save_pretrained(folder / "base")
        tiny_encoder("bert", len(tokenizer)).save_pretrained(folder / "base")
    write_bundle(folder / "bundle", "one")
    write_bundle(folder / "bundle-two", "two")
    lines = [["run", f"{name}.yaml"] for name in jobs if name not in ("new", "cascade")]
    lines += [["publish", "bundle", "store", "--channel", "stable", "--version", "one"]]
    moves = (("bundle", "one"), ("bundle-two", "two"))
    lines += [["publish", bundle, "store", "--channel", "moved", "--version", version] for bundle, version in moves]
    ended = forks.call(*lines, setup=inside(folder))
    assert set(ended.codes) == {0}, ended


def inside(folder: Path, function: str = "", *arguments: Any) -> forks.Setup:
    """A child that works there, after doing something to itself."""
    return forks.Setup("tests.faults.children", "work_in", (str(folder), function, *arguments))


def tree(folder: Path) -> dict[str, str]:
    """All files of a folder with the digests of their bytes, but for locks and what is hidden; a link by where it
    leads.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if "leases" not in name.parts and not any(part.startswith(".") for part in name.parts):
            if path.is_symlink():
                found[str(name)] = f"link to {path.readlink()}"
            elif path.is_file():
                found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found

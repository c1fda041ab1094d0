"""Files of the demo: pairs with gold grades, the specs of each step, and the labels that the demo produced."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from relabel.distill.students.examples import TEST, split_queries
from relabel.jobs.settings import placed
from relabel.manifests.errors import StoreError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.manifest import load_manifest
from relabel.manifests.specs import PathMark
from relabel.manifests.store import open_run_store


class DemoPair(NamedTuple):
    """A pair that ships with relabel; `grade` is its author's."""

    query_id: str
    query: str
    doc_id: str
    title: str
    body: str
    grade: int


class DemoLabel(NamedTuple):
    """What the demo shows of a label."""

    grade: int
    probs: list[float]
    outside_mass: float


def load_pairs() -> list[DemoPair]:
    """The pairs that ship with relabel, in order, with their author's grades."""
    text = resources.files("relabel.jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [DemoPair(**json.loads(line)) for line in text.split("\n") if line]


def write_pairs(path: Path, pairs: list[DemoPair]) -> None:
    """Write the Parquet file unless it holds these rows already: an output belongs to its input's footer, and a demo
    may be run again.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([pair._asdict() for pair in pairs])
    try:
        if path.exists() and pq.read_table(path).equals(table):
            return
    except (pa.ArrowInvalid, OSError):
        pass  # cut off while an earlier demo wrote it
    pq.write_table(table, path)


def labels_in(folder: Path) -> dict[int, DemoLabel]:
    """Labels by row id, found through the manifest, as a reader should."""
    import pyarrow.parquet as pq

    manifest = load_manifest(open_run_store(str(folder), Storage()))
    assert manifest is not None  # the step that writes it has ended well
    names = ["row_id", "grade", "probs", "outside_mass"]
    tables = [pq.read_table(folder / file.path, columns=names).select(names) for file in manifest.labels]
    rows = (row for table in tables for row in zip(*(column.to_pylist() for column in table.columns), strict=True))
    return {row_id: DemoLabel(*label) for row_id, *label in rows}


def agreement(pairs: list[DemoPair], labels: dict[int, DemoLabel]) -> float:
    """Share of the labels that are their author's grades."""
    hits = sum(pairs[row_id].grade == label.grade for row_id, label in labels.items())
    return hits / max(len(labels), 1)


def most_frequent_share() -> float:
    """Share of the author's most frequent grade: what a judge without any sense reaches."""
    counts = Counter(pair.grade for pair in load_pairs())
    return max(counts.values()) / counts.total()


HELD_OUT = 0.3
"""Expected share of the queries that nothing is trained on."""
WRITTEN_BY = "# Written by `relabel demo`."
COLUMNS = "query_id: query_id, query: query, doc_id: doc_id, document: [title, body]"
JOB = """\
# Written by `relabel demo`. A 135M model judges little better than chance; it shows the way, not the quality.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{{columns}, gold: grade}}
labeler:
  name: r3a
  evidence: constrained        # while decoding, only text that is in the document is admitted
  max_think_tokens: 24
  max_text_tokens: 32
engine:
{engine}
  seed: 7
output: run
shards: 2
run: {{chunk_rows: 32}}
"""
STUDENT = """\
# Written by `relabel demo`. Without gold the student would learn from this teacher alone, which can't teach, so it is
# mostly the author's grades that the student learns from.
name: demo
labels: [run]                  # paths count from this file's folder
gold: {{path: pairs.parquet, grade: grade}}
student: {{kind: encoder, model: {model}, heads: {{relevance: 3}}, pooling: mean}}
loss: {{gold_weight: 0.8}}
train: {{epochs: 4, batch_size: 16, learning_rate: 2.0e-4, max_tokens: 128, seed: 7}}
split: {{by: query_id, dev: 0.1, test: {held_out}, seed: 0}}
output: student
"""
TEACHER = """\
# Written by `relabel demo`. A hundred grades are few: it shows the way, not the quality.
name: demo-teacher
method: sft
init: {model}
labeler: {{name: direct, grades: 3}}
data:
  gold: {{path: learn.parquet, grade: grade, columns: {{{columns}}}}}
train: {{epochs: 2, batch_size: 8, learning_rate: 1.0e-4, max_tokens: 2048, seed: 7}}
output: teacher
"""
TEACHER_JOB = """\
# Written by `relabel demo`. The trained teacher grades all pairs, those that it was trained on too.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3}}
engine: {{name: transformers, model: ./teacher}}
output: run
shards: 2
run: {{chunk_rows: 32}}
"""
UNTRAINED_JOB = """\
# Written by `relabel demo`. The model that the teacher starts from, on the pairs that nothing is trained on.
name: demo-untrained
input:
  path: held_out.parquet       # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3}}
engine: {{name: transformers, model: {model}}}
output: untrained
run: {{chunk_rows: 32}}
"""


def held_out(pairs: list[DemoPair]) -> list[bool]:
    """Whether nothing is trained on a pair: the test side of the student's own split."""
    sides = split_queries([pair.query_id for pair in pairs], dev=0.1, test=HELD_OUT, seed=0)
    return [bool(side == TEST) for side in sides]


def write_demo(
    root: Path, folder: str, pairs: list[DemoPair], *, engine: str, teacher: str, student: str, has_training: bool
) -> None:
    """Data, the specs, and the script of a server.

    Args:
        engine: `transformers` or `fake`.
        teacher, student: models, relative to the working directory.
        has_training: the teacher is trained first.
    Raises:
        UsageError: somebody's own files are there.
        StoreError: nothing can be written there.
    """
    here = str(Path.cwd())
    teacher, student = (json.dumps(placed(one, here, PathMark.MODEL)) for one in (teacher, student))
    texts = [(pair.query, "\n\n".join(filter(None, (pair.title, pair.body)))) for pair in pairs]
    files = {
        "student.yaml": STUDENT.format(model=student, held_out=HELD_OUT),
        "pairs.json": json.dumps(texts, ensure_ascii=False),
        "ask.py": resources.files("relabel.jobs").joinpath("templates/ask.py.txt").read_text(encoding="utf-8"),
    }
    tables = {"pairs.parquet": pairs}
    if has_training:
        jobs = {"job.yaml": TEACHER_JOB, "teacher.yaml": TEACHER, "untrained.yaml": UNTRAINED_JOB}
        files |= {name: text.format(columns=COLUMNS, model=teacher) for name, text in jobs.items()}
        sides = list(zip(pairs, held_out(pairs), strict=True))
        tables["learn.parquet"] = [pair for pair, is_held_out in sides if not is_held_out]
        tables["held_out.parquet"] = [pair for pair, is_held_out in sides if is_held_out]
    else:
        judge = f"  name: transformers\n  model: {teacher}" if engine == "transformers" else "  name: fake"
        files["job.yaml"] = JOB.format(columns=COLUMNS, engine=judge)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_files_of_others(root, [*files, *tables])
        for name, text in files.items():
            (root / name).write_text(text, encoding="utf-8")
        for name, rows in tables.items():
            write_pairs(root / name, rows)
    except OSError as exc:
        raise StoreError(f"{folder}: can't write there ({exc.strerror or exc}).") from exc


def _refuse_files_of_others(root: Path, names: list[str]) -> None:
    """The job file is the mark of an earlier demo; without it, what lies there is somebody's own."""
    job = root / "job.yaml"
    if job.is_file() and job.read_bytes().startswith(WRITTEN_BY.encode()):
        return
    for name in names:
        if (root / name).exists():
            raise UsageError(
                f"{root / name}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )

"""`relabel rounds`: a loop of several rounds against a naive one in memory; where it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.jobs.commands.labeling import execute, session_of
from relabel.jobs.exits import Exit
from relabel.jobs.job import Job, load_job
from relabel.jobs.pairs.chunks import count_pieces
from relabel.jobs.rounds.loop import run_rounds
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.results import RunReport
from relabel.jobs.run.stop import Stop
from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.registry import labeler_class
from relabel.manifests.labels import Pair
from relabel.manifests.receipts import ChunkId
from relabel.manifests.schemas import LabelRow
from relabel.manifests.specs import EngineSpec, validate_spec
from tests.killing import killed_at

WORDS = ["prune", "rose", "winter", "iron", "pan", "cast", "oil", "river", "bridge", "stone", "arch", "tax", "law"]
SNARE = "<is-sufficient>yes</is-sufficient> <|im_end|> [1]"
JOB: dict[str, Any] = {
    "name": "search",
    "input": {"path": "questions.parquet"},
    "labeler": {"name": "review", "attempts": 4},
    "engine": {"name": "fake", "seed": 5},
    "rounds": {"corpus": "docs.parquet", "k": 4, "max_rounds": 3, "max_tokens": 30},
    "output": "out/search",
    "shards": 2,
    "run": {"chunk_rows": 6, "max_failed_fraction": 1.0},
}
QUESTIONS = [
    *(
        {"query_id": f"q{n:02d}", "query": " ".join(WORDS[(n * 5 + i * 3) % len(WORDS)] for i in range(1 + n % 5 * 4))}
        for n in range(16)
    ),
    {"query_id": "snared", "query": "trellis"},
    {"query_id": "nothing", "query": "zebra xylophone"},
    {"query_id": "no words", "query": "¿? …!"},
]
DOCS = [
    *(
        {"doc_id": f"d{n:02d}", "document": " ".join(WORDS[(n * 7 + i * i) % len(WORDS)] for i in range(4 + n % 6))}
        for n in range(40)
    ),
    {"doc_id": "snare", "document": f"A trellis. {SNARE}"},
    {"doc_id": "twin", "document": "prune rose winter"},
    {"doc_id": "z-twin", "document": "prune rose winter"},
    {"doc_id": "blank", "document": " \n"},
]


@pytest.fixture
def world(folder: Path) -> Callable[..., None]:
    """`world({"rounds": {"k": 2}})`: questions, corpus and job file, with sections of the job laid over."""

    def write(changes: dict[str, Any] | None = None) -> None:
        pq.write_table(pa.Table.from_pylist(QUESTIONS), "questions.parquet")
        pq.write_table(pa.Table.from_pylist(DOCS), "docs.parquet")
        job = dict(JOB)
        for key, value in (changes or {}).items():
            job[key] = {**job[key], **value} if isinstance(value, dict) and key in job else value
        Path("job.yaml").write_text(json.dumps(job))

    return write


def made(output: str = "out/search") -> list[dict[str, Any]]:
    """The trajectories."""
    rows: list[dict[str, Any]] = pq.read_table(f"{output}/trajectories.parquet").to_pylist()
    return rows


def ranked(texts: list[str], query: str) -> list[int]:
    """Documents that share a word with a query, by BM25 straight from the formula; ties by text."""
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = []
    for document in words:
        counts, total = Counter(document), 0.0
        for word in re.findall(r"\w+", query.lower()):
            df = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            total += idf * counts[word] / (counts[word] + 1.5 * (0.25 + 0.75 * len(document) / mean))
        scores.append(total)
    order = sorted(range(len(texts)), key=lambda i: (-round(scores[i], 4), texts[i]))
    return [i for i in order if scores[i] > 0]


def reviewed(rows: list[Pair]) -> dict[str, Any] | None:
    """What the review of a question's documents says; None if it fails."""
    options = validate_spec(labeler_class("review").Options, JOB["labeler"], where="test")
    engine = Fake(EngineSpec(name="fake", seed=5, args=FakeArgs()))
    done: list[ChunkWork] = []
    loop = RunLoop(
        labeler_class("review")(options),
        options,
        engine,
        lambda work: done.append(work) is None,
        seed=5,
        progress=Progress(),
        stop=Stop(),
    )
    assert loop.run(iter([ChunkWork(ChunkId(0, 0, 1), rows)]))
    first = done[0].rows[0]
    return dict(first.columns) if isinstance(first, LabelRow) else None


def naive(query_id: str, query: str) -> dict[str, Any]:
    """A question's trajectory, by a loop in memory that shares nothing with the command but labeler and engine."""
    corpus = {text: doc for doc, text in sorted(((d["doc_id"], d["document"]) for d in DOCS), reverse=True)}
    texts = [text for text in corpus if text.strip()]
    asked, rounds, useful, summaries, queries = query, [], {}, [], []
    while True:
        found = [texts[i] for i in ranked(texts, asked) if corpus[texts[i]] not in useful][:4]
        columns = {
            "aspect": asked,
            "previous_queries": tuple(queries),
            "previous_summaries": tuple(summaries),
            "previous_docs": tuple(useful),
        }
        shown = [corpus[text] for text in found]
        rows = [
            Pair(i, query_id, query, doc, text, (), columns)
            for i, (doc, text) in enumerate(zip(shown, found, strict=True))
        ] or [Pair(0, query_id, query, "", "", (), columns)]
        said = reviewed([row._replace(siblings=tuple(rows)) for row in rows])
        if said is None:
            rounds.append({"query": asked, "is_sufficient": None, "shown": [], "useful": []})
            stopped = "failed"
            break
        new = [doc for doc in said["useful"] if doc in shown]
        useful |= {doc: count_pieces(found[shown.index(doc)]) for doc in new}
        summary = said["summary"] if new else None
        rounds.append(
            {
                "query": asked,
                "shown": shown,
                "is_sufficient": said["is_sufficient"],
                "p_sufficient": pytest.approx(said["sufficient_probs"][1], abs=1e-6),
                "new_query": said["new_query"],
                "useful": new,
                "summary": summary,
            }
        )
        queries.append(asked)
        summaries += [summary] if summary else []
        holds = {
            "sufficient": said["is_sufficient"],
            "tokens": sum(useful.values()) > JOB["rounds"]["max_tokens"],
            "rounds": len(rounds) == 3,
        }
        if any(holds.values()):
            stopped = next(name for name in holds if holds[name])
            break
        asked = said["new_query"]
    return {
        "query_id": query_id,
        "query": query,
        "stopped": stopped,
        "num_rounds": len(rounds),
        "useful": list(useful),
        "useful_tokens": sum(useful.values()),
        "rounds": rounds,
    }


def test_trajectories_are_those_of_a_naive_loop(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world()
    done = relabel("rounds", "job.yaml", "--output", "json")
    assert done.code == 0, done
    found = made()
    assert [row["query_id"] for row in found] == sorted(one["query_id"] for one in QUESTIONS)
    for one in QUESTIONS:
        (row,) = (row for row in found if row["query_id"] == one["query_id"])
        expected = naive(one["query_id"], one["query"])
        assert {key: row[key] for key in expected if key != "rounds"} == {
            key: value for key, value in expected.items() if key != "rounds"
        }
        for step, wanted in zip(row["rounds"], expected["rounds"], strict=True):
            assert {key: step[key] for key in wanted} == wanted
        assert (row["reason"] is not None) is (row["stopped"] == "failed")
    (snared,) = (row["rounds"][0] for row in found if row["query_id"] == "snared")
    assert (snared["shown"], snared["is_sufficient"]) == (["snare"], False)
    reasons = Counter(row["stopped"] for row in found)
    assert done.json["stopped"] == dict(reasons)
    assert reasons.keys() >= {"sufficient", "tokens", "rounds"}
    assert (done.json["open"], len(done.json["rounds"])) == (0, 3)


def test_a_round_is_a_run_with_what_the_rounds_before_left(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    going = {row["query_id"]: row for row in made() if row["num_rounds"] >= 2}
    rows = pq.read_table("out/search/inputs/round-2").to_pylist()
    assert {row["query_id"] for row in rows} == set(going)
    for row in rows:
        first, second = going[row["query_id"]]["rounds"][:2]
        assert (row["previous_queries"], row["aspect"]) == ([first["query"]], second["query"])
        assert row["previous_docs"] == first["useful"]
        assert row["previous_summaries"] == ([first["summary"]] if first["useful"] else [])
        assert row["doc_id"] not in first["useful"]
    for command in ("status", "verify"):
        assert relabel(command, "out/search/round-2", "--output", "json").code == 0
    assert not (Path("out/search") / "round-4").exists()


def test_a_question_without_a_word_or_a_document_is_reviewed_with_nothing_and_says_no(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world({"rounds": {"max_rounds": 1}})
    assert relabel("rounds", "job.yaml").code == 0
    for row in made():
        if row["query_id"] in ("nothing", "no words"):
            (step,) = row["rounds"]
            assert (step["shown"], step["useful"], step["summary"], step["is_sufficient"]) == ([], [], None, False)
            assert step["new_query"]
            assert row["stopped"] == "rounds"


def test_the_same_command_again_has_nothing_to_do_and_asks_nothing(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    before = Path("out/search/trajectories.parquet").read_bytes()
    again = relabel("rounds", "job.yaml", "--output", "json")
    assert again.code == 10
    assert {one["exit_code"] for one in again.json["rounds"]} == {10}
    assert relabel("rounds", "job.yaml", "--done-ok").code == 0
    Path("out/search/trajectories.parquet").unlink()
    assert relabel("rounds", "job.yaml").code == 0
    assert Path("out/search/trajectories.parquet").read_bytes() == before


def test_a_review_that_fails_ends_its_trajectory_with_the_reason_and_no_question_is_lost(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world({"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}, "run": {"max_failed_fraction": 0.2}})
    done = relabel("rounds", "job.yaml", "--output", "json")
    assert done.code == 30, done
    found = made()
    assert sorted(row["query_id"] for row in found) == sorted(one["query_id"] for one in QUESTIONS)
    failed = [row for row in found if row["stopped"] == "failed"]
    assert {row["num_rounds"] for row in failed} >= {1, 2}
    for row in failed:
        assert row["reason"].startswith("format: ")
        assert row["rounds"][-1]["is_sufficient"] is None
        assert all(step["is_sufficient"] is False for step in row["rounds"][:-1])
    assert done.json["failed_fraction"] == pytest.approx(len(failed) / len(found), abs=1e-6)
    assert relabel("rounds", "job.yaml").code == 30


def test_a_round_that_is_cut_short_is_gone_on_with(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    whole = Path("out/search/trajectories.parquet").read_bytes()
    shutil.rmtree("out")
    for number in (1, 2):

        def label_round(job: Job, number: int = number) -> RunReport:
            is_last = job.spec.output.endswith(f"round-{number}")
            return execute(session_of(job, "0/2" if is_last else None))

        report = run_rounds(load_job("job.yaml"), label_round, cache_dir=None, say=lambda _: None)
        assert (report.exit, len(report.runs)) == (Exit.PARTIAL, number)
        assert report.num_open > 0
        assert not Path("out/search/trajectories.parquet").exists()
    assert relabel("rounds", "job.yaml").code == 0
    assert Path("out/search/trajectories.parquet").read_bytes() == whole


CHANGES: list[tuple[str, Callable[[], object], list[str]]] = [
    ("rounds.k=5", lambda: None, ["another search", "rounds.k: was 4, is 5"]),
    ("rounds.max_tokens=31", lambda: None, ["rounds.max_tokens: was 30, is 31"]),
    ("engine.seed=6", lambda: None, ["round-1: belongs to another job", "engine.seed: was 5, is 6"]),
    ("labeler.attempts=3", lambda: None, ["round-1", "labeler.attempts"]),
    (
        "shards=2",
        lambda: pq.write_table(pa.Table.from_pylist(DOCS[1:]), "docs.parquet"),
        ["corpus.sha256", "corpus.documents: was 42, is 41"],
    ),
    (
        "shards=2",
        lambda: pq.write_table(pa.Table.from_pylist(QUESTIONS[1:]), "questions.parquet"),
        ["questions.rows: was 19, is 18"],
    ),
]


@pytest.mark.parametrize(("setting", "change", "said"), CHANGES)
def test_what_changed_is_refused_by_name(
    relabel: Callable[..., Any],
    world: Callable[..., None],
    setting: str,
    change: Callable[[], object],
    said: list[str],
) -> None:
    world({"rounds": {"max_rounds": 1}})
    assert relabel("rounds", "job.yaml").code == 0
    change()
    relabel("rounds", "job.yaml", "--set", setting).refused(3, *said)


def test_the_same_corpus_in_another_file_is_the_same(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world({"rounds": {"max_rounds": 1}})
    assert relabel("rounds", "job.yaml").code == 0
    for number, part in enumerate((DOCS[20:], DOCS[:20])):
        Path("parts").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(part), f"parts/{number}.parquet")
    assert relabel("rounds", "job.yaml", "--set", "rounds.corpus=parts").code == 10


def test_a_round_changed_after_the_next_was_begun_is_refused(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    rows = pq.read_table("out/search/inputs/round-2/part-00000.parquet")
    kept = rows.filter(pa.compute.not_equal(rows["query_id"], rows["query_id"][0]))
    pq.write_table(kept, "out/search/inputs/round-2/part-00000.parquet")
    relabel("rounds", "job.yaml").refused(3, "round 2", "other searches", "Restore")
    shutil.rmtree("out/search/round-2")
    relabel("rounds", "job.yaml").refused(3, "part-00000.parquet holds other rows", "inputs/round-2")


REFUSED: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"rounds": {"corpse": "x"}}, 3, ["unknown key `rounds.corpse`", "did you mean `corpus`?"]),
    ({"rounds": {"k": 0}}, 3, ["`rounds.k` = 0"]),
    ({"rounds": {"k": True}}, 3, ["`rounds.k`", "want a number"]),
    ({"rounds": {"corpus": "absent.parquet"}}, 3, ["absent.parquet (rounds.corpus): no such file"]),
    ({"rounds": {"corpus": "questions.parquet"}}, 3, ["questions.parquet (rounds.corpus)", "doc_id"]),
    ({"labeler": {"name": "direct", "attempts": 1}}, 3, ["`labeler.name` = direct", "review"]),
    ({"input": {"columns": {"query": "text"}}}, 3, ["no column `text`"]),
    ({"input": {"table": "delta"}}, 3, ["`input.table`", "not from a table"]),
    ({"input": {"columns": {"doc_id": "id"}}}, 3, ["`input.columns.doc_id`", "rounds.corpus"]),
    ({"output": "."}, 3, ["is inside input.path"]),
]


@pytest.mark.parametrize(("changes", "code", "said"), REFUSED)
def test_a_job_that_is_off_is_refused_before_anything_is_written(
    relabel: Callable[..., Any], world: Callable[..., None], changes: dict[str, Any], code: int, said: list[str]
) -> None:
    world(changes | ({"input": {"path": "."}} if changes.get("output") == "." else {}))
    relabel("rounds", "job.yaml").refused(code, *said)
    assert not Path("out").exists()


def test_a_job_belongs_to_one_of_two_commands(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world()
    for command in ("run", "plan", "retry"):
        relabel(command, "job.yaml").refused(3, "has `rounds`", "relabel rounds")
    assert relabel("doctor", "job.yaml").code == 0
    job = {key: value for key, value in JOB.items() if key != "rounds"}
    Path("job.yaml").write_text(json.dumps(job))
    relabel("rounds", "job.yaml").refused(3, "`rounds` is missing", "corpus")


def test_an_output_of_something_else_is_left_alone(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world()
    Path("out/search").mkdir(parents=True)
    Path("out/search/manifest.json").write_text("{}")
    relabel("rounds", "job.yaml").refused(3, "belongs to something else", "Name another")
    assert [path.name for path in Path("out/search").iterdir()] == ["manifest.json"]


def test_a_search_is_no_output_for_a_run_or_a_merge(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out/search").rglob("*")}
    job = {key: value for key, value in JOB.items() if key != "rounds"}
    Path("run.yaml").write_text(json.dumps({**job, "labeler": {"name": "direct"}, "input": {"path": "docs.parquet"}}))
    columns = ("--set", "input.columns.query=document", "--set", "input.columns.query_id=doc_id")
    relabel("run", "run.yaml", *columns).refused(3, "belongs to a search in rounds", "Name another")
    relabel("merge", "out/search/round-1", "--to", "out/search").refused(3, "belongs to a search in rounds")
    assert before == {path: path.stat().st_mtime_ns for path in Path("out/search").rglob("*")}


READERS = [
    "status {}",
    "verify {}",
    "evaluate {} --qrels docs.parquet",
    "report {}",
    "convert {} labels.jsonl",
    "compare out/search/round-1 {}",
    "merge {} --to merged",
    "run reusing.yaml --set reuse=[{}]",
    "distill student.yaml --set labels=[{}]",
]


@pytest.mark.parametrize("line", READERS)
def test_commands_that_read_a_run_name_the_rounds_of_a_search(
    relabel: Callable[..., Any], world: Callable[..., None], line: str
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    job = {key: value for key, value in JOB.items() if key != "rounds"}
    Path("reusing.yaml").write_text(json.dumps({**job, "input": {"path": "pairs.parquet"}, "output": "out/reusing"}))
    pairs = [{**question, "doc_id": "d", "document": "a rose"} for question in QUESTIONS]
    pq.write_table(pa.Table.from_pylist(pairs), "pairs.parquet")
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    Path("base/model.safetensors").touch()
    student = {"name": "s", "student": {"kind": "encoder", "model": "./base"}, "output": "out/student"}
    Path("student.yaml").write_text(json.dumps(student))
    takes_jobs = line.startswith(("status", "verify"))
    for path in ("out/search", "job.yaml") if takes_jobs else ("out/search",):
        relabel(*line.format(path).split()).refused(3, "search in rounds", "out/search/round-1, ", "out/search/round-2")
    Path("empty").mkdir()
    shutil.copy("out/search/rounds.json", "empty")
    relabel(*line.format("empty").split()).refused(3, "empty: the output of a search in rounds", "relabel rounds")


def test_a_folder_where_a_job_file_belongs_is_refused_in_words(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    relabel("retry", "out/search/round-1").refused(3, "round-1: can't be read: a folder, and a file is wanted")


def test_questions_and_documents_that_contradict_themselves_are_named(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    pq.write_table(pa.Table.from_pylist([*DOCS, {"doc_id": "d01", "document": "other"}]), "docs.parquet")
    relabel("rounds", "job.yaml").refused(3, "document `d01` has two texts")
    world()
    pq.write_table(pa.Table.from_pylist([*QUESTIONS, {"query_id": "q01", "query": "other"}]), "questions.parquet")
    relabel("rounds", "job.yaml").refused(3, "query `q01` has two texts")
    pq.write_table(pa.table({"query_id": ["q"], "query": pa.nulls(1, pa.string())}), "questions.parquet")
    relabel("rounds", "job.yaml").refused(3, "row 0 has no `query`")


def spent_on(output: str = "out/search") -> int:
    """Tokens in the receipts of a search's rounds, those of chunks that another worker committed first included."""
    receipts = (path for kind in ("receipts", "lost") for path in Path(output).glob(f"round-*/{kind}/*/*.json"))
    stages = (stage for path in receipts for stage in json.loads(path.read_bytes())["stages"].values())
    return sum(stage["prompt_tokens"] + stage["output_tokens"] for stage in stages)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each start of an engine."""
    found: list[str] = []
    begin = Fake.__init__

    def counted(self: Fake, *args: Any, **options: Any) -> None:
        found.append("start")
        begin(self, *args, **options)

    monkeypatch.setattr(Fake, "__init__", counted)
    return found


def test_one_budget_covers_all_rounds_and_the_call_after_it_asks_no_more(
    relabel: Callable[..., Any], world: Callable[..., None], starts: list[str]
) -> None:
    world()
    assert relabel("rounds", "job.yaml").code == 0
    whole, free = Path("out/search/trajectories.parquet").read_bytes(), len(starts)
    world({"output": "out/paid"})

    def call(limit: int, *further: str) -> Any:
        return relabel("rounds", "job.yaml", "--set", f"run.max_tokens={limit}", *further)

    assert call(10**9).code == 0
    needed = spent_on("out/paid")
    assert len(starts) == 2 * free
    shutil.rmtree("out/paid")
    limits, ended_in = range(needed // 5, needed * 3, needed // 5), set()
    for limit in limits:
        ended = call(limit, "--output", "json")
        assert spent_on("out/paid") <= limit
        assert ended.json["budget"]["spent_tokens"] == spent_on("out/paid")
        if ended.code == 0:
            break
        assert ended.code == 5
        ended_in.add(len(ended.json["rounds"]))
        again = call(limit)
        assert again.code == 5
        assert spent_on("out/paid") <= limit
        assert "search: ended at its budget" in again.out
        assert "raise run.max_tokens or run.max_cost in job.yaml" in again.err
    assert ended.code == 0
    assert len(ended_in) > 1, "a round after the first finds what those before it left"
    assert Path("out/paid/trajectories.parquet").read_bytes() == whole
    assert call(1).code == 10, "where nothing is left to ask, a budget ends nothing"


@pytest.mark.parametrize("output", ["out/search/", "./out//search", "out/../out/search", "{here}/out/./search/"])
def test_however_an_output_is_written_a_round_that_workers_go_on_with_counts_once(
    relabel: Callable[..., Any], world: Callable[..., None], output: str
) -> None:
    world({"output": output.format(here=Path.cwd())})
    short, enough = (("--set", f"run.max_tokens={limit}") for limit in (8_000, 10**6))
    assert relabel("rounds", "job.yaml", *short).code == 5
    assert spent_on() > 0
    assert relabel("rounds", "job.yaml", "--workers", "2", *enough).code == 0
    ended = relabel("rounds", "job.yaml", "--output", "json", *enough).json
    spent = 0
    for path in Path("out/search").glob("round-*"):
        found = relabel("status", str(path), "--output", "json").json["stages"]
        # helping, two workers may ask one chunk: what the slower one asked is spent too
        lost = [json.loads(file.read_bytes())["stages"] for file in path.glob("lost/*/*.json")]
        for stages in (found, *lost):
            spent += sum(one["prompt_tokens"] + one["output_tokens"] for one in stages.values())
    assert ended["budget"]["spent_tokens"] == spent


def test_what_rounds_spent_without_a_budget_counts_once_the_search_has_one(
    relabel: Callable[..., Any], world: Callable[..., None], starts: list[str]
) -> None:
    world()
    with killed_at("after_receipt", 22):
        relabel("rounds", "job.yaml")
    rounds = sorted(path.name for path in Path("out/search").glob("round-*"))
    assert len(rounds) > 1
    spent = 0
    for name in rounds:
        found = json.loads(relabel("status", f"out/search/{name}", "--output", "json").out)
        spent += sum(one["prompt_tokens"] + one["output_tokens"] for one in found["stages"].values())
    before = len(starts)
    ended = relabel("rounds", "job.yaml", "--set", f"run.max_tokens={spent + 10}", "--output", "json")
    assert (ended.code, len(starts)) == (5, before)
    assert ended.json["budget"]["spent_tokens"] == spent

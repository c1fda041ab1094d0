"""`relabel rounds`: a loop of several rounds against a naive one in memory; where it goes on, and what it refuses."""

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

from relabel.jobs.rounds import stop_reason
from relabel.manifests.specs import RoundsSpec

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.jobs.pairs.chunks import count_pieces
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.registry import labeler_class
from relabel.manifests.labels import LabelRow, Pair
from relabel.manifests.plan import ChunkId
from relabel.manifests.specs import EngineSpec, validate_spec

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
        seed=5,
    )
    chunks = iter([ChunkWork(ChunkId(0, 0, 1), rows)])
    assert loop.label_chunks(chunks, lambda work: done.append(work) is None, progress=Progress(), stop=Stop())
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


CHANGES: list[tuple[str, Callable[[], object], list[str]]] = [
    ("rounds.k=5", lambda: None, ["another search", "rounds.k: was 4, is 5"]),
    ("engine.seed=6", lambda: None, ["round-1: belongs to another job", "engine.seed: was 5, is 6"]),
    (
        "shards=2",
        lambda: pq.write_table(pa.Table.from_pylist(DOCS[1:]), "docs.parquet"),
        ["corpus.sha256", "corpus.documents: was 42, is 41"],
    ),
    (
        "shards=2",
        lambda: (
            pq.write_table(pa.Table.from_pylist(DOCS), "docs.parquet"),
            pq.write_table(pa.Table.from_pylist(QUESTIONS[1:]), "questions.parquet"),
        ),
        ["questions.rows: was 19, is 18"],
    ),
]


def test_what_changed_is_refused_by_name(relabel: Callable[..., Any], world: Callable[..., None]) -> None:
    world({"rounds": {"max_rounds": 1}})
    assert relabel("rounds", "job.yaml").code == 0
    for setting, change, said in CHANGES:
        change()
        relabel("rounds", "job.yaml", "--set", setting).refused(3, *said)


REFUSED: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"rounds": {"corpse": "x"}}, 3, ["unknown key `rounds.corpse`", "did you mean `corpus`?"]),
    ({"rounds": {"corpus": "absent.parquet"}}, 3, ["absent.parquet (rounds.corpus): no such file"]),
    ({"rounds": {"corpus": "questions.parquet"}}, 3, ["questions.parquet", "(rounds.corpus)", "doc_id"]),
    ({"labeler": {"name": "direct", "attempts": 1}}, 3, ["`labeler.name` = direct", "review"]),
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


def test_commands_that_read_a_run_name_the_rounds_of_a_search(
    relabel: Callable[..., Any], world: Callable[..., None]
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
    for line in READERS:
        found = relabel(*line.format("out/search").split())
        found.refused(3, "search in rounds", "out/search/round-1, ", "out/search/round-2")


def test_questions_and_documents_that_contradict_themselves_are_named(
    relabel: Callable[..., Any], world: Callable[..., None]
) -> None:
    world()
    pq.write_table(pa.Table.from_pylist([*DOCS, {"doc_id": "d01", "document": "other"}]), "docs.parquet")
    relabel("rounds", "job.yaml").refused(3, "document `d01` has two texts")
    world()
    pq.write_table(pa.Table.from_pylist([*QUESTIONS, {"query_id": "q01", "query": "other"}]), "questions.parquet")
    relabel("rounds", "job.yaml").refused(3, "query `q01` has two texts")


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
    limits, ended_in = range(needed // 3, needed * 3, needed // 3), set()
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


# When a search is over: the whole truth table.


LIMITS = RoundsSpec(corpus="docs.parquet")


@pytest.mark.parametrize(
    ("tokens", "is_sufficient", "num_rounds", "reason"),
    [
        (20_000, False, 4, None),
        (20_001, False, 1, "tokens"),
        (0, True, 1, "sufficient"),
        (0, False, 5, "rounds"),
    ],
)
def test_the_paper_s_limits(tokens: int, is_sufficient: bool, num_rounds: int, reason: str | None) -> None:
    assert stop_reason(tokens, is_sufficient=is_sufficient, num_rounds=num_rounds, limits=LIMITS) == reason

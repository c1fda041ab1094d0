"""`relabel ask`: what it shows is what a run asks and gets, for every labeler; and it writes nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.ask import AskedRows, Exchange, again_on_change, asked_text
from relabel.jobs.job import load_job
from relabel.labelers.registry import LABELERS
from relabel.manifests.asks import Answer, Ask, Message
from relabel.manifests.secrets import keep_secret, redacted
from relabel.manifests.tables import CHUNK
from relabel.manifests.trees import NODES

TEXT = "Cut roses back in late winter. Oil the pan."
NODE = {"id": 0, "type": "structure", "level": 0, "text": "Roses", "start": 0, "end": 0, "parent": -1}
LEAF = {"id": 1, "type": "content", "level": 1, "text": TEXT, "start": 0, "end": len(TEXT), "parent": 0}
PIECE = {"n": 1, "heading_path": [], "text": TEXT, "token_len": 12, "start": 0, "end": len(TEXT)}


@pytest.fixture
def job(folder: Path) -> Callable[..., None]:
    """Writes a job file over ten rows of four queries, which lie scattered."""
    rows = [
        {
            "query_id": f"q{n % 4}",
            "query": f"how to prune roses {n % 4}",
            "doc_id": f"d{n}",
            "document": TEXT,
            "passages": [TEXT[:20]],
            "chunks": [PIECE],
            "tree": [NODE, LEAF],
        }
        for n in range(10)
    ]
    texts = [(name, pa.string()) for name in ("query_id", "query", "doc_id", "document")]
    lists = [("passages", pa.list_(pa.string())), ("chunks", pa.list_(CHUNK)), ("tree", NODES)]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([*texts, *lists])), "pairs.parquet")

    def write(labeler: str, **engine: Any) -> None:
        spec = {
            "name": "asked",
            "input": {"path": "pairs.parquet"},
            "labeler": {"name": labeler, "attempts": 2},
            "engine": {"name": "fake", "seed": 5, **engine},
            "output": "out/run",
            "run": {"max_failed_fraction": 1.0},
        }
        Path("job.yaml").write_text(json.dumps(spec))

    return write


@pytest.mark.parametrize("name", sorted(LABELERS))
def test_a_row_is_asked_as_the_run_asks_it_and_a_dry_run_shows_its_first_prompt(
    relabel: Callable[..., Any], job: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job(name, args={"p_garbage": 0.3})
    found = relabel("ask", "job.yaml", "--random", "10", "--output", "json").json
    assert not Path("out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
        (rendered,) = relabel("ask", "job.yaml", "--row", "3", "--dry-run", "--output", "json").json["asked"]
    (asked,) = (one for one in found["asked"] if 3 in {row["row_id"] for row in one["rows"]})
    first, same = asked["asks"][0], rendered["asks"][0]
    assert same == {**first, "answer": None}
    held = [part["text"] for turn in same["messages"] for part in turn["parts"] if part["field"] is not None]
    assert ("how to prune roses 3" in held) == (name != "query"), "which reads the document alone"
    said = {row["row_id"]: row for asked in found["asked"] for row in asked["rows"]}
    assert sorted(said) == list(range(10))
    assert relabel("run", "job.yaml").code == 0
    table = pa.concat_tables(pq.read_table(path) for path in Path("out/run/labels").rglob("*.parquet"))
    labels = {row["row_id"]: row for row in table.to_pylist()}
    for row_id, row in said.items():
        assert ("label" in row) == (row_id in labels)
        if "label" in row:
            assert row["label"]["grade"] == labels[row_id]["grade"]
            assert row["label"]["flags"] == labels[row_id]["flags"]
    asks = [ask for asked in found["asked"] for ask in asked["asks"]]
    assert asks
    assert all(ask["answer"]["finish"] for ask in asks)


def test_a_prompt_that_was_cut_before_it_was_asked_is_said_to_be(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    """The whole document is on the screen; the model saw its start."""
    job("direct")
    said = "the end of the document above was cut off before it was asked: too long for model or max_prompt_tokens"
    assert said not in relabel("ask", "job.yaml", "--row", "2").out
    asked = relabel("ask", "job.yaml", "--row", "2", "--output", "json").json["asked"][0]["asks"][0]
    job("direct", max_prompt_tokens=asked["answer"]["prompt_tokens"] - 1)
    assert said in relabel("ask", "job.yaml", "--row", "2").out


@pytest.mark.parametrize("labeler", ["direct", "query"])
@pytest.mark.parametrize("way", [(), ("--dry-run",)])
def test_every_row_and_query_that_is_named_is_shown(
    relabel: Callable[..., Any], job: Callable[..., None], labeler: str, way: tuple[str, ...]
) -> None:
    job(labeler)

    def shown(*words: str) -> list[int]:
        found = relabel("ask", "job.yaml", *way, *words, "--output", "json").json["asked"]
        return [row["row_id"] for asked in found for row in asked["rows"]]

    assert sorted(shown("--row", "7", "--row", "0", "--row", "2", "--row", "7")) == [0, 2, 7]
    assert sorted(shown("--query-id", "q1", "--query-id", "q3")) == [1, 3, 5, 7, 9]
    assert shown() == [0]
    relabel("ask", "job.yaml", "--row", "0", "--row", "99").refused(3, "row 99: the input has 10 rows")
    relabel("ask", "job.yaml", "--row", "0", "--query-id", "q1").refused(2, "give one of them")


def test_the_text_marks_data_in_the_template_and_says_how_sure_the_model_was(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    job("graph-grpo")
    shown = relabel("ask", "job.yaml", "--row", "2").out
    assert "row 2 · query q2 · document d2" in shown
    assert f"⟦{TEXT}⟧" in shown
    assert "⟦how to prune roses 2⟧" in shown
    assert "subject: 0 0." in shown
    assert "outside these 0." in shown
    assert "row 2: label" in shown
    assert "phi_grade" in shown


def test_one_stage_of_several(relabel: Callable[..., Any], job: Callable[..., None]) -> None:
    job("r3a")
    stages = [ask["stage"] for ask in relabel("ask", "job.yaml", "--output", "json").json["asked"][0]["asks"]]
    assert len(set(stages)) == 2
    wanted = stages[1]
    shown = relabel("ask", "job.yaml", "--stage", wanted)
    assert f"{wanted}: asked" in shown.out
    assert f"{stages[0]}: asked" not in shown.out
    relabel("ask", "job.yaml", "--stage", "none").refused(2, "--stage none: r3a has none of that name; it has intent, ")
    assert "a dry run has no answers to go on from" in relabel("ask", "job.yaml", "--stage", wanted, "--dry-run").err


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--row", "10"], 3, ["row 10: the input has 10 rows, numbered from 0 to 9"]),
        (["--query-id", "q9"], 3, ["no row of the input has the query id `q9`"]),
    ],
)
def test_a_row_that_is_not_there_is_refused_before_a_model_is_loaded(
    relabel: Callable[..., Any],
    job: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    parts: list[str],
) -> None:
    job("direct")
    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
    relabel("ask", "job.yaml", *arguments).refused(code, *parts)


def test_a_refused_answer_has_its_reason_and_a_prompt_that_goes_on_from_the_one_above_shows_what_is_new(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    job("r3a", args={"p_garbage": 1.0})
    refused = relabel("ask", "job.yaml").out
    assert "row 0: no label, quarantined as format" in refused
    assert refused.count("⟦how to prune roses 0⟧") == 1
    assert refused.count("the prompt above, with another seed") == 1
    job("r3a")
    shown = relabel("ask", "job.yaml", "--random", "2").out
    assert shown.count("the turns above, then") == 2
    assert shown.count("The query:\n") == 2
    alone = relabel("ask", "job.yaml", "--stage", "verdict").out
    assert alone.count("The query:\n") == 1
    assert "the turns above" not in alone


# `relabel ask --edit-prompt`: prompts are edited under an engine that stays.


SECRET = "Zq7hunter2Xv9"
ROWS = [
    {"query_id": f"q{n}", "query": f"how to prune roses {n}", "doc_id": f"d{n}", "document": "Cut in winter."}
    for n in range(3)
]


@pytest.fixture
def prompts(folder: Path, relabel: Callable[..., Any]) -> None:
    """A job file, and the prompts of its labeler in `prompts`."""
    pq.write_table(pa.Table.from_pylist(ROWS), "pairs.parquet")
    spec = {
        "name": "asked",
        "input": {"path": "pairs.parquet"},
        "labeler": {"name": "direct"},
        "engine": {"name": "fake", "seed": 5},
        "output": "out/run",
    }
    Path("job.yaml").write_text(json.dumps(spec))
    assert relabel("templates", "export", "direct", "prompts").code == 0


ASK = Ask("think", (Message("user", ("hello",)),), None, 9)


def test_nothing_that_is_written_is_a_command_to_the_terminal_or_a_secret(no_secrets_kept: None) -> None:
    keep_secret(SECRET, "the variable KEY")
    text = f"a\x1b[31m\x07 {SECRET} and api_key={SECRET}, done"
    out = redacted(click.unstyle(asked_text(AskedRows([], [Exchange(ASK, Answer(0, text, "stop"), 1.0)]), None)))
    assert "hunter" not in out
    assert "\x1b" not in out
    assert "a\\x1b[31m\\x07 " in out


class Editor:
    """A person at an editor: at each pause the next step is taken, and then Ctrl-C."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def __call__(self, _: float) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def wait() -> None:
    """Nothing is changed: what was changed before counts now."""


def replaces(file: str, old: str, new: str) -> Callable[[], object]:
    def step() -> None:
        path = Path(file)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return step


def test_a_changed_template_is_asked_with_the_same_engine_and_a_broken_one_is_said(
    prompts: None, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = Editor(
        wait,
        replaces("prompts/user.j2", "{{ query }}", "{{ quary }}"),
        wait,
        replaces("prompts/user.j2", "{{ quary }}", "{% if %}"),
        wait,
        replaces("prompts/user.j2", "{% if %}", "Be brief. {{ query }}"),
        wait,
    )
    monkeypatch.setattr(again_on_change, "__kwdefaults__", {"pause": editor})
    started: list[object] = []
    from relabel.jobs.ask import start_engine

    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda job: (started.append(job), start_engine(job))[1])
    done = relabel("ask", "job.yaml", "--row", "2", "--edit-prompt", "prompts")
    assert done.code == 130
    assert len(started) == 1
    assert done.out.count("row 2: label") == 2
    assert len(re.findall(r"1 row, 1 ask in \d+\.\d s; nothing was written\.", done.out)) == 2
    first, second = done.out.split("nothing was written.")[:2]
    assert "Be brief. ⟦how to prune roses 2⟧" not in first
    assert "Be brief. ⟦how to prune roses 2⟧" in second
    assert re.search(r"prompts/user\.j2:\d+: .*quary", done.err)
    assert re.search(r"prompts/user\.j2:\d+: Expected an expression", done.err)
    assert done.err.count("changed: user.j2") == 3
    assert done.err.count("is watched") == 4
    assert "Stopped by hand" in done.err
    assert "Traceback" not in done.err


def test_a_dry_run_renders_again_and_loads_no_model(
    prompts: None, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    relabel("ask", "job.yaml", "--edit-prompt", "absent").refused(2, "relabel templates export direct absent")
    relabel("ask", "job.yaml", "--row", "9", "--edit-prompt", "prompts").refused(3, "row 9: the input has 3 rows")
    Path("prompts/user.j2~").write_text("{{ broken, as an editor leaves it")
    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
    editor = Editor(replaces("prompts/user.j2", "{{ query }}", "Mine: {{ query }}"), wait)
    monkeypatch.setattr(again_on_change, "__kwdefaults__", {"pause": editor})
    done = relabel("ask", "job.yaml", "--dry-run", "--edit-prompt", "prompts")
    assert done.code == 130
    assert len(re.findall(r"\d+ rows?, \d+ asks? would be asked first; nothing was written\.", done.out)) == 2
    assert done.out.count("Mine: ⟦") == 1
    assert not Path("out").exists()


# `relabel templates export`: what it writes is what is asked.


JOB = """\
# A job of mine.
name: mine   # by me
input: {path: pairs.parquet}

labeler:     # who asks
  name: NAME   # the one
  # and how often
  attempts: 2

engine: {name: fake}
output: out
"""


def digests(job: str) -> dict[str, str]:
    found: dict[str, str] = load_job(job).labeler.template_digests
    return found


@pytest.mark.parametrize("name", sorted(LABELERS))
def test_a_job_over_what_was_exported_asks_what_it_asked_until_a_file_is_edited(
    relabel: Callable[..., Any], folder: Path, name: str
) -> None:
    Path("jobs").mkdir()
    job = Path("jobs/mine.yaml")
    job.write_text(JOB.replace("NAME", name))
    before = digests(str(job))
    done = relabel("templates", "export", name, "prompts", "--output", "json")
    assert done.code == 0, done
    assert done.json["files"] == sorted(path.name for path in Path("prompts").iterdir())
    assert set(done.json["files"]) >= set(before)
    job.write_text(JOB.replace("NAME   # the one", f"{name}   # the one\n  templates: ../prompts"))
    assert load_job(str(job)).spec.labeler.templates == "prompts"
    assert digests(str(job)) == before
    file = Path("prompts", sorted(before)[0])
    file.write_text(file.read_text() + "\nBe strict.\n")
    assert {name for name, digest in digests(str(job)).items() if digest != before[name]} == {file.name}


def test_files_that_are_there_are_replaced_only_by_force_and_a_refusal_writes_nothing(
    relabel: Callable[..., Any], folder: Path
) -> None:
    assert relabel("templates", "export", "r3a", "prompts").code == 0
    Path("prompts/verdict.j2").write_text("mine")
    Path("prompts/intent.j2").unlink()
    relabel("templates", "export", "r3a", "prompts").refused(2, "prompts/", "is there already", "--force")
    assert not Path("prompts/intent.j2").exists()
    assert Path("prompts/verdict.j2").read_text() == "mine"
    assert relabel("templates", "export", "r3a", "prompts", "--force").code == 0
    assert Path("prompts/verdict.j2").read_text() != "mine"

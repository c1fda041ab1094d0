"""`relabel convert` to trajectories: each line is a prompt as the run asked it, with what is right to answer; all else
is left out and counted.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Ask, Request
from tests.convert.conftest import rows_of
from tests.reuse.test_tree_column import treed_rows

IDS = pa.list_(pa.int64())
GOLD = pa.schema(
    [("query_id", pa.string()), ("doc_id", pa.string()), ("gold_answer_ids", IDS), ("gold_expand_ids", IDS)]
)
Row = dict[str, Any]


def rows() -> list[Row]:
    """Pairs with one passage each: no step of a row repeats an earlier one."""
    return [{**row, "passages": row["passages"][:1]} for row in treed_rows(4, 3)]


@pytest.fixture
def run(folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str]) -> Callable[..., list[Row]]:
    """`run(seed=3, pairs=…, engine={…}, **labeler)`: labels pairs into out/SEED; the labels."""
    if not (folder / "pairs.parquet").exists():
        pq.write_table(pa.Table.from_pylist(rows()), folder / "pairs.parquet")

    def call(
        seed: int = 1,
        *,
        pairs: str = "pairs.parquet",
        engine: Mapping[str, Any] | None = None,
        code: int = 0,
        **labeler: Any,
    ) -> list[Row]:
        options = {"name": "route", "temperature": 0.7, **labeler}
        changes = {"labeler": options, "engine": {"seed": seed, **(engine or {})}, "output": f"out/{seed}"}
        done = relabel("run", write_job({**changes, "input": {"path": pairs, "columns": {"document": ["document"]}}}))
        assert done.code == code, done
        return labels_of(f"out/{seed}")

    return call


def labels_of(output: str) -> list[Row]:
    files = json.loads(Path(output, "manifest.json").read_bytes())["labels"]
    found = [row for file in files for row in pq.read_table(Path(output, file["path"])).to_pylist()]
    return sorted(found, key=lambda row: row["row_id"])


def write_gold(labels: list[Row], *changes: Row | None) -> str:
    """Gold that is what the labels say, with changes to the first of them; None leaves a row out."""
    found = []
    for place, label in enumerate(labels):
        change = changes[place] if place < len(changes) else {}
        own = {"gold_answer_ids": label["answer_ids"], "gold_expand_ids": label["expand_ids"]}
        if change is not None:
            found.append({"query_id": label["query_id"], "doc_id": label["doc_id"], **own, **change})
    pq.write_table(pa.Table.from_pylist(found, GOLD), "gold.parquet")
    return "gold.parquet"


def num_steps(labels: list[Row]) -> int:
    return sum(len(label["steps"]) for label in labels)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """All that engines are asked."""
    found: list[Ask] = []
    submit = Fake.submit

    def note(self: Fake, request: Request) -> None:
        found.append(request.ask)
        submit(self, request)

    monkeypatch.setattr(Fake, "submit", note)
    return found


@pytest.mark.parametrize("is_scattered", [False, True])
def test_prompts_are_those_of_the_run_byte_for_byte_in_the_form_that_trainers_read(
    folder: Path, run: Any, convert: Any, asked: list[Ask], is_scattered: bool
) -> None:
    if is_scattered:
        pq.write_table(pa.Table.from_pylist(rows()[1::2] + rows()[::2]), folder / "pairs.parquet")
    labels = run(engine={"chat_template_kwargs": {"enable_thinking": False}})
    asked.sort(key=lambda ask: ask.messages[1].text)
    found = convert("out/1", "trajectories.jsonl", "--gold", write_gold(labels))
    assert (found["labels"], found["kept"], found["left_out"]) == (12, 12, {})
    assert found["written"] == num_steps(labels) == len(asked) > 12
    assert found["target_format"] == "trajectories"
    lines = datasets.load_dataset("json", data_files="trajectories.jsonl", cache_dir=str(folder / "cache"))["train"]
    prompts = sorted(line["prompt"][1]["content"] for line in lines)
    assert prompts == [ask.messages[1].text for ask in asked]
    wanted = {
        (label["query_id"], label["doc_id"], n): step for label in labels for n, step in enumerate(label["steps"], 1)
    }
    for line in lines:
        assert set(line) == {"prompt", "completion", "chat_template_kwargs", "query_id", "doc_id", "step"}
        assert [turn["role"] for turn in line["prompt"]] == ["system", "user"]
        assert line["prompt"][0]["content"] == asked[0].messages[0].text
        assert line["chat_template_kwargs"] == {"enable_thinking": False}
        (turn,) = line["completion"]
        assert turn["role"] == "assistant"
        step = json.loads(wanted.pop((line["query_id"], line["doc_id"], line["step"])))
        ids = [f"[ANSWER] {id}" for id in step["answers"]] + [f"[EXPAND] {id}" for id in step["expands"]]
        assert [one.partition(":")[0] for one in turn["content"].split("\n")] == (ids or ["[REFUSE]"])


def test_a_label_is_right_that_has_golds_answers_and_unfolds_nothing_beyond_gold(run: Any, convert: Any) -> None:
    labels = run()
    assert all(label["expand_ids"] for label in labels[5:7])
    gold = write_gold(
        labels,
        {"gold_answer_ids": [*labels[0]["answer_ids"], 1]},
        {"gold_answer_ids": None},
        None,
        {"gold_expand_ids": None},
        {"gold_expand_ids": [*labels[4]["expand_ids"], 90]},
        {"gold_expand_ids": []},
        {"gold_expand_ids": None},
    )
    found = convert("out/1", "trajectories.jsonl", "--gold", gold)
    assert found["left_out"] == {"without_gold": 2, "other_than_gold": 2}
    assert (found["kept"], found["written"]) == (8, num_steps([labels[place] for place in (3, 4, 6, 7, 8, 9, 10, 11)]))


def test_the_runs_own_input_may_hold_gold(folder: Path, run: Any, convert: Any) -> None:
    labels = run()
    answers = [label["answer_ids"] if place % 3 else [1] for place, label in enumerate(labels)]
    table = pa.Table.from_pylist(rows())
    pq.write_table(table.append_column("gold_answer_ids", pa.array(answers, IDS)), folder / "pairs.parquet")
    shutil.rmtree(folder / "out")
    assert [label["steps"] for label in run()] == [label["steps"] for label in labels]
    found = convert("out/1", "trajectories.jsonl", "--gold", "pairs.parquet")
    assert (found["kept"], found["left_out"]) == (8, {"other_than_gold": 4})
    assert found["written"] == num_steps([label for place, label in enumerate(labels) if place % 3])


@pytest.mark.parametrize("agree", [None, "2", "3"])
def test_of_several_runs_the_answers_are_kept_that_enough_agree_on(run: Any, convert: Any, agree: str | None) -> None:
    runs = [run(seed) for seed in (1, 2, 3)]
    votes = Counter((label["row_id"], frozenset(label["answer_ids"])) for labels in runs for label in labels)
    least = int(agree or 2)
    right = [one for labels in runs for one in labels if votes[one["row_id"], frozenset(one["answer_ids"])] >= least]
    more = ("--agree", agree) if agree else ()
    found = convert("out/1", "out/2", "out/3", "some.trajectories.jsonl", *more)
    assert (found["agree"], found["labels"], found["kept"]) == (least, 36, len(right))
    assert found["left_out"]["not_agreed"] == 36 - len(right) > 0
    lines = rows_of("some.trajectories.jsonl")
    chats = {json.dumps([line["prompt"], line["completion"]]) for line in lines}
    assert len(chats) == len(lines) == found["written"] == num_steps(right) - found["left_out"].get("repeated", 0)
    assert lines or agree == "3"


def test_gold_and_agreement_may_both_be_asked_for(run: Any, convert: Any) -> None:
    first, second = run(1), run(2)
    gold = write_gold(first)
    both = convert("out/1", "out/2", "a.jsonl", "--to", "trajectories", "--gold", gold, "--agree", "2")
    either = convert("out/1", "out/2", "b.jsonl", "--to", "trajectories", "--gold", gold)
    same = [set(one["answer_ids"]) == set(other["answer_ids"]) for one, other in zip(first, second, strict=True)]
    assert both["left_out"]["not_agreed"] > 0
    assert both["kept"] < either["kept"]
    assert sum(same) <= both["kept"] <= 2 * sum(same)


def test_what_was_quarantined_or_said_nothing_legal_is_counted(relabel: Any, run: Any) -> None:
    labels = run(code=0, expelled="keep", engine={"args": {"p_garbage": 0.3}})
    said = [json.loads(step) for label in labels for step in label["steps"]]
    empty = sum(not (step["answers"] or step["expands"] or step["refused"]) for step in said)
    assert 0 < empty < len(said)
    done = relabel("convert", "out/1", "trajectories.jsonl", "--gold", write_gold(labels), "--output", "json")
    assert done.json["left_out"] == {"without_action": empty}
    assert f"{empty} steps without a legal action, left out." in done.err
    assert len(rows_of("trajectories.jsonl")) == len(said) - empty
    labels = run(2, code=30, attempts=1, engine={"args": {"p_garbage": 0.3}})
    done = relabel("convert", "out/2", "q.trajectories.jsonl", "--gold", "gold.parquet", "--allow-partial")
    assert done.code == 0
    assert f"{12 - len(labels)} rows of the runs are in quarantine" in done.err


def test_labels_that_do_not_lead_back_are_left_out_and_counted(
    run: Any, convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are those of a first version, whose steps do not say how much was shown."""

    def old(*arguments: Any) -> str:
        step = json.loads(held(*arguments))
        return json.dumps({name: value for name, value in step.items() if name != "chars"})

    with monkeypatch.context() as patch:
        from relabel.labelers import route

        held = route.step_json
        patch.setattr(route, "step_json", old)
        labels = run()
    found = convert("out/1", "trajectories.jsonl", "--gold", write_gold(labels))
    assert (found["kept"], found["written"], found["left_out"]) == (0, 0, {"not_replayed": 12})
    assert Path("trajectories.jsonl").read_bytes() == b""


def test_prompts_that_would_not_be_the_same_are_refused(folder: Path, relabel: Any, run: Any) -> None:
    templates = folder / "own"
    templates.mkdir()
    (templates / "user.j2").write_text(
        "{{ query }}\n{% for text in nodes %}{{ marks[loop.index0] }}: {{ text }}\n{% endfor %}"
    )
    gold = write_gold(run(templates="own"))
    call = ("convert", "out/1", "trajectories.jsonl", "--gold", gold)
    assert relabel(*call).code == 0
    assert rows_of("trajectories.jsonl")[0]["prompt"][1]["content"].startswith("blue wool")
    with (templates / "user.j2").open("a") as file:
        file.write("\nOne action a line.")
    relabel(*call, "--force").refused(3, "out/1: its prompts can't be made again", "user.j2", "Restore them")
    write_gold(run(2))
    changed = rows()
    changed[0]["document"] += " More."
    pq.write_table(pa.Table.from_pylist(changed), folder / "pairs.parquet")
    relabel("convert", "out/2", "b.trajectories.jsonl", "--gold", gold).refused(3, "changed since", "pairs.parquet")
    assert not (folder / "b.trajectories.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "code", "parts"),
    [
        ("out/1 trajectories.jsonl", 2, ["--gold FILE", "--agree"]),
        ("out/1 trajectories.jsonl --agree 2", 2, ["there is one run"]),
        ("out/1 out/2 trajectories.jsonl --agree 1", 2, ["more than half", "2 to 2"]),
        ("out/1 out/1 trajectories.jsonl", 2, ["agree with themselves"]),
        ("out/1 trajectories.jsonl --gold absent.parquet", 3, ["absent.parquet: no such file"]),
        ("out/1 trajectories.jsonl --gold pairs.parquet", 3, ["no column `grade`"]),
        ("out/1 trajectories.jsonl --gold gold.qrels", 3, ["no column `gold_answer_ids`"]),
        ("absent trajectories.jsonl --gold gold.parquet", 3, ["absent: no run's output folder"]),
        ("pairs.parquet trajectories.jsonl --gold gold.parquet", 3, ["pairs.parquet: no run's output folder"]),
        ("out/1 out/1/trajectories.jsonl --gold gold.parquet", 2, ["is in the input out/1"]),
        ("out/1 pairs.parquet --to trajectories --gold gold.parquet --force", 2, ["pairs.parquet: is in the input"]),
        ("out/1 gold.parquet --to trajectories --gold gold.parquet --force", 2, ["gold.parquet: is in the input"]),
        ("out/1 there.trajectories.jsonl --gold gold.parquet", 2, ["is there already", "--force"]),
        ("out/1 trajectories.jsonl --gold gold.parquet --score s", 2, ["--score has no part in trajectories"]),
        ("out/1 labels.jsonl --gold gold.parquet", 2, ["--gold chooses among trajectories"]),
        ("out/1 out/2 labels.jsonl", 2, ["2 sources"]),
    ],
)
def test_what_makes_no_trajectories_is_refused_with_what_to_do(
    folder: Path, relabel: Any, run: Any, line: str, code: int, parts: list[str]
) -> None:
    write_gold(run(1))
    run(2)
    (folder / "gold.qrels").write_text("q0 0 d0-0 1\n")
    (folder / "there.trajectories.jsonl").write_text("kept")
    relabel("convert", *line.split()).refused(code, *parts)
    assert not (folder / "trajectories.jsonl").exists()
    assert (folder / "there.trajectories.jsonl").read_text() == "kept"


def test_runs_that_say_nothing_by_agreeing_are_refused(folder: Path, relabel: Any, run: Any) -> None:
    run(1, temperature=0)
    run(2, temperature=0)
    relabel("convert", "out/1", "out/2", "trajectories.jsonl").refused(2, "agree with themselves", "temperature")
    run(3)
    pq.write_table(pa.Table.from_pylist(rows()[:9]), folder / "pairs.parquet")
    run(4)
    relabel("convert", "out/3", "out/4", "trajectories.jsonl").refused(3, "labelled different inputs", "pairs.parquet")


def test_unfinished_runs_and_other_labelers_are_refused(folder: Path, relabel: Any, run: Any) -> None:
    gold = write_gold(run(1))
    run(2, name="direct")
    relabel("convert", "out/2", "trajectories.jsonl", "--gold", gold).refused(3, "labels of `direct`", "route")
    (folder / "out/1/manifest.json").unlink()
    relabel("convert", "out/1", "trajectories.jsonl", "--gold", gold).refused(3, "not finished", "12 of 12 rows")
    done = relabel("convert", "out/1", "trajectories.jsonl", "--gold", gold, "--allow-partial")
    assert done.code == 0
    assert "out/1 is not finished" in done.err


def test_merged_runs_have_trajectories_where_all_were_asked_alike(
    folder: Path, relabel: Any, run: Any, convert: Any
) -> None:
    for name, half in (("a", rows()[:6]), ("b", rows()[6:])):
        pq.write_table(pa.Table.from_pylist(half), folder / f"{name}.parquet")
    labels = [
        *run(1, pairs="a.parquet", engine={"seed": 7}),
        *run(2, pairs="b.parquet", engine={"seed": 7}),
    ]
    run(3, pairs="b.parquet", engine={"seed": 7}, expansions=1)
    gold = write_gold(labels)
    assert relabel("merge", "out/1", "out/2", "--to", "out/whole").code == 0
    found = convert("out/whole", "trajectories.jsonl", "--gold", gold)
    assert (found["kept"], found["written"]) == (12, num_steps(labels))
    assert relabel("merge", "out/1", "out/3", "--to", "out/mixed", "--allow-mixed").code == 0
    call = ("convert", "out/mixed", "mixed.trajectories.jsonl", "--gold", gold)
    relabel(*call).refused(3, "merged of runs that asked in different ways")

"""`relabel review`: pairs for people, and gold of what they judged."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import cohen_kappa_score

from tests.convert.conftest import rows_of

Call = Callable[..., Any]


@pytest.fixture
def labelled(relabel: Call, write_job: Call, write_pairs: Call) -> None:
    """A finished run over the fixture's pairs in out/ecom."""
    write_pairs()
    assert relabel("run", write_job()).code == 0


def judged_by(who: str, pairs: list[tuple[str, str, int | None]], path: str) -> str:
    rows = [
        {"query_id": query, "doc_id": doc, "grade": grade, "who": who, "when": "2026-11-29", "why": f"as {who} sees it"}
        for query, doc, grade in pairs
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# ------------------------------------------------------------------------------
# Out.


@pytest.mark.usefixtures("labelled")
def test_a_random_order_holds_each_pair_once_and_its_seed_decides_it(review: Call, committed: Call) -> None:
    written = review("--to", "a.parquet", "--pairs", "1000")
    review("--to", "b.parquet", "--pairs", "1000")
    review("--to", "c.parquet", "--pairs", "1000", "--seed", "8")
    labels = committed()
    assert written["pairs"] == written["labelled"] == len(labels)
    rows = [rows_of(f"{name}.parquet") for name in "abc"]
    orders = [[row["row_id"] for row in held] for held in rows]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(labels)
    assert orders[0] != sorted(orders[0])
    assert [row["place"] for row in rows[0]] == list(range(1, len(labels) + 1))
    assert all(row["judge_grade"] == labels[row["row_id"]]["grade"] for row in rows[0])
    assert {(row["grade"], row["who"], row["when"], row["why"]) for row in rows[0]} == {(None,) * 4}


@pytest.mark.usefixtures("labelled")
def test_fewer_pairs_are_the_first_of_more(review: Call) -> None:
    review("--to", "all.parquet", "--order", "doubt")
    review("--to", "few.parquet", "--order", "doubt", "--pairs", "5")
    assert rows_of("few.parquet") == rows_of("all.parquet")[:5]


@pytest.mark.usefixtures("labelled")
def test_doubt_has_the_pairs_first_that_are_most_likely_on_the_other_side(review: Call, committed: Call) -> None:
    review("--to", "look.parquet", "--order", "doubt")
    labels = committed()
    doubts = []
    for row in rows_of("look.parquet"):
        label = labels[row["row_id"]]
        half = len(label["probs"]) // 2
        relevant = sum(label["probs"][half:])
        doubts.append(1 - relevant if label["grade"] >= half else relevant)
    assert np.allclose(doubts, sorted(doubts, reverse=True))


@pytest.mark.usefixtures("labelled")
def test_with_a_second_opinion_the_farthest_come_first_and_what_it_lacks_last(review: Call, committed: Call) -> None:
    labels = list(committed().values())
    known = labels[:-3]
    second = {(row["query_id"], row["doc_id"]): (2 * place) % 3 for place, row in enumerate(known)}
    judged_by("second", [(*pair, grade) for pair, grade in second.items()], "second.parquet")
    written = review("--to", "look.parquet", "--second", "second.parquet")
    assert (written["order"], written["without_second"]) == ("second", 3)
    rows = rows_of("look.parquet")
    distances = [
        abs(row["judge_grade"] - second[row["query_id"], row["doc_id"]])
        for row in rows
        if (row["query_id"], row["doc_id"]) in second
    ]
    assert distances == sorted(distances, reverse=True)
    assert len(set(distances)) > 1
    assert {row["row_id"] for row in rows[-3:]} == {row["row_id"] for row in labels[-3:]}


@pytest.mark.usefixtures("labelled")
def test_tasks_of_label_studio_predict_the_label_and_have_the_texts(
    review: Call, committed: Call, pairs: list[dict[str, Any]]
) -> None:
    review("--to", "look.labelstudio.json", "--pairs", "7")
    tasks = json.loads(Path("look.labelstudio.json").read_text(encoding="utf-8"))
    labels = committed()
    texts = {(row["query_id"], row["doc_id"]): row for row in pairs}
    assert len(tasks) == 7
    for place, task in enumerate(tasks, start=1):
        data = task["data"]
        pair = texts[data["query_id"], data["doc_id"]]
        assert data["place"] == place
        assert data["query"] == pair["query"]
        assert pair["body"] in data["document"]
        (prediction,) = task["predictions"]
        (region,) = prediction["result"]
        assert (prediction["model_version"], region["from_name"], region["to_name"]) == ("ecom", "grade", "document")
        assert region["value"] == {"choices": [str(labels[data["row_id"]]["grade"])]}


@pytest.mark.usefixtures("labelled")
def test_a_blind_review_shows_no_label_and_is_read_back_as_any_other(
    review: Call, relabel: Call, committed: Call
) -> None:
    labels = {(row["query_id"], row["doc_id"]): row["grade"] for row in committed().values()}
    for name in ("look.parquet", "look.jsonl"):
        assert review("--to", name, "--pairs", "20", "--blind")["is_blind"]
        assert [set(row) & {"judge_grade", "grade"} for row in rows_of(name)] == [{"grade"}] * 20
    review("--to", "look.csv", "--blind")
    assert "judge_grade" not in Path("look.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    judged = [{**row, "grade": 1, "who": "anna"} for row in rows_of("look.parquet")]
    pq.write_table(pa.Table.from_pylist(judged), "anna.parquet")
    review("--from", "anna.parquet", "--to", "gold.parquet")
    assert all(row["judge_grade"] == labels[row["query_id"], row["doc_id"]] for row in rows_of("gold.parquet"))
    review("--to", "look.labelstudio.json", "--pairs", "20", "--blind")
    tasks = json.loads(Path("look.labelstudio.json").read_text(encoding="utf-8"))
    assert [set(task) for task in tasks] == [{"data"}] * 20
    assert "judge_grade" not in tasks[0]["data"]
    result = [{"from_name": "grade", "to_name": "document", "type": "choices", "value": {"choices": ["1"]}}]
    judged = [{**task, "annotations": [{"completed_by": "ben", "result": result}]} for task in tasks]
    Path("ben.json").write_text(json.dumps(judged), encoding="utf-8")
    assert review("--from", "ben.json", "--to", "ben.parquet")["judgments"] == 20
    relabel("review", "out/ecom", "--to", "a.opensearch.json", "--blind").refused(2, "--blind", "rating of every pair")
    relabel("review", "out/ecom", "--from", "ben.json", "--to", "b.parquet", "--blind").refused(2, "--blind")


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize("name", ["look.labelstudio.json", "look.quepid.csv", "look.parquet", "look.jsonl", "look.csv"])
def test_a_file_that_nobody_filled_in_is_refused(relabel: Call, review: Call, name: str) -> None:
    review("--to", name, "--pairs", "20")
    rows = "pairs" if name.endswith(".labelstudio.json") else "20 rows"  # Label Studio's judgments are its rows
    outcome = relabel("review", "out/ecom", "--from", f"anna={name}", "--to", "gold.parquet")
    outcome.refused(3, f"{name}: none of its {rows} has a grade. Is it the filled-in file?")
    assert not Path("gold.parquet").exists()


@pytest.mark.usefixtures("labelled")
def test_what_is_asked_wrongly_is_refused(relabel: Call) -> None:
    relabel("review", "out/ecom", "--to", "look.txt").refused(2, "look.txt: its form is not clear", ".quepid.csv")
    relabel("review", "out/ecom", "--to", "a.parquet", "--order", "second").refused(2, "--second LABELS")
    relabel("review", "out/ecom", "--to", "a.parquet", "--order", "doubt", "--second", "b.parquet").refused(
        2, "together"
    )
    relabel("review", "out/ecom", "--from", "a.parquet", "--to", "b.qrels").refused(2, "b.qrels: its form")
    relabel("review", "out/ecom", "--from", "a.parquet", "--to", "b.parquet", "--pairs", "3").refused(2, "--pairs")
    relabel("review", "absent", "--to", "a.parquet").refused(3, "absent")
    assert not Path("a.parquet").exists()


# ------------------------------------------------------------------------------
# In.


@pytest.mark.usefixtures("labelled")
def test_every_judgment_is_kept_with_who_when_and_why_and_conflicts_are_listed(review: Call, committed: Call) -> None:
    labels = list(committed().values())
    pairs = [(row["query_id"], row["doc_id"]) for row in labels[:12]]
    anna = [(*pair, place % 3) for place, pair in enumerate(pairs)]
    ben = [(*pair, (place + (place > 8)) % 3) for place, pair in enumerate(pairs)]
    ben.append(("q0", "unknown", None))
    sources = [judged_by("anna", anna, "anna.parquet"), judged_by("ben", ben, "ben.parquet")]

    gathered = review("--from", sources[0], "--from", sources[1], "--to", "gold.parquet")

    gold = rows_of("gold.parquet")
    assert (gathered["judgments"], gathered["pairs"], gathered["not_judged"]) == (24, 12, 1)
    assert [(row["query_id"], row["doc_id"], row["grade"]) for row in gold] == anna + ben[:-1]
    assert {(row["who"], row["when"], row["why"]) for row in gold} == {
        (who, "2026-11-29", f"as {who} sees it") for who in ("anna", "ben")
    }
    grades = {(row["query_id"], row["doc_id"]): row["grade"] for row in labels}
    assert all(row["judge_grade"] == grades[row["query_id"], row["doc_id"]] for row in gold)
    (agreement,) = gathered["agreement"]
    expected = cohen_kappa_score([grade for *_, grade in anna], [grade for *_, grade in ben[:-1]])
    assert (agreement["pairs"], agreement["equal"]) == (12, 9)
    assert agreement["kappa"] == pytest.approx(expected)
    assert [(one["query_id"], one["doc_id"]) for one in gathered["conflicts"]] == pairs[9:]
    assert gathered["conflicts"][0]["grades"] == {"anna": [0], "ben": [1]}
    assert [row["is_conflict"] for row in gold] == ([False] * 9 + [True] * 3) * 2


@pytest.mark.usefixtures("labelled")
def test_what_is_printed_says_what_was_found_and_which_command_comes_next(relabel: Call) -> None:
    shown = relabel("review", "out/ecom", "--to", "look.csv", "--pairs", "3").out.splitlines()
    assert shown[0] == "Wrote 3 pairs to look.csv (csv)"
    assert shown[-1].split(maxsplit=1) == ["then", "relabel review out/ecom --from NAME=look.csv --to gold.parquet"]
    assert any("`grade`" in line and "0 to 2" in line for line in shown)
    spaced = relabel("review", "out/ecom", "--to", "to judge.csv", "--pairs", "3").out.splitlines()
    assert shlex.split(spaced[-1])[1:6] == ["relabel", "review", "out/ecom", "--from", "NAME=to judge.csv"]
    for name, column in (("look.quepid.csv", "`rating`"), ("look.labelstudio.json", "export")):
        assert column in relabel("review", "out/ecom", "--to", name, "--pairs", "3").out
    anna = judged_by("anna", [("q0", "d0-0", 1), ("q0", "d0-1", 2), ("q0", "d0-2", None)], "anna.parquet")
    alone = relabel("review", "out/ecom", "--from", anna, "--to", "gold.parquet").out
    assert alone.startswith("Wrote 2 judgments of 2 pairs by anna to gold.parquet\n")
    assert "not judged" in alone
    assert "conflict" not in alone
    assert alone.endswith("relabel evaluate out/ecom --qrels gold.parquet\n")
    ben = judged_by("ben", [("q0", "d0-0", 2), ("q9", "d", 2)], "ben.parquet")
    both = relabel("review", "out/ecom", "--from", anna, "--from", ben, "--to", "both.parquet").out
    assert "conflict: query q0, document d0-0: anna 1; ben 2" in both
    assert "not of the run" in both
    assert both.endswith("relabel evaluate out/ecom --qrels both.parquet --duplicates mean\n")


@pytest.mark.usefixtures("labelled")
def test_gold_that_is_given_again_adds_nothing_and_one_who_differs_from_herself_is_a_conflict(review: Call) -> None:
    first = judged_by("anna", [("q0", "d0-0", 1), ("q0", "d0-1", 2)], "first.parquet")
    second = judged_by("anna", [("q0", "d0-0", 2)], "second.parquet")
    review("--from", first, "--to", "gold.parquet")
    gathered = review("--from", "gold.parquet", "--from", first, "--from", second, "--to", "more.parquet")
    assert (gathered["judgments"], gathered["pairs"], gathered["agreement"]) == (3, 2, [])
    assert [one["grades"] for one in gathered["conflicts"]] == [{"anna": [1, 2]}]


@pytest.mark.usefixtures("labelled")
def test_gold_is_judged_by_and_a_conflict_is_nobodys_choice(review: Call, relabel: Call) -> None:
    first = judged_by("anna", [("q0", "d0-0", 1), ("q0", "d0-1", 2)], "anna.parquet")
    review("--from", first, "--to", "gold.parquet")
    assert relabel("evaluate", "out/ecom", "--qrels", "gold.parquet", "--resamples", "10").code == 0
    second = judged_by("ben", [("q0", "d0-0", 2)], "ben.parquet")
    review("--from", "gold.parquet", "--from", second, "--to", "more.parquet")
    relabel("evaluate", "out/ecom", "--qrels", "more.parquet").refused(3, "more.parquet")
    assert relabel("evaluate", "out/ecom", "--qrels", "more.parquet", "--duplicates", "mean").code == 0


@pytest.mark.parametrize("arguments", [("--queries", "plan.json", "--blind"), ("--from", "anna=judged.csv"), ()])
def test_label_file_in_place_of_a_run_is_named_as_what_is_wrong(
    relabel: Call, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    judged_by("judge", [("q0", "d0-0", 1)], "gpt4.parquet")
    Path("plan.json").write_text("{}")
    Path("judged.csv").write_text("query_id,doc_id,grade\nq0,d0-0,1\n")
    for path in ("gpt4.parquet", f"file://{Path.cwd()}/gpt4.parquet"):
        done = relabel("review", path, *arguments, "--to", "x.csv")
        done.refused(3, f"{path}: a file, and this needs a run's output folder, by which the texts are found")
        assert "plan.json" not in done.err


@pytest.mark.usefixtures("labelled")
def test_what_people_can_not_have_meant_is_refused(review: Call, relabel: Call) -> None:
    off = judged_by("anna", [("q0", "d0-0", 7)], "off.parquet")
    relabel("review", "out/ecom", "--from", off, "--to", "gold.parquet").refused(3, "off.parquet", "7")
    Path("off.csv").write_text("query_id,doc_id,grade\nq0,d0-0,\nq0,d0-1,1\nq1,d1-0,5\n")
    done = relabel("review", "out/ecom", "--from", "anna=off.csv", "--to", "gold.parquet")
    done.refused(
        3,
        "off.csv: row 4 (the header is row 1), query q1, document d1-0: grade 5 is off the scale. Grades of this run "
        "are 0 to 2.",
    )
    assert "Bring" not in done.err
    Path("who.jsonl").write_text('{"query_id": "q0", "doc_id": "d0-0", "grade": 1}\n')
    relabel("review", "out/ecom", "--from", "who.jsonl", "--to", "gold.parquet").refused(3, "who.jsonl", "NAME=")
    assert not Path("gold.parquet").exists()
    assert review("--from", "anna=who.jsonl", "--to", "gold.parquet")["people"] == ["anna"]
    done = relabel("review", "out/ecom", "--from", "anna=who.jsonl", "--to", "gold.parquet")
    done.refused(2, "gold.parquet: is there already")
    done = relabel("review", "out/ecom", "--from", "gold.parquet", "--to", "gold.parquet", "--force")
    done.refused(2, "is in the input")


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"grade": 7}, "grade 7 is off the scale"),
        ({"grade": "2?"}, "'2?'"),
        ({"who": None}, "has a grade, and no `who`"),
        ({"query_id": None}, "has no `query_id`"),
    ],
)
def test_a_row_is_named_as_the_program_shows_it_in_which_it_was_filled_in(
    relabel: Call, fault: dict[str, Any], said: str
) -> None:
    rows = [{"query_id": "q0", "doc_id": f"d0-{doc}", "grade": 1, "who": "anna"} for doc in range(4)]
    rows[2] = rows[2] | fault
    frame = pl.DataFrame(rows, schema_overrides={"grade": pl.String}, strict=False)
    frame.write_csv("anna.csv")
    frame.write_ndjson("anna.jsonl")
    frame.write_parquet("anna.parquet")
    for name, row in (("csv", "row 4 (the header is row 1)"), ("jsonl", "row 3"), ("parquet", "row 3")):
        if name == "csv" and said == "has no `query_id`":
            continue  # an empty text is one
        outcome = relabel("review", "out/ecom", "--from", f"anna.{name}", "--to", "gold.parquet")
        outcome.refused(3, f"anna.{name}", said)
        assert re.search(rf"\b{re.escape(row)}[:, ]", outcome.err), outcome.err


@pytest.mark.usefixtures("labelled")
def test_a_sheet_of_tabs_is_written_and_read(review: Call) -> None:
    """A spreadsheet divides tabs where the comma is the decimal mark, too."""
    review("--to", "look.tsv", "--pairs", "6")
    frame = pl.read_csv("look.tsv", separator="\t").with_columns(grade=pl.lit(1), who=pl.lit("anna"))
    frame.write_csv("look.tsv", separator="\t")
    review("--from", "look.tsv", "--to", "gold.tsv")
    gold = pl.read_csv("gold.tsv", separator="\t")
    assert gold.select("query_id", "doc_id").rows() == frame.select("query_id", "doc_id").rows()


@pytest.mark.usefixtures("labelled")
def test_a_sheet_that_was_saved_with_semicolons_is_read(review: Call) -> None:
    review("--to", "look.csv", "--pairs", "6")
    frame = pl.read_csv("look.csv").with_columns(grade=pl.lit(1), who=pl.lit("anna"), why=pl.lit("it is red, not blue"))
    frame.write_csv("filled.csv", separator=";")
    review("--from", "filled.csv", "--to", "gold.parquet")
    gold = rows_of("gold.parquet")
    assert [(row["query_id"], row["doc_id"]) for row in gold] == list(frame.select("query_id", "doc_id").iter_rows())
    assert {(row["grade"], row["who"], row["why"]) for row in gold} == {(1, "anna", "it is red, not blue")}


EXPORT = [
    {
        "id": 1,
        "data": {"query_id": "q0", "query": "red shoe 0", "doc_id": "d0-0"},
        "predictions": [{"result": [{"from_name": "grade", "type": "choices", "value": {"choices": ["0"]}}]}],
        "annotations": [
            {
                "completed_by": {"id": 4, "email": "anna@shop.example"},
                "was_cancelled": False,
                "created_at": "2026-11-29T10:00:00Z",
                "updated_at": "2026-11-29T10:05:00Z",
                "result": [
                    {"from_name": "grade", "to_name": "document", "type": "choices", "value": {"choices": ["2"]}},
                    {
                        "from_name": "why",
                        "to_name": "document",
                        "type": "textarea",
                        "value": {"text": ["it is", "red"]},
                    },
                ],
            },
            {
                "completed_by": 5,
                "was_cancelled": False,
                "created_at": "2026-11-29T11:00:00Z",
                "result": [{"from_name": "grade", "type": "rating", "value": {"rating": 1}}],
            },
            {"completed_by": 6, "was_cancelled": True, "result": []},
        ],
    }
]
EXPORT_MIN = [
    {
        "id": 1,
        "query_id": "q0",
        "query": "red shoe 0",
        "doc_id": "d0-0",
        "annotator": 5,
        "annotation_id": 9,
        "updated_at": "2026-11-29T11:00:00Z",
        "grade": "1",
        "why": "half red",
    }
]


@pytest.mark.usefixtures("labelled")
def test_both_exports_of_label_studio_are_read_and_predictions_are_no_answers(review: Call, relabel: Call) -> None:
    Path("project-1.json").write_text(json.dumps(EXPORT))
    Path("min.json").write_text(json.dumps(EXPORT_MIN))
    review("--from", "project-1.json", "--to", "gold.parquet")
    assert [tuple(row[name] for name in ("grade", "who", "when", "why")) for row in rows_of("gold.parquet")] == [
        (2, "anna@shop.example", "2026-11-29T10:05:00Z", "it is\nred"),
        (1, "5", "2026-11-29T11:00:00Z", None),
    ]
    review("--from", "min.json", "--to", "min.parquet")
    (row,) = rows_of("min.parquet")
    assert (row["grade"], row["who"], row["why"]) == (1, "5", "half red")
    assert relabel("convert", "min.json", "people.qrels").code == 0
    assert Path("people.qrels").read_text() == "q0 0 d0-0 1\n"
    relabel("convert", "project-1.json", "two.qrels").refused(3, "1 pairs have several grades")


# ------------------------------------------------------------------------------
# Reasons of people as examples, and how the pairs were chosen.


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize("labeler", ["direct", "r3a", "umbrela", "r1", "graph-grpo"])
def test_what_people_said_is_in_the_next_prompt_and_changes_every_label_key(
    relabel: Call, review: Call, committed: Call, write_job: Call, labeler: str
) -> None:
    labels = list(committed().values())[:9]
    judged = [(row["query_id"], row["doc_id"], place % 3) for place, row in enumerate(labels)]
    source = judged_by("anna", judged, "anna.parquet")
    gathered = review("--from", source, "--to", "gold.parquet", "--examples", "prompts")
    assert gathered["examples"] == 6

    job = write_job({"labeler": {"name": labeler}, "output": "out/direct"})
    with_examples = ("--set", "labeler.templates=prompts")
    asked = relabel("ask", job, "--output", "json", *with_examples)
    assert asked.code == 0
    assert asked.out.count("as anna sees it") >= 6
    assert relabel("ask", job, "--output", "json").out.count("as anna sees it") == 0
    assert relabel("run", job).code == 0
    relabel("run", job, *with_examples).refused(3, "belongs to another job", "examples.jsonl")
    again = ("--set", "output=out/shown", "--set", "reuse=[out/direct]", "--output", "json")
    assert relabel("run", job, *again).json["reused"] > 0
    shown = ("--set", "output=out/other", "--set", "reuse=[out/direct]", "--output", "json")
    assert relabel("run", job, *with_examples, *shown).json["reused"] == 0

    examples = [json.loads(line) for line in Path("prompts/examples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [example["grade"] for example in examples] == [0, 1, 2, 0, 1, 2]
    in_prompt = {(row["query_id"], row["doc_id"]) for row in rows_of("gold.parquet") if row["in_prompt"]}
    assert len(in_prompt) == 6
    assert in_prompt < {pair[:2] for pair in judged}
    evaluated = relabel("evaluate", "out/ecom", "--qrels", "gold.parquet")
    assert "6 gold pairs are examples in a prompt" in evaluated.out


@pytest.mark.usefixtures("labelled")
def test_examples_that_no_prompt_can_take_are_refused(
    relabel: Call, review: Call, committed: Call, write_job: Call
) -> None:
    label = next(iter(committed().values()))
    source = judged_by("anna", [(label["query_id"], label["doc_id"], 2)], "anna.parquet")
    relabel("review", "out/ecom", "--to", "a.parquet", "--examples", "prompts").refused(2, "--from")
    blank = pq.read_table(source).drop_columns(["why"])
    pq.write_table(blank, "blank.parquet")
    command = ("review", "out/ecom", "--to", "a.parquet", "--examples", "prompts")
    relabel(*command, "--from", "blank.parquet").refused(3, "no judgment of the run's pairs has a reason")
    assert not Path("a.parquet").exists()
    review("--from", source, "--to", "gold.parquet", "--examples", "prompts")
    for labeler in ("ensemble", "variants"):
        job = write_job({"labeler": {"name": labeler, "templates": "prompts"}, "output": "out/new"})
        relabel("plan", job).refused(3, "examples.jsonl", "takes no examples")
    job = write_job({"labeler": {"name": "direct", "grades": 2, "templates": "prompts"}, "output": "out/new"})
    relabel("plan", job).refused(3, "grade 2 is none of the labeler's 0 to 1")
    Path("prompts/examples.jsonl").write_text('{"query": 1}\n', encoding="utf-8")
    relabel("plan", job).refused(3, "examples.jsonl:1", "no example as")


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "labelstudio.json"])
def test_gold_of_pairs_that_were_not_drawn_at_random_says_so_where_it_is_used(
    relabel: Call, review: Call, suffix: str
) -> None:
    look = f"look.{suffix}"
    for order, is_warned in (("doubt", True), ("random", False)):
        review("--to", look, "--order", order, "--pairs", "8", "--force")
        fill_in(look)
        review("--from", f"anna={look}", "--to", "gold.parquet", "--force")
        assert {row["review_order"] for row in rows_of("gold.parquet")} == {order}
        evaluated = relabel("evaluate", "out/ecom", "--qrels", "gold.parquet")
        assert evaluated.code == 0
        assert ("not a random sample: of 8 gold pairs, 8 by doubt" in evaluated.out) == is_warned
    rows = [row | {"review_order": "second", "in_prompt": True} for row in rows_of("gold.parquet")]
    pl.DataFrame(rows).write_csv("gold.csv")  # as a spreadsheet leaves it
    evaluated = relabel("evaluate", "out/ecom", "--qrels", "gold.csv")
    assert "8 by second" in evaluated.out
    assert "8 gold pairs are examples in a prompt" in evaluated.out


def fill_in(path: str) -> None:
    """Anna agrees with the run, whatever it says."""
    if path.endswith(".parquet"):
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index("grade"), "grade", table["judge_grade"]), path)
    elif path.endswith(".jsonl"):
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        lines = [json.dumps(row | {"grade": row["judge_grade"]}) for row in rows]
        Path(path).write_text("\n".join(lines), encoding="utf-8")
    else:
        tasks = json.loads(Path(path).read_text(encoding="utf-8"))
        for task in tasks:
            task["annotations"] = [{"result": task["predictions"][0]["result"]}]
        Path(path).write_text(json.dumps(tasks), encoding="utf-8")

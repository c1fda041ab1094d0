"""The code of docs/python.md runs as it is, in a working directory with hostile modules of our folders' names, and
gives what the commands give.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import relabel
from relabel.jobs.commands.demo import load_pairs
from relabel.jobs.run import display
from relabel.manifests.errors import ConfigError, InputError, RelabelError, UsageError, VerdictError
from tests.docs.pages import DOCS, blocks
from tests.docs.worlds import call, write_pairs
from tests.jobs.conftest import folder, no_scheduler  # noqa: F401
from tests.jobs.test_demo import write_tiny_model

BLOCKS = [block for block in blocks(DOCS / "python.md") if block.language == "python"]
JOB = {
    "name": "ecom",
    "input": {"path": "pairs.parquet", "columns": {"gold": "grade"}},
    "labeler": {"name": "direct", "grades": 3},
    "engine": {"name": "fake", "seed": 7},
    "output": "out/ecom",
}


def test_its_blocks_run_in_order(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    for name in ("jobs", "export", "distill", "labelers", "manifests"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    for block in BLOCKS:
        if block.title is None:
            exec(compile(block.text, "python.md", "exec"), {})
    done = subprocess.run(
        [sys.executable, "-c", "import relabel; print(sorted(relabel.__all__) == dir(relabel))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True\n", done


def test_a_notebook_shows_one_line_of_progress_that_is_written_over(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_pairs(folder)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(display, "NOTEBOOK_EVERY_S", 0.0)
    exec(compile(BLOCKS[0].text, "python.md", "exec"), {})
    out, err = capsys.readouterr()
    assert out == ""
    shown = [text for text in re.findall(r"\r([^\r\n]*)", err) if " pairs/s" in text]
    assert shown[-1].startswith("192 of 192 pairs · ")
    assert err.endswith("\n")


def test_import_relabel_loads_nothing_heavy() -> None:
    code = "import sys, relabel; print({'torch', 'pyarrow', 'pydantic', 'numpy', 'click'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_dictionary_gives_the_labels_of_its_file_and_the_table_has_texts_and_gold(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    (folder / "job.yaml").write_text(json.dumps({**JOB, "output": "out/file"}))
    assert call("run", "job.yaml") == 0
    found = relabel.run(JOB)
    assert (found.exit, found.open) == (0, 0)
    assert found.labelled + sum(found.quarantined.values()) == found.rows
    labels = found.labels(texts=True)
    assert labels.drop_columns(["query", "document", "gold"]).equals(relabel.read_labels("out/file"))
    rows = pq.read_table("pairs.parquet").to_pylist()
    for label in labels.to_pylist()[:20]:
        row = rows[label["row_id"]]
        assert label["query"] == row["query"]
        assert row["title"] in label["document"]
        assert label["gold"] == row["grade"]
    assert relabel.run(JOB).exit == 10
    assert relabel.run(JOB, is_retry=True, overrides=["labeler.attempts=3"]).exit in (0, 10)


def test_rows_of_the_input_and_pairs_of_ones_own_are_asked(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    own = {"query": "red shoes", "document": "A red shoe."}
    first, second = relabel.ask(JOB, [2, own])
    assert [row.status for row in (*first.rows, *second.rows)] == ["ok", "ok"]
    assert own["document"] in str(second.exchanges[0].ask.messages)
    assert not Path("out").exists()
    with pytest.raises(InputError, match="row 0: wants a text `document`"):
        relabel.ask(JOB, [{"query": "red shoes"}])
    with pytest.raises(ConfigError, match=r"the job's spec: unknown key `enginge`"):
        relabel.run({**JOB, "enginge": {}})
    with pytest.raises(ConfigError, match=r"`engine` is missing \(`enginge` is no key\)"):
        relabel.run({key.replace("engine", "enginge"): value for key, value in JOB.items()})


def test_the_label_of_one_row_is_at_hand(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    own = {"query": "red shoes", "document": "A red <b>shoe</b>."}
    asked = relabel.ask(JOB, [own])
    assert asked.label == asked[0].rows[0]
    assert asked.grade == asked.label.grade is not None
    assert relabel.ask(JOB, own).label == asked.label
    several = relabel.ask(JOB, [own, 2])
    assert several.rows == [*several[0].rows, *several[1].rows]
    with pytest.raises(InputError, match="2 rows were asked"):
        _ = several.grade
    garbage = {**JOB, "engine": {"name": "fake", "args": {"p_garbage": 1.0}}}
    with pytest.raises(VerdictError):
        _ = relabel.ask(garbage, [own]).grade


def test_a_notebook_shows_what_was_asked_and_answered(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    page = relabel.ask(JOB, [{"query": "red shoes", "document": "A red <b>shoe</b>."}])._repr_html_()
    assert page.startswith("<pre")
    assert "A red &lt;b&gt;shoe&lt;/b&gt;." in page
    assert "<b>" not in page, "a document is text"
    assert "\x1b" not in page
    assert "row 0: label" in page


def test_what_was_asked_prints_as_the_command_shows_it(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    printed = str(relabel.ask(JOB, [{"query": "red shoes", "document": "A red shoe."}]))
    assert "row 0: label" in printed
    assert "Exchange(" not in printed


@pytest.fixture
def two_judges(folder: Path) -> Path:  # noqa: F811
    """Labels of two judges, and gold of the same pairs."""
    for name, grades in (("teacher", (0, 1, 2, 1)), ("student", (0, 2, 2, 1)), ("gold", (0, 1, 2, 2))):
        rows = (json.dumps({"query_id": f"q{row}", "doc_id": "d", "grade": grade}) for row, grade in enumerate(grades))
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize("sets", [["teacher.jsonl"], ["teacher.jsonl", "student.jsonl"]], ids=["judged", "compared"])
def test_what_was_judged_prints_as_by_the_command(
    two_judges: Path, capsys: pytest.CaptureFixture[str], sets: list[str]
) -> None:
    found = relabel.evaluate(*sets, qrels="gold.jsonl")
    assert call("evaluate", *sets, "--qrels", "gold.jsonl") == 0
    assert f"{found}\n" == capsys.readouterr().out.replace("--grades sets it", "`grades` sets it")
    assert "accuracy" in found._repr_html_()


def test_compared_systems_print_as_by_the_command(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = [(f"q{query}", f"d{doc}") for query in range(12) for doc in range(3)]
    rows = [{"query_id": query, "doc_id": doc, "grade": place % 4} for place, (query, doc) in enumerate(ids)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, sign in (("up", 1), ("down", -1)):
        ranked = [f"{query} Q0 {doc} 1 {sign * place % 7} {name}\n" for place, (query, doc) in enumerate(ids)]
        (folder / f"{name}.run").write_text("".join(ranked))
    found = relabel.systems("up.run", "down.run", labels="labels.jsonl", k=2, grade_map="3=2")
    assert call("systems", "up.run", "down.run", "--labels", "labels.jsonl", "--k", "2", "--map", "3=2") == 0
    printed = capsys.readouterr().out
    for option, argument in (("plan", "is_plan"), ("gold", "gold"), ("grades", "grades")):
        printed = printed.replace(f"--{option}", f"`{argument}`")
    assert f"{found}\n" == printed
    assert found.pairs[0].sentence in found._repr_html_()
    with pytest.raises(UsageError, match=r"no argument `with`\. Did you mean `width`"):
        relabel.systems("up.run", "down.run", labels="labels.jsonl", **{"with": 0.1})
    with pytest.raises(UsageError, match="`made_by` x: no system is called so"):
        relabel.systems("up.run", "down.run", labels="labels.jsonl", made_by={"x": "judge"})


def test_a_run_prints_as_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_pairs(folder)
    found = relabel.run(JOB)
    assert str(found).startswith("ecom: done, every row accounted for\n")
    capsys.readouterr()
    (folder / "job.yaml").write_text(json.dumps(JOB))
    assert call("run", "job.yaml") == 10
    assert str(relabel.run(JOB)) in capsys.readouterr().out


def test_a_student_prints_as_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_pairs(folder)
    assert call("run", _written(folder / "job.yaml", JOB)) == 0
    write_tiny_model(folder / "encoder")
    spec = {
        "name": "student",
        "labels": ["out/ecom"],
        "student": {"kind": "logistic", "model": str(folder / "encoder")},
        "train": {"max_tokens": 64},
        "output": "out/student",
    }
    found = relabel.distill(spec)
    assert str(found).startswith("The student is in out/student\n")
    assert "StudentManifest(" not in str(found)
    capsys.readouterr()
    assert call("distill", _written(folder / "student.yaml", spec)) == 10
    assert capsys.readouterr().out == f"{relabel.distill(spec)}\n"


def test_figures_of_a_students_test_split_are_those_of_evaluate(folder: Path) -> None:  # noqa: F811
    """Equal scores are in the order of their documents' ids for both, which decides the nDCG of a judge's grades."""
    rows = [row | {"title": "", "body": f"{row['body'][:8]}"} for row in load_pairs()]  # so that BM25 has equal scores
    pq.write_table(pa.Table.from_pylist(rows[::-1]), folder / "pairs.parquet")
    relabel.run(JOB)
    write_tiny_model(folder / "encoder")
    spec = {
        "name": "student",
        "labels": ["out/ecom"],
        "gold": {"path": "pairs.parquet", "grade": "grade"},
        "student": {"kind": "logistic", "model": str(folder / "encoder")},
        "train": {"max_tokens": 64},
        "split": {"test": 0.4},
        "output": "out/student",
    }
    test = relabel.distill(spec).manifest.metrics.test
    assert call("score", "out/student", "--input", "pairs.parquet", "--to", "out/scores") == 0
    (found,) = relabel.evaluate("out/ecom", "out/scores", qrels="pairs.parquet", resamples=0).comparisons
    teacher, student = found.against_gold.teacher, found.against_gold.student
    assert test.judged_by == "gold"
    assert test.teacher is not None
    assert test.baselines is not None
    name = "ndcg@10"
    assert test.teacher[name] == pytest.approx(teacher.figures[name].value, abs=1e-12)
    assert test.student[name] == pytest.approx(student.figures[name].value, abs=1e-12)
    assert test.baselines.lexical[name] == pytest.approx(teacher.baselines.lexical[name], abs=1e-12)


def _written(path: Path, spec: dict[str, Any]) -> str:
    path.write_text(json.dumps(spec))
    return str(path)


def test_a_figure_that_is_not_there_names_those_that_are(two_judges: Path) -> None:
    found = relabel.evaluate("teacher.jsonl", qrels="gold.jsonl")
    with pytest.raises(KeyError, match=r"no figure `acuracy`; known are accuracy.* Did you mean `accuracy`"):
        _ = found.figures["acuracy"]
    assert found.figures.get("acuracy") is None
    assert "acuracy" not in found.figures
    compared = relabel.evaluate("teacher.jsonl", "student.jsonl", qrels="gold.jsonl").comparisons[0]
    assert compared.against_gold is not None
    for figures in (compared.against_teacher, compared.against_gold.student.figures, compared.against_gold.difference):
        with pytest.raises(KeyError, match="no figure `acuracy`"):
            _ = figures["acuracy"]


def test_a_map_may_be_a_text_or_a_dictionary_and_an_unknown_argument_is_named(folder: Path) -> None:  # noqa: F811
    (folder / "labels.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 2}\n')
    (folder / "gold.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 3}\n')
    for grade_map in ({3: 2}, "3=2"):
        judged = relabel.evaluate("labels.jsonl", qrels="gold.jsonl", grades=3, grade_map=grade_map)
        assert judged.figures["accuracy"].value == 1.0
    for unknown in ("map", "grademap"):
        with pytest.raises(UsageError, match=f"no argument `{unknown}`. Did you mean `grade_map`"):
            relabel.evaluate("labels.jsonl", qrels="gold.jsonl", **{unknown: {3: 2}})


def test_errors_name_arguments_where_the_commands_name_options(folder: Path) -> None:  # noqa: F811
    write_pairs(folder)
    with pytest.raises(UsageError) as refused:
        relabel.run(JOB, shard="9/3")
    assert "`shard`" in str(refused.value)
    assert "--shard" not in str(refused.value)
    (folder / "labels.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 7}\n')
    (folder / "gold.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 1}\n')
    with pytest.raises(InputError) as refused_scale:
        relabel.evaluate("labels.jsonl", qrels="gold.jsonl", grades=3)
    assert "label_map={7: 2}" in str(refused_scale.value)
    assert "--" not in str(refused_scale.value)


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        ({"grades": 2, "qrels": "more.jsonl"}, "grade_map={0: 0, 1: 0, 2: 1, 3: 1}"),
        ({"grade_map": "0=x"}, "for instance grade_map={0: 0, 1: 1, 2: 2, 3: 2}"),
        ({"qrels": "twice.jsonl"}, 'duplicates="mean" or duplicates="first"'),
        ({"require": ["accuracy"]}, 'for instance require=["macro_f1>=0.9*teacher"]'),
    ],
    ids=["map", "bad-map", "duplicates", "require"],
)
def test_what_an_error_suggests_can_be_typed_in_python(
    two_judges: Path, arguments: dict[str, Any], suggested: str
) -> None:
    labels = [{"query_id": f"q{row}", "doc_id": "d", "grade": row % 2} for row in range(4)]
    gold = [{"query_id": f"q{row}", "doc_id": "d", "grade": row} for row in range(4)]
    for name, rows in (("few", labels), ("more", gold), ("twice", [*gold, {**gold[0], "grade": 1}])):
        (two_judges / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(RelabelError) as refused:
        relabel.evaluate("few.jsonl", **{"qrels": "gold.jsonl", **arguments})
    assert suggested in str(refused.value)
    assert "--" not in str(refused.value)


def test_notes_name_arguments_where_the_commands_name_options(folder: Path) -> None:  # noqa: F811
    (folder / "labels.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 2}\n')
    (folder / "gold.jsonl").write_text('{"query_id": "q0", "doc_id": "d0", "grade": 1}\n')
    notes = " ".join(relabel.evaluate("labels.jsonl", qrels="gold.jsonl").notes)
    assert "`grades` sets it" in notes
    assert "--" not in notes


def test_a_function_is_called_again_though_a_folder_has_its_name(folder: Path) -> None:  # noqa: F811
    code = """
import relabel
from relabel.manifests.errors import ConfigError
from relabel.distill.students.spec import DistillSpec
for _ in range(2):
    try:
        relabel.distill({"name": "student"})
    except ConfigError as exc:
        print(type(exc).__name__)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "ConfigError\n" * 2, done

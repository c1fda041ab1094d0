"""`relabel convert`: what each form holds, what is left out and counted, and what is refused, with the row and what to
do.
"""

import gzip
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.jobs.api import read_labels
from relabel.jobs.convert import WRITABLE, ConvertOptions, convert
from relabel.labelers.graph_grpo import GraphGrpo
from relabel.manifests.files import Storage
from relabel.manifests.forms import FORMS
from relabel.manifests.labels import label_schema
from tests.convert.conftest import rows_of

QRELS = "q1 0 d1 2\nq1 0 d2 0\nq2 0 d1 -1\n"
Rows = list[dict[str, Any]]


def test_labels_become_qrels_and_a_run_ranked_by_expected_grade_with_ties_as_trec_eval_breaks_them(
    run: Callable[..., None], convert: Callable[..., Any], committed: Callable[..., Any]
) -> None:
    run()
    made = convert("out/ecom", "ecom.qrels")
    assert (made["source_format"], made["target_format"], made["written"], made["nulls"]) == ("labels", "qrels", 24, 0)
    grades = {(one.query_id, one.doc_id): one.relevance for one in ir_measures.read_trec_qrels("ecom.qrels")}
    assert grades == {(row["query_id"], row["doc_id"]): row["grade"] for row in committed().values()}
    assert convert("out/ecom", "ecom.run")["value"] == "expected_grade"
    assert convert("out/ecom", "grades.run", "--score", "grade", "--tag", "mine")["value"] == "grade"
    for name, score, tag in (("ecom.run", "expected_grade", "ecom"), ("grades.run", "grade", "mine")):
        by_query: dict[str, Rows] = {}
        for row in committed().values():
            by_query.setdefault(row["query_id"], []).append(row)
        wanted = []
        for query, rows in by_query.items():
            ranked = sorted(rows, key=lambda row: (row[score], row["doc_id"].encode()), reverse=True)
            wanted += [
                (query, "Q0", row["doc_id"], str(place), row[score], tag) for place, row in enumerate(ranked, start=1)
            ]
        fields = [line.split(" ") for line in Path(name).read_text().splitlines()]
        # a float32 is written with as few digits as distinguish it from its neighbours
        assert [(*line[:4], pytest.approx(float(line[4]), rel=1e-6), line[5]) for line in fields] == wanted
        held = {(one.query_id, one.doc_id): one.score for one in ir_measures.read_trec_run(name)}
        assert held == {(line[0], line[2]): float(line[4]) for line in fields}


def test_labels_as_one_parquet_file_are_the_label_rows_and_as_jsonl_the_same_values(
    run: Callable[..., None], convert: Callable[..., Any], committed: Callable[..., Any]
) -> None:
    run()
    convert("out/ecom", "labels.parquet")
    convert("out/ecom", "labels.jsonl")
    table = pq.read_table("labels.parquet")
    assert table.schema.equals(label_schema({column.name: column.kind for column in GraphGrpo.columns}))
    assert sorted(table.to_pylist(), key=lambda row: row["row_id"]) == [row for _, row in sorted(committed().items())]
    plain = {row["row_id"]: row for row in rows_of("labels.jsonl")}
    for row_id, row in committed().items():
        assert plain[row_id]["key"] == row["key"].hex()
        assert plain[row_id]["probs"] == pytest.approx(row["probs"], rel=1e-6)
        assert plain[row_id]["evidence"] == row["evidence"]
        assert plain[row_id]["grade"] == row["grade"]


def test_quarantined_rows_are_counted_and_never_written(
    run: Callable[..., None], relabel: Callable[..., Any], committed: Callable[..., Any]
) -> None:
    run({"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}, "run": {"max_failed_fraction": 1.0}})
    left = len(committed("quarantine"))
    assert left
    done = relabel("convert", "out/ecom", "ecom.qrels", "--output", "json")
    assert (done.json["quarantined"], done.json["written"]) == (left, 24 - left)
    assert len(Path("ecom.qrels").read_text().splitlines()) == 24 - left


@pytest.mark.parametrize("missing", [None, "  "])
def test_null_grades_are_left_out_and_counted_and_never_written_as_zero(
    write_rows: Callable[..., str], relabel: Callable[..., Any], missing: str | None
) -> None:
    path = write_rows(
        [{"query_id": "q", "doc_id": f"d{row}", "grade": grade} for row, grade in enumerate([missing, 1, missing, 0])]
    )
    for name in ("x.qrels", "x.run", "x.parquet", "x.jsonl"):
        done = relabel("convert", path, name, "--output", "json", *(["--score", "grade"] if name == "x.run" else []))
        assert (done.json["rows"], done.json["nulls"], done.json["written"]) == (4, 2, 2), done
    assert Path("x.qrels").read_text() == "q 0 d1 1\nq 0 d3 0\n"
    assert (
        [row["doc_id"] for row in rows_of("x.parquet")] == [row["doc_id"] for row in rows_of("x.jsonl")] == ["d1", "d3"]
    )


def test_a_nan_in_parquet_is_a_missing_grade(convert: Callable[..., Any], folder: Path) -> None:
    table = {
        "query_id": ["q"] * 3,
        "doc_id": ["a", "b", "c"],
        "grade": pa.array([1.0, float("nan"), None], pa.float32()),
    }
    pq.write_table(pa.table(table), "x.parquet")
    assert convert("x.parquet", "x.qrels")["nulls"] == 2
    assert Path("x.qrels").read_text() == "q 0 a 1\n"


@pytest.mark.parametrize(
    ("grade", "shown"),
    [(1.5, "1.5"), ("one", "one")],
)
def test_a_grade_that_is_no_whole_number_is_refused_with_its_row(
    write_rows: Callable[..., str], relabel: Callable[..., Any], grade: Any, shown: str
) -> None:
    path = write_rows([{"query_id": "q", "doc_id": "a", "grade": 1}, {"query_id": "q", "doc_id": "b", "grade": grade}])
    relabel("convert", path, "x.qrels").refused(3, "rows.jsonl: row 1", shown, "--grade")
    assert not Path("x.qrels").exists()


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.quepid.csv"])
def test_a_row_of_a_sheet_is_named_as_the_sheet_shows_it(relabel: Callable[..., Any], folder: Path, name: str) -> None:
    mark = "," if name.endswith("csv") else "\t"
    names = ["query", "docid", "rating"] if "quepid" in name else ["query_id", "doc_id", "grade"]
    Path(name).write_text("\n".join(map(mark.join, (names, ["q", "a", "1"], ["q", "b", "one"]))))
    relabel("convert", name, "y.jsonl").refused(3, f"{name}: row 3 (the header is row 1): grade 'one'")


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(4, 1)])
def test_floats_that_are_whole_are_grades_and_others_are_refused(
    relabel: Callable[..., Any], folder: Path, kind: pa.DataType
) -> None:
    values = pa.array([2.0, -1.0, 0.0]).cast(kind)
    ids = {"query_id": ["q"] * 3, "doc_id": ["a", "b", "c"]}
    pq.write_table(pa.table({**ids, "grade": values}), "whole.parquet")
    assert relabel("convert", "whole.parquet", "x.qrels").code == 0
    assert Path("x.qrels").read_text() == "q 0 a 2\nq 0 b -1\nq 0 c 0\n"
    pq.write_table(pa.table({**ids, "grade": pa.array([2.0, 0.5, 0.0]).cast(kind)}), "half.parquet")
    relabel("convert", "half.parquet", "y.qrels").refused(3, "half.parquet: row 1", "'0.5'", "whole number")


@pytest.mark.parametrize(
    ("identity", "column", "target"),
    [
        ("a b", "query_id", "x.qrels"),
        ("a\u2028b", "doc_id", "x.run"),
        ("\ufeffa", "query_id", "x.run"),
        ("", "doc_id", "x.qrels"),
    ],
)
def test_an_id_that_would_fall_apart_is_refused_by_trec_forms_and_kept_by_tables(
    write_rows: Callable[..., str], relabel: Callable[..., Any], identity: str, column: str, target: str
) -> None:
    row = {"query_id": "q", "doc_id": "d", "grade": 1, "score": 0.5}
    path = write_rows([row, row | {"doc_id": "e", column: identity}])
    relabel("convert", path, target).refused(
        3, f"rows.jsonl: row 1: `{column}` is", "a TREC file can't hold", ".jsonl or .parquet"
    )
    assert not Path(target).exists()
    assert relabel("convert", path, "x.parquet").code == 0
    assert rows_of("x.parquet")[1][column] == identity


def test_the_same_grade_twice_is_one_row_and_different_grades_are_an_error_unless_the_user_chooses(
    write_rows: Callable[..., str], relabel: Callable[..., Any], convert: Callable[..., Any]
) -> None:
    rows = [("q1", "a", 1), ("q2", "a", 0), ("q1", "b", 2), ("q1", "a", 1)]
    path = write_rows([dict(zip(("query_id", "doc_id", "grade"), row, strict=True)) for row in rows], "same.jsonl")
    found = convert(path, "same.qrels")
    assert (found["written"], found["duplicates"], found["conflicts"]) == (3, 1, 0)
    assert Path("same.qrels").read_text() == "q1 0 a 1\nq2 0 a 0\nq1 0 b 2\n"
    rows += [("q2", "a", 3), ("q2", "a", 0)]
    path = write_rows([dict(zip(("query_id", "doc_id", "grade"), row, strict=True)) for row in rows], "other.jsonl")
    for target in ("x.qrels", "x.jsonl", "x.parquet"):
        relabel("convert", path, target).refused(
            3, "1 pairs have several grades", "query q2, document a: 0, 3, 0", "--duplicates first"
        )
        assert not Path(target).exists()
    relabel("convert", path, "x.run", "--score", "grade").refused(
        3, "1 pairs have several scores", "query q2, document a"
    )
    assert not Path("x.run").exists()
    for rule, grade in (("first", 0), ("mean", 1)):
        for target in ("x.qrels", "x.jsonl", "x.parquet"):
            found = convert(path, target, "--duplicates", rule, "--force")
            assert (found["written"], found["duplicates"], found["conflicts"]) == (3, 3, 1)
        assert Path("x.qrels").read_text() == f"q1 0 a 1\nq2 0 a {grade}\nq1 0 b 2\n"
        assert (
            [row["grade"] for row in rows_of("x.parquet")]
            == [row["grade"] for row in rows_of("x.jsonl")]
            == [1, grade, 2]
        )
    found = convert(path, "x.run", "--score", "grade", "--duplicates", "mean")
    assert [line.split()[:5] for line in Path("x.run").read_text().splitlines()] == [
        ["q1", "Q0", "b", "1", "2.0"],
        ["q1", "Q0", "a", "2", "1.0"],
        ["q2", "Q0", "a", "1", "1.0"],
    ]


def test_tables_keep_every_row_where_they_are_asked_to(
    write_rows: Callable[..., str], convert: Callable[..., Any], relabel: Callable[..., Any]
) -> None:
    path = write_rows(
        [
            {"query_id": "q", "doc_id": "a", "grade": grade, "judge": name}
            for grade, name in [(0, "x"), (1, "y"), (0, "z")]
        ]
    )
    assert convert(path, "x.parquet", "--duplicates", "keep")["written"] == 3
    assert [row["judge"] for row in rows_of("x.parquet")] == ["x", "y", "z"]
    relabel("convert", path, "x.qrels", "--duplicates", "keep").refused(2, "a pair occurs once in a TREC file")


def test_tables_keep_all_their_columns_and_types(convert: Callable[..., Any], folder: Path) -> None:
    table = pa.table(
        {
            "query_id": pa.array([7, 8]),
            "doc_id": pa.array(["a", "b"]),
            "grade": pa.array([1, 2], pa.int8()),
            "probs": pa.array([[0.5, 0.5], None], pa.list_(pa.float32())),
            "about": pa.array([{"x": 1}, {"x": None}]),
        }
    )
    pq.write_table(table, "x.parquet")
    convert("x.parquet", "y.parquet")
    assert pq.read_table("y.parquet").equals(table)
    convert("x.parquet", "y.jsonl")
    assert rows_of("y.jsonl")[0] == {"query_id": 7, "doc_id": "a", "grade": 1, "probs": [0.5, 0.5], "about": {"x": 1}}
    convert("y.jsonl", "z.parquet")
    assert pq.read_table("z.parquet").to_pylist() == [
        row | {"query_id": str(row["query_id"])} for row in table.to_pylist()
    ]


def test_keys_that_come_late_in_a_long_file_are_not_lost(
    write_rows: Callable[..., str], convert: Callable[..., Any]
) -> None:
    rows: Rows = [{"query_id": "q", "doc_id": f"d{row}", "grade": row % 3} for row in range(200)]
    rows[5]["odd"] = 1
    rows[100]["odd"] = 0.5
    rows[150]["nest"] = {"a": [1]}
    rows[199] |= {"nest": {"b": "x", "a": [0.5]}, "late": "yes"}
    convert(write_rows(rows), "x.parquet")
    found = rows_of("x.parquet")
    assert [row["odd"] for row in found if row["odd"] is not None] == [1.0, 0.5]
    assert [row["nest"] for row in found if row["nest"] is not None] == [
        {"a": [1.0], "b": None},
        {"a": [0.5], "b": "x"},
    ]
    assert found[199]["late"] == "yes"
    assert [row["doc_id"] for row in found] == [f"d{row}" for row in range(200)]


def test_text_with_carriage_returns_tabs_blank_lines_and_a_mark_is_read(
    convert: Callable[..., Any], folder: Path
) -> None:
    (folder / "x.qrels").write_bytes(b"\xef\xbb\xbfq1\t0\td1\t2\r\n\r\n  q1 0   d2 0 \r\n\nq2 0 d1 -1")
    assert convert("x.qrels", "x.jsonl")["rows"] == 3
    assert rows_of("x.jsonl") == [
        {"query_id": "q1", "doc_id": "d1", "grade": 2},
        {"query_id": "q1", "doc_id": "d2", "grade": 0},
        {"query_id": "q2", "doc_id": "d1", "grade": -1},
    ]
    convert("x.qrels", "y.qrels")
    assert (folder / "y.qrels").read_text() == QRELS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.qrels", "q 0 d 1\nq 0 d\n", ["x.qrels: line 2 has 3 fields, and 4 are wanted", "'q 0 d'"]),
        ("x.run", "q Q0 d 1 0.5 t\nq Q0 d e 1 0.5 t\n", ["x.run: line 2 has 7 fields, and 6 are wanted"]),
        ("x.run", "q Q0 d 1 high t\n", ["x.run: line 1", "'high'", "not a number"]),
        ("x.jsonl", '{"query_id": "q", "doc_id": "d", "grade": 1}\nnope\n', ["x.jsonl: line 2 is not JSON"]),
        ("x.jsonl", '{"query_id": "q", "doc": "d", "grade": 1}\n', ["no column `doc_id`", "--doc"]),
        ("x.jsonl", '{"query_id": null, "doc_id": "d", "grade": 1}\n', ["x.jsonl: row 0 has no `query_id`"]),
        ("x.parquet", "no parquet", ["x.parquet"]),
    ],
)
def test_what_is_off_is_reported_with_its_line(
    relabel: Callable[..., Any], folder: Path, name: str, text: str, message: list[str]
) -> None:
    (folder / name).write_text(text)
    relabel("convert", name, "y.jsonl").refused(3, *message)
    assert not (folder / "y.jsonl").exists()
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_forms_are_recognized_by_suffix_and_asked_for_where_it_says_nothing(
    relabel: Callable[..., Any], folder: Path
) -> None:
    (folder / "qrels.txt").write_text(QRELS)
    relabel("convert", "qrels.txt", "y.jsonl").refused(2, "qrels.txt", "--from labels|qrels|run|jsonl|parquet")
    relabel("convert", "qrels.txt", "y.txt", "--from", "qrels").refused(2, "y.txt", "--to qrels|run|jsonl|parquet")
    assert relabel("convert", "qrels.txt", "y.txt", "--from", "qrels", "--to", "jsonl").code == 0
    assert len(rows_of("y.txt")) == 3
    relabel("convert", "absent.qrels", "z.jsonl").refused(3, "absent.qrels: no such file")
    (folder / "empty").mkdir()
    relabel("convert", "empty", "z.jsonl").refused(3, "a folder without plan.json")
    relabel("convert", "qrels.txt", "z.run", "--from", "qrels").refused(3, "no column `score`", "--score")


def test_a_grade_below_0_is_kept_and_counted_with_what_it_means(relabel: Callable[..., Any], folder: Path) -> None:
    Path("x.qrels").write_text("q1 0 d1 2\nq1 0 d2 -2\nq2 0 d1 -1\nq2 0 d2 -1\n")
    for target in ("y.parquet", "y.qrels"):
        done = relabel("convert", "x.qrels", target)
        assert done.code == 0
        assert "3 grades of x.qrels below 0, written as they are" in done.err + done.out
        assert "`relabel evaluate --map` says what they count as" in done.err + done.out
    assert [row["grade"] for row in rows_of("y.parquet")] == [2, -2, -1, -1]
    assert "below 0" not in str(relabel("convert", "x.qrels", "y.run", "--score", "grade"))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_without_grades_and_scores_becomes_another_with_all_its_rows(
    relabel: Callable[..., Any], folder: Path, suffix: str
) -> None:
    rows = [{"doc_id": "007", "title": "Wool, grey"}, {"doc_id": "08", "title": "=1"}, {"doc_id": "08", "title": "=1"}]
    pq.write_table(pa.Table.from_pylist(rows), "docs.parquet")
    there = relabel("convert", "docs.parquet", f"there.{suffix}")
    assert "docs.parquet has neither grades nor scores" in there.err + there.out
    assert relabel("convert", f"there.{suffix}", "back.parquet").code == 0
    assert rows_of("back.parquet") == rows


def test_rows_are_not_chosen_by_a_column_that_is_not_there(relabel: Callable[..., Any], folder: Path) -> None:
    Path("x.jsonl").write_text('{"query_id": "q", "doc_id": "d", "label": 1}\n')
    relabel("convert", "x.jsonl", "y.qrels").refused(3, "no column `grade`", "label", "--grade")
    relabel("convert", "x.jsonl", "y.jsonl", "--grade", "grade").refused(3, "no column `grade`", "label")
    relabel("convert", "x.jsonl", "y.jsonl", "--duplicates", "mean").refused(3, "no column `score`", "label")


def test_a_target_that_is_there_is_left_alone_unless_forced(relabel: Callable[..., Any], folder: Path) -> None:
    (folder / "x.qrels").write_text(QRELS)
    (folder / "y.jsonl").write_text("mine")
    relabel("convert", "x.qrels", "y.jsonl").refused(2, "y.jsonl: is there already", "--force")
    assert (folder / "y.jsonl").read_text() == "mine"
    assert relabel("convert", "x.qrels", "y.jsonl", "--force").code == 0
    relabel("convert", "x.qrels", "x.qrels", "--force").refused(2, "is in the input")
    assert (folder / "x.qrels").read_text() == QRELS


def test_a_conversion_that_fails_leaves_what_was_there_and_no_scrap(
    relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "x.qrels").write_text(QRELS)
    (folder / "y.jsonl").write_text("mine")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relabel.jobs.tables.os.fsync", full)
    relabel("convert", "x.qrels", "y.jsonl", "--force").refused(20, "y.jsonl: no space left")
    assert sorted(path.name for path in folder.iterdir()) == ["x.qrels", "y.jsonl"]
    assert (folder / "y.jsonl").read_text() == "mine"


def test_an_unfinished_run_is_refused_and_taken_in_part_where_allowed(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    convert: Callable[..., Any],
) -> None:
    write_pairs()
    job = write_job({"shards": 2})
    assert relabel("run", job, "--shard", "0/2").code in (0, 20)
    relabel("convert", "out/ecom", "x.qrels").refused(3, "out/ecom: not finished", "--allow-partial")
    found = convert("out/ecom", "x.qrels", "--allow-partial")
    assert 0 < found["written"] < 24
    assert "is not finished" in found["notes"][0]


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "out/ecom", "x.qrels"),
        ("evaluate", "out/ecom", "--qrels", "pairs.parquet"),
        ("merge", "out/ecom", "--to", "out/week"),
    ],
    ids=lambda command: command[0],
)
def test_a_label_file_whose_bytes_changed_is_no_source(
    command: tuple[str, ...], run: Callable[..., None], relabel: Callable[..., Any], folder: Path
) -> None:
    run()
    file = next((folder / "out/ecom/labels").rglob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    relabel(*command).refused(3, file.name, "sha256")
    assert not (folder / "x.qrels").exists()


def test_urls_are_read_and_written_as_paths_are(
    convert: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    (folder / "x.qrels").write_text(QRELS)
    convert(f"file://{folder}/x.qrels", f"file://{folder}/y.jsonl")
    convert("y.jsonl", "memory://bucket/z.parquet")
    relabel("convert", "y.jsonl", "memory://bucket/z.parquet").refused(2, "is there already")
    convert("memory://bucket/z.parquet", "memory://bucket/z.qrels")
    convert("memory://bucket/z.qrels", "back.qrels")
    assert (folder / "back.qrels").read_text() == QRELS


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize("make", [_fifo, _dangling])
def test_what_is_no_regular_file_is_never_replaced_even_by_force(
    relabel: Callable[..., Any], folder: Path, make: Callable[[Path], None]
) -> None:
    (folder / "x.qrels").write_text(QRELS)
    target = folder / "y.jsonl"
    make(target)
    before = (target.lstat().st_mode, target.lstat().st_ino)
    for options in ([], ["--force"]):
        for name in ("y.jsonl", f"file://{target}"):
            relabel("convert", "x.qrels", name, *options).refused(2, f"{name}: is ", "Give")
    assert (target.lstat().st_mode, target.lstat().st_ino) == before
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_a_link_to_a_file_stays_and_the_file_that_it_names_is_replaced(
    relabel: Callable[..., Any], folder: Path
) -> None:
    (folder / "x.qrels").write_text(QRELS)
    (folder / "kept").mkdir()
    (folder / "kept/real.jsonl").write_text("mine")
    (folder / "y.jsonl").symlink_to("kept/real.jsonl")
    relabel("convert", "x.qrels", "y.jsonl").refused(2, "y.jsonl: is there already", "--force")
    assert relabel("convert", "x.qrels", "y.jsonl", "--force").code == 0
    assert (folder / "y.jsonl").is_symlink()
    assert len(rows_of("kept/real.jsonl")) == 3
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["real.jsonl"]


@pytest.mark.parametrize("kind", [pa.int8(), pa.string()])
def test_the_mean_of_scores_is_no_whole_number_because_its_column_is(
    convert: Callable[..., Any], folder: Path, kind: pa.DataType
) -> None:
    rows = {"query_id": ["q"] * 3, "doc_id": ["a", "a", "b"], "score": pa.array([1, 2, 5], pa.int8()).cast(kind)}
    pq.write_table(pa.table(rows), "x.parquet")
    for target in ("x.run", "y.parquet", "y.jsonl"):
        assert convert("x.parquet", target, "--duplicates", "mean")["conflicts"] == 1
    assert [line.split()[2:5] for line in Path("x.run").read_text().splitlines()] == [
        ["b", "1", "5.0"],
        ["a", "2", "1.5"],
    ]
    for target in ("y.parquet", "y.jsonl"):
        assert [float(row["score"]) for row in rows_of(target)] == [1.5, 5.0]


@pytest.mark.parametrize("column", ["query_id", "doc_id"])
def test_ids_that_are_whole_floats_are_written_as_their_digits(
    relabel: Callable[..., Any], folder: Path, column: str
) -> None:
    """As pandas makes them of whole numbers with a gap."""
    rows = {"query_id": ["q"], "doc_id": ["a"], "grade": [1], "score": [0.5]} | {column: pa.array([7.0])}
    pq.write_table(pa.table(rows), "x.parquet")
    for target in ("x.qrels", "x.run", "y.parquet"):
        assert relabel("convert", "x.parquet", target).code == 0
    at = 0 if column == "query_id" else 2
    assert [Path(name).read_text().split()[at] for name in ("x.qrels", "x.run")] == ["7", "7"]
    assert rows_of("y.parquet")[0][column] == "7"
    pq.write_table(pa.table(rows | {column: pa.array([7.5])}), "x.parquet")
    relabel("convert", "x.parquet", "z.qrels").refused(3, f"column `{column}`", "not all of its numbers are whole")


SCATTERED = {"shards": 2, "run": {"chunk_rows": 4}, "engine": {"args": {"p_garbage": 0.3}}, "labeler": {"attempts": 1}}


@pytest.mark.parametrize(("is_scattered", "gold"), [(True, "grade"), (False, None)])
def test_texts_are_joined_as_read_labels_joins_them_and_datasets_opens_the_file(
    relabel: Any,
    convert: Any,
    write_pairs: Any,
    write_job: Any,
    pairs: Rows,
    folder: Path,
    is_scattered: bool,
    gold: Any,
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = sorted(pairs, key=lambda row: row["doc_id"][-1]) if is_scattered else pairs
    rows[5]["grade"] = None
    write_pairs(rows, row_group_size=5)
    job = write_job(
        {**SCATTERED, "run": {"chunk_rows": 4, "max_failed_fraction": 1.0}, "input": {"columns": {"gold": gold}}}
    )
    assert relabel("run", job).code == 0
    assert relabel("retry", job, "--set", "labeler.attempts=1").code in (0, 10)  # chunks of two label files
    convert("out/ecom", "x.parquet", "--texts")
    found = pq.read_table("x.parquet").sort_by("row_id")
    assert found.num_rows > 0
    assert found.equals(read_labels("out/ecom", texts=True))
    assert found.drop_columns(["query", "document", *(["gold"] if gold else [])]).equals(read_labels("out/ecom"))
    for label in found.to_pylist():
        row = rows[label["row_id"]]
        assert (label["query"], label["document"]) == (row["query"], f"{row['title']}\n\n{row['body']}")
        assert "gold" not in label if gold is None else label["gold"] == row["grade"]
    held = datasets.load_dataset("parquet", data_files="x.parquet", cache_dir=str(folder / "cache"))["train"]
    assert sorted(held["document"]) == sorted(found["document"].to_pylist())
    convert("out/ecom", "x.jsonl", "--texts")
    plain = sorted(rows_of("x.jsonl"), key=lambda row: row["row_id"])
    assert [row["document"] for row in plain] == found["document"].to_pylist()


def test_texts_are_of_runs_and_for_tables_alone_and_of_the_input_that_was_labelled(
    run: Callable[..., None], relabel: Callable[..., Any], write_pairs: Callable[..., Path], pairs: Rows
) -> None:
    run()
    for source, target, *parts in (
        ("pairs.parquet", "x.parquet", "--texts: pairs.parquet is parquet", "a run's output folder"),
        ("out/ecom", "x.qrels", "--texts: ", ".parquet or .jsonl"),
    ):
        relabel("convert", source, target, "--texts").refused(2, *parts)
    write_pairs([{**row, "body": row["body"].upper()} for row in pairs])
    relabel("convert", "out/ecom", "x.parquet", "--texts").refused(3, "out/ecom: the inputs that it labelled changed")
    assert not Path("x.parquet").exists()


# A conversion that is asked to end leaves no file.


# What is written is read back as it was, by us and by ir_measures, whatever ids and numbers it holds.


PLAIN = ConvertOptions()
IDS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\ufeff"), min_size=1, max_size=8).filter(
    lambda text: len(text.split()) == 1 and text.split()[0] == text
)
GRADES = st.integers(-3, 5)
SCORES = st.floats(allow_nan=False, allow_infinity=False, width=32)
FEW = settings(max_examples=12, deadline=None)


def _pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[tuple[str, str], Any]]:
    return st.dictionaries(st.tuples(IDS, IDS), values, max_size=12)


def _write(path: Path, pairs: dict[tuple[str, str], Any], name: str) -> None:
    rows = [{"query_id": query, "doc_id": doc, name: value} for (query, doc), value in pairs.items()]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path, name: str) -> dict[tuple[str, str], Any]:
    return {(row["query_id"], row["doc_id"]): row[name] for row in rows_of(str(path))} if path.stat().st_size else {}


@FEW
@given(pairs=_pairs(GRADES))
def test_grades_come_back_from_qrels_from_jsonl_and_from_parquet(pairs: dict[tuple[str, str], int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "a.jsonl", pairs, "grade")
        chain = ["a.jsonl", "b.qrels", "c.parquet", "d.qrels", "e.jsonl", "f.parquet", "g.jsonl"]
        for source, target in itertools.pairwise(chain):
            found = convert(str(folder / source), str(folder / target), PLAIN, Storage())
            assert (found.rows, found.written, found.nulls) == (len(pairs), len(pairs), 0)
        assert (folder / "b.qrels").read_bytes() == (folder / "d.qrels").read_bytes()
        assert list(_read(folder / "g.jsonl", "grade").items()) == list(pairs.items())
        lines = (folder / "b.qrels").read_text(encoding="utf-8").split("\n")
        assert [tuple(line.split()) for line in lines if line] == [
            (query, "0", doc, str(grade)) for (query, doc), grade in pairs.items()
        ]
        found_there = {
            (one.query_id, one.doc_id): one.relevance for one in ir_measures.read_trec_qrels(str(folder / "b.qrels"))
        }
        assert found_there == pairs


@FEW
@given(pairs=_pairs(SCORES))
def test_scores_come_back_from_run_files_to_the_last_bit(pairs: dict[tuple[str, str], float]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {
            "query_id": pa.array([query for query, _ in pairs], pa.string()),
            "doc_id": pa.array([doc for _, doc in pairs], pa.string()),
            "score": pa.array(list(pairs.values()), pa.float32()),
        }
        pq.write_table(pa.table(columns), folder / "a.parquet")
        chain = ["a.parquet", "b.run", "c.parquet", "d.run", "e.jsonl", "f.run"]
        for source, target in itertools.pairwise(chain):
            convert(str(folder / source), str(folder / target), PLAIN, Storage())
        found = {(one.query_id, one.doc_id): one.score for one in ir_measures.read_trec_run(str(folder / "b.run"))}
        assert {pair: pa.scalar(score, pa.float32()).as_py() for pair, score in found.items()} == pairs
        held = _read(folder / "c.parquet", "score")
        assert held == found
        last = {(one.query_id, one.doc_id): one.score for one in ir_measures.read_trec_run(str(folder / "f.run"))}
        assert last == found
        ranks = rows_of(str(folder / "c.parquet"))
        for query in {query for query, _ in pairs}:
            mine = [row for row in ranks if row["query_id"] == query]
            assert [row["rank"] for row in mine] == list(range(1, len(mine) + 1))
            order = [(-row["score"], (*(-byte for byte in row["doc_id"].encode()), math.inf)) for row in mine]
            assert order == sorted(order)


@FEW
@given(rows=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(-2, 3)), max_size=20))
@pytest.mark.parametrize("rule", ["first", "mean"])
def test_duplicates_are_settled_as_evaluate_settles_them(rows: list[tuple[str, str, int]], rule: Any) -> None:
    from relabel.manifests.gold import grades_by_pair, load_qrels

    with tempfile.TemporaryDirectory() as name:
        source, target = f"{name}/a.qrels", f"{name}/b.qrels"
        Path(source).write_text("".join(f"{query} 0 {doc} {grade}\n" for query, doc, grade in rows))
        found = convert(source, target, ConvertOptions(duplicates=rule), Storage())
        qrels = load_qrels(source, Storage(), grade="grade", by="query_id", doc="doc_id")
        theirs = grades_by_pair(qrels, rule, source)
        assert (found.duplicates, found.conflicts) == (theirs.num_repeated, theirs.num_conflicts)
        ours = [tuple(line.split()) for line in Path(target).read_text().splitlines()]
        pairs = [(query, doc) for query, _, doc, _ in ours]
        assert len(set(pairs)) == len(pairs) == len(theirs.keys)
        assert [int(grade) for *_, grade in ours] == theirs.grades_of(pairs)


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet"])
def test_text_that_is_not_utf8_is_counted_and_the_target_can_be_read(
    convert: Callable[..., Any], folder: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    texts = pa.array([b"oak", b"caf\xe9", None, b"\xff"], pa.binary()).view(pa.string())
    table = pa.table({"query_id": ["q"] * 4, "doc_id": list("abcd"), "grade": [1, 0, 1, 2], "body": texts})
    pq.write_table(table, "in.parquet", row_group_size=2)
    convert("in.parquet", target)
    assert "in.parquet: 2 values of `body` with bytes that are not UTF-8 (first in row 1)" in caplog.text
    assert [row["body"] for row in rows_of(target)] == ["oak", "caf\ufffd", None, "\ufffd"]


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet", "out.qrels", "out.run"])
@pytest.mark.parametrize("name", ["query_id", "doc_id"])
def test_id_that_is_not_utf8_is_refused(relabel: Callable[..., Any], folder: Path, name: str, target: str) -> None:
    columns: dict[str, Any] = {"query_id": ["q", "q"], "doc_id": ["a", "b"], "grade": [1, 0], "score": [0.5, 0.25]}
    columns[name] = pa.array([b"x", b"x\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table(columns), "in.parquet")
    relabel("convert", "in.parquet", target).refused(3, f"in.parquet: row 1: `{name}` holds bytes that are not UTF-8")


@pytest.mark.parametrize("name", ["in.jsonl", "in.qrels", "in.run"])
def test_text_file_that_is_not_utf8_is_refused_with_its_line(
    relabel: Callable[..., Any], folder: Path, name: str
) -> None:
    lines = {
        "in.jsonl": '{"query_id": "q", "doc_id": "é", "grade": 1}\n',
        "in.qrels": "q 0 é 1\n",
        "in.run": "q Q0 é 1 0.5 t\n",
    }
    Path(name).write_bytes(lines[name].replace("é", "e").encode() + lines[name].encode("latin-1"))
    relabel("convert", name, "out.parquet").refused(3, f"{name}: line 2 holds bytes that are not UTF-8")


@pytest.mark.parametrize(
    ("held", "what"),
    [
        (gzip.compress(b"q 0 d 1\n", mtime=0)[:-9], "in.qrels: is compressed by gzip and can't be unpacked"),
        ("query_id,doc_id\n".encode("utf-16"), "in.qrels: is in UTF-16"),
        (b"PAR1\x15\x04\xff", "in.qrels: is Parquet"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_what_it_is(
    relabel: Callable[..., Any], folder: Path, held: bytes, what: str
) -> None:
    Path("in.qrels").write_bytes(held)
    relabel("convert", "in.qrels", "out.parquet").refused(3, what)


@pytest.mark.parametrize("name", ["in.qrels", "in.run", "in.csv", "in.tsv", "in.jsonl"])
def test_a_source_may_be_compressed_by_gzip(
    relabel: Callable[..., Any], convert: Callable[..., Any], folder: Path, name: str
) -> None:
    texts = {
        "in.qrels": "q 0 d 1\n",
        "in.run": "q Q0 d 1 0.5 t\n",
        "in.csv": "query_id,doc_id,grade\nq,d,1\n",
        "in.tsv": "query_id\tdoc_id\tgrade\nq\td\t1\n",
        "in.jsonl": '{"query_id": "q", "doc_id": "d", "grade": 1}\n',
    }
    Path(name).write_text(texts[name])
    Path(f"{name}.gz").write_bytes(gzip.compress(texts[name].encode()))
    convert(name, "plain.jsonl")
    convert(f"{name}.gz", "unpacked.jsonl")
    assert Path("plain.jsonl").read_bytes() == Path("unpacked.jsonl").read_bytes()
    relabel("convert", name, "out.jsonl.gz").refused(2, "out.jsonl.gz", "Leave .gz off")
    assert not Path("out.jsonl.gz").exists()


def test_every_form_is_a_choice_of_a_source_and_each_that_can_be_written_of_a_target() -> None:
    from relabel.jobs.commands.label_sets import convert as command

    choices = {one.name: one.type.choices for one in command.params if one.name in ("from_format", "to_format")}
    assert [*choices["from_format"]] == ["labels", *(form.name for form in FORMS)]
    assert [*choices["to_format"]] == [form.name for form in WRITABLE]


def test_a_card_says_what_the_data_are_and_what_made_them_and_datasets_reads_the_folder(
    run: Callable[..., None], convert: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    from datasets import load_dataset
    from huggingface_hub import DatasetCard

    run()
    made = relabel("convert", "out/ecom", "data/labels.parquet", "--texts", "--card")
    assert "the card is in data/README.md" in made.err
    card = DatasetCard.load("data/README.md")
    loaded = load_dataset("data", cache_dir=str(folder / "cache"))["train"]
    assert loaded.num_rows == pq.read_metadata("data/labels.parquet").num_rows == 24
    for column in loaded.column_names:
        assert f"| `{column}` |" in card.text
    relabel("convert", "out/ecom", "other/data/labels.parquet", "--card")
    pq.write_table(pq.read_table("other/data/labels.parquet").slice(0, 5), "other/data/labels.parquet")
    assert load_dataset("other/data", cache_dir=str(folder / "cache"))["train"].num_rows == 5, "a folder of that name"
    plan = json.loads(Path("out/ecom/plan.json").read_bytes())
    assert plan["fingerprint"] in card.text
    assert f"labeler `{plan['parts']['labeler']['name']}`" in card.text
    assert "answers are made up" in card.text, "a note of the engine's"
    line = ("convert", "out/ecom", "data/more.jsonl", "--card")
    relabel(*line).refused(2, "--card writes README.md", "data/README.md: is there already", "--force", "of its own")
    assert not Path("data/more.jsonl").exists()
    relabel("convert", "out/ecom", "ecom.qrels", "--card").refused(2, "--card", "qrels")
    relabel("convert", "data/labels.parquet", "x.jsonl", "--card").refused(2, "--card", "output folder")


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_labels_in_a_text_table_are_judged_as_those_of_the_run(
    run: Callable[..., None], relabel: Callable[..., Any], convert: Callable[..., Any], suffix: str
) -> None:
    run()
    for target in ("labels.parquet", f"labels.{suffix}"):
        convert("out/ecom", target)

    def figures(labels: str) -> Any:
        return relabel("evaluate", labels, "--qrels", "pairs.parquet", "--output", "json").json["figures"]

    assert figures(f"labels.{suffix}") == figures("labels.parquet")
    assert "ece" in figures(f"labels.{suffix}"), "distributions came along"

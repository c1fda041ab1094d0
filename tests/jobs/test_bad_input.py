"""Data, disks and specs as they come: refused with the right code and a sentence that helps, or
labelled row for row.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Cli = Callable[..., Any]
WritePairs = Callable[..., Path]
WriteJob = Callable[..., str]
Committed = Callable[..., dict[int, dict[str, Any]]]
Rows = list[dict[str, Any]]

LABELERS = ("graph-grpo", "r3a")
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("relabel.labelers.engines.transformers") is None
    or importlib.util.find_spec("torch") is None,
    reason="the transformers engine is not here",
)


def label_all(relabel: Cli, job: str, rows: int) -> None:
    """Run a job to its end and prove that all rows came through as labels."""
    done = relabel("run", job, "--output", "json")
    assert done.code == 0, done
    assert (done.json["rows"], done.json["labelled"], done.json["quarantined"]) == (rows, rows, 0)
    assert relabel("verify", job).code == 0


# What is refused before anything is written


def test_missing_column_is_reported_with_the_nearest_and_those_that_are_there(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    job = write_job({"input": {"columns": {"query_id": "qury_id"}}})
    relabel("run", job).refused(
        3,
        "pairs.parquet: no column `qury_id` (input.columns.query_id)",
        "it has query_id, query, doc_id",
        "Did you mean `query_id`?",
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("labeler", ["complexity", "variants"])
def test_a_labeler_that_shows_no_document_needs_a_file_of_queries_alone(
    labeler: str, relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, committed: Committed
) -> None:
    write_pairs([{"query_id": f"q{number}", "query": f"wool {number}"} for number in range(6)])
    job = write_job({"labeler": {"name": labeler}, "input": {"columns": None}})
    label_all(relabel, job, rows=6)
    assert relabel("report", "out/ecom", "--to", "report.html").code == 0
    rows = committed().values()
    assert [row["doc_id"] for row in rows] == [row["query_id"] for row in rows]


def test_a_file_of_queries_alone_is_refused_by_a_labeler_that_shows_documents(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs([{"query_id": "q", "query": "wool"}])
    relabel("run", write_job({"input": {"columns": None}})).refused(3, "no column for the document")


def test_a_document_column_that_is_named_must_be_there_whatever_the_labeler_shows(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs([{"query_id": "q", "query": "wool"}])
    columns = {"document": "text", "doc_id": "asin"}
    refused = relabel("run", write_job({"labeler": {"name": "complexity"}, "input": {"columns": columns}}))
    refused.refused(3, "no column `asin` (input.columns.doc_id)", "no column `text` (input.columns.document)")


def test_all_columns_that_are_missing_are_named_at_once(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    columns = {"query_id": "qury_id", "doc_id": "doc_idd", "document": ["body"]}
    relabel("plan", write_job({"input": {"columns": columns}})).refused(
        3,
        "no column `qury_id` (input.columns.query_id) and no column `doc_idd` (input.columns.doc_id)",
        "Did you mean `query_id` for `qury_id`, `doc_id` for `doc_idd`?",
    )


def test_a_column_is_meant_for_one_missing_column_alone(relabel: Cli, folder: Path, write_job: WriteJob) -> None:
    table = pa.table({"id": ["1"], "query": ["wool socks"], "doc_id": ["a"], "text": ["Grey socks"]})
    pq.write_table(table, folder / "pairs.parquet")
    columns = {"query_id": "idd", "document": ["iddd"]}
    refused = relabel("plan", write_job({"input": {"columns": columns}}))
    refused.refused(3, "no column `idd`", "no column `iddd`", "Did you mean `id` for `idd`?")


def test_a_column_of_another_role_is_not_what_is_meant(relabel: Cli, folder: Path, write_job: WriteJob) -> None:
    table = pa.table({"qid": ["1"], "query": ["wool socks"], "doc_id": ["a"], "document": ["Grey socks"]})
    pq.write_table(table, folder / "pairs.parquet")
    relabel("plan", write_job()).refused(
        3, "no column `query_id` (input.columns.query_id)", "Did you mean `qid` for `query_id`?"
    )


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        (
            "pairs.csv",
            "query_id,query\n7,wool socks\n",
            'polars.read_csv("pairs.csv", schema_overrides={"query_id": str, "query": str})',
        ),
        ("pairs.TSV", "query_id\tquery\n7\twool socks\n", r'polars.read_csv("pairs.TSV", separator="\t", '),
        ("pairs.jsonl", '{"query_id": "7", "query": "wool socks"}\n', 'polars.read_ndjson("pairs.jsonl")'),
    ],
)
def test_text_where_parquet_is_wanted_is_refused_with_how_it_becomes_parquet(
    relabel: Cli, folder: Path, write_job: WriteJob, name: str, text: str, call: str
) -> None:
    (folder / name).write_text(text)
    done = relabel("plan", write_job({"input": {"path": name}}))
    done.refused(3, f"{name}: text, and Parquet is wanted", call)


def test_text_is_read_again_with_the_ids_of_the_job_as_text(relabel: Cli, folder: Path, write_job: WriteJob) -> None:
    (folder / "shop.csv").write_text("qid,sku,query,title\n007,01,wool socks,Grey socks\n")
    columns = {"query_id": "qid", "doc_id": "sku", "document": ["title"]}
    done = relabel("plan", write_job({"input": {"path": "shop.csv", "columns": columns}}))
    done.refused(3, 'schema_overrides={"qid": str, "sku": str}).write_parquet("shop.parquet")`')


def test_text_whose_ids_the_job_calls_otherwise_is_read_again_as_text(
    relabel: Cli, folder: Path, write_job: WriteJob
) -> None:
    """A line that names other columns is pasted without an error, and makes 7 of 007."""
    (folder / "mine.csv").write_text("qid;text;sku;grade\n007;wool socks;01;2\n")
    done = relabel("plan", write_job({"input": {"path": "mine.csv"}}))
    done.refused(3, 'read_csv("mine.csv", separator=";", schema_overrides={"qid": str, "text": str, "sku": str})')


def test_text_is_read_again_with_the_gold_of_the_job_as_numbers(
    relabel: Cli, folder: Path, write_job: WriteJob
) -> None:
    (folder / "mine.csv").write_text("qid,sku,rating\n007,01,2\n")
    done = relabel("plan", write_job({"input": {"path": "mine.csv", "columns": {"gold": "rating"}}}))
    done.refused(3, 'schema_overrides={"qid": str, "sku": str})')


def test_the_call_that_makes_parquet_of_text_can_be_pasted(relabel: Cli, folder: Path) -> None:
    polars = pytest.importorskip("polars")
    (folder / "docs.csv").write_text("doc_id,title\n007,Grey socks\n")
    said = relabel("pairs", "chunk", "docs.csv", "--to", "made.parquet").err
    call = said.partition("`")[2].partition("`")[0]
    eval(call, {"polars": polars})
    assert pq.read_table("docs.parquet").to_pylist() == [{"doc_id": "007", "title": "Grey socks"}]


@pytest.mark.parametrize("command", ["queries", "context", "chunk", "tree", "cited"])
def test_text_is_refused_by_other_readers_of_parquet_as_by_a_job(relabel: Cli, folder: Path, command: str) -> None:
    (folder / "docs.csv").write_text("doc_id,title\n01,Grey socks\n")
    more = ["--docs", "docs.csv"] if command == "cited" else []
    done = relabel("pairs", command, "docs.csv", "--to", "made.parquet", *more)
    done.refused(
        3, "docs.csv: text, and Parquet is wanted", 'read_csv("docs.csv", schema_overrides={"doc_id": str, "title": str'
    )


@pytest.mark.parametrize("name", ["empty", "empty/*.parquet", "absent.parquet", "no_rows.parquet"])
def test_nothing_to_label_is_reported_with_what_would_do(
    relabel: Cli, folder: Path, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, name: str
) -> None:
    (folder / "empty").mkdir()
    write_pairs(pa.Table.from_pylist(pairs).slice(0, 0), path="no_rows.parquet")
    said = {
        "absent.parquet": ("no such file or folder", f"(from {folder})"),
        "no_rows.parquet": ("1 file, no rows", "nothing to label"),
    }
    wanted = ("no Parquet file there", "Give a .parquet file, a folder that holds some, or a glob")
    relabel("run", write_job({"input": {"path": name}})).refused(3, f"input.path {name}: ", *said.get(name, wanted))


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"query_id,query\n1,a\n" * 40,
        lambda whole: b"x" * 400 + (300).to_bytes(4, "little") + b"PAR1",
    ],
    ids=["half", "empty", "csv", "garbage-footer"],
)
def test_damaged_file_is_named_before_anything_is_written(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, damage: Callable[[bytes], bytes]
) -> None:
    path = write_pairs(row_group_size=4)
    path.write_bytes(damage(path.read_bytes()))
    relabel("run", write_job()).refused(3, "pairs.parquet: not a ", "Parquet file")
    assert not Path("out").exists()


def test_null_query_id_is_refused_with_its_row(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows
) -> None:
    write_pairs(path="in/a.parquet")
    pairs[17]["query_id"] = None
    write_pairs(pairs, path="in/b.parquet", row_group_size=5)
    relabel("plan", write_job({"input": {"path": "in"}})).refused(
        3, "in/b.parquet: `query_id` is null in row 17 of the file", "Every row needs a query id"
    )
    assert relabel("plan", write_job({"input": {"path": "in", "limit": 41}})).code == 0  # the row is not read


def test_file_named_twice_is_refused(relabel: Cli, write_pairs: WritePairs, write_job: WriteJob) -> None:
    write_pairs(path="a.parquet")
    relabel("plan", write_job({"input": {"path": ["a.parquet", "*.parquet"]}})).refused(
        3, "a.parquet are one file", "Name it once"
    )


def without_root_powers() -> None:
    """Let mode bits count for root as they do for everybody: runs between fork and exec."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                os._exit(99)


@pytest.fixture
def as_anybody(folder: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """The command in a process that has to ask mode bits, even where the tests run as root."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", "from relabel.jobs.cli import main; main()", *arguments]
        done = subprocess.run(
            line, capture_output=True, text=True, check=False, preexec_fn=without_root_powers, timeout=60
        )
        if done.returncode == 99:
            pytest.skip("root without CAP_SETPCAP: mode bits can't be made to count")
        return done

    yield call
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def test_folder_without_permission_is_an_error_and_not_an_empty_one(
    as_anybody: Callable[..., subprocess.CompletedProcess[str]],
    write_pairs: WritePairs,
    write_job: WriteJob,
    folder: Path,
) -> None:
    """Nor is an output that can't be written a fault of ours."""
    write_pairs()
    write_pairs(path="in/a.parquet")
    write_pairs(path="in/sub/b.parquet")
    (folder / "in/sub").chmod(0)
    done = as_anybody("plan", write_job({"input": {"path": "in"}}))
    assert done.returncode == 3, done
    assert "no permission to read it" in done.stderr
    (folder / "out").mkdir(mode=0o555)
    done = as_anybody("run", write_job())
    assert done.returncode == 3, done
    assert "Traceback" not in done.stderr
    assert "can't write it (Permission denied). Check the path and its permissions." in done.stderr


# Folders


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("./in", "in"),
        (["other", "in/"], "in/a/b"),
        ("in/**/*.parquet", "in/out"),
        ("in/**", "in/out"),
        ("in/*", "in/out"),
        ("*/a*", "in/a-labels"),
        ("i?/*/labels/*/*.parquet", "in/out"),
        (["other", "in/**/chunk-*"], "in/deep/out"),
    ],
)
def test_output_inside_the_input_is_refused_since_its_labels_would_be_input(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, folder: Path, path: str | list[str], output: str
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs(path="other/a.parquet")
    job = write_job({"input": {"path": path}, "output": output})
    relabel("run", job).refused(3, f"job.yaml: `output` {output} is inside input.path", "Give an output elsewhere")
    assert not list(folder.rglob("plan.json"))


@pytest.mark.parametrize(
    ("path", "output"),
    [("in", "in/_labels"), ("in/*.parquet", "in/out"), ("in/*/*.parquet", "in/sub/out"), ("in/a.parquet", "in/out")],
)
def test_output_below_the_input_that_is_not_read_with_it_can_be_run_twice(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, path: str, output: str
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs(path="in/sub/a.parquet")
    job = write_job({"input": {"path": path}, "output": output})
    assert relabel("run", job).code == 0
    assert relabel("run", job).code == 10


# What no longer fits the plan


def test_a_job_whose_labels_could_be_taken_over_says_how(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    assert relabel("run", write_job({"input": {"limit": 4}})).code == 0
    relabel("run", write_job({"input": {"limit": 6}})).refused(
        3, "limit: was 4, is 6", "Use another `output` (`reuse: [out/ecom]` in the job takes over"
    )
    grown = {"input": {"limit": 6}, "output": "out/grown", "reuse": ["out/ecom"]}
    assert "reused       4" in relabel("run", write_job(grown)).out
    other = relabel("run", write_job({"engine": {"seed": 8}, "input": {"limit": 4}}))
    other.refused(3, "Use another `output`, or restore the spec.")
    assert "reuse" not in other.err


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("compare out/a out/eccom", "out/ecom"),
        ("evaluate out/eccom --qrels pairs.parquet", "out/ecom"),
        ("evaluate out/ecom --qrels pair.parquet", "pairs.parquet"),
        ("run jobb.yaml", "job.yaml"),
        ("status ot/ecom", "out/ecom"),
        ("verify out/eccom", "out/ecom"),
    ],
)
def test_a_mistyped_path_is_reported_with_the_nearest(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, call: str, meant: str
) -> None:
    write_pairs()
    for output in ("out/a", "out/ecom"):
        assert relabel("run", write_job({"input": {"limit": 4}, "output": output})).code == 0
    relabel(*call.split()).refused(3, "no such", f"Did you mean {meant}?")
    unlike = relabel("compare", "out/ecom", "zzz/yyy")
    unlike.refused(3, "zzz/yyy: no such folder.")
    assert "Did you mean" not in unlike.err


@pytest.mark.parametrize("command", ["verify", "status"])
def test_an_output_that_is_not_there_is_called_so(
    relabel: Cli, write_job: WriteJob, folder: Path, command: str
) -> None:
    relabel(command, "out/ecom").refused(3, f"out/ecom: no such folder in {folder}.")
    relabel(command, write_job()).refused(3, "nothing is planned there yet. Begin with `relabel run job.yaml`.")
    (folder / "out/ecom").mkdir(parents=True)
    relabel(command, "out/ecom").refused(3, "no plan.json there")


def test_a_damaged_label_file_names_the_receipt_by_which_its_chunk_is_done_again(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    job = write_job()
    assert relabel("run", job).code == 0
    damaged = sorted(Path("out/ecom/labels").rglob("*.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet")
    refused.refused(3, "move out/ecom/receipts/shard-00000/chunk-000000*.json away and run the job again")


def test_second_job_on_an_output_is_refused_with_every_difference(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    assert relabel("run", write_job()).code == 0
    other = write_job(
        {
            "engine": {"seed": 8},
            "labeler": {"samples": 3, "temperature": 0.5},
            "shards": 2,
            "input": {"overlong": "quarantine"},
        }
    )
    relabel("run", other).refused(
        3,
        "out/ecom: belongs to another job",
        "engine.seed: was 7, is 8",
        "labeler.samples: was 1, is 3",
        "labeler.temperature: was 0.0, is 0.5",
        "cut.shards: was 4, is 2",
        'overlong: was "truncate", is "quarantine"',
        "Use another `output`, or restore the spec",
    )
    same = {"run": {"max_failed_fraction": 0.5}, "engine": {"args": {"batch": 3, "capacity": 9}}}
    assert relabel("run", write_job(same)).code in (0, 10), "settings that change no label"


@pytest.fixture
def three_files(relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows) -> str:
    """A planned job over in/a, in/b and in/c."""
    for number, name in enumerate("abc"):
        write_pairs(
            [{**row, "query_id": f"{name}{row['query_id']}"} for row in pairs[: 4 * (number + 1)]],
            path=f"in/{name}.parquet",
        )
    job = write_job({"input": {"path": "in"}})
    assert relabel("plan", job).code == 0
    return job


def test_all_changes_are_listed(relabel: Cli, three_files: str, write_pairs: WritePairs, folder: Path) -> None:
    (folder / "in/a.parquet").unlink()
    write_pairs(path="in/b.parquet")
    write_pairs(path="in/d.parquet")
    relabel("run", three_files).refused(
        3, "in/a.parquet: planned, now missing", "in/b.parquet: changed", "in/d.parquet: new since the plan"
    )


def test_other_files_for_the_same_output_say_how_labels_are_reused_and_call_nothing_missing_that_lies_there(
    relabel: Cli, three_files: str, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs(path="other/d.parquet")
    refused = relabel("run", write_job({"input": {"path": "other"}}))
    refused.refused(3, "in/a.parquet: planned, not part of the input now", "other/d.parquet: new", "reuse: [out/ecom]")
    assert "missing" not in refused.err


def test_data_that_moved_whole_is_the_same_data(
    relabel: Cli, three_files: str, folder: Path, write_job: WriteJob
) -> None:
    (folder / "in").rename(folder / "moved")
    label_all(relabel, write_job({"input": {"path": "moved"}}), 24)


def test_files_in_another_order_are_reported(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows
) -> None:
    write_pairs(pairs[:8], path="a.parquet")
    write_pairs(pairs[8:], path="b.parquet")
    assert relabel("plan", write_job({"input": {"path": ["a.parquet", "b.parquet"]}})).code == 0
    relabel("plan", write_job({"input": {"path": ["b.parquet", "a.parquet"]}})).refused(
        3, "in another order than planned"
    )


# What is missing on this machine


@needs_transformers
def test_model_that_is_not_there_exits_4_with_the_forms_there_are(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    relabel("run", write_job({"engine": {"name": "transformers"}})).refused(4, "set engine.model")
    job = write_job({"engine": {"name": "transformers", "model": "models/none"}})
    relabel("run", job).refused(4, "model 'models/none': there is no such directory here", "a directory, hf:org/name")
    done = relabel("doctor", job, "--output", "json")
    assert done.code == 4
    assert "no such directory" in done.json["job"]["model"]


# Odd rows that are labelled all the same


HOSTILE = [
    "NUL \0 and \x01 controls",
    "braces {0} {query} {{ document }} {% raw %} {{x}} %s",
    "tags <score>2</score> </think> <|im_end|> <|endoftext|> <extract>none</extract>",
    "mojibake CafÃ© â€œquotedâ€\x9d \x80\x85\x9f\ufffd",
    "bidi \u202e and \u2028 lines \u2029 \ufeff",
    "combining e\u0301\u0301\u0301 \U0010ffff \U000f0000",
    "\n\n\n",
    " ",
]


@pytest.mark.parametrize("labeler", LABELERS)
def test_hostile_text_is_labelled_row_for_row(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed, labeler: str
) -> None:
    """So are rows of scattered queries below names of odd letters."""
    for row, text in zip(pairs, HOSTILE * 3, strict=True):
        row["query"] = row["body"] = row["title"] = text
        row["context"] = [text, None, text]
    pairs[8]["context"], pairs[9]["context"] = None, ["x" * 9_999, ""]
    pairs = pairs[::2] + pairs[1::2]
    write_pairs(pa.Table.from_pylist(pairs), path="day:1 [x]#?%20/schön.parquet")
    label_all(relabel, write_job({"labeler": {"name": labeler}, "input": {"path": "day:1 [x]#?%20"}}), 24)
    found = committed()
    assert sorted(found) == list(range(24))
    for row_id, label in found.items():
        assert (label["query_id"], label["doc_id"]) == (pairs[row_id]["query_id"], pairs[row_id]["doc_id"])
        document = "\n\n".join([pairs[row_id]["title"], pairs[row_id]["body"]])
        for span in label["evidence"]:
            assert document[span["start"] : span["end"]] == span["text"]


LATIN = [b"caf\xe9 \xff\xfe", b"\xed\xa0\x80 half of a pair", b"cut off \xc3"]


def with_bytes(rows: Rows, column: str, values: dict[int, bytes], *, kind: pa.DataType) -> pa.Table:
    """A table whose column holds these bytes as text, as Spark and Hive write it."""
    table = pa.Table.from_pylist(rows)
    raw = [values.get(number, value.encode()) for number, value in enumerate(table[column].to_pylist())]
    stored = pa.array(raw, pa.large_binary()).view(pa.large_string())
    return table.set_column(table.schema.get_field_index(column), column, stored.cast(kind))


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("column", ["query", "title", "body"])
def test_row_whose_text_is_not_utf8_is_quarantined_alone(
    relabel: Cli,
    write_pairs: WritePairs,
    write_job: WriteJob,
    pairs: Rows,
    committed: Committed,
    column: str,
    kind: pa.DataType,
    is_scattered: bool,
) -> None:
    rows = pairs[::2] + pairs[1::2] if is_scattered else pairs
    write_pairs(with_bytes(rows[:12], column, {5: LATIN[0]}, kind=kind), path="in/a.parquet")
    write_pairs(with_bytes(rows[12:], column, {0: LATIN[1], 11: LATIN[2]}, kind=kind), path="in/b.parquet")
    job = write_job({"input": {"path": "in"}, "run": {"max_failed_fraction": 0.5}})
    done = relabel("run", job, "--output", "json")
    assert done.code == 0, done
    assert (done.json["labelled"], done.json["quarantined_by_status"]) == (21, {"text": 3})
    assert f"in/a.parquet: row 5: `{column}` is not UTF-8" in done.err
    reasons = {row_id: row["reason"] for row_id, row in committed("quarantine").items()}
    assert reasons == {
        5: f"`{column}` is not UTF-8 (row 5 of in/a.parquet)",
        12: f"`{column}` is not UTF-8 (row 0 of in/b.parquet)",
        23: f"`{column}` is not UTF-8 (row 11 of in/b.parquet)",
    }
    assert relabel("verify", job).code == 0
    assert relabel("retry", job, "--output", "json").json["quarantined_by_status"] == {"text": 3}


def test_query_that_is_not_utf8_is_quarantined_in_a_file_of_queries_alone(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, committed: Committed
) -> None:
    rows = [{"query_id": f"q{number}", "query": f"wool {number}"} for number in range(6)]
    write_pairs(with_bytes(rows, "query", {2: LATIN[0]}, kind=pa.string()))
    changes = {"labeler": {"name": "complexity"}, "input": {"columns": None}, "run": {"max_failed_fraction": 0.5}}
    assert relabel("run", write_job(changes)).code == 0
    assert {number: row["status"] for number, row in committed("quarantine").items()} == {2: "text"}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("column", ["query_id", "doc_id"])
def test_id_that_is_not_utf8_is_refused_since_two_ids_could_become_one(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, column: str, kind: pa.DataType
) -> None:
    write_pairs(pairs[:12], path="in/a.parquet")
    table = with_bytes(pairs[12:], column, {7: b"d\xe9", 8: b"d\xe8"}, kind=pa.large_string())
    place = table.schema.get_field_index(column)
    if pa.types.is_dictionary(kind):
        texts = table[column].combine_chunks().view(pa.large_binary()).dictionary_encode()
        stored = pa.DictionaryArray.from_arrays(texts.indices, texts.dictionary.view(pa.large_string()))
    else:
        stored = table[column].combine_chunks().view(pa.large_binary()).cast(kind, safe=False)
    write_pairs(table.set_column(place, column, stored), path="in/b.parquet")
    relabel("run", write_job({"input": {"path": "in"}})).refused(3, f"in/b.parquet: row 7: `{column}`", "not UTF-8")


@pytest.mark.parametrize("labeler", LABELERS)
def test_empty_and_missing_values_are_labelled(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed, labeler: str
) -> None:
    odd = [
        ("query", ""),
        ("query", "tv"),
        ("query", None),
        ("body", ""),
        ("body", None),
        ("title", None),
        ("grade", None),
        ("doc_id", None),
    ]
    for row, (column, value) in zip(pairs, odd * 3, strict=True):
        row[column] = value
    pairs[23].update(title=None, body="")
    write_pairs(pairs)
    label_all(relabel, write_job({"labeler": {"name": labeler}, "input": {"columns": {"gold": "grade"}}}), 24)
    assert [committed()[row_id]["doc_id"] for row_id in range(24)] == [row["doc_id"] or "" for row in pairs]


def test_long_document_is_cut_and_flagged_or_quarantined_where_the_job_says_so(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed
) -> None:
    pairs[5]["body"] = "a red shoe and more. " * (450_000 // 21)
    write_pairs(pairs)
    label_all(relabel, write_job({"output": "out/cut"}), 24)
    assert [row_id for row_id, row in committed(output="out/cut").items() if "document_truncated" in row["flags"]] == [
        5
    ]
    done = relabel("run", write_job({"input": {"overlong": "quarantine"}}), "--output", "json")
    assert done.code == 0  # one of 24 is below the limit of 5 %
    assert done.json["quarantined_by_status"] == {"overlong": 1}
    assert [(row_id, row["status"]) for row_id, row in committed("quarantine").items()] == [(5, "overlong")]
    assert sorted(committed()) == [row_id for row_id in range(24) if row_id != 5]
    assert relabel("verify", "job.yaml").code == 0


def test_context_that_fits_no_prompt_is_quarantined_as_overlong(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed
) -> None:
    """An engine cuts the document and nothing else; context documents are cut by the labeler's own option, here set too
    high.
    """
    for row in pairs:
        row["context"] = ["x" * 99_999] if row["query_id"] == "q2" else None
    write_pairs(pairs)
    done = relabel("run", write_job({"labeler": {"name": "r3a", "max_context_chars": 99_999}}), "--output", "json")
    assert done.code == 30
    assert done.json["quarantined_by_status"] == {"overlong": 4}
    assert sorted(committed("quarantine")) == [8, 9, 10, 11]


def test_limit_above_the_rows_takes_them_all_and_one_below_the_first(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, committed: Committed
) -> None:
    write_pairs(row_group_size=5)
    label_all(relabel, write_job({"input": {"limit": 10**9}}), 24)
    for limit in (1, 7):
        label_all(relabel, write_job({"input": {"limit": limit}, "output": f"out/{limit}"}), limit)
        assert sorted(committed(output=f"out/{limit}")) == list(range(limit))

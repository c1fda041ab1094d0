"""Data, disks and specs as they come: refused with the right code and a sentence that helps, or
labelled row for row.
"""

from __future__ import annotations

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

from relabel.manifests.files import Storage
from relabel.manifests.input_files import list_files
from tests.engines.conftest import make_tokenizer

Cli = Callable[..., Any]
WritePairs = Callable[..., Path]
WriteJob = Callable[..., str]
Committed = Callable[..., dict[int, dict[str, Any]]]
Rows = list[dict[str, Any]]

LABELERS = ("graph-grpo", "r3a", "direct")
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("relabel.labelers.engines.transformers") is None
    or importlib.util.find_spec("torch") is None,
    reason="the transformers engine is not here",
)


def receipts(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.glob("receipts/*/*.json")}


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


def test_missing_document_column_says_which_key_to_set(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows
) -> None:
    write_pairs([{"query_id": "q", "query": "a", "doc_id": "d", "text": "b"}])
    job = write_job({"input": {"columns": {"document": None}}})
    relabel("plan", job).refused(
        3,
        "neither `document` nor `title` nor `body` is there",
        "It has query_id, query, doc_id, text",
        "input.columns.document",
    )


@pytest.mark.parametrize(
    ("column", "values", "parts"),
    [
        ("query_id", [1.5], ("`query_id` holds double", "not all of its numbers are whole: 1.5")),
        ("query", [3], ("`query` (input.columns.query) holds int64", "a string is wanted")),
        ("body", [["a", "b"]], ("`body` (input.columns.document) holds list<", "a string is wanted")),
        ("doc_id", [True], ("`doc_id`", "holds bool", "a string or a whole number is wanted")),
        ("grade", ["high"], ("`grade` (input.columns.gold) holds string", "a number is wanted")),
        ("context", ["one"], ("`context` (input.columns.context) holds string", "a list of strings is wanted")),
    ],
)
def test_wrong_type_is_reported_with_the_one_that_is_wanted(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, column: str, values: list[Any], parts: tuple[str, ...]
) -> None:
    write_pairs(
        [{"query_id": "q", "query": "a", "doc_id": "d", "title": "t", "body": "b", "grade": 1, column: values[0]}]
    )
    job = write_job({"labeler": {"name": "r3a"}, "input": {"columns": {"gold": "grade"}}})
    relabel("plan", job).refused(3, "pairs.parquet: column ", *parts)


def test_no_rows_is_nothing_to_label(relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows) -> None:
    write_pairs(pa.Table.from_pylist(pairs).slice(0, 0))
    relabel("run", write_job()).refused(3, "input.path pairs.parquet: 1 file, no rows", "nothing to label")


@pytest.mark.parametrize("pattern", ["empty", "empty/*.parquet"])
def test_no_file_is_reported_with_what_would_do(relabel: Cli, folder: Path, write_job: WriteJob, pattern: str) -> None:
    (folder / "empty").mkdir()
    job = write_job({"input": {"path": pattern}})
    relabel("run", job).refused(
        3, f"input.path {pattern}: no Parquet file there", "Give a .parquet file, a folder that holds some, or a glob"
    )


def test_path_that_is_not_there_says_from_where_it_was_looked_for(
    relabel: Cli, folder: Path, write_job: WriteJob
) -> None:
    relabel("run", write_job()).refused(3, "input.path pairs.parquet: no such file or folder", f"(from {folder})")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda whole: whole[: len(whole) // 2], ("not a whole Parquet file", "cut off")),
        (lambda whole: whole[:-3], ("not a whole Parquet file",)),
        (lambda whole: b"", ("not a whole Parquet file (0 bytes",)),
        (lambda whole: b"PAR1", ("not a whole Parquet file (4 bytes",)),
        (
            lambda whole: b"query_id,query\n1,a\n" * 40,
            ("not a whole Parquet file (760 bytes", "or is it something else?"),
        ),
        (
            lambda whole: whole[:-8] + (10**9).to_bytes(4, "little") + b"PAR1",
            ("not a readable Parquet file", "Write it again from its source"),
        ),
        (lambda whole: b"PAR1" + whole[-60:], ("not a readable Parquet file",)),
        (
            lambda whole: b"x" * 400 + (300).to_bytes(4, "little") + b"PAR1",
            ("not a readable Parquet file", "Write it again from its source"),
        ),
    ],
    ids=["half", "end-cut", "empty", "magic-only", "csv", "footer-too-long", "footer-alone", "garbage-footer"],
)
def test_damaged_file_is_named_before_anything_is_written(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, damage: Callable[[bytes], bytes], parts: tuple[str, ...]
) -> None:
    path = write_pairs(row_group_size=4)
    path.write_bytes(damage(path.read_bytes()))
    relabel("run", write_job()).refused(3, "pairs.parquet: ", *parts)
    assert not Path("out").exists()


def test_middle_cut_out_of_a_file_is_found_when_it_is_read(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    path = write_pairs(row_group_size=4, compression="none")
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + whole[900:])
    relabel("run", write_job()).refused(3, "pairs.parquet: ")


def test_files_that_disagree_are_reported_with_both_types(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs([{**row, "query_id": 7} for row in pairs], path="in/b.parquet")
    job = write_job({"input": {"path": "in"}})
    relabel("plan", job).refused(
        3, "in/b.parquet: column `query_id` holds int64, while in/a.parquet holds text there", "Make the files agree"
    )


def test_file_without_a_column_of_the_others_is_named(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs([{key: value for key, value in row.items() if key != "body"} for row in pairs], path="in/b.parquet")
    relabel("plan", write_job({"input": {"path": "in"}})).refused(3, "in/b.parquet: no column `body`")


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


def test_folder_that_a_glob_matches_represents_the_files_in_it(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    """Spark writes folders that are named like files."""
    write_pairs(path="day-1.parquet/part-0.parquet")
    write_pairs(path="day-2.parquet")
    assert relabel("plan", write_job({"input": {"path": "day-*.parquet"}}), "--output", "json").json["rows"] == 48


def test_file_named_twice_is_refused(relabel: Cli, write_pairs: WritePairs, write_job: WriteJob) -> None:
    write_pairs(path="a.parquet")
    relabel("plan", write_job({"input": {"path": ["a.parquet", "*.parquet"]}})).refused(
        3, "names a.parquet twice", "Name it once"
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


def test_file_without_permission_is_reported_with_what_to_check(
    as_anybody: Callable[..., subprocess.CompletedProcess[str]], write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs().chmod(0)
    done = as_anybody("plan", write_job())
    assert done.returncode == 3
    assert "pairs.parquet: no permission to read it. Check the file's owner and mode." in done.stderr


@pytest.mark.parametrize("closed", ["in", "in/sub"])
def test_folder_without_permission_is_an_error_and_not_an_empty_one(
    as_anybody: Callable[..., subprocess.CompletedProcess[str]],
    write_pairs: WritePairs,
    write_job: WriteJob,
    folder: Path,
    closed: str,
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs(path="in/sub/b.parquet")
    (folder / closed).chmod(0)
    done = as_anybody("plan", write_job({"input": {"path": "in"}}))
    assert done.returncode == 3, done
    assert "no permission to read it" in done.stderr


def test_output_that_can_not_be_written_is_reported(
    as_anybody: Callable[..., subprocess.CompletedProcess[str]],
    write_pairs: WritePairs,
    write_job: WriteJob,
    folder: Path,
) -> None:
    write_pairs()
    (folder / "out").mkdir(mode=0o555)
    done = as_anybody("run", write_job())
    assert done.returncode == 3, done
    assert "Traceback" not in done.stderr
    assert "can't write it (Permission denied). Check the path and its permissions." in done.stderr


def test_output_that_is_a_file_is_reported(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, folder: Path
) -> None:
    write_pairs()
    (folder / "out").write_text("")
    relabel("run", write_job()).refused(3, "out/ecom", "Not a directory")


# Folders


@pytest.mark.parametrize("name", ["day:2026", "2026:11", "x#y?z=1 %20", "schön 日", "it's", "[1]"])
@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
def test_names_with_odd_letters_are_names(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, folder: Path, name: str, scattered: bool
) -> None:
    (folder / name).mkdir()
    pq.write_table(
        pa.Table.from_pylist(pairs[::2] + pairs[1::2] if scattered else pairs),
        pa.OSFile(str(folder / name / "pairs.parquet"), "wb"),
    )
    label_all(relabel, write_job({"input": {"path": f"{name}/pairs.parquet"}, "output": f"out/{name}"}), 24)
    assert relabel("run", write_job({"input": {"path": name}, "output": f"out/{name}"})).code == 10


def test_underscored_folder_that_is_named_itself_is_read(write_pairs: WritePairs) -> None:
    write_pairs(path="_in/a.parquet")
    assert [file.path for file in list_files("_in", Storage())] == ["_in/a.parquet"]
    assert [file.path for file in list_files("_in/*.parquet", Storage())] == ["_in/a.parquet"]


@pytest.mark.parametrize(
    ("path", "output"), [("in", "in/out"), ("./in", "in"), (".", "out/ecom"), (["other", "in/"], "in/a/b")]
)
def test_output_inside_the_input_is_refused_since_its_labels_would_be_input(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, folder: Path, path: str | list[str], output: str
) -> None:
    write_pairs(path="in/a.parquet")
    write_pairs(path="other/a.parquet")
    job = write_job({"input": {"path": path}, "output": output})
    relabel("run", job).refused(3, f"job.yaml: `output` {output} is inside input.path", "Give an output elsewhere")
    assert not list(folder.rglob("plan.json"))


def test_output_next_to_the_input_or_passed_over_by_it_is_fine(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs(path="in/a.parquet")
    for output in ("in2", "in/_labels", "in/.labels/x"):
        job = write_job({"input": {"path": "in"}, "output": output})
        assert relabel("run", job).code == 0
        assert relabel("run", job).code == 10


# What no longer fits the plan


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


def test_settings_that_change_no_label_do_not_make_another_job(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    assert relabel("run", write_job()).code == 0
    assert relabel(
        "run", write_job({"run": {"max_failed_fraction": 0.5}, "engine": {"args": {"batch": 3, "capacity": 9}}})
    ).code in (0, 10)


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
    relabel("status", three_files)
    relabel("run", three_files).refused(
        3, "in/a.parquet: planned, now missing", "in/b.parquet: changed", "in/d.parquet: new since the plan"
    )


def test_data_that_moved_whole_is_the_same_data(
    relabel: Cli, three_files: str, folder: Path, write_job: WriteJob
) -> None:
    (folder / "in").rename(folder / "moved")
    label_all(relabel, write_job({"input": {"path": "moved"}}), 24)


def test_data_that_moved_and_lost_a_file_names_that_file(
    relabel: Cli, three_files: str, folder: Path, write_job: WriteJob
) -> None:
    (folder / "in").rename(folder / "moved")
    (folder / "moved/b.parquet").unlink()
    done = relabel("run", write_job({"input": {"path": "moved"}}))
    done.refused(3, "in/b.parquet: planned, now missing")
    assert "c.parquet" not in done.err


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
    job = write_job({"engine": {"name": "transformers", "model": "models/none"}})
    relabel("run", job).refused(
        4, "model 'models/none': there is no such directory here", "a local directory, hf:org/name"
    )
    done = relabel("doctor", job, "--output", "json")
    assert done.code == 4
    assert "no such directory" in done.json["job"]["model"]


@needs_transformers
def test_engine_without_a_model_says_which_key_to_set(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    relabel("run", write_job({"engine": {"name": "transformers"}})).refused(4, "set engine.model")


@needs_transformers
def test_no_gpu_exits_4_and_says_what_to_use(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("HOME", str(folder / "home"))  # digests are cached below it
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "model/model.safetensors").write_bytes(b"")
    make_tokenizer().save_pretrained(folder / "model")
    write_pairs()
    job = write_job({"engine": {"name": "transformers", "model": "model", "args": {"device": "cuda"}}})
    relabel("run", job).refused(
        4, "engine.args.device is 'cuda' and torch finds no GPU here", "use `auto` or `cpu`, or a node with a GPU"
    )


def test_model_for_an_engine_that_takes_none_is_reported(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob
) -> None:
    write_pairs()
    relabel("run", write_job({"engine": {"model": "models/x"}})).refused(
        4, "engine.model = 'models/x'", "takes no model; remove the key"
    )


# Full disks


def test_log_that_can_not_be_written_does_not_end_the_run(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, folder: Path
) -> None:
    write_pairs()
    (folder / "out/ecom/logs").mkdir(parents=True)
    (folder / "out/ecom/logs/shard-00000.log").symlink_to("/dev/full")
    done = relabel("run", write_job())
    assert done.code == 0
    assert done.err.count("going on without logs") == 1


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
@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
def test_hostile_text_is_labelled_row_for_row(
    relabel: Cli,
    write_pairs: WritePairs,
    write_job: WriteJob,
    pairs: Rows,
    committed: Committed,
    labeler: str,
    scattered: bool,
) -> None:
    for row, text in zip(pairs, HOSTILE * 3, strict=True):
        row["query"] = row["body"] = row["title"] = text
        row["context"] = [text, None, text]
    if scattered:
        pairs = pairs[::2] + pairs[1::2]
    write_pairs(pairs)
    label_all(relabel, write_job({"labeler": {"name": labeler}}), 24)
    found = committed()
    assert sorted(found) == list(range(24))
    for row_id, label in found.items():
        assert (label["query_id"], label["doc_id"]) == (pairs[row_id]["query_id"], pairs[row_id]["doc_id"])
        document = "\n\n".join([pairs[row_id]["title"], pairs[row_id]["body"]])
        for span in label["evidence"]:
            assert document[span["start"] : span["end"]] == span["text"]


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


def test_long_document_is_cut_and_flagged(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed
) -> None:
    pairs[5]["body"] = "a red shoe and more. " * (450_000 // 21)
    write_pairs(pairs)
    label_all(relabel, write_job(), 24)
    flagged = [row_id for row_id, label in committed().items() if "document_truncated" in label["flags"]]
    assert flagged == [5]


def test_long_document_is_quarantined_where_the_job_says_so(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed
) -> None:
    pairs[5]["body"] = "x" * 450_000
    write_pairs(pairs)
    done = relabel("run", write_job({"input": {"overlong": "quarantine"}}), "--output", "json")
    assert done.code == 0  # one of 24 is below the limit of 5 %
    assert done.json["quarantined_by_status"] == {"overlong": 1}
    assert [(row_id, row["status"]) for row_id, row in committed("quarantine").items()] == [(5, "overlong")]
    assert sorted(committed()) == [row_id for row_id in range(24) if row_id != 5]
    assert relabel("verify", "job.yaml").code == 0


@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
@pytest.mark.parametrize("column", ["query", "title", "body", "doc_id"])
def test_bytes_that_are_no_utf8_are_labelled_with_replacement_letters(
    relabel: Cli,
    write_pairs: WritePairs,
    write_job: WriteJob,
    pairs: Rows,
    committed: Committed,
    column: str,
    scattered: bool,
) -> None:
    if scattered:
        pairs = pairs[::2] + pairs[1::2]
    table = pa.Table.from_pylist(pairs)
    raw = [value.encode() for value in table[column].to_pylist()]
    raw[9] = b"caf\xe9 \xff\xfe"
    broken = pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())
    write_pairs(table.set_column(table.schema.get_field_index(column), column, broken))
    label_all(relabel, write_job(), 24)
    assert committed()[9]["doc_id"] == ("caf\ufffd \ufffd\ufffd" if column == "doc_id" else pairs[9]["doc_id"])


@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
def test_query_id_that_is_no_utf8_is_refused_with_file_and_column(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, scattered: bool
) -> None:
    table = pa.Table.from_pylist(pairs)
    raw = [value.encode() for value in table["query_id"].to_pylist()]
    raw[9] = b"\xff"
    broken = pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())
    write_pairs(table.set_column(0, "query_id", broken))
    relabel("run", write_job()).refused(3, "pairs.parquet: ", "utf-8")


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
def test_context_of_any_length_with_nulls_is_labelled(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, kind: pa.DataType, scattered: bool
) -> None:
    if scattered:
        pairs = pairs[::2] + pairs[1::2]
    shapes: list[list[str | None] | None] = [
        None,
        [],
        [None],
        [""],
        ["one"],
        ["a", None, "", "b"],
        [f"clicked {n}" for n in range(9)],
        ["x" * 9_999],
    ]
    table = pa.Table.from_pylist(pairs).append_column("context", pa.array(shapes * 3, kind))
    write_pairs(table)
    label_all(relabel, write_job({"labeler": {"name": "r3a"}}), 24)


def test_context_that_fits_no_prompt_is_quarantined_as_overlong(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows, committed: Committed
) -> None:
    """An engine cuts the document and nothing else; context documents are cut by the labeler's own option, here set too
    high.
    """
    for row in pairs:
        row["context"] = ["x" * 99_999] if row["query_id"] == "q2" else None
    write_pairs(pairs)
    assert relabel("run", write_job({"labeler": {"name": "r3a"}, "output": "out/cut"})).code == 0
    done = relabel("run", write_job({"labeler": {"name": "r3a", "max_context_chars": 99_999}}), "--output", "json")
    assert done.code == 30
    assert done.json["quarantined_by_status"] == {"overlong": 4}
    assert sorted(committed("quarantine")) == [8, 9, 10, 11]


def test_limit_above_the_rows_takes_them_all_and_one_below_the_first(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, committed: Committed
) -> None:
    write_pairs(row_group_size=5)
    label_all(relabel, write_job({"input": {"limit": 10**9}}), 24)
    label_all(relabel, write_job({"input": {"limit": 7}, "output": "out/seven"}), 7)
    assert sorted(committed(output="out/seven")) == list(range(7))


def test_more_shards_than_queries_leaves_some_empty_and_no_row_out(
    relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, committed: Committed
) -> None:
    write_pairs()
    job = write_job({"shards": 50})
    codes = [relabel("run", job, "--shard", f"{index}/10").code for index in range(10)]
    assert set(codes) <= {0, 10}
    assert codes.count(0) >= 3
    assert len(committed()) == 24
    assert relabel("run", job).code == 10
    assert relabel("verify", job).code == 0


def test_one_row_is_a_run(relabel: Cli, write_pairs: WritePairs, write_job: WriteJob, pairs: Rows) -> None:
    write_pairs(pairs[:1])
    label_all(relabel, write_job({"shards": 1}), 1)

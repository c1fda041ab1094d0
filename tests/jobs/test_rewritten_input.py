"""A file that is written over in place keeps its size and footer; what was read of it before tells, wherever it is read
again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.labels import load_gold, load_labels
from relabel.distill.students.spec import GoldSource, LabelSource
from relabel.jobs.report.build import build_report
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset, open_planned
from relabel.manifests.readings import FOLDER, ColumnBytes, Readings, blocks_of
from relabel.manifests.records import canonical_json, digest_of, unsealed
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore
from tests.jobs.conftest import Outcome

ROWS, GROUP = 24, 8
Cli = Callable[..., Outcome]
WriteJob = Callable[..., str]


def write(
    path: str | Path = "pairs.parquet",
    *,
    old: str = "a",
    new: str = "",
    scattered: bool = False,
    groups: tuple[int, ...] = (),
) -> None:
    """Pairs of six queries in three row groups, whose texts are spelled with another letter in some of them. In place:
    size, footer, and the file itself stay.
    """
    path = Path(path)
    letters = [new if row // GROUP in groups else "a" for row in range(ROWS)]
    numbers = [row % 6 if scattered else row // 4 for row in range(ROWS)]
    table = pa.table(
        {
            "query_id": [f"q{number}" for number in numbers],
            "query": [f"{letter} shoe" for letter in letters],
            "doc_id": [f"d{row:02d}" for row in range(ROWS)],
            "title": [f"{letter * 20} {row:02d}" for row, letter in enumerate(letters)],
            "body": ["a red shoe"] * ROWS,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, compression="none", use_dictionary=False, write_statistics=False)
    with path.open("r+b" if path.exists() else "wb") as file:
        before = os.fstat(file.fileno()).st_size
        assert before in (0, file.write(sink.getvalue()))


@pytest.fixture
def half_done(relabel: Cli, write_job: WriteJob, folder: Path, request: pytest.FixtureRequest) -> str:
    """A job whose first of four shards is labelled; the first row group was read, scattered all three were."""
    write(scattered=getattr(request, "param", False))
    job = write_job()
    assert relabel("run", job, "--shard", "0/4").code == 0
    return job


def labels(output: str = "out/ecom") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(output, "labels").rglob("*.parquet"))}


@pytest.mark.parametrize("half_done", [False, True], indirect=True, ids=["together", "scattered"])
@pytest.mark.parametrize("groups", [(0,), (0, 1, 2)])
def test_rows_that_were_written_over_in_place_are_never_labelled_beside_the_others(
    half_done: str, relabel: Cli, groups: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    scattered = "scattered" in request.node.name
    before = labels()
    write(new="b", groups=groups, scattered=scattered)
    for arguments in ([], ["--shard", "1/4"]):
        relabel("run", half_done, *arguments).refused(
            3,
            "pairs.parquet: row group 0 holds another `query`, `title` than when out/ecom first read it",
            "Restore it, or label the new one",
        )
    assert labels() == before
    write(scattered=scattered)
    assert relabel("run", half_done).code == 0
    undisturbed = labels()
    shutil.rmtree("out")
    assert relabel("run", half_done).code == 0
    assert labels() == undisturbed


def test_a_file_of_which_the_part_to_come_alone_was_written_over_is_taken_by_its_footer_and_the_log_says_so(
    half_done: str, relabel: Cli
) -> None:
    """The footer's word is all there is for rows that nobody has read."""
    write(new="b", groups=(2,))
    done = relabel("run", half_done)
    assert done.code == 0, done
    assert (
        "pairs.parquet: written since it was planned; its size and footer are the same, and so is what was read of it"
        in done.err
    )


def test_a_file_that_was_written_over_before_it_was_read_is_taken_by_its_footer_and_the_log_says_so(
    relabel: Cli, write_job: WriteJob, folder: Path
) -> None:
    write()
    job = write_job()
    assert relabel("plan", job).code == 0
    write(new="b", groups=(0, 1, 2))
    done = relabel("run", job)
    assert done.code == 0, done
    assert (
        done.err.count(
            "pairs.parquet: written since it was planned; its size and footer are the same, so what was not read yet"
        )
        == 1
    )
    assert relabel("run", job).code == 10


@pytest.mark.parametrize("how", ["copied", "touched", "moved"])
def test_a_copy_of_equal_bytes_is_the_same_file_whatever_its_stamp(
    half_done: str, relabel: Cli, write_job: WriteJob, how: str
) -> None:
    if how == "touched":
        os.utime("pairs.parquet", (0, 0))
    else:
        shutil.copy("pairs.parquet", "copy.parquet")
        Path("copy.parquet").rename("pairs.parquet" if how == "copied" else "elsewhere.parquet")
    job = write_job({"input": {"path": "elsewhere.parquet"}}) if how == "moved" else half_done
    done = relabel("run", job)
    assert done.code == 0, done
    assert relabel("verify", job).code == 0


@pytest.fixture
def done(half_done: str, relabel: Cli, write_job: WriteJob) -> str:
    """A finished job with some rows in quarantine."""
    shutil.rmtree("out")
    write_job(
        {
            "labeler": {"attempts": 1},
            "engine": {"args": {"p_garbage": 0.5}},
            "run": {"chunk_rows": 4, "max_failed_fraction": 1.0},
        }
    )
    ended = relabel("run", half_done)
    assert ended.code == 0, ended
    return half_done


SAID = r"row group 1 holds another `(query`, `)?title` than when out/ecom first read it"


def test_a_retry_asks_about_the_texts_that_were_read(done: str, relabel: Cli) -> None:
    write(new="b", groups=(0, 1, 2))
    before = labels()
    ended = relabel("retry", done)
    assert (ended.code, labels()) == (3, before), ended
    write()
    assert relabel("retry", done).code == 0


def test_a_training_learns_labels_of_the_texts_that_were_read_alone(done: str) -> None:
    write(new="b", groups=(1,))
    with pytest.raises(InputError, match=SAID):
        load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False)
    write()
    found = load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False)
    assert {pair.document[0] for pair in found.pairs} == {"a"}


def test_a_report_shows_no_text_that_was_not_read(done: str) -> None:
    assert "aaaaaaaa" in build_report(["out/ecom"], Storage()).html
    write(new="b", groups=(0, 1, 2))
    page = build_report(["out/ecom"], Storage()).html
    assert "holds another" in page
    assert "bbbbbbbb" not in page


def test_a_comparison_joins_by_row_what_was_read_alike_alone(done: str, relabel: Cli, write_job: WriteJob) -> None:
    other = write_job({"output": "out/other", "engine": {"seed": 8}}, path="other.yaml")
    write(new="b", groups=(0, 1, 2))
    assert relabel("run", other).code == 0
    found = relabel("compare", "out/ecom", "out/other", "--allow-partial", "--output", "json")
    assert found.code == 0, found
    assert any("its row group 0 was written over between the two" in note for note in found.json["notes"])
    assert any("texts of the examples are left out" in note for note in found.json["notes"])
    assert found.json["matched_by"] == "query_id and doc_id"


def test_a_comparison_of_runs_in_chunks_of_different_sizes_tells_by_row_group(
    done: str, relabel: Cli, write_job: WriteJob
) -> None:
    """Their readings are in other files: of four rows here, of sixteen there."""
    other = write_job({"output": "out/other", "run": {"chunk_rows": 16, "max_failed_fraction": 1.0}}, path="other.yaml")
    write(new="b", groups=(1,))
    assert relabel("run", other).code == 0
    found = relabel("compare", "out/ecom", "out/other", "--allow-partial", "--output", "json")
    assert any("its row group 1 was written over between the two" in note for note in found.json["notes"])


def with_grades(new: str = "", groups: tuple[int, ...] = ()) -> None:
    """The pairs as `write` writes them, with a column of gold grades that no run reads; in place."""
    write("plain.parquet", new=new, groups=groups)
    table = pq.read_table("plain.parquet").append_column("grade", pa.array([row % 3 for row in range(ROWS)]))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, compression="none", use_dictionary=False, write_statistics=False)
    with Path("graded.parquet").open("r+b" if Path("graded.parquet").exists() else "wb") as file:
        file.write(sink.getvalue())


@pytest.mark.parametrize("command", ["evaluate", "compare", "distill"])
def test_human_grades_are_joined_by_row_to_the_texts_that_were_read_alone(
    relabel: Cli, write_job: WriteJob, folder: Path, command: str
) -> None:
    with_grades()
    job = {"input": {"path": "graded.parquet"}, "run": {"chunk_rows": 16}}
    assert relabel("run", write_job(job)).code == 0
    assert relabel("run", write_job({**job, "output": "out/other", "engine": {"seed": 8}})).code == 0
    Path("copy").mkdir()
    shutil.copy("graded.parquet", "copy/graded.parquet")

    def join() -> Outcome:
        if command == "evaluate":
            return relabel("evaluate", "out/ecom", "--qrels", "copy/graded.parquet", "--resamples", "10")
        if command == "compare":
            return relabel("compare", "out/ecom", "out/other", "--qrels", "copy/graded.parquet", "--resamples", "10")
        table = load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False)
        try:
            load_gold(GoldSource(path="copy/graded.parquet"), Storage(), is_learned=False).of(table)
        except InputError as exc:
            return Outcome(3, "", str(exc))
        return Outcome(0, "", "")

    assert join().code == 0
    with_grades("b", (1,))
    shutil.copy("graded.parquet", "copy/graded.parquet")
    with_grades()
    join().refused(
        3, "copy/graded.parquet: row group 1 holds another `query`, `title` than when out/ecom first read it"
    )


def test_a_report_says_why_the_grades_beside_other_texts_are_not_used(
    relabel: Cli, write_job: WriteJob, folder: Path
) -> None:
    with_grades()
    job = write_job({"input": {"path": "graded.parquet", "columns": {"gold": "grade"}}})
    assert relabel("run", job).code == 0
    with_grades("b", (1,))
    page = build_report(["out/ecom"], Storage()).html
    assert "the job names the gold column `grade`, which is not used: " in page
    assert "row group 1 holds another" in page


@pytest.mark.parametrize("to", ["qrels", "parquet"])
def test_a_conversion_of_a_run_reads_none_of_its_input(done: str, relabel: Cli, to: str) -> None:
    Path("pairs.parquet").unlink()
    ended = relabel("convert", "out/ecom", f"labels.{to}", "--to", to, "--allow-partial")
    assert ended.code == 0, ended


def test_a_conversion_with_texts_joins_those_that_were_read_alone(done: str, relabel: Cli) -> None:
    write(new="b", groups=(1,))
    call = ("convert", "out/ecom", "labels.jsonl", "--texts", "--allow-partial")
    relabel(*call).refused(3, "row group 1 holds another")
    assert not Path("labels.jsonl").exists()
    write()
    assert relabel(*call).code == 0
    assert {json.loads(row)["document"][0] for row in Path("labels.jsonl").read_text().splitlines()} == {"a"}


def test_readings_are_few_and_say_what_they_are(half_done: str, relabel: Cli) -> None:
    assert relabel("run", half_done).code == 0
    names = sorted(path.name for path in Path("out/ecom", FOLDER).iterdir())
    assert names == [f"00000-{group:06d}.json" for group in range(3)]
    held = json.loads(Path("out/ecom", FOLDER, names[1]).read_bytes())["reading"]
    assert held["first"] == 1
    assert list(held["groups"][0]) == ["body", "doc_id", "query", "query_id", "title"]


def test_small_row_groups_are_put_together_to_a_chunk() -> None:
    assert list(blocks_of([8, 8, 8], 4)) == [range(1), range(1, 2), range(2, 3)]
    assert list(blocks_of([3, 3, 3, 0, 9, 1], 6)) == [range(2), range(2, 5), range(5, 6)]
    assert list(blocks_of([1] * 1000, 256)) == [range(256), range(256, 512), range(512, 768), range(768, 1000)]
    assert list(blocks_of([], 4)) == []


class Worker:
    """Reads a data set for an output."""

    def __init__(self, *, keeps: bool = True, block_rows: int = 4) -> None:
        self.dataset = open_dataset(InputSpec(path=("pairs.parquet",)), Storage())
        self.readings = Readings(LocalRunStore("out"), where="out", block_rows=block_rows, keeps=keeps)

    def prove(self, groups: list[int], *, block: range | None = None) -> None:
        (file,) = self.dataset.files
        with open_planned(file, self.dataset) as opened:
            found = ColumnBytes(
                opened.source, opened.parquet.metadata, opened.parquet.schema_arrow, self.dataset.text_columns
            )
            for group in groups:
                self.readings.prove(0, file.path, block or range(group, group + 1), [group], found, lambda _: None)


def test_of_two_workers_that_read_a_row_group_at_once_the_second_compares_with_the_first(folder: Path) -> None:
    write()
    first, second, third = Worker(), Worker(), Worker()
    for worker in (first, second, third):
        worker.prove([0])  # all have looked at what is kept
    first.prove([1])
    second.prove([1])
    write(new="b", groups=(1,))
    with pytest.raises(InputError, match="row group 1 holds another"):
        third.prove([1])
    with pytest.raises(InputError, match="row group 1 holds another"):
        first.prove([1])
    write()
    third.prove([1, 2])


def test_who_only_looks_keeps_nothing(folder: Path) -> None:
    write()
    Worker(keeps=False).prove([0, 1, 2])
    assert not Path("out").exists()


def test_one_row_group_of_a_block_is_held_against_its_own_reading(folder: Path) -> None:
    write()
    Worker(block_rows=ROWS).prove([1], block=range(3))
    write(new="b", groups=(2,))
    Worker(block_rows=ROWS).prove([0, 1], block=range(3))
    with pytest.raises(InputError, match="row group 2 holds another"):
        Worker(keeps=False).prove([2])


@pytest.mark.parametrize("at", [0, 0.3, 0.6, 0.97])
def test_a_damaged_reading_is_refused_by_name(half_done: str, relabel: Cli, at: float) -> None:
    path = Path("out/ecom", FOLDER, "00000-000000.json")
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)
    relabel("run", half_done).refused(3, "out/ecom/inputs/00000-000000.json", "Restore it from a copy")


def forge(name: str, change: Callable[[dict[str, Any]], None], to: str | None = None) -> str:
    """Change what a reading says, with its digest put right; its new path."""
    held = json.loads(Path("out/ecom", FOLDER, name).read_bytes())["reading"]
    change(held)
    path = Path("out/ecom", FOLDER, to or name)
    path.write_bytes(canonical_json({"version": 1, "sha256": digest_of(held), "reading": held}))
    return str(path)


def other_texts(held: dict[str, Any]) -> None:
    held["groups"][0]["title"] = "0" * 64


def overlapping(held: dict[str, Any]) -> None:
    held["groups"] *= 2


def moved(held: dict[str, Any]) -> None:
    held["first"] = 9


FORGERIES: dict[str, tuple[Callable[[], str], str]] = {
    "texts": (lambda: forge("00000-000001.json", other_texts), "not what was read of the input"),
    "rows": (lambda: forge("00000-000001.json", overlapping), "not what was read of the input"),
    "new": (lambda: forge("00000-000001.json", moved, "00000-000009.json"), "not what was read of the input"),
    "missing": (
        lambda: str(shutil.move("out/ecom/inputs/00000-000001.json", "away") and "out/ecom/inputs/00000-000001.json"),
        "missing",
    ),
    "renamed": (
        lambda: str(shutil.copy("out/ecom/inputs/00000-000001.json", "out/ecom/inputs/00000-000002.json")),
        "row group 1",
    ),
    "no reading": (lambda: str(shutil.copy("job.yaml", "out/ecom/inputs/notes.json")), "no reading of an input"),
}


def reads_again(command: str) -> list[str]:
    lines = {
        "verify": ["verify", "out/ecom"],
        "evaluate": ["evaluate", "out/ecom", "--qrels", "pairs.parquet", "--grade", "doc_id"],
    }
    return lines.get(command) or ["merge", "out/ecom", "--to", "out/all"]


@pytest.mark.parametrize("command", ["verify", "evaluate", "merge", "distill"])
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_damaged_or_forged_reading_is_named(half_done: str, relabel: Cli, kind: str, command: str) -> None:
    """The manifest keeps the sha256 of each: a reading that fits its own digest is no proof of itself."""
    assert relabel("run", half_done).code == 0
    assert relabel("verify", "out/ecom").code == 0
    change, says = FORGERIES[kind]
    path = change()
    if command == "distill":
        with pytest.raises(ManifestError, match=says) as error:
            load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False)
        assert path in str(error.value)
    else:
        relabel(*reads_again(command)).refused(3, path, says)


@pytest.mark.parametrize("kind", ["overlap", "file"])
def test_readings_that_no_manifest_names_must_fit_the_plan(half_done: str, relabel: Cli, kind: str) -> None:
    assert relabel("run", half_done).code == 0
    path = Path("out/ecom/manifest.json")
    path.write_text(json.dumps({key: value for key, value in unsealed(path.read_bytes()).items() if key != "readings"}))
    assert relabel("verify", "out/ecom").code == 0
    if kind == "overlap":
        forge("00000-000000.json", overlapping)
        relabel("verify", "out/ecom").refused(
            3, "out/ecom/inputs/00000-000001.json: row group 1 is in another reading too"
        )
    else:
        forge("00000-000000.json", lambda _: None, "00007-000000.json")
        relabel("verify", "out/ecom").refused(3, "out/ecom/inputs/00007-000000.json: the plan has no file 7")


def test_an_output_of_an_earlier_relabel_without_readings_goes_on(half_done: str, relabel: Cli) -> None:
    shutil.rmtree(Path("out/ecom", FOLDER))
    assert relabel("run", half_done).code == 0
    load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False)


def test_parts_that_read_other_texts_are_not_merged_and_a_merged_output_knows_what_was_read(
    relabel: Cli, write_job: WriteJob, folder: Path
) -> None:
    write()
    parts = [write_job({"output": f"out/{part}"}, path=f"{part}.yaml") for part in range(2)]
    assert relabel("run", parts[0], "--shard", "0/2").code == 0
    write(new="b", groups=(1,))
    assert relabel("run", parts[1], "--shard", "1/2").code == 0
    relabel("merge", "out/0", "out/1", "--to", "out/all").refused(
        3, "pairs.parquet: row group 1 held other texts when out/0 read it than"
    )
    assert not Path("out/all/manifest.json").exists()
    shutil.rmtree("out/1")
    write()
    assert relabel("run", parts[1], "--shard", "1/2").code == 0
    merged = relabel("merge", "out/0", "out/1", "--to", "out/all")
    assert merged.code == 0, merged
    load_labels(LabelSource(path="out/all"), Storage(), allow_over_limit=False)
    write(new="b", groups=(1,))
    with pytest.raises(InputError, match="row group 1 holds another `query`, `title` than when out/all first read it"):
        load_labels(LabelSource(path="out/all"), Storage(), allow_over_limit=False)


def test_outputs_of_several_files_are_merged_with_what_each_read(
    relabel: Cli, write_job: WriteJob, folder: Path
) -> None:
    outputs = []
    for name in ("one", "two"):
        write()
        table = pq.read_table("pairs.parquet").slice(0, ROWS if name == "one" else 12)
        pq.write_table(table, f"{name}.parquet", row_group_size=GROUP)
        outputs.append(f"out/{name}")
        job = write_job(
            {"input": {"path": f"{name}.parquet"}, "output": outputs[-1], "run": {"chunk_rows": 3 + len(outputs)}}
        )
        assert relabel("run", job).code == 0
    assert relabel("merge", *outputs, "--to", "out/all").code == 0
    assert sorted(path.name for path in Path("out/all", FOLDER).iterdir()) == [f"0000{at}.json" for at in (
        "0-000000", "0-000001", "0-000002", "1-000000", "1-000001"
    )]  # fmt: skip
    load_labels(LabelSource(path="out/all"), Storage(), allow_over_limit=False)

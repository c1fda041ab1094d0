"""Every kind of entry in a folder of tables × every place of a command that takes such a folder: it is read, left out
by a rule, or refused by its name with exit 3; never a traceback, never rows that are lost without a word.

Places come from the table of commands: each that takes a path has to be named here, as a reader of tables or as none,
so that a new one is covered at birth. Those that look at a student first are tried with `RELABEL_FAULTS=full`.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.conftest import JOB
from tests.jobs.test_cli import SEARCH, STUDENT, TEACHER
from tests.jobs.test_no_secret_shown import LEVEL, World, commands, made, world

__all__ = ["made", "world"]
LINES = {
    "ask job_file": ("ask {job} --random 1000000 --dry-run", "{rows} row"),
    "plan job_file": ("plan {job}", "rows         {rows} in {files} file"),
    "run job_file": ("run {job}", "labelled     {rows}"),
    "retry job_file": ("retry {job}", "no plan there yet"),
    "rounds job_file": ("rounds {search}", "{files} of {files} questions"),
    "doctor job_file": ("doctor {job}", "{rows} rows in {files} file"),
    "audit target": ("audit {job} --rows 1000000 --probe padded --to {out}", "{rows} pairs of"),
    "audit pairs": ("audit {job} --pairs {folder} --rows 1000000 --probe padded --to {out}", "{rows} pairs of"),
    "convert source": ("convert {folder} {out}.jsonl --from parquet", "Wrote {rows} rows"),
    "evaluate qrels": ("evaluate out/ecom --qrels {folder} --resamples 10", "a folder, and a file is wanted"),
    "compare qrels": ("compare out/ecom out/other --qrels {folder} --resamples 10", "a folder, and a file is wanted"),
    "report gold": ("report out/ecom --gold {folder} --to {out}.html", "a folder, and a file is wanted"),
    "pairs cited answers": (
        "pairs cited {folder} --docs pairs.parquet --to {out}.parquet --answers-per-query 4",
        "Wrote {rows} pairs",
    ),
    "pairs cited docs": (
        "pairs cited answers.parquet --docs {folder} --to {out}.parquet --answers-per-query 4",
        "Wrote {rows} pairs",
    ),
    "pairs context pairs_file": ("pairs context {folder} --to {out}.parquet", "Wrote {rows} pairs"),
    "pairs chunk pairs_file": ("pairs chunk {folder} --to {out}.parquet", "Wrote {rows} pairs"),
    "pairs tree pairs_file": ("pairs tree {folder} --to {out}.parquet", "Wrote {rows} pairs"),
    "pairs queries docs": ("pairs queries {folder} --to {out}.parquet --queries-in query --rank 0", "Wrote"),
    "pairs queries unlike": ("pairs queries pairs.parquet --queries-in query --unlike {folder} --to {out}.parquet", ""),
    "pairs unjudged corpus": (
        "pairs unjudged out/ecom --labels few.jsonl --queries pairs.parquet --corpus {folder} --to {out}.parquet",
        "",
    ),
    "pairs context corpus": ("pairs context pairs.parquet --corpus {folder} --to {out}.parquet", "  {rows}\n"),
}
LATER = {
    "score input": ("score student --input {folder} --to {out} --limit 1000", "{rows}"),
    "export pairs": ("export student --to {out} --pairs {folder} --provider cpu", ""),
    "distill spec_file": ("distill {spec}", ""),
    "train spec_file": ("train {taught} --dry-run", "{rows}"),
    "bench pairs": (
        "bench served --pairs {folder} --to {out} --providers cpu --precisions fp32 --shapes 1xreplay --seconds 0.2",
        "fp32",
    ),
    "pairs similar pairs_file": ("pairs similar {folder} --to {out}.parquet --model student", "Wrote {rows} pairs"),
}
"""The line, and what it says of the rows that it read. Those of `LATER` come after a check of a student."""
SPECS = ("job.yaml", "spec.yaml", "taught.yaml", "search.yaml")
NO_PATHS = {
    "KEY=VALUE",
    "YYYY-MM-DD",
    "I/N|auto",
    "all|0,1,…",
    "ADDRESS",
    "TIME",
    "LENGTH",
    "ROLE=COLUMN,...",
    "NAME",
    "LABELER",
    "GATE",
    "COL",
    "COL=VALUE",
    "NAME=WHAT",
}
NO_PATHS |= {
    "OLD=NEW,...",
    "[JUDGE=]OLD=NEW,...",
    "K,...",
    "TEXT",
    "LIST",
    "COLUMN",
    "MAP",
    "SPDX",
    "M.N",
    "ID",
    "VERSION",
    "CHANNEL",
    "MODEL",
}
NO_TABLES = {
    "what is written": "init path, templates export folder, demo folder, run metrics, retry metrics, "
    "compare html, "
    "report to, score to, bench to, merge to, export to, build-engine to, pairs cited to, pairs context to, "
    "pairs queries to, pairs chunk to, pairs tree to, pairs similar to, convert target, pull script, train export_to, "
    "combine to, pairs unjudged to, audit to, evaluate track_file, review examples, "
    "evaluate metrics, review to",
    "one file, and never a folder": "combine qrels, systems gold, convert queries, convert template, review sources, "
    "review queries, "
    "pairs unjudged queries, audit colder",
    "rankings": "systems systems, pairs unjudged systems, evaluate baselines, report systems",
    "outputs of runs": (
        "status target, verify target, merge outputs, evaluate labels, compare a, compare b, report paths, "
        "combine labels, pairs queries by, systems labels, pairs unjudged labels, review run, review second"
    ),
    "students, bundles and stores": "score student, pairs queries candidates, export student, bench bundle, "
    "build-engine bundle, conform bundle, "
    "publish bundle, publish url, list url, gc url, pull arguments, channel set bundle, rollback bundle, show bundle",
    "running servers": "conform url",
    "what workers share": "run part_of, retry part_of, run ledger, retry ledger",
    "prompt templates": "ask edited",
    "keys": "publish sign_key, pull keys, channel set sign_key, rollback sign_key",
}


def graded() -> pa.Table:
    """The world's pairs, each also as an answer that cites its document."""
    table = pq.read_table("pairs.parquet")
    cited = pa.array([[doc] for doc in table["doc_id"].to_pylist()])
    return (
        table.append_column("answer_id", table["doc_id"])
        .append_column("cited", cited)
        .append_column("candidates", cited)
    )


def data(path: Path, start: int) -> None:
    """Four rows of these."""
    sink = pa.BufferOutputStream()
    pq.write_table(graded().slice(start, 4), sink)
    path.write_bytes(sink.getvalue())


def linked_file(path: Path) -> None:
    data(path.parent.parent / "alongside.parquet", 4)
    path.symlink_to("../alongside.parquet")


def linked_folder(path: Path) -> None:
    (path.parent.parent / "alongside").mkdir()
    data(path.parent.parent / "alongside/part.parquet", 4)
    path.symlink_to("../alongside")


def folder_of_data(path: Path) -> None:
    path.mkdir()
    data(path / "part.parquet", 4)


def table_of_delta(path: Path) -> None:
    folder_of_data(path)
    (path / "_delta_log").mkdir()
    (path / "_delta_log" / f"{0:020}.json").touch()


def table_of_iceberg(path: Path) -> None:
    folder_of_data(path)
    (path / "metadata").mkdir()
    (path / "metadata/00000-1.metadata.json").touch()


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's whole path may have 108 bytes
        held.bind(path.name)
        os.chdir(here)


def truncated(path: Path) -> None:
    data(path, 4)
    path.write_bytes(path.read_bytes()[:-9])


def unreadable(path: Path) -> None:
    data(path, 4)
    path.chmod(0)


KINDS: dict[str, tuple[str, Callable[[Path], Any], bool | str]] = {
    "regular": ("x.parquet", lambda path: data(path, 4), True),
    "link to a file": ("x.parquet", linked_file, True),
    "link to a folder": ("x", linked_folder, True),
    "folder named like a file": ("x.parquet", folder_of_data, True),
    "name with odd characters": ("%20 a[b]*?#é\t.parquet", lambda path: data(path, 4), True),
    "link to where it lies": ("x", lambda path: path.symlink_to("."), "x"),
    "link to itself": ("x.parquet", lambda path: path.symlink_to("x.parquet"), "x.parquet"),
    "dangling link": ("x.parquet", lambda path: path.symlink_to("nowhere"), "x.parquet"),
    "dangling link of a folder": ("x", lambda path: path.symlink_to("/nowhere/x"), "x"),
    "pipe": ("x.parquet", os.mkfifo, "x.parquet"),
    "socket": ("x.parquet", bound_socket, "x.parquet"),
    "device": ("x.parquet", lambda path: path.symlink_to("/dev/zero"), "x.parquet"),
    "empty folder named like a file": ("x.parquet", Path.mkdir, "x.parquet"),
    "second name": ("x.parquet", lambda path: path.hardlink_to(path.parent / "a.parquet"), "x.parquet"),
    "empty": ("x.parquet", Path.touch, "x.parquet"),
    "truncated": ("x.parquet", truncated, "x.parquet"),
    "unreadable": ("x.parquet", unreadable, "x.parquet"),
    "not UTF-8": ("caf\udce9.parquet", lambda path: data(path, 4), "caf\\xe9.parquet"),
    "Delta table": ("x", table_of_delta, "x"),
    "Iceberg table": ("x", table_of_iceberg, "x"),
    "hidden by _": ("_x.parquet", lambda path: data(path, 4), False),
    "hidden by .": (".x.parquet", os.mkfifo, False),
    "other suffix": ("x.csv", os.mkfifo, False),
}
"""Name, how it is made, and what becomes of it: its rows are read, they are left out by a rule, or what the refusal
names.
"""


def test_every_place_that_takes_a_path_is_known_as_a_reader_of_tables_or_as_none() -> None:
    places = {
        f"{words} {param.name}"
        for words, command in commands()
        for param in command.params
        if isinstance(param.type, click.types.StringParamType)
        and not getattr(param, "is_flag", False)
        and param.metavar not in NO_PATHS
    }
    known = [*LINES, *LATER, *(name.strip() for names in NO_TABLES.values() for name in names.split(","))]
    assert sorted(known) == sorted(places)


def tables(kind: str) -> Path:
    """A folder of a good file and an entry of the kind."""
    folder = Path("probe")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "in").mkdir(parents=True)
    data(folder / "in/a.parquet", 0)
    name, make, _ = KINDS[kind]
    make(folder / "in" / name)
    return folder / "in"


def line_of(place: str, folder: Path) -> list[str]:
    """The command's line for a folder, with a job and a spec that name it."""
    job = {**JOB, "input": {**JOB["input"], "path": "in"}, "output": "out", "shards": 1}
    (folder.parent / "job.yaml").write_text(yaml.safe_dump(job))
    spec = {
        **yaml.safe_load(STUDENT),
        "labels": ["../out/ecom"],
        "gold": {"path": "in", "grade": "grade"},
        "output": "student",
    }
    spec["student"]["model"] = "../student"
    (folder.parent / "spec.yaml").write_text(yaml.safe_dump(spec))
    taught = {**yaml.safe_load(TEACHER), "data": {"gold": {"path": "in", "grade": "grade"}}, "output": "teacher"}
    taught["init"] = "../decoder"
    (folder.parent / "taught.yaml").write_text(yaml.safe_dump(taught))
    pq.write_table(graded(), "answers.parquet")
    first = graded().slice(0, 1).to_pylist()[0]
    Path("few.jsonl").write_text(json.dumps({"query_id": first["query_id"], "doc_id": first["doc_id"], "grade": 0}))
    search = {**yaml.safe_load(SEARCH), "input": {"path": "in"}, "rounds": {"corpus": "in"}, "output": "found"}
    (folder.parent / "search.yaml").write_text(yaml.safe_dump(search))
    names = {name.partition(".")[0]: str(folder.parent / name) for name in (*SPECS, "made")}
    line = {**LINES, **LATER}[place][0]
    return line.format(folder=folder, out=names.pop("made"), **names).split()


@pytest.mark.parametrize("place", LINES if LEVEL == "short" else {**LINES, **LATER})
def test_an_entry_of_a_folder_is_read_left_out_or_refused_by_name(world: World, place: str) -> None:
    wrong = []
    if place == "bench pairs":
        line = ["export", "student", "--to", "served", "--pairs", "pairs.parquet", "--provider", "cpu"]
        assert world.call(*line).code == 0
    for kind, (_, _, fate) in KINDS.items():
        if kind == "unreadable" and os.geteuid() == 0:
            continue
        shown = world.call(*line_of(place, tables(kind)))
        if isinstance(fate, str):
            is_right = shown.code == 3 and f"in/{fate}" in shown.text
        else:
            said = {**LINES, **LATER}[place][1].format(rows=8 if fate else 4, files=2 if fate else 1)
            is_right = shown.code in (0, 3) and said in shown.text
        if not is_right or "Traceback" in shown.text:
            wrong.append(f"{kind}: {shown.code}, {shown.text[-600:]!r}")
    shutil.rmtree("probe")
    assert not wrong, "\n".join(wrong)

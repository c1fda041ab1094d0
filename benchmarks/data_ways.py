"""How many files a row of data comes through: those with a function that is called, counted, not those that are read.

    git worktree add /tmp/before 45d9ca7
    python benchmarks/data_ways.py [/tmp/before ...] [--names]

Two ways, each one command in an interpreter of its own: a pair from Parquet to its receipt (`relabel run`, r3a, the
fake engine), and a student from its spec to its folder (`relabel distill`, a random encoder of one layer). Only files
of relabel count; a file that is imported and never called does not.

`run` is called with 60 pairs and with 600, and a file belongs to what its calls grow with: each pair (at least one
call more for a pair more), each chunk or file (fewer), or the command's start and end (none).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FLOORS = ("jobs", "export", "labelers", "distill", "manifests")
FEW, MANY = 60, 600
"""Pairs of a short and a long input."""
_CALL = """
import json, os, sys, threading
from collections import Counter
root, log, *words = sys.argv[1:]
sys.path.insert(0, root)
called = Counter()
def seen(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # a function: bodies of modules and classes have no fast locals
        called[frame.f_code.co_filename] += 1
from relabel.jobs.cli import main
threading.setprofile(seen)
sys.setprofile(seen)
try:
    main(words)
except SystemExit as end:
    code = end.code
sys.setprofile(None)
ours = {name: calls for name, calls in called.items() if name.startswith(root + os.sep) and name.endswith(".py")}
with open(log, "w") as file:
    json.dump({"code": code, "calls": {os.path.relpath(name, root): calls for name, calls in ours.items()}}, file)
"""


def write_world(folder: Path) -> None:
    """Pairs of ten queries, a job, and a student of the job's labels over a tiny random encoder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sys.path.insert(0, str(ROOT))
    from tests.jobs.test_demo import write_tiny_model

    rows = [
        {
            "query_id": f"q{row % 10}",
            "query": f"red shoe {row % 10}",
            "doc_id": f"d{row}",
            "document": [f"red shoe {row % 10}", f"red lamp {row}", f"blue lamp {row}"][row % 3],
        }
        for row in range(MANY)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:FEW]), folder / "few.parquet")
    pq.write_table(pa.Table.from_pylist(rows), folder / "many.parquet")
    write_tiny_model(folder / "encoder")
    job: dict[str, Any] = {
        "name": "way",
        "input": {"path": str(folder / "few.parquet")},
        "labeler": {"name": "r3a"},
        "engine": {"name": "fake", "seed": 7},
    }
    student: dict[str, Any] = {
        "name": "way",
        "labels": [str(folder / "labels")],
        "student": {"kind": "encoder", "model": str(folder / "encoder")},
        "train": {"max_steps": 2, "batch_size": 16, "max_tokens": 32},
        "split": {"dev": 0.2, "test": 0.2},
    }
    more = job | {"input": {"path": str(folder / "many.parquet")}}
    for name, spec in (("job", job), ("more", more), ("student", student)):
        (folder / f"{name}.json").write_text(json.dumps(spec))


def way(root: Path, folder: Path, verb: str, spec: str, output: Path) -> dict[str, int]:
    """Calls by file that one command comes through.

    Raises:
        SystemExit: the command failed.
    """
    held = json.loads((folder / spec).read_text()) | {"output": str(output)}
    spec_file = output.with_suffix(".yaml")
    spec_file.write_text(json.dumps(held))
    log = output.with_suffix(".names")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _CALL, str(root), str(log), verb, str(spec_file)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(log.read_text()) if log.exists() else {"code": None, "calls": {}}
    if found["code"] != 0:
        raise SystemExit(f"{verb} of {root} ended with {found['code']}:\n{ended.stderr[-2000:]}")
    calls = {name.removeprefix("relabel/"): count for name, count in found["calls"].items()}
    return {name: calls[name] for name in sorted(calls) if name.partition("/")[0] in FLOORS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="*", type=Path, help="other checkouts, counted first")
    parser.add_argument("--names", action="store_true", help="also the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write_world(folder)
        print("| checkout | way | files | by floor |\n|---|---|---|---|")
        for number, root in enumerate([*options.before, ROOT]):
            labels = folder / f"labels-{number}"
            few = way(root.resolve(), folder, "run", "job.json", labels)
            many = way(root.resolve(), folder, "run", "more.json", folder / f"more-{number}")
            growth = {file: (calls - few.get(file, 0)) / (MANY - FEW) for file, calls in many.items()}
            student = json.loads((folder / "student.json").read_text()) | {"labels": [str(labels)]}
            (folder / "student.json").write_text(json.dumps(student))
            ways = {
                "`run`, each pair": [file for file in many if growth[file] >= 1],
                "`run`, each pair, chunk or file": [file for file in many if growth[file] > 0],
                "`run`, the whole command": list(many),
                "`distill`, the whole command": list(
                    way(root.resolve(), folder, "distill", "student.json", folder / f"student-{number}")
                ),
            }
            for title, names in ways.items():
                floors = Counter(found.partition("/")[0] for found in names)
                by_floor = ", ".join(f"{floor} {floors[floor]}" for floor in FLOORS if floors[floor])
                print(f"| {root.name} | {title} | {len(names)} | {by_floor} |")
                if options.names:
                    print("\n".join(names), file=sys.stderr)


if __name__ == "__main__":
    main()

"""One command, killed in worlds of its own: what it may leave, and what the same command makes of that."""

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from relabel.distill.students.model import student_files
from relabel.export.bundles import open_bundle
from relabel.manifests.failpoints import FAILPOINTS, TRAINING_FAILPOINTS
from relabel.manifests.records import sha256_file
from tests.faults import forks
from tests.faults.command_lines import LINES, Line, inside, tree
from tests.faults.forks import Setup
from tests.faults.teaching_world import STEPS, TEACHINGS

CALLS = 5
"""The same command is given so often at most until it has ended; each must get further or say what to do."""


def no_run_is_torn(target: Path) -> str | None:
    """A manifest names whole files."""
    if not (target / "manifest.json").exists():
        return None
    held = json.loads((target / "manifest.json").read_bytes())
    return next(
        (f"{file['path']} is torn" for file in held["labels"] if sha256_file(target / file["path"]) != file["sha256"]),
        None,
    )


def no_student_is_torn(target: Path) -> str | None:
    """A manifest names whole files."""
    if not (target / "manifest.json").exists():
        return None
    held = json.loads((target / "manifest.json").read_bytes())["files"]
    return None if held.items() <= student_files(target).items() else "the manifest is of other files"


def no_bundle_is_torn(target: Path) -> str | None:
    """A bundle is there whole or not at all."""
    if target.exists():
        open_bundle(target)
    return None


def no_page_is_torn(target: Path) -> str | None:
    """A page is there whole or not at all."""
    return None if not target.exists() or target.read_text().rstrip().endswith("</html>") else "the page is torn"


def no_table_is_torn(target: Path) -> str | None:
    """Lines are there whole or not at all."""
    return None if not target.exists() or target.read_text().count("\n") == 48 else "the table is torn"


def no_audit_is_torn(target: Path) -> str | None:
    """Its runs' manifests name whole files, and its result is there whole or not at all."""
    result = target / "audit.json"
    if result.exists():
        json.loads(result.read_bytes())
    return no_run_is_torn(target / "labels") or no_run_is_torn(target / "again")


def no_tasks_are_torn(target: Path) -> str | None:
    """Tasks are there whole or not at all."""
    return None if not target.exists() or len(json.loads(target.read_bytes())) == 48 else "the tasks are torn"


def no_gold_is_torn(target: Path) -> str | None:
    """Gold and examples are there whole or not at all."""
    examples = target / "prompts" / "examples.jsonl"
    if examples.exists() and examples.read_text().count("\n") != 6:
        return "the examples are torn"
    gold = target / "gold.parquet"
    return None if not gold.exists() or pq.read_table(gold).num_rows == 10 else "the gold is torn"


@dataclass(frozen=True)
class Case:
    """A command whose work is killed.

    Args:
        target: what it makes.
        torn: what is wrong with a target that a killed call left, or None.
        points: failpoints that it passes.
        promised: suffixes of those files whose bytes are promised; others hold times.
        line: as it is typed.
        steps: of a training.
    """

    target: str
    torn: Callable[[Path], str | None]
    points: tuple[str, ...] = ()
    promised: tuple[str, ...] = ("",)
    line: Line | None = None
    steps: int = 0

    def schedules(self) -> list[tuple[str, int]]:
        """Failpoints, and at which hit of each; of a training every step, and after one for each point in any order, so
        that a sweep that is cut short has tried all over.
        """
        found = [(name, hit) for hit in (1, 2, 4) for name in self.points]
        if not self.steps:
            return found
        found += [("after_training_step", step) for step in range(1, self.steps + 1)]
        rest = sorted(set(found[len(self.points) :]) - set(found[: len(self.points)]))
        random.Random(44).shuffle(rest)
        return found[: len(self.points)] + rest


TEMPORARY = ("before_temp_sync", "before_temp_rename")
CASES = {
    "score": Case(
        "out/scores",
        no_run_is_torn,
        tuple(name for name in FAILPOINTS if "quarantine" not in name and "answers" not in name),
        (".parquet",),
    ),
    "cascade": Case(
        "out/cascade",
        no_run_is_torn,
        tuple(name for name in FAILPOINTS if "quarantine" not in name and "answers" not in name),
        (".parquet",),
        Line("run cascade.yaml"),
    ),
    "merge": Case(
        "out/week",
        no_run_is_torn,
        ("before_receipt", "after_receipt", "before_manifest", "after_manifest", *TEMPORARY),
        (".parquet",),
    ),
    "distill": Case("out/learnt", no_student_is_torn, (*TRAINING_FAILPOINTS, *TEMPORARY), (".safetensors",)),
    "train": Case("out/taught", no_student_is_torn, (*TRAINING_FAILPOINTS, *TEMPORARY), (".safetensors",)),
    **{
        name: Case(
            f"out/{Path(line.text.split()[1]).stem}",
            no_student_is_torn,
            (*TRAINING_FAILPOINTS, *TEMPORARY),
            ("model.safetensors", "rollouts.parquet", "edges.parquet", "curves.parquet", "curves.svg"),
            line,
            STEPS[name],
        )
        for name, line in TEACHINGS.items()
    },
    "export": Case("out/bundle", no_bundle_is_torn, TEMPORARY),
    "report": Case("report.html", no_page_is_torn, (), ()),
    "convert": Case("labels.qrels", no_table_is_torn),
    "compare": Case("page.html", no_page_is_torn, (), ()),
    "audit": Case(
        "out/audit",
        no_audit_is_torn,
        (*(name for name in FAILPOINTS if "quarantine" not in name and "answers" not in name),),
        (".parquet", "audit.json"),
    ),
    "review": Case("look.labelstudio.json", no_tasks_are_torn),
    "review in": Case(
        "people",
        no_gold_is_torn,
        line=Line("review out/ecom --from judged.parquet --to people/gold.parquet --examples people/prompts"),
    ),
}


@dataclass(frozen=True)
class Bench:
    """One command in worlds of its own, and what an undisturbed call leaves and takes."""

    name: str
    case: Case
    world: Path
    folder: Path
    expected: dict[str, str]
    seconds: float

    def new(self, name: str) -> Path:
        return Path(shutil.copytree(self.world, self.folder / name, symlinks=True))

    def start(self, folder: Path, setup: Setup | None = None, *more: str) -> forks.Child:
        line = self.case.line or LINES[self.name]
        return forks.start([*line.text.split(), *more], setup=setup or inside(folder), parent=line.parent)

    def made(self, folder: Path) -> dict[str, str]:
        """The files of the target by name; of those whose bytes are promised, the digests too."""
        target = folder / self.case.target
        found = tree(target) if target.is_dir() else {"": sha256_file(target)} if target.exists() else {}
        return {name: digest if name.endswith(self.case.promised) else "any" for name, digest in found.items()}

    def others(self, folder: Path) -> dict[str, str]:
        """All that is not the target's."""
        return {name: digest for name, digest in tree(folder).items() if not name.startswith(self.case.target)}

    def judge(self, folder: Path, ended: forks.Ended) -> str | None:
        """What is wrong once a call was killed: with what it left, or with what the same command makes of that."""
        if wrong := self.case.torn(folder / self.case.target):
            return f"{wrong}, after {ended}"
        if self.others(folder) != self.others(self.world):
            return f"other files of the folder changed, after {ended}"
        more: tuple[str, ...] = ()
        for _ in range(CALLS):
            again = self.start(folder, None, *more).wait()
            # after a kill after the last step the error says that the file is there; whether it is the right one is
            # looked at below
            is_refused = again.codes == [2] and "is there already" in again.text and bool(self.made(folder))
            if again.codes in ([0], [10]) or is_refused:
                break
            more = ("--resume",) if again.codes == [3] and "--resume" in again.text else more
        if again.codes not in ([0], [10]) and not is_refused:
            return f"the same command again: {again}"
        if self.others(folder) != self.others(self.world):
            return "other files of the folder changed"
        if (found := self.made(folder)) != self.expected:
            return f"other files than an undisturbed call leaves: {differing(found, self.expected)}"
        shutil.rmtree(folder)
        return None


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of files that two trees do not have alike."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def undisturbed_bench(name: str, world: Path, folder: Path) -> Bench:
    """A command that was called twice: its promise of bytes is checked first."""
    case, found, took = CASES[name], [], []
    for number in range(2):
        trial = Bench(name, case, world, folder, {}, 0.0)
        place, begun = trial.new(f"whole-{number}"), time.monotonic()
        ended = trial.start(place).wait()
        took.append(time.monotonic() - begun)
        assert ended.codes == [0], ended
        found.append(trial.made(place))
        assert case.torn(place / case.target) is None
        assert trial.others(place) == trial.others(world)
    assert all(one == found[0] != {} for one in found)
    return Bench(name, case, world, folder, found[0], statistics.mean(took))

"""Merging again into the same folder, after its sources went on: what is there then is what a new merge would give, or
what was there.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.manifests import failpoints
from tests.reuse.conftest import Days, Row, rows_of

ARGS: dict[str, Any] = {"labeler": {"attempts": 1}, "run": {"max_failed_fraction": 1.0}}
Spoil = Callable[..., None]


class DeathError(BaseException):
    """Nothing catches it."""


class Weeks:
    """Two sources and what is merged of them.

    Args:
        kind: `parts` for two outputs of one job, `days` for two jobs over different rows.
    """

    def __init__(self, days: Days, spoil: Spoil, kind: str, *, is_new: bool = True) -> None:
        self.days, self.spoil = days, spoil
        rows = rows_of(12, 5)
        self.num_rows = len(rows)
        if not is_new:
            names = ("one", "two") if kind == "days" else ("job", "job")
            self.jobs = dict(zip(("one", "two"), (days.folder / f"{name}.yaml" for name in names), strict=True))
        elif kind == "days":
            self.jobs = {"one": days.job("one", rows[:30], **ARGS), "two": days.job("two", rows[30:], **ARGS)}
        else:
            self.jobs = dict.fromkeys(("one", "two"), days.job("job", rows, **ARGS))

    def call(self, verb: str, name: str, *spoilt: str) -> None:
        self.spoil(*spoilt)
        code, message = self.days.call(verb, self.jobs[name], "--set", f"output={self.days.out(name)}")
        assert code == 0, message

    def redo(self, name: str, *spoilt: str, shard: int = 0, chunk: int = 1) -> None:
        """As our own errors advise: a chunk's receipts are moved away, and the job is run again."""
        for receipt in (self.days.out(name) / "receipts" / f"shard-{shard:05d}").glob(f"chunk-{chunk:06d}*.json"):
            receipt.unlink()
        self.call("run", name, *spoilt)

    def merge(self, to: str = "week") -> tuple[int, Any]:
        return self.days.call("merge", self.days.out("one"), self.days.out("two"), "--to", self.days.out(to))

    def die_at(self, failpoint: str) -> None:
        """Merge, and die there; real kills are in tests/faults."""
        name, _, count = failpoint.partition(":")
        left = [int(count or 1)]

        def hit(place: str) -> None:
            left[0] -= place == name
            if not left[0]:
                raise DeathError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            with pytest.raises(DeathError):
                self.merge()

    def held(self, name: str) -> list[Row]:
        """Every row of an output as its files have it, once each, and what its manifest says of them."""
        manifest, out = self.days.manifest(name), self.days.out(name)
        found = {
            kind: [row for file in manifest[kind] for row in pq.read_table(out / file["path"]).to_pylist()]
            for kind in ("labels", "quarantine")
        }
        rows = sorted(found["labels"] + found["quarantine"], key=lambda row: int(row["row_id"]))
        assert [row["row_id"] for row in rows] == list(range(self.num_rows))
        assert manifest["rows"] == {
            "in": self.num_rows,
            "labelled": len(found["labels"]),
            "reused": 0,
            "quarantined": len(found["quarantine"]),
        }
        assert manifest["quarantined_by_status"] == dict(Counter(row["status"] for row in found["quarantine"]))
        return rows

    def is_as_a_new_merge(self) -> None:
        """The week equals what is merged into an empty folder now; the proof and the commands agree."""
        shutil.rmtree(self.days.out("new"), ignore_errors=True)
        assert self.merge("new")[0] == 0
        assert self.held("week") == self.held("new")
        code, said = self.days.call("verify", self.days.out("week"))
        assert code == 0, said
        assert said["labelled"] == self.days.manifest("new")["rows"]["labelled"]
        sources = [self.days.manifest(name) for name in ("one", "two")]
        listed = [(one["fingerprint"], one["receipts_sha256"]) for one in self.days.manifest("week")["merged_from"]]
        assert listed == [(source["fingerprint"], source["receipts_sha256"]) for source in sources]
        assert self.merge()[0] == 10
        assert self.days.call("status", self.days.out("week"))[1]["is_finished"]


@pytest.fixture(params=["parts", "days"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def weeks(days: Days, spoil: Spoil, kind: str) -> Weeks:
    return Weeks(days, spoil, kind)


@pytest.fixture(scope="module")
def begun() -> dict[str, tuple[Path, Path]]:
    """By kind: the folder of what was merged once, and a copy of it as it was then. Specs and plans hold whole paths,
    so it stays there.
    """
    return {}


@pytest.fixture
def merged(
    begun: dict[str, tuple[Path, Path]], spoil: Spoil, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Weeks:
    """Merged while each source has rows in quarantine, other ones each."""
    if kind in begun:
        folder, kept = begun[kind]
        shutil.rmtree(folder)
        shutil.copytree(kept, folder, symlinks=True)
        return Weeks(Days(folder), spoil, kind, is_new=False)
    folder, kept = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp(f"{kind}-kept") / "kept"
    weeks = Weeks(Days(folder), spoil, kind)
    weeks.call("run", "one", "kind 0")
    weeks.call("run", "two", "kind 1", "kind 2", "kind 3", "kind 4")
    assert weeks.merge()[0] == 0
    weeks.is_as_a_new_merge()
    shutil.copytree(folder, kept, symlinks=True)
    begun[kind] = folder, kept
    return weeks


def tree(out: Path) -> dict[str, bytes]:
    """What readers look at: without locks, logs and data files that no receipt names."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.suffix == ".json" and path.is_file()
    }


def test_a_source_that_was_retried_is_followed(merged: Weeks) -> None:
    """The fault that lost 102 rows of 120 under exit code 0: the retry's receipts of one source after the first ones of
    another.
    """
    merged.call("retry", "two")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()
    table = merged.days.folder / "week-labels.parquet"
    code, converted = merged.days.call("convert", merged.days.out("week"), table)
    assert code == 0, converted
    assert pq.read_metadata(table).num_rows == merged.days.manifest("week")["rows"]["labelled"]
    assert {row["status"] for row in merged.held("week") if not row["doc_id"].endswith("-0")} == {"ok"}


@pytest.mark.parametrize("kind", ["parts"])
def test_a_retry_whose_rows_are_not_those_of_the_other_source_is_followed(merged: Weeks) -> None:
    merged.call("retry", "two", "kind 1")
    merged.call("retry", "one", "kind 0")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()
    merged.call("retry", "one")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()
    assert {row["status"] for row in merged.held("week") if row["row_id"] < 30} == {"ok"}


def test_a_chunk_that_was_done_again_is_followed(merged: Weeks) -> None:
    merged.call("retry", "one", "kind 0")
    merged.merge()
    merged.redo("one", "kind 3")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()
    merged.redo("two")
    merged.redo("one", "kind 0", "kind 4")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()


@pytest.mark.parametrize("kind", ["parts"])
def test_a_chunk_that_was_done_again_with_the_same_rows_changes_nothing(merged: Weeks) -> None:
    before = tree(merged.days.out("week"))
    merged.redo("one", "kind 0")
    assert merged.merge()[0] == 10
    assert tree(merged.days.out("week")) == before


@pytest.mark.parametrize("kind", ["days"])
def test_a_retry_that_was_taken_back_is_followed(merged: Weeks) -> None:
    before = merged.held("week")
    merged.call("retry", "one")
    assert merged.merge()[0] == 0
    for receipt in merged.days.out("one").rglob("receipts/*/*.2.json"):
        receipt.unlink()
    merged.call("run", "one")
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()
    assert merged.held("week") == before


@pytest.mark.parametrize("failpoint", ["after_receipt:5", "after_manifest"])
@pytest.mark.parametrize("kind", ["days"])
def test_a_second_merge_that_is_killed_goes_on_where_it_was(merged: Weeks, failpoint: str) -> None:
    merged.call("retry", "two")
    merged.redo("one", "kind 3")
    merged.die_at(failpoint)
    verified = merged.days.call("verify", merged.days.out("week"))[0]
    assert verified == (0 if failpoint == "after_manifest" else 3)
    assert merged.merge()[0] == (10 if failpoint == "after_manifest" else 0)
    merged.is_as_a_new_merge()


@pytest.mark.parametrize("kind", ["parts"])
def test_a_source_that_goes_on_between_a_killed_merge_and_the_next_is_followed(weeks: Weeks) -> None:
    weeks.call("run", "one", "kind 0")
    weeks.call("run", "two", "kind 1", "kind 2")
    weeks.die_at("after_receipt:4")
    weeks.call("retry", "one", "kind 0")
    weeks.call("retry", "two", "kind 1")
    weeks.redo("one", "kind 4")
    assert weeks.merge()[0] == 0
    weeks.is_as_a_new_merge()


@pytest.mark.parametrize("kind", ["parts"])
def test_a_merge_that_meets_a_damaged_file_leaves_what_was_there(merged: Weeks) -> None:
    """Also where it has read others before that it would have committed."""
    days = merged.days
    before = tree(days.out("week"))
    merged.call("retry", "two")
    label = sorted(days.out("two").rglob("labels/*/*.2-*.parquet"))[-1]
    data = label.read_bytes()
    label.write_bytes(data[:-9] + b"x" + data[-8:])
    code, message = merged.merge()
    assert (code, label.name in message) == (3, True)
    assert tree(days.out("week")) == before
    assert days.call("verify", days.out("week"))[0] == 0
    label.write_bytes(data)
    assert merged.merge()[0] == 0
    merged.is_as_a_new_merge()


@pytest.mark.parametrize("kind", ["days"])
def test_a_merge_of_a_source_that_lost_a_chunk_leaves_what_was_there(merged: Weeks) -> None:
    days = merged.days
    before = tree(days.out("week"))
    merged.call("retry", "one")
    next((days.out("two") / "receipts").rglob("*.json")).unlink()
    code, message = merged.merge()
    assert (code, "not finished" in message) == (3, True)
    assert tree(days.out("week")) == before
    assert days.call("verify", days.out("week"))[0] == 0


@pytest.mark.parametrize("kind", ["parts"])
def test_a_merge_of_fewer_parts_than_before_is_refused_and_of_more_is_not(merged: Weeks) -> None:
    """Labels that only the part that is not named has would be gone."""
    days = merged.days
    before = tree(days.out("week"))
    code, message = days.call("merge", days.out("two"), "--to", days.out("week"))
    assert (code, str(days.out("one")) in message) == (3, True)
    assert tree(days.out("week")) == before
    assert days.call("merge", days.out("two"), "--to", days.out("less"))[0] == 0
    assert days.call("merge", days.out("two"), days.out("one"), "--to", days.out("less"))[0] == 0
    assert days.manifest("less")["rows"] == days.manifest("week")["rows"]


def test_a_folder_that_holds_another_run_is_left_as_it_was(days: Days) -> None:
    days.run("monday", rows_of(4, 3))
    days.run("tuesday", list(reversed(rows_of(6, 3)))[:9])
    days.run("other", rows_of(2, 2))
    before = sorted(days.out("other").rglob("*"))
    code, message = days.call("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("other"))
    assert (code, "holds another run's output" in message) == (3, True)
    assert sorted(days.out("other").rglob("*")) == before
    assert days.call("verify", days.out("other"))[0] == 0

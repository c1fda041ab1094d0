"""Answers of chunks that a stop left unfinished are kept and not asked again, and listed where they were refused; the
run that continues ends with the bytes of one that nobody stopped. What is damaged, or another run's, is asked again.
"""

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run import label
from relabel.jobs.run.answer_journal import AnswerJournal
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.manifests.asks import Answer, Distribution, EngineFacts
from relabel.manifests.plan import ChunkId
from relabel.manifests.store import LocalStore

WRITE_S = 0.02
"""So that a line of the journal is written between two polls."""
STOP_AFTER = 30
"""Answers: amid the first attempts of several chunks."""
GARBAGE: dict[str, Any] = {
    "labeler": {"name": "umbrela"},
    "engine": {"args": {"p_garbage": 0.6, "batch": 3}},
    "run": {"chunk_rows": 8, "max_failed_fraction": 1.0},
    "shards": 1,
}


def rows_of(folder: Path, output: str) -> dict[str, bytes]:
    """Labels and quarantine, by place and digest."""
    found = sorted(folder.glob(f"{output}/labels/*/*")) + sorted(folder.glob(f"{output}/quarantine/*/*"))
    return {str(path.relative_to(folder / output)): path.read_bytes() for path in found}


@pytest.fixture
def stopped(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Starts a run whose every other answer is refused, and stops it amid its chunks as a second Ctrl-C would. Its
    journal has several lines.
    """
    write_pairs()
    write_job(GARBAGE)

    def run(*options: str) -> Any:
        class Stopped(RunLoop):
            def _poll(self) -> Any:
                if self.progress.requests >= STOP_AFTER:
                    self.stop.now()
                time.sleep(WRITE_S)
                return super()._poll()

        with monkeypatch.context() as patch:
            patch.setattr(label, "RunLoop", Stopped)
            patch.setattr("relabel.jobs.run.answer_journal.APPEND_EVERY_S", 0.0)
            patch.setattr("relabel.jobs.run.loop.CHECK_EVERY_S", 0.0)
            return relabel("run", "job.yaml", *options)

    return run


def refused_in(folder: Path) -> list[Any]:
    return [one for file in folder.glob("out/ecom/refused/*/*") for one in json.loads(file.read_bytes())["refused"]]


def lines_in(folder: Path) -> list[bytes]:
    """Of the journal, one a flush."""
    (file,) = folder.glob("out/ecom/journal/*/*")
    return file.read_bytes().splitlines(keepends=True)[1:]


def answers_in(lines: list[bytes]) -> list[Any]:
    return [values for line in lines for values in json.loads(line)[1:-1]]


def test_a_stop_lists_refused_answers_and_says_what_was_open(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    done = stopped()
    assert done.code == 20
    assert " of 3 chunks; " in done.out
    assert " begun here, " in done.out
    kept_here = re.search(r"\n  kept +(\d+) answers more of this run, [1-9][\d,]* tokens, for the next one\n", done.out)
    assert kept_here is not None
    assert int(kept_here[1]) > 0
    assert "listed in out/ecom/refused" in done.err
    shown = refused_in(folder)
    assert shown
    assert {one["status"] for one in shown} <= {"format", "truncated", "refused"}
    kept = len({(values[0], values[1]) for values in answers_in(lines_in(folder))})
    assert (
        f"  kept         {kept} answers more, not asked again by the same engine\n" in relabel("status", "job.yaml").out
    )
    assert relabel("status", "job.yaml", "--output", "json").json["kept"] == kept > 0
    (file,) = folder.glob("out/ecom/journal/*/*")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]) + b"torn")
    assert 0 < relabel("status", "job.yaml", "--output", "json").json["kept"] < kept
    file.unlink()
    assert "  kept" not in relabel("status", "job.yaml").out


def test_a_label_whose_answer_was_kept_is_counted_once_in_the_warning_of_mass_outside_the_grades(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.jobs.run.notices.MOST_OUTSIDE_MASS", -1.0)
    assert stopped("--output", "json").json["this_run"]["kept"]["answers"] > 0
    for file in folder.glob("out/ecom/notices/*"):
        file.rename(file.with_name("of-another-process.json"))
    relabel("run", "job.yaml")
    labels = [pq.read_table(path) for path in folder.glob("out/ecom/labels/*/*")]
    count = sum(len(table["outside_mass"].drop_null()) for table in labels)
    assert f"({count:,} labels)" in relabel("status", "job.yaml").out


def test_the_run_that_continues_asks_none_of_them_again_and_ends_as_if_never_stopped(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    first = stopped("--output", "json").json
    shown = refused_in(folder)
    saved = len(answers_in(lines_in(folder)))
    second = relabel("run", "job.yaml", "--output", "json").json
    assert second["rows_open"] == 0
    assert first["this_run"]["kept"]["answers"] > 0
    assert "kept" not in second["this_run"]
    assert list(folder.glob("out/ecom/refused/*/*")) == []
    assert list(folder.glob("out/ecom/journal/*/*")) == []
    assert relabel("verify", "out/ecom").code == 0
    alone = relabel("run", "job.yaml", "--set", "output=out/alone", "--output", "json").json
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")
    assert saved > len(shown) > 0, "answers that were accepted are kept too"
    failed = sum(one["finish"] not in ("stop", "length") for one in shown)
    assert first["this_run"]["in_vain"]["requests"] == failed
    assert second["this_run"]["in_vain"]["requests"] == 0
    # what the labels took is counted, whichever execution asked
    assert alone["this_run"]["requests"] == first["this_run"]["requests"] + second["this_run"]["requests"]
    assert alone["stages"] == second["stages"]


def test_an_output_stopped_twice_uses_both_journals(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped()
    monkeypatch.setattr(f"{__name__}.STOP_AFTER", 4)
    stopped()
    journals = list(folder.glob("out/ecom/journal/*/*"))
    assert len(journals) == 2
    kept = [file.read_bytes().splitlines()[1:] for file in journals]
    keys = [{key for _, key, *_ in answers_in(lines)} for lines in kept]
    assert not keys[0] & keys[1], "what was kept is not asked again"
    assert relabel("run", "job.yaml").code == 0
    relabel("run", "job.yaml", "--set", "output=out/alone")
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")


# Damage.


def change_text(data: bytes, number: int) -> bytes:
    """As `sed` would: another grade in one line."""
    lines = data.splitlines(keepends=True)
    values = json.loads(lines[number])
    values[1][2] = "##final score: 3"
    lines[number] = json.dumps(values).encode() + b"\n"
    return b"".join(lines)


def reseal(data: bytes, number: int) -> bytes:
    """Likewise, with a digest of the line alone."""
    lines = change_text(data, number).splitlines(keepends=True)
    *values, _ = json.loads(lines[number])
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    lines[number] = json.dumps([*values, digest]).encode() + b"\n"
    return b"".join(lines)


def tear(data: bytes, number: int) -> bytes:
    """A kill amid a write."""
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:number], lines[number][: len(lines[number]) // 2]])


def swap_keys(data: bytes, number: int) -> bytes:
    """The answer of another row."""
    lines = data.splitlines(keepends=True)
    mine, other = (json.loads(lines[place])[1][1].encode() for place in (number, number - 1 or number + 1))
    lines[number] = lines[number].replace(mine, other)
    return b"".join(lines)


def flip_a_bit(data: bytes, number: int) -> bytes:
    changed = bytearray(data)
    changed[random.Random(number).randrange(len(data))] ^= 1
    return bytes(changed)


def cut_head(data: bytes, number: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[1:])


def other_plan(data: bytes, number: int) -> bytes:
    return data.replace(b'"fingerprint": "', b'"fingerprint": "0', 1)


def noise(data: bytes, number: int) -> bytes:
    return random.Random(number).randbytes(len(data))


DAMAGES = (change_text, reseal, tear, swap_keys, flip_a_bit, cut_head, other_plan, noise)


def test_what_is_damaged_is_asked_again(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    stopped()
    (file,) = folder.glob("out/ecom/journal/*/*")
    whole = file.read_bytes()
    num_lines = len(lines_in(folder))
    assert num_lines >= 3
    relabel("run", "job.yaml", "--set", "output=out/alone")
    expected = rows_of(folder, "out/alone")
    before = {path: path.read_bytes() for path in (folder / "out/ecom").rglob("*") if path.is_file()}
    rng = random.Random(5)
    for damage in DAMAGES:
        for number in rng.sample(range(1, num_lines + 1), 3):
            for path in (folder / "out/ecom").rglob("*"):
                if path.is_file():
                    path.unlink()
            for path, data in before.items():
                path.write_bytes(data)
            file.write_bytes(damage(whole, number))
            assert relabel("run", "job.yaml").code == 0, (damage, number)
            assert rows_of(folder, "out/ecom") == expected, (damage, number)
            assert relabel("verify", "out/ecom").code == 0


def test_others_files_are_left_alone(stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path) -> None:
    stopped()
    (file,) = folder.glob("out/ecom/journal/*/*")
    (listed, *_) = folder.glob("out/ecom/refused/*/*")
    os.mkfifo(file.with_name("w-0000.jsonl"))
    foreign = [file.parent.parent / "README.txt", file.with_name("x"), listed.with_name("chunk-one.json")]
    for path in foreign:
        path.write_text("somebody's")
    assert relabel("run", "job.yaml").code == 0
    assert relabel("verify", "out/ecom").code == 0
    assert all(path.read_text() == "somebody's" for path in foreign)


# The record itself.


ANSWERS = st.builds(
    Answer,
    st.just(-1),
    st.text(st.characters()),
    st.sampled_from(["stop", "length"]),
    st.dictionaries(
        st.text(max_size=5),
        st.builds(Distribution, st.tuples(st.floats(), st.floats(0, 1)), st.floats(allow_nan=False)),
        max_size=2,
    ),
    prompt_tokens=st.integers(0, 10**9),
    output_tokens=st.integers(0, 10**9),
    cached_tokens=st.integers(0, 10**9),
    flags=st.tuples(st.text(max_size=8)),
    raw=st.text(st.characters()),
)
FACTS = EngineFacts("made-up", "1", "none", "0", notes=("so",), details={"ids": [1, 2]})


def opened(store: LocalStore, **changes: Any) -> AnswerJournal:
    values: dict[str, Any] = {"fingerprint": "f", "engine": FACTS, "worker": "w"} | changes
    return AnswerJournal(store, **values, attempts=lambda _: {})


@given(answers=st.lists(ANSWERS, min_size=1, max_size=4))
def test_an_answer_is_kept_as_it_was(answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> None:
    store = LocalStore(tmp_path_factory.mktemp("journal"))
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    work.fresh = [(bytes([number]) * 16, answer, None) for number, answer in enumerate(answers)]
    journal.flush(lambda *_: True)
    journal.close()
    again = ChunkWork(ChunkId(0, 3), [])
    opened(store).begins(again)
    # repr: NaN is not equal to itself
    assert repr(again.known) == repr({bytes([number]) * 16: answer for number, answer in enumerate(answers)})


def test_damage_to_one_line_costs_the_answers_of_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    for flush in range(3):
        work.fresh = [(bytes([flush, number]) * 8, Answer(-1, f"yes {number}", "stop"), None) for number in range(4)]
        journal.flush(lambda *_: True)
    journal.close()
    (file,) = tmp_path.glob("journal/*/*")
    file.write_bytes(change_text(file.read_bytes(), 2))
    again = ChunkWork(ChunkId(0, 3), [])
    opened(store).begins(again)
    assert {key[0] for key in again.known} == {0, 2}
    assert len(again.known) == 8


def test_a_file_of_the_first_version_is_used(tmp_path: Path) -> None:
    """It holds an answer a line."""
    store = LocalStore(tmp_path)
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    grade = {"grade": Distribution((0.1, 0.9), 1e-9)}
    answers = {bytes([number]) * 16: Answer(-1, f"yes {number}", "stop", grade) for number in range(3)}
    work.fresh = [(key, answer, None) for key, answer in answers.items()]
    journal.flush(lambda *_: True)
    journal.close()
    (file,) = tmp_path.glob("journal/*/*")
    header, record = file.read_bytes().splitlines()
    first = sealed([{**json.loads(header)[0], "version": 1}], b"")
    written = json.loads(record)[1:-1]
    for values in written:
        values[7] = grade
    lines = [sealed(values, first) for values in written]
    file.write_bytes(b"".join([first, *lines]))
    again = ChunkWork(ChunkId(0, 3), [])
    opened(store).begins(again)
    assert again.known == answers


def sealed(values: list[Any], before: bytes) -> bytes:
    """A line as the first version wrote it: with the sha256 of what is before it and of itself without that."""
    digest = hashlib.sha256(before + json.dumps(values).encode()).hexdigest()
    return json.dumps([*values, digest]).encode() + b"\n"


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "another"}, {"engine": EngineFacts("made-up", "2", "none", "0")}],
    ids=["plan", "engine"],
)
def test_answers_of_another_plan_or_engine_are_asked_again(changes: dict[str, Any], tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    work.fresh = [(bytes(16), Answer(-1, "yes", "stop"), None)]
    journal.flush(lambda *_: True)
    journal.close()
    again = ChunkWork(ChunkId(0, 3), [])
    opened(store, **changes).begins(again)
    assert again.known == {}


def test_a_disk_has_an_answer_after_half_a_second(tmp_path: Path) -> None:
    """With a turn of the loop between, a kill costs less than a second's answers."""
    store = LocalStore(tmp_path)
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    work.fresh = [(bytes(16), Answer(-1, "yes", "stop"), None)]
    time.sleep(0.5)
    journal.update(lambda *_: True)
    journal.close()
    again = ChunkWork(ChunkId(0, 3), [])
    opened(store).begins(again)
    assert again.known.keys() == {bytes(16)}


def test_an_answer_in_doubt_is_kept_once_the_engine_was_seen_to_work(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    work = ChunkWork(ChunkId(0, 3), [])
    journal = opened(store)
    journal.begins(work)
    work.fresh = [(bytes(16), Answer(-1, "!!!", "stop"), ("score", 3))]
    journal.flush(lambda stage, number: False)
    assert len(work.fresh) == 1
    journal.flush(lambda stage, number: (stage, number) == ("score", 3))
    assert work.fresh == []
    journal.close()


def test_a_file_goes_once_its_chunks_are_committed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    works = [ChunkWork(ChunkId(0, number), []) for number in range(2)]
    journal = opened(store)
    for work in works:
        journal.begins(work)
        work.fresh = [(bytes(16), Answer(-1, "yes", "stop"), None)]
    journal.flush(lambda *_: True)
    journal.commits(works[0])
    journal.flush(lambda *_: True)
    journal.commits(works[1])
    journal.close()
    assert store.names("journal") == []

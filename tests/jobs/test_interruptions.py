"""SIGTERM and Ctrl-C end a command whatever a library makes of the KeyboardInterrupt, and nothing that went on after it
takes a place.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relabel.distill.training.checkpoints import commit
from relabel.export.bundles import switch
from relabel.jobs.commands.options import sigterm_ends
from relabel.jobs.commands.train import says_how_to_continue
from relabel.jobs.files import written
from relabel.jobs.run.stop import StartStopped, Stop, start_unless_stopped
from relabel.manifests.files import Storage
from relabel.manifests.process import Terminated, check_interrupted, draining, is_stop_wished


def swallow(number: int) -> None:
    """A library that goes on as if nothing had come."""
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)


def make_it_another(number: int) -> None:
    """An import of a C extension."""
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt as exc:
        raise ImportError("initialization failed") from exc


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """The signal; Ctrl-C is heeded also where this suite was begun in the background."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield request.param
    signal.signal(signal.SIGINT, earlier)


def test_an_error_that_a_library_makes_of_it_is_an_interruption(number: int) -> None:
    with pytest.raises(KeyboardInterrupt) as end, sigterm_ends():
        make_it_another(number)
    assert isinstance(end.value, Terminated) == (number == signal.SIGTERM)


def to_a_file(place: Path) -> None:
    with written(str(place), Storage()) as file:
        file.write_text("odd")
        swallow(signal.SIGTERM)


def to_a_bundle(place: Path) -> None:
    part = place.with_name("part")
    part.mkdir()
    swallow(signal.SIGTERM)
    switch(part, place)


def to_a_checkpoint(place: Path) -> None:
    part = place.with_name(".part-1")
    part.mkdir()
    swallow(signal.SIGTERM)
    commit(part, place)


@pytest.mark.parametrize("make", [to_a_file, to_a_bundle, to_a_checkpoint])
def test_what_went_on_after_it_takes_no_place(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_ends():
        make(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_next_command_begins_again(tmp_path: Path, number: int) -> None:
    with sigterm_ends():
        swallow(number)
        with pytest.raises(KeyboardInterrupt):
            check_interrupted()
    check_interrupted()
    with written(str(tmp_path / "a"), Storage()) as file:
        file.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"


def drain(number: int, *, times: int, done: list[str]) -> None:
    with says_how_to_continue("out", is_first=False), draining():
        for _ in range(times):
            os.kill(os.getpid(), number)
        assert is_stop_wished()
        done.append("checkpoint")


def tidy(number: int, *, done: list[str]) -> None:
    with says_how_to_continue("out", is_first=False):
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            done.append("tidied")


def test_where_a_launcher_repeats_it_a_signal_is_no_impatience(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Systemd and Slurm signal torchrun and its processes, and torchrun passes on what it got: the second signal cut
    the drain short, and no checkpoint was left.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        drain(number, times=3, done=done)
    with pytest.raises(KeyboardInterrupt):
        tidy(number, done=done)
    assert done == ["checkpoint", "tidied"]


def test_without_a_launcher_the_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt) as end:
        drain(number, times=1, done=done)
    assert isinstance(end.value, Terminated) == (number == signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        drain(number, times=2, done=done)
    assert done == ["checkpoint"]


def test_what_a_launcher_sends_to_all_where_one_has_ended_does_not_cut_off_what_this_one_has_to_say() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with pytest.raises(ImportError), sigterm_ends(has_launcher=True):
            raise ImportError("no such module")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_engine_whose_start_makes_an_error_of_a_stop_is_not_started() -> None:
    stop = Stop()

    def start() -> None:
        stop.drain("SIGTERM")
        stop.is_starting = False  # as the handler does before it raises
        try:
            raise StartStopped
        except StartStopped as exc:
            raise ImportError("initialization failed") from exc

    assert start_unless_stopped(stop, start) is None

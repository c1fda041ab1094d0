"""`relabel conform` names a server's mistake: each of the table is planted and named by its own name, on other scales
and with others; a right server is never accused. That each name is of what it says is for `test_conform.py`, which
plants mistakes without the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from relabel.export.conform import Conformity, conform
from relabel.export.loader import Student
from relabel.export.mistakes import (
    RIGHT,
    SAME,
    Comparison,
    Mistake,
    Steps,
    Subject,
    explain,
    longest_of,
    mistakes_of,
)


class Server:
    """Answers by steps, in this process."""

    api = "cohere"

    def __init__(
        self, subject: Subject, steps: Steps, scale: Callable[[np.ndarray], np.ndarray] = lambda scores_N: scores_N
    ) -> None:
        self._subject, self._steps, self._scale = subject, steps, scale
        self.shifts = 0.0
        self.requests: list[list[tuple[str, str]]] = []

    def scores(self, query: str, documents: Sequence[str]) -> np.ndarray:
        request = [(query, document) for document in documents]
        self.requests.append(request)
        scores_N = self._steps.scores(self._subject, [request])
        right_N = RIGHT.scores(self._subject, [request])
        self.shifts += float(np.abs(scores_N - right_N).max())
        return self._scale(scores_N)


@pytest.fixture(scope="module")
def encoder(bundle: Path) -> Subject:
    return Subject(Student(bundle, provider="cpu"))


@pytest.fixture(scope="module")
def decoder_subject(decoder_bundle: Path) -> Subject:
    return Subject(Student(decoder_bundle, provider="cpu"))


def asked_of(server: Server, subject: Subject) -> Conformity:
    with mock.patch("relabel.export.conform.BATCH", 16):
        return conform(subject.student.folder, server)  # type: ignore[arg-type]


def served(subject: Subject, *mistakes: Mistake, scale: Any = lambda scores_N: scores_N) -> tuple[Conformity, float]:
    """What conform says of a server with these mistakes, and how far they move its scores."""
    server = Server(subject, replace(RIGHT, **{one.step: one.done for one in mistakes}), scale)
    found = asked_of(server, subject)
    return found, server.shifts


def named(subject: Subject, *names: str) -> list[Mistake]:
    table = {one.name: one for one in mistakes_of(subject, 2 * subject.encoder.max_tokens)}
    return [table[name] for name in names]


def check_table(subject: Subject) -> list[str]:
    """Every mistake is named where it moves a score of what conform asks; the names of those that move none."""
    right = Server(subject, RIGHT)
    assert asked_of(right, subject).verdict == "equal"
    requests = right.requests
    right_N = RIGHT.scores(subject, requests)
    idle = []
    for mistake in mistakes_of(subject, longest_of(subject, requests)):
        try:
            served_N = replace(RIGHT, **{mistake.step: mistake.done}).scores(subject, requests)
        except Exception as exc:  # such a server could not answer, either
            if "ONNXRuntimeError" not in str(exc):
                raise
            continue
        apart_N = np.abs(served_N - right_N)
        if apart_N.max() < SAME:
            idle.append(mistake.name)
            continue
        compared = Comparison(requests, served_N, apart_N, np.ones(len(apart_N), dtype=bool), most=5e-3)
        found = explain(subject, compared, combines=False)
        assert found is not None, mistake.name
        assert mistake.name in found.name.split("; or "), (mistake.name, found)
        assert found.explained == pytest.approx(1.0, abs=1e-6)
    return idle


def test_every_mistake_of_an_encoder_is_named(encoder: Subject) -> None:
    idle = check_table(encoder)
    assert len(idle) <= 3, idle


def test_every_mistake_of_a_decoder_is_named(decoder_subject: Subject) -> None:
    idle = check_table(decoder_subject)
    assert len(idle) <= 3, idle


SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the log-odds of the expected grade": lambda scores_N: np.log(scores_N) - np.log1p(-scores_N),
    "the expected grade from 0 to 2": lambda scores_N: 2 * scores_N,
}
ON_SCALES = [
    "query and document are swapped",
    "the query is missing",
    "long texts are cut on the left",
    "token types are left out",
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ON_SCALES)
def test_a_mistake_on_another_scale_is_named_with_it(name: str, scale: str, encoder: Subject) -> None:
    found, _ = served(encoder, *named(encoder, name), scale=SCALES[scale])
    assert (found.verdict, found.reason) == ("different", name)
    assert scale in found.scale


TOGETHER = [
    ("query and document are swapped", "token types are left out"),
    ("token types are left out", "texts are cut at 16 tokens, not at 32"),
    ("special tokens are left out", "the probability of grade 1 alone"),
]


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_two_mistakes_are_named_together(names: tuple[str, str], encoder: Subject) -> None:
    found, _ = served(encoder, *named(encoder, *names))
    assert found.verdict == "different"
    assert all(name in found.reason for name in names), found.reason


def test_a_cut_on_the_left_is_not_equal(encoder: Subject) -> None:
    """Though it moves no score by more than a change of precision may."""
    found, _ = served(encoder, *named(encoder, "long texts are cut on the left"))
    assert (found.verdict, found.reason) == ("different", "long texts are cut on the left")


@pytest.mark.parametrize("noise", [0.0, 1e-6, 3e-4, 2e-3])
@pytest.mark.parametrize("seed", range(3))
def test_a_right_server_is_equal_whatever_its_precision_moves(noise: float, seed: int, encoder: Subject) -> None:
    random = np.random.default_rng(seed)
    moved: dict[bytes, float] = {}

    def by_precision(scores_N: np.ndarray) -> np.ndarray:
        for score in scores_N:
            moved.setdefault(score.tobytes(), float(np.clip(random.normal(), -2, 2)))
        return scores_N + noise * np.array([moved[score.tobytes()] for score in scores_N])

    found, _ = served(encoder, scale=by_precision)
    assert (found.verdict, found.reason, found.worst) == ("equal", "", []), found

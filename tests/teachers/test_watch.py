"""What is reward hacking, and what is not, on curves that a human can read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.teachers.watch import WATCHED, RewardWatch, WatchSection
from relabel.distill.training.curves import Curve

DEFAULTS = {"window": 2, "patience": 2}


def curve_of(figure: str, values: list[float], *, evaluated: tuple[int, ...] = ()) -> Curve:
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, "train", {figure: value})
        if step in evaluated:
            curve.add(step, "dev", {"reward": 0.5})
    return curve


def begins(figure: str, values: list[float], *, gold_share: float = 0.4, **changes: Any) -> list[tuple[str, int]]:
    watch = RewardWatch(WatchSection(**{**DEFAULTS, **changes}), gold_share=gold_share)
    return [(one.key, one.start) for one in watch.episodes(curve_of(figure, values))]


@pytest.mark.parametrize(
    ("figure", "values", "wanted"),
    [
        ("response_tokens", [10, 10, 20, 40, 40], [("length", 4)]),
        ("response_tokens", [40, 40, 20, 6, 6], [("length", 4)]),  # 13 is a third
        ("response_tokens", [10, 20, 30, 40, 20], []),
        ("no_evidence_rate", [0.1, 0.2, 0.6, 0.6, 0.1, 0.1, 0.1], [("no_evidence", 4)]),
        ("top_grade_share", [0.5, 0.9, 1.0, 1.0], [("one_grade", 3)]),
        ("format_rate", [0.2, 0.6, 0.8, 1.0, 0.6, 0.6, 0.9], [("format", 6)]),
        ("format_rate", [0.1, 0.1, 0.3, 0.9], []),
    ],
)
def test_an_episode_begins_where_a_windows_mean_passes_its_threshold(
    figure: str, values: list[float], wanted: list[tuple[str, int]]
) -> None:
    assert begins(figure, values) == wanted


def test_a_figure_that_swings_about_its_threshold_is_one_episode() -> None:
    swinging = [0.0, 0.0, 0.6, 0.6, 0.3, 0.9, 0.0, 0.0, 0.9, 0.9]
    assert begins("no_evidence_rate", swinging) == [("no_evidence", 4), ("no_evidence", 10)]


def test_skewed_gold_raises_the_share_that_one_grade_may_have() -> None:
    assert begins("top_grade_share", [0.5, 0.5, 0.97, 0.97], gold_share=0.96) == []
    assert begins("top_grade_share", [0.5, 0.5, 0.99, 0.99], gold_share=0.96) == [("one_grade", 4)]


def test_a_warning_that_outlasts_the_evaluations_ends_training_and_one_from_the_start_does_not() -> None:
    watch = RewardWatch(WatchSection(**DEFAULTS), gold_share=0.4)
    values = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert watch.ended_by(curve_of("no_evidence_rate", values, evaluated=(1, 2, 3))) is None
    ended = watch.ended_by(curve_of("no_evidence_rate", values, evaluated=(2, 3, 5)))
    assert ended is not None
    assert (ended.start, ended.key) == (3, "no_evidence")
    from_the_start = curve_of("no_evidence_rate", [1.0] * 6, evaluated=(1, 2, 3, 4, 5, 6))
    assert watch.ended_by(from_the_start) is None
    assert not watch.is_warned(from_the_start)
    assert [one.start for one in watch.episodes(from_the_start)] == [2]
    only_warns = RewardWatch(WatchSection(window=2, patience=None), gold_share=0.4)
    assert only_warns.ended_by(curve_of("no_evidence_rate", values, evaluated=(2, 3, 5))) is None


FIGURES = ("reward", *(figure for figure, _ in WATCHED.values()))
STEPS = st.lists(st.dictionaries(st.sampled_from(FIGURES), st.floats(0, 1)), max_size=30)


@given(steps=STEPS, window=st.integers(1, 4), evaluated=st.sets(st.integers(1, 30)), taken_up=st.integers(0, 30))
def test_a_curve_that_is_read_as_it_grows_has_the_episodes_of_one_that_is_read_whole(
    steps: list[dict[str, float]], window: int, evaluated: set[int], taken_up: int
) -> None:
    """Also where a training goes on from an earlier step, with the points of its checkpoint."""
    section = WatchSection(window=window, patience=2)
    growing, curve = RewardWatch(section, gold_share=0.4), Curve()

    def go(first: int) -> None:
        for step, values in enumerate(steps[first - 1 :], start=first):
            curve.add(step, "train", values)
            if step in evaluated:
                curve.add(step, "dev", {"reward": 0.5})
            fresh = RewardWatch(section, gold_share=0.4)
            assert growing.episodes(curve) == fresh.episodes(Curve(list(curve.points)))
            assert growing.ended_by(curve) == fresh.ended_by(curve)

    go(1)
    curve.points = [point for point in curve.points if point[0] <= taken_up]
    go(min(taken_up, len(steps)) + 1)

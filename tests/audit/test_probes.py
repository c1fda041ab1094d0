"""Probes change what they say, and the figures are those of a plain loop."""

import numpy as np
import pytest

from relabel.jobs.audit import Moves, move_figures
from relabel.jobs.probes import PROBES, forged_answer, judge_of
from relabel.labelers.registry import Labeler, labeler_class
from relabel.manifests.asks import Answer
from relabel.manifests.labels import Pair
from relabel.manifests.specs import validate_spec

PAIR = Pair(7, "q", "wool socks for winter", "d", "Warm socks made of merino wool. Size 40 to 44.")


def labeler_of(name: str) -> Labeler:
    kind = labeler_class(name)
    return kind(validate_spec(kind.Options, {"name": name}, where="a test"))


@pytest.mark.parametrize("name", ["umbrela", "r1", "graph-grpo"])
def test_a_forged_answer_is_one_that_the_labeler_would_take_for_its_highest_grade(name: str) -> None:
    labeler = labeler_of(name)
    judge = judge_of(labeler, 4)
    conversation = labeler.label(PAIR)
    next(conversation)
    with pytest.raises(StopIteration) as end:
        conversation.send(Answer(0, forged_answer(PAIR, judge), "stop"))
    assert str(end.value.value.grade) == judge.top


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_leaves_the_ids_and_the_document_or_its_words(probe: object) -> None:
    probe = next(one for one in PROBES if one is probe)
    judge = judge_of(labeler_of("direct"), 4)
    changed = probe.change(PAIR, judge)
    assert changed is not None
    assert (changed.row_id, changed.query_id, changed.doc_id) == (7, "q", "d")
    assert sorted(changed.query.split()) == sorted(PAIR.query.split())
    has_document = " ".join(PAIR.document.split()) in " ".join(changed.document.split())
    assert has_document == (probe.name != "lorem")


def test_nothing_is_changed_where_there_is_nothing_to_change() -> None:
    judge = judge_of(labeler_of("direct"), 4)
    empty = Pair(0, "q", "socks", "d", "")
    nothing = {probe.name for probe in PROBES if probe.change(empty, judge) is None}
    assert nothing == {"repeated", "truncation", "query-order", "whitespace"}


def test_figures_are_those_of_a_plain_loop_and_intervals_are_over_queries() -> None:
    random = np.random.default_rng(5)
    query_of = random.integers(0, 30, size=200)
    before = random.random(200) * 3
    query_step = random.normal(size=30)
    after = before + 0.2 + query_step[query_of]
    after[::9] = np.nan
    query_ids = [f"q{number}" for number in query_of]
    moves = {"stuffing": Moves(before, after)}
    figures = move_figures(moves, {"stuffing": "up"}, query_ids, step=0.3, seed=7)
    known = [(first, second) for first, second in zip(before, after, strict=True) if second == second]
    steps = [second - first for first, second in known]
    mean = figures["stuffing.moves"]
    moved = figures["stuffing.moved"]
    assert mean.value == pytest.approx(sum(steps) / len(steps))
    assert moved.value == pytest.approx(sum(step >= 0.3 for step in steps) / len(steps))
    assert mean.over == moved.over == len(known)
    of_rows = 2 * 1.96 * np.std(steps) / np.sqrt(len(steps))
    assert mean.high is not None
    assert mean.low is not None
    assert mean.high - mean.low > 1.5 * of_rows  # rows of a query move together

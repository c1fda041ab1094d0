"""`variants`: what is asked of it, and what its answers become."""

from __future__ import annotations

import pytest

from relabel.manifests.asks import Ask
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.schemas import LabelRow
from tests.labelers.driving import ROSES, labeler, replay, reply, run_loop


def variants_of(*lines: str, **options: int) -> Label:
    answer = reply("<think>t</think><queries>\n" + "\n".join(lines) + "</queries>")
    label, _ = replay(labeler("variants", **options), ROSES, [answer])
    assert label is not None
    return label


def first_ask(pair: Pair, name: str = "variants") -> Ask:
    return next(labeler(name).label(pair))


def test_variants_are_asked_once_a_query_and_written_to_every_row() -> None:
    pairs = [Pair(i, f"q{i % 2}", f"prune roses of kind {i % 2}", f"d{i}", f"Document {i}.") for i in range(20)]
    rows, asks = run_loop("variants", pairs)
    assert (len(rows), asks) == (20, 2)
    for parity in (0, 1):
        (held,) = {tuple(row.columns["variants"]) for row in rows[parity::2] if isinstance(row, LabelRow)}
        assert 2 <= len(held) <= 3


def test_variants_are_kept_as_written_and_repetitions_and_the_question_go() -> None:
    label = variants_of(" Pruning  CLIMBING roses", "When to prune?", "when  to prune?", "rose care", max_variants=5)
    assert label.columns == {"variants": ["When to prune?", "rose care"]}
    assert (label.grade, label.distribution, label.reasoning) == (None, None, "t")


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("one",),
        ("one", "ONE"),
        ("one", "pruning climbing  ROSES"),
        ("one", "", " \t"),
        ("a", "b", "c", "d"),
    ],
)
def test_fewer_than_two_variants_or_more_than_were_asked_for_are_no_label(lines: tuple[str, ...]) -> None:
    with pytest.raises(VerdictError) as caught:
        variants_of(*lines)
    assert caught.value.status == "format"


def test_what_earlier_rounds_left_is_shown_where_it_is_there_and_as_data() -> None:
    bare = first_ask(ROSES)
    assert bare.messages[1].fields == ("query",)
    asked = first_ask(ROSES._replace(columns={"aspect": "<|im_end|>", "previous_queries": ("a", "{{ b }}")}))
    assert asked.messages[1].fields == ("query", "aspect", "previous_queries", "previous_queries")
    assert asked.messages[1].parts[3::2] == ("<|im_end|>", "a", "{{ b }}")
    empty = first_ask(ROSES._replace(columns={"aspect": "", "previous_queries": ()}))
    assert empty.messages == bare.messages


def test_votes_on_an_answer_about_a_query_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples"):
        labeler("variants", samples=3)

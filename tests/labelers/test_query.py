"""`query`: what is taken for a search and what is asked for again."""

import pytest

from relabel.manifests.errors import VerdictError
from tests.labelers.driving import ROSES, labeler, replay, reply, walk
from tests.labelers.driving import fake as fake_engine


def test_a_query_is_one_line_without_white_space_around_it_and_no_grade() -> None:
    label, _ = replay(labeler("query"), ROSES, [reply("<query>\n  when to  cut\troses </query>\n")])
    assert (label.columns, label.grade, label.distribution) == ({"made_query": "when to cut roses"}, None, None)


@pytest.mark.parametrize("said", ["", " ", "?! –", "one two three four five", "rose care\npruning", "<query>"])
def test_what_is_no_short_search_is_out_of_format(said: str) -> None:
    with pytest.raises(VerdictError) as caught:
        replay(labeler("query", max_words=4), ROSES, [reply(f"<query>{said}</query>")])
    assert caught.value.status == "format"


def test_the_document_is_all_that_is_shown_of_a_pair() -> None:
    _, (ask,), _ = walk(labeler("query"), ROSES._replace(query="SECRET"), fake_engine())
    assert [name for message in ask.messages for name in message.fields] == ["document"]
    assert not any("SECRET" in part for message in ask.messages for part in message.parts)


def test_the_fake_engine_makes_a_short_search_of_tags_too() -> None:
    pair = ROSES._replace(document="0<score>2</score><score >2</score >")
    for seed in range(16):
        label, _, _ = walk(labeler("query"), pair, fake_engine(), seed)
        assert label.columns["made_query"]

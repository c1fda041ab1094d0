import pytest
from helpdesk.labeler import Resolves, ResolvesOptions

from relabel.manifests.asks import Answer
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Pair

TICKET = Pair(0, "t1", "my lamp does not start", "a1", "A lamp that is new.\n\nHold the button for five seconds.")


def read(text):
    turns = Resolves(ResolvesOptions()).label(TICKET)
    next(turns)
    with pytest.raises(StopIteration) as end:
        turns.send(Answer(0, text, "stop"))
    return end.value.value


def test_the_step_is_a_place_in_the_article():
    label = read("<step>Hold the button</step><score>2</score>")
    assert label.grade == 2
    assert TICKET.document[label.evidence[0].start : label.evidence[0].end] == "Hold the button"


def test_a_step_that_the_article_does_not_hold_is_refused():
    with pytest.raises(VerdictError):
        read("<step>Buy another lamp.</step><score>2</score>")

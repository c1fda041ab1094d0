"""`umbrela` and `r1`: reasoning and a grade, and nothing else becomes one; five samples give the vote and the mean."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label
from relabel.manifests.receipts import ChunkId
from relabel.manifests.schemas import LabelRow
from relabel.manifests.specs import validate_spec
from tests.labelers.driving import ROSES, fake, labeler, reply, walk
from tests.strategies import contents_of, mutated, written

NAMES = ("umbrela", "r1")
DIST = {"score": Distribution((0.1, 0.2, 0.7), 0.01)}


def label_of(name: str, text: str, **fields: object) -> Label:
    generator = labeler(name).label(ROSES)
    next(generator)
    with pytest.raises(StopIteration) as end:
        generator.send(reply(text, **fields))
    return end.value.value


@pytest.mark.parametrize("name", NAMES)
def test_a_label_holds_the_grade_the_reasoning_and_the_distribution(name: str) -> None:
    label = label_of(
        name, "<think>Two of 3.</think>\n<score> 1 </score>\n", distributions=DIST, flags=("document_truncated",)
    )
    assert (label.grade, label.reasoning, label.distribution, label.flags) == (
        1,
        "Two of 3.",
        DIST["score"],
        ["document_truncated"],
    )
    assert (label.intent, label.evidence, label.columns) == (None, (), {})
    assert label_of(name, "<think></think><score>0</score>").flags == ["no_distribution"]


@pytest.mark.parametrize(("name", "grades"), [("umbrela", 4), ("r1", 3)])
def test_the_default_scale_is_the_papers(name: str, grades: int) -> None:
    (ask,) = labeler(name).probe()
    assert ask.decisions == (("score", "<score>", tuple(map(str, range(grades)))),)
    assert (ask.prefill, ask.shared_by, ask.stage) == ("", None, "verdict")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "<score>2</score>",
        "<score>2</score><think>So 2.</think>",
        "<think>It is a 2.</think>",
        "<think>Fine.</think>2",
        "<think>Fine.</think><score>9</score>",
        "<think>Fine.</think><score>1 or 2</score>",
        "<think>Fine.</think><score>1</score><score>2</score>",
        "<think>Fine.</think>\nFinal: <score>2</score>",
        "##final score: 2",
    ],
)
def test_anything_but_the_two_sections_is_no_label(name: str, text: str) -> None:
    generator = labeler(name).label(ROSES)
    next(generator)
    with pytest.raises(VerdictError) as caught:
        generator.send(reply(text, distributions=DIST))
    assert caught.value.status == "format"


@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_verdict_is_read_as_written_and_a_mutated_one_is_that_grade_or_none(name: str, data: st.DataObject) -> None:
    (ask,) = labeler(name).probe()
    assert ask.format is not None
    contents = data.draw(contents_of(ask.format))
    text = data.draw(written(ask.format, contents))
    assert label_of(name, text).grade == int(contents["score"])
    generator = labeler(name).label(ROSES)
    next(generator)
    with pytest.raises((StopIteration, VerdictError)) as end:
        generator.send(reply(data.draw(mutated(text))))
    if isinstance(end.value, StopIteration):
        assert 0 <= end.value.value.grade < len(ask.decisions[0].labels)


def test_umbrela_leads_by_steps_and_r1_does_not() -> None:
    systems = {name: labeler(name, grades=3).probe()[0].messages[0].text for name in NAMES}
    assert "1. " in systems["umbrela"]
    assert "4. " in systems["umbrela"]
    assert len(systems["r1"]) < len(systems["umbrela"]) / 2


@pytest.mark.parametrize("grades", range(2, 11))
def test_umbrelas_instructions_name_grades_of_its_own_scale(grades: int) -> None:
    """UMBRELA's "important, but with extra information" is the grade below the highest: 2 of 0 to 3, and 1 where R3A
    has 0 to 2. With two grades, "answers at least in part" leaves no place for either.
    """
    systems = {
        steps: labeler("umbrela", grades=grades, steps=steps).probe()[0].messages[0].text
        for steps in ("umbrela", "r3a")
    }
    for system in systems.values():
        named = [int(grade) for grade in re.findall(r"[Gg]rade (?:is )?(\d)", system)]
        assert named == {2: [], 3: [1, 2, 0]}.get(grades, [1, grades - 2, grades - 1, 0])
        assert "middle" not in system
        assert ("nothing else" in system) == (grades > 2)
        assert "\n\n\n" not in system
    assert ["trusted" in system for system in systems.values()] == [True, False]


@pytest.mark.parametrize("name", NAMES)
def test_what_pairs_share_comes_first_and_the_document_last_but_for_a_closing_line(name: str) -> None:
    _, asks, _ = walk(labeler(name), ROSES, fake())
    system, user = asks[0].messages
    assert system.fields == ()
    assert user.fields == ("query", "document")
    assert user.parts[-1].count(".") <= 2
    assert len(user.parts[-1]) < 80


def test_five_samples_give_the_vote_and_the_mean() -> None:
    """`samples: 5` through the run loop: the row is the majority's grade and the mean of the five distributions, and
    keeps all five.
    """
    options = validate_spec(
        labeler_class("umbrela").Options, {"name": "umbrela", "samples": 5, "temperature": 1.0}, where="test"
    )
    pairs = [ROSES._replace(row_id=i, query_id=f"q{i}", document=f"{i} {ROSES.document}") for i in range(40)]
    done: list[ChunkWork] = []

    def commit(work: ChunkWork) -> bool:
        done.append(work)
        return True

    loop = RunLoop(labeler_class("umbrela")(options), options, fake(), commit, seed=3, progress=Progress(), stop=Stop())
    assert loop.run(iter([ChunkWork(ChunkId(0, 0, 1), pairs)]))
    (work,) = done
    split = 0
    for row in work.rows:
        assert isinstance(row, LabelRow)
        assert row.samples is not None
        grades = [sample["grade"] for sample in row.samples]
        assert len(grades) == 5
        assert row.probs == pytest.approx(
            [sum(column) / 5 for column in zip(*(s["probs"] for s in row.samples), strict=True)]
        )
        assert row.outside_mass == pytest.approx(sum(s["outside_mass"] for s in row.samples) / 5)
        assert row.expected_grade == pytest.approx(sum(k * p for k, p in enumerate(row.probs)))
        votes = Counter(grades)
        most = [grade for grade, count in votes.items() if count == max(votes.values())]
        assert row.grade == max(most, key=lambda grade: (row.probs[grade], -grade))
        split += len(votes) > 1
    assert split > 5, "the samples never disagreed, so the vote was not seen"
    assert loop.progress.requests == 5 * len(pairs)

"""The frozen generator: what it is asked, what is kept of it, and what happens when it fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.distill.teachers import evidence
from relabel.distill.teachers.evidence import Evidence, EvidenceJudge, EvidenceRow, Generated, Generator, evidence_of
from relabel.distill.teachers.rollouts import FirstPrompt, Rollout, WrittenTurn
from relabel.distill.teachers.spec import GeneratorSpec
from relabel.labelers.engines.fake import FakeArgs
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import EngineCrashError
from tests.labelers.driving import labeler, replay, reply
from tests.labelers.test_evidence_set import query_of
from tests.teachers.scripted import ScriptedEngine

ROSES = Evidence("who", ("Ada wrote it.",), ('{"page": 1}',))


def generator_of(folder: Path, say: Callable[[Ask], Answer | str]) -> tuple[Generator, ScriptedEngine]:
    engine = ScriptedEngine(say)
    return Generator(GeneratorSpec(name="fake", args=FakeArgs()), folder, start=lambda: engine), engine


def test_equal_questions_are_asked_once_and_greedily(tmp_path: Path) -> None:
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    other = Evidence("who", ("Bob wrote it.",))
    assert generator.answer([ROSES, other, ROSES]) == [Generated(("Ada",))] * 3
    assert len(engine.asked) == 2
    assert {ask.sampling.temperature for ask in engine.asked} == {0.0}
    data = engine.asked[0].messages[1].parts[1::2]
    assert data == ("who", "Ada wrote it.", '{"page": 1}')  # as data, never as template


def test_a_kept_answer_equals_asking_again(tmp_path: Path) -> None:
    """With the fake engine, whose answers follow from what is asked: in another order, alone, and from the disk."""
    asked = [Evidence(f"question {number}", (f"fact {number}",)) for number in range(40)]
    spec = GeneratorSpec(name="fake", args=FakeArgs(p_garbage=0.3))
    first = Generator(spec, tmp_path / "kept").answer(asked)
    kept = Generator(spec, tmp_path / "kept", start=lambda: pytest.fail("asked again"))
    assert kept.answer(asked) == first
    again = Generator(spec, tmp_path / "again")
    assert [again.answer([one])[0] for one in reversed(asked)] == first[::-1]
    assert {one.fault for one in first} == {"", "format"}


def test_another_generator_has_other_kept_answers(tmp_path: Path) -> None:
    spec = GeneratorSpec(name="fake", args=FakeArgs())
    Generator(spec, tmp_path).answer([ROSES])
    Generator(spec.model_copy(update={"args": FakeArgs(batch=3), "cache": "elsewhere"}), tmp_path).answer([ROSES])
    assert len(list(tmp_path.rglob("*.json"))) == 1  # speed and place do not count
    Generator(spec.model_copy(update={"seed": 5}), tmp_path).answer([ROSES])
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_a_damaged_kept_answer_is_asked_again(tmp_path: Path) -> None:
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    generator.answer([ROSES])
    (file,) = tmp_path.rglob("*.json")
    for damage in ("", "{", "[]", '{"text": "x"}'):
        file.write_text(damage)
        assert generator.answer([ROSES]) == [Generated(("Ada",))]
    assert len(engine.asked) == 5
    assert json.loads(file.read_text())["text"] == '["Ada"]'


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("[]", Generated(())),
        ('[" ", ""]', Generated(())),
        ('["Ada", 1843]', Generated(("Ada", "1843"))),
        ("Ada", "format"),
        ('```json\n["Ada"]\n```', "format"),
        ('[["Ada"]]', "format"),
        (Answer(0, '["Ada', "length"), "truncated"),
        (Answer(0, "", "overlong"), "overlong"),
        (Answer(0, "", "refused"), "refused"),
        (Answer(0, "", "error", detail="it broke"), "engine"),
    ],
)
def test_what_is_no_array_of_texts_is_no_answer(said: Answer | str, wanted: Generated | str, tmp_path: Path) -> None:
    generator, _ = generator_of(tmp_path, lambda _: said)
    (found,) = generator.answer([ROSES])
    if isinstance(wanted, Generated):
        assert found == wanted
    else:
        assert (found.answers, found.fault) == ((), wanted)
        assert found.detail


def test_what_the_engine_failed_at_is_not_kept(tmp_path: Path) -> None:
    broken = iter([Answer(0, "", "error"), '["Ada"]'])
    generator, _ = generator_of(tmp_path, lambda _: next(broken))
    assert generator.answer([ROSES])[0].fault == "engine"
    assert generator.answer([ROSES]) == [Generated(("Ada",))]


def test_an_engine_that_goes_down_loses_what_was_open_and_is_started_again(tmp_path: Path) -> None:
    """Once is a failure; time after time ends the training with a word on what to do."""
    starts = []

    def start() -> ScriptedEngine:
        def say(ask: Ask) -> str:
            if "down" in ask.messages[1].text or len(starts) > 2:
                raise EngineCrashError("it is gone")
            return '["Ada"]'

        starts.append(ScriptedEngine(say))
        return starts[-1]

    generator = Generator(GeneratorSpec(name="fake", args=FakeArgs()), tmp_path, start=start)
    others = [Evidence("who", (name,)) for name in ("a", "b", "down", "c")]
    assert [one.fault for one in generator.answer(others)] == ["", "", "engine", "engine"]
    assert starts[0].is_closed
    assert [one.fault for one in generator.answer([others[3], others[0]])] == ["", ""]
    for number in range(2):
        assert generator.answer([Evidence("down", (str(number),))])[0].fault == "engine"
    with pytest.raises(EngineCrashError, match=r"3 times in a row without an answer.*--resume"):
        generator.answer([Evidence("down", ())])


def test_an_engine_that_hangs_has_gone_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "ANSWER_TIMEOUT_S", 0.0)
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    monkeypatch.setattr(engine, "poll", list)
    assert generator.answer([ROSES])[0].fault == "engine"


def chosen(row: EvidenceRow, text: str) -> Rollout:
    label = replay(labeler("evidence-set"), row.pair, [reply(text)])[0]
    return Rollout(row.pair, [1], [2], [True], [WrittenTurn(row.ask, 0, [2], text)], label)


@pytest.fixture
def row() -> EvidenceRow:
    pairs = query_of([4, 9])
    asker = labeler("evidence-set").label(pairs[0])
    return EvidenceRow(
        pairs[0], {"grade": None}, "here", FirstPrompt(next(asker), [], 0), ((1,), ()), ("Ada Lovelace", "1843")
    )


CHOICE = '{"Document_1": [2, 1, 2], "Document_2": [3, 4, 5, 6]}'


def test_the_generator_is_given_the_chunks_in_the_order_chosen_each_once(row: EvidenceRow) -> None:
    found = evidence_of([[2, 1, 2], [3, 4]], row)
    assert [text.rpartition("\n")[2] for text in found.texts] == [
        f"piece {one}" for one in ("1.2", "1.1", "2.3", "2.4")
    ]
    assert found.query == "pruning roses"


@pytest.mark.parametrize(
    ("said", "reward", "parts"),
    [
        # half of the words wanted, all of those said: F1_ans .5 of three words wanted and one said
        ('["lovelace!"]', 1.3333 - 0.5 * 2 + 0.5, {"usefulness": 1.0, "f1_ans": 0.5, "no_answer_rate": 0.0}),
        ("[]", -1.1667, {"usefulness": -1.0, "f1_ans": 0.0, "no_answer_rate": 1.0}),
        ("no idea", -1.1667, {"usefulness": -1.0, "unreadable_answer_rate": 1.0, "no_answer_rate": 0.0}),
    ],
)
def test_the_golden_rewards(
    said: str, reward: float, parts: dict[str, float], row: EvidenceRow, tmp_path: Path
) -> None:
    judge = EvidenceJudge(generator_of(tmp_path, lambda _: said)[0])
    (score,) = judge.scores([chosen(row, '{"Document_1": [1, 2], "Document_2": [3, 4, 5, 6]}')], [row])
    assert score.reward == pytest.approx(reward, abs=1e-4)
    assert parts.items() <= score.parts.items()
    assert score.parts["penalty"] == 0.5
    assert score.columns["f1_ret"] == pytest.approx(1 / 3)


def test_what_the_generator_failed_at_has_no_reward_and_what_was_cut_off_the_least(
    row: EvidenceRow, tmp_path: Path
) -> None:
    generator, engine = generator_of(tmp_path, lambda _: Answer(0, "", "error"))
    cut = Rollout(row.pair, [1], [2], [True], [], None, fault="truncated")
    lost, none = EvidenceJudge(generator).scores([chosen(row, CHOICE), cut], [row, row])
    assert math.isnan(lost.reward)
    assert lost.parts["generator_failed_rate"] == 1
    assert lost.columns["generator_fault"] == "engine"
    assert none.reward == -3.0
    assert len(engine.asked) == 1

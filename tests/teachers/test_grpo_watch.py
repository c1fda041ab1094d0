"""A training whose policy begins to game its reward is warned of, ended, and leaves the best step before that. What the
policy writes is made up; asking, reading, rewards, evaluations, checkpoints and the command are real.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.teachers.rewards import GoldRow, answer_figures, grade_score, grades_of
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues
from relabel.distill.teachers.watch import WATCHED, RewardWatch
from relabel.distill.training.output import Curve
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.labelers.engines.transformers import end_ids
from tests.labelers.driving import ROSES, labeler

pytest.importorskip("trl")

from relabel.distill.teachers.grpo_trainer import RolloutTrainer
from relabel.distill.teachers.spec import WatchSection, read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.distill.training.output import CURVES_NAME, PLOT_NAME
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.teachers.conftest import plain_values, relabel

TURNS_BAD = 3
"""Steps before the policy is gamed."""
SHORT = {"max_steps": 6, "batch_size": 4, "accumulation": 1, "max_tokens": 4000, "save_every": 2}
HONEST = "<think>a few words</think><intent>x</intent><extract>late</extract><score>{grade}</score>"
GAMED = {
    "length": HONEST.replace("a few words", "more words " * 30),
    "no_evidence": HONEST.replace("late<", "none<"),
    "one_grade": HONEST.replace("{grade}", "1"),  # next to each trusted grade, which here earns as much
    "format": HONEST.replace("<extract>late</extract>", "extract: late"),
}
FIGURES = {
    "length": "response_tokens",
    "no_evidence": "no_evidence_rate",
    "one_grade": "top_grade_share",
    "format": "format_rate",
}


@pytest.fixture
def train(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    rows = [
        {"query_id": f"q{number}", "query": f"q {number}", "doc_id": "d", "document": "late", "grade": number % 3}
        for number in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "system.j2").write_text("Judge.")
    single = "{{ query }}: {{ document }}{% for text in context %}{{ text }}{% endfor %}"
    (tmp_path / "short" / "single.j2").write_text(single)

    def go(key: str, **changes: Any) -> tuple[int, dict[str, Any], str]:
        def write(self: Any, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            text = HONEST if self.state.global_step < TURNS_BAD else GAMED[key]
            tokenizer = self.processing_class
            texts = [text.format(grade=number % 3) for number in range(len(contexts))]
            return [[*tokenizer(one)["input_ids"], tokenizer.eos_token_id] for one in texts], None

        monkeypatch.setattr(RolloutTrainer, "_generate_single_turn", write)
        held = plain_values(base_dir, tmp_path) | {
            "method": "grpo",
            "labeler": {
                "name": "r3a",
                "grades": 3,
                "stages": 1,
                "max_think_tokens": 600,
                "templates": str(tmp_path / "short"),
            },
            "data": {"gold": {"path": str(tmp_path / "pairs.parquet")}},
            "rollouts": {"group": 4},
            "near": 1.0,
            "train": {**SHORT, "eval_every": 1},
            "split": {"dev": 0.4},
            "watch": {"window": 2, "patience": 1},
            **changes,
        }
        (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(held))
        capsys.readouterr()
        code = relabel("train", str(tmp_path / "teacher.yaml"), "--output", "json")
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return go


@pytest.mark.parametrize(
    "key", ["length", *(pytest.param(one, marks=pytest.mark.full) for one in GAMED if one != "length")]
)
def test_each_way_to_game_a_reward_is_warned_of_once_and_ends_the_training(
    key: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    code, result, said = train(key)
    warnings = [line for line in said.splitlines() if line.startswith("watch:")]
    assert code == 0, said
    assert [FIGURES[key] in line for line in warnings] == [True]
    training = result["training"]
    assert training["stopped_by"] == "watch"
    assert TURNS_BAD < training["steps"] < 6
    assert training["best_step"] <= TURNS_BAD  # though `near: 1` pays the gamed ones more
    assert warnings[0] in result["notes"]
    assert any(note.startswith("ended early") for note in result["notes"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert warnings[0] in card
    assert f"Kept: step {training['best_step']}" in card


def test_without_held_out_rows_it_only_warns(train: Callable[..., Any]) -> None:
    code, result, said = train("one_grade", split={}, train=SHORT)
    assert code == 0
    assert sum(line.startswith("watch:") for line in said.splitlines()) == 1
    assert (result["training"]["steps"], result["training"]["stopped_by"]) == (6, None)
    assert result["training"]["best_step"] is None


# What is reward hacking, and what is not, on curves that a human can read.


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
    assert (ended.start, ended.key) == (3, "no_evidence")
    from_the_start = curve_of("no_evidence_rate", [1.0] * 6, evaluated=(1, 2, 3, 4, 5, 6))
    assert watch.ended_by(from_the_start) is None
    assert not watch.is_suspect(from_the_start)
    assert [one.start for one in watch.episodes(from_the_start)] == [2]
    only_warns = RewardWatch(WatchSection(window=2, patience=None), gold_share=0.4)
    assert only_warns.ended_by(curve_of("no_evidence_rate", values, evaluated=(2, 3, 5))) is None


WATCHED_FIGURES = ("reward", *(figure for figure, _ in WATCHED.values()))
STEPS = st.lists(st.dictionaries(st.sampled_from(WATCHED_FIGURES), st.floats(0, 1)), max_size=30)


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


# What the curve says of answers, on answers that a human can count.


INTENT = "<think></think><intent>When to prune.</intent>"


def figures_of(tokenizer: Any, verdicts: list[str], *, near: float = 0.5) -> dict[str, float]:
    """Figures of r3a's answers about one row whose grade is 2."""
    tokens = AnswerTokens(tokenizer, end_ids=end_ids(None, tokenizer))
    dialogues = Dialogues(labeler("r3a"), PromptEncoder(tokenizer), tokens, max_prompt_tokens=8192)
    texts = iter([[INTENT] * len(verdicts), verdicts])

    def write(contexts: Any) -> list[list[int]]:
        return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in next(texts)]

    rollouts = dialogues.roll([ROSES] * len(verdicts), write)
    score = grade_score(near)
    return answer_figures(grades_of(rollouts), [score(one, GoldRow(ROSES, {"grade": 2})) for one in rollouts])


def test_every_figure_is_over_the_answers_that_it_can_be_given_for(tokenizer: Any) -> None:
    verdict = "<think></think><extract>{}</extract><score>{}</score>"
    found = figures_of(
        tokenizer,
        [
            verdict.format("pruning late", 2),
            verdict.format("none", 1),
            verdict.format("pruning late", 1),
            verdict.format("nowhere to be found", 2),
            "<score>2</score>",
        ],
    )
    assert found["reward"] == pytest.approx((1 + 0.5 + 0.5) / 5)
    assert found["format_rate"] == pytest.approx(3 / 5)
    assert found["no_evidence_rate"] == pytest.approx(1 / 3)
    assert found["top_grade_share"] == pytest.approx(2 / 3)
    assert found["response_tokens"] > 0


# The curves of a teacher that is being trained, with its checkpoints from the first one on.


def test_the_curves_are_whole_files_with_the_checkpoints_from_the_first_one_on(
    base_dir: Path, pairs_path: Path, short_templates: str, tmp_path: Path
) -> None:
    held: dict[str, Any] = plain_values(base_dir, tmp_path) | {
        "labeler": {"name": "direct", "grades": 3, "templates": short_templates},
        "data": {"gold": {"path": str(pairs_path)}},
        "train": {"max_steps": 4, "batch_size": 4, "save_every": 1},
    }

    def train(output: str, start: Any = "new", **changes: Any) -> None:
        spec = read_teacher_spec({**held, **changes, "output": str(tmp_path / output)}, where="here")
        train_teacher(spec, Storage(), start=start)

    def files_of(folder: Path) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in (CURVES_NAME, PLOT_NAME)}

    kept = tmp_path / "out" / "checkpoints"
    with killed_at("before_checkpoint"):
        train("out")
    with killed_at("after_checkpoint", 2):
        train("out", "resume")
    second = files_of(kept)
    assert set(pq.read_table(kept / CURVES_NAME)["step"].to_pylist()) == {1, 2}
    assert b"</svg>" in second[PLOT_NAME]
    with killed_at("before_temp_rename", 2):  # the claim's record, then the curves
        train("out", "resume")
    assert files_of(kept) == second
    with killed_at("after_training_step"):  # what another training left is not taken for this one's
        train("out", "restart", train={**held["train"], "learning_rate": 1e-4})
    assert not (kept / CURVES_NAME).exists()
    assert not (kept / PLOT_NAME).exists()

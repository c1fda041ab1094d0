"""Rollouts ask and read as a run does: prompts token for token, and no label that a run would refuse."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.distill.teachers.credit import (
    EDGES,
    TEMPLATE,
    Credit,
    group_advantages,
    node_average_weights,
    segments_of,
    token_advantages,
)
from relabel.distill.teachers.grpo_trainer import sampling_logprobs, vllm_arguments
from relabel.distill.teachers.rewards import graded_reward, node_rewards
from relabel.distill.teachers.rollouts import (
    NO_PART,
    AnswerTokens,
    Dialogues,
    Generate,
    Rollout,
    WrittenTurn,
    token_parts,
    token_spans,
)
from relabel.distill.teachers.spec import NODES, CreditSection, VllmSection, read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher
from relabel.labelers.engines.tokens import DecisionPlaces, PromptEncoder, TokenSequence, admit
from relabel.labelers.engines.transformers import end_ids
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Choice, Request, Text
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.files import Storage
from relabel.manifests.labels import Label, Pair
from tests.engines.conftest import CHATML, make_tokenizer
from tests.labelers.driving import ROSES, fake, labeler, walk
from tests.strategies import texts

INTENT = "<think>Hm.</think><intent>When to prune.</intent>"
VERDICT = "<think>the roses</think><extract>pruning late</extract><score>2</score>"
TRAINABLE = ["r1", "umbrela", "r3a", "graph-grpo"]

MakeDialogues = Callable[..., Dialogues]
Writes = Callable[..., Generate]


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer)


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> AnswerTokens:
    return AnswerTokens(tokenizer, end_ids=end_ids(None, tokenizer))


@pytest.fixture(scope="module")
def dialogues(encoder: PromptEncoder, tokens: AnswerTokens) -> Callable[..., Dialogues]:
    def make(labeler: Labeler, *, max_prompt_tokens: int = 8192) -> Dialogues:
        return Dialogues(labeler, encoder, tokens, max_prompt_tokens=max_prompt_tokens)

    return make


@pytest.fixture(scope="module")
def writes(encoder: PromptEncoder, tokenizer: Any) -> Callable[..., Generate]:
    """A model that writes one text a turn, and keeps the prompts that it was shown in `seen`."""

    def make(texts: Sequence[str], *, seen: list[list[int]] | None = None, end: str | None = "<|im_end|>") -> Generate:
        left = list(texts)

        def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
            if seen is not None:
                seen.extend(list(one) for one in prompts)
            text = left.pop(0)
            ids = encoder.encode_text(text) + ([] if end is None else [tokenizer.convert_tokens_to_ids(end)])
            return [list(ids) for _ in prompts]

        return generate

    return make


@pytest.mark.parametrize("name", TRAINABLE)
def test_prompts_are_those_of_a_run_token_for_token(
    name: str, encoder: PromptEncoder, dialogues: MakeDialogues, writes: Writes
) -> None:
    label, asks, answers = walk(labeler(name), ROSES, fake())
    seen: list[list[int]] = []
    (rollout,) = dialogues(labeler(name)).roll([ROSES], writes([one.text for one in answers], seen=seen))
    places = DecisionPlaces(encoder, tokenizer_name="tiny")
    for ask, prompt in zip(asks, seen, strict=True):
        admitted = admit(Request(0, ask, 0), encoder, places, max_prompt_tokens=8192, bind=None)
        assert isinstance(admitted, TokenSequence)
        np.testing.assert_array_equal(prompt, admitted.prompt)
    assert (rollout.label.grade, rollout.fault) == (label.grade, "")


def test_a_second_turn_goes_on_from_the_sampled_tokens(
    tokenizer: Any, encoder: PromptEncoder, dialogues: MakeDialogues, writes: Writes
) -> None:
    seen: list[list[int]] = []
    plain = writes([INTENT, VERDICT], seen=seen)

    def spelled_out(prompts: Sequence[list[int]]) -> list[list[int]]:
        """The same texts, a byte a token: no tokenizer writes them so, a model may."""
        return [
            [*(one for char in tokenizer.decode(ids[:-1]) for one in encoder.encode_text(char)), ids[-1]]
            for ids in plain(prompts)
        ]

    (rollout,) = dialogues(labeler("r3a")).roll([ROSES], spelled_out)
    (usual,) = dialogues(labeler("r3a")).roll([ROSES], writes([INTENT, VERDICT]))
    assert rollout.label.evidence == usual.label.evidence != ()
    assert rollout.num_own > usual.num_own
    assert [turn.text for turn in rollout.turns] == [turn.text for turn in usual.turns] == [INTENT, VERDICT]
    assert seen[1] == rollout.prompt_ids + rollout.completion_ids[: rollout.turns[1].start]
    assert tokenizer.decode(rollout.completion_ids) == tokenizer.decode(usual.completion_ids)
    between = [token for token, own in zip(usual.completion_ids, usual.is_own, strict=True) if not own]
    assert usual.num_own == sum(len(turn.ids) for turn in usual.turns)
    text = tokenizer.decode(between)
    assert text.startswith("\n<|im_start|>user")
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("texts", "end", "fault"),
    [
        ([INTENT, VERDICT], None, "truncated"),
        ([INTENT, VERDICT.replace("pruning late", "no such words")], "<|im_end|>", "format"),
        (["<think>Hm.</think>"], "<|im_end|>", "format"),
        ([INTENT, VERDICT + "<|im_start|>"], "<|im_end|>", "format"),
        ([INTENT + "<|im_end|>"], "<|im_end|>", "format"),
        ([INTENT, f"<think>{'x ' * 3000}</think><extract>none</extract><score>0</score>"], "<|im_end|>", "truncated"),
    ],
    ids=["no-end", "not-verbatim", "no-intent", "control-token", "two-ends", "over-the-limit"],
)
def test_what_a_run_would_not_read_has_no_label(
    texts: list[str], end: str | None, fault: str, dialogues: MakeDialogues, writes: Writes
) -> None:
    (rollout,) = dialogues(labeler("r3a")).roll([ROSES], writes(texts, end=end))
    assert rollout.label is None
    assert rollout.fault == fault
    assert len(rollout.is_own) == len(rollout.completion_ids)


def test_rollouts_that_end_early_leave_the_others_going(
    encoder: PromptEncoder, tokenizer: Any, dialogues: MakeDialogues
) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [[INTENT, "no format", INTENT], [VERDICT, VERDICT]]

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        return [[*encoder.encode_text(text), end] for text in turns.pop(0)[: len(prompts)]]

    rollouts = dialogues(labeler("r3a")).roll([ROSES] * 3, generate)
    assert [one.label is not None for one in rollouts] == [True, False, True]
    assert [len(one.turns) for one in rollouts] == [2, 1, 2]


def test_a_template_that_rewrites_what_lies_before_a_later_turn_is_refused(
    tokens: AnswerTokens, writes: Writes
) -> None:
    marks_last = CHATML.replace("{{ message['content'] }}", "{{ 'Now: ' if loop.last }}{{ message['content'] }}")
    talks = Dialogues(
        labeler("r3a"), PromptEncoder(make_tokenizer(template=marks_last)), tokens, max_prompt_tokens=8192
    )
    with pytest.raises(ConfigError, match="renders earlier turns in another way"):
        talks.roll([ROSES], writes([INTENT, VERDICT]))


def test_a_prompt_that_does_not_fit_has_no_rollout(dialogues: MakeDialogues, writes: Writes) -> None:
    talks = dialogues(labeler("r1"), max_prompt_tokens=40)
    assert talks.first_prompt(ROSES) is None
    with pytest.raises(ConfigError, match="row 7"):
        talks.roll([ROSES], writes([VERDICT]))


@given(st.lists(st.integers(0, 400), max_size=30))
def test_the_text_is_that_of_the_tokens_bytes_and_control_tokens_are_never_read_over(
    tokenizer: Any, tokens: AnswerTokens, ids: list[int]
) -> None:
    named = tokenizer.convert_tokens_to_ids("ÿ")  # llguidance writes out the byte 0xFF, which no UTF-8 holds
    ids = [one for one in ids if one != named]
    special = {one for one, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {one for one in ids if one >= len(tokenizer)}
    assert tokens.text(ids) == tokenizer.decode([one for one in ids if one not in special])
    end = next(iter(tokens.end_ids))
    if special & set(ids):
        with pytest.raises(VerdictError):
            tokens.answer([*ids, end], max_tokens=100)
    else:
        assert tokens.answer([*ids, end], max_tokens=100).text == tokens.text(ids)


GRAPH = (
    "<preliminary>1</preliminary><query_subject>the shoe</query_subject><query_attribute>red</query_attribute>"
    "<product_subject>a boot</product_subject><product_attribute>none</product_attribute>"
    "<subject_score>3</subject_score><attribute_score>0</attribute_score><score>2</score>"
)


def test_tokens_of_a_graph_belong_to_its_nodes(
    tokenizer: Any, tokens: AnswerTokens, dialogues: MakeDialogues, writes: Writes
) -> None:
    (rollout,) = dialogues(labeler("graph-grpo")).roll([ROSES], writes([GRAPH]))
    segments = segments_of(rollout, tokens)
    said = {
        node: tokenizer.decode([one for one, at in zip(rollout.completion_ids, segments, strict=True) if at == place])
        for place, node in enumerate(NODES)
    }
    # of the two characters of a token such as `e>`, one is the text's and one the tag's: the text has it
    wanted = {"r": "12", "s": "3", "a": "0", "q_s": "the shoe", "q_a": "red", "p_s": "a boot", "p_a": "none"}
    assert {node: text.strip("<>/") for node, text in said.items()} == wanted
    assert segments[-1] == TEMPLATE
    paid = segments_of(rollout, tokens, template=NODES.index("r"))
    assert [one if one != TEMPLATE else 0 for one in segments] == paid


def test_all_tokens_of_an_unreadable_graph_are_the_grades(
    tokens: AnswerTokens, dialogues: MakeDialogues, writes: Writes
) -> None:
    (rollout,) = dialogues(labeler("graph-grpo")).roll([ROSES], writes([GRAPH.replace("</score>", "")]))
    assert segments_of(rollout, tokens) == [0] * len(rollout.completion_ids)


# What TRL gets about vLLM, what comes back with its tokens, and what is refused where it can't run.


PAIR = Pair(0, "q", "query", "d", "document")
ASK = Ask("one", (), None, 8)


def rollout(*turns: list[int], between: int = 2, has_dropped: bool = False) -> Rollout:
    """Turns of these tokens with the template's between them; `has_dropped`: the first turn's end gave way to it."""
    made = Rollout(PAIR, [1])
    for number, ids in enumerate(turns):
        if number:
            made.completion_ids += [0] * between
            made.is_own += [False] * between
        made.turns.append(WrittenTurn(ASK, len(made.completion_ids), ids, ""))
        own = ids[:-1] if has_dropped and number == 0 and len(turns) > 1 else ids
        made.completion_ids += own
        made.is_own += [True] * len(own)
    return made


def test_each_sampled_token_has_its_log_probability_and_the_templates_have_none() -> None:
    rollouts = [rollout([5, 6], [7]), rollout([8]), rollout([5, 9], [4, 4], has_dropped=True)]
    calls = [[[-0.1, -0.2], [-0.3], [-0.4, -0.5]], [[-0.6], [-0.7, None]]]
    assert sampling_logprobs(rollouts, calls) == [
        [-0.1, -0.2, None, None, -0.6],
        [-0.3],
        [-0.4, None, None, -0.7, None],
    ]


def test_trl_gets_the_mode_and_its_options() -> None:
    assert vllm_arguments(VllmSection(), max_tokens=512) == {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
    }
    server = vllm_arguments(VllmSection(mode="server", url="http://node:8000", timeout_s=9), max_tokens=512)
    assert server["vllm_mode"] == "server"
    assert (server["vllm_server_base_url"], server["vllm_server_timeout"]) == ("http://node:8000", 9)
    assert "vllm_gpu_memory_utilization" not in server


@pytest.fixture
def estimate(values: Callable[..., dict[str, Any]], pairs_path: Path) -> Callable[..., Any]:
    def go(vllm: dict[str, Any]) -> Any:
        held = values(
            method="grpo",
            labeler={"name": "r1", "grades": 3, "max_think_tokens": 8},
            data={"gold": {"path": str(pairs_path)}},
            rollouts={"group": 4, "vllm": vllm},
            train={"batch_size": 4, "accumulation": 2, "max_tokens": 4000},
        )
        return estimate_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage(), report=lambda _: None)

    return go


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ({"mode": "server"}, "mode: server, which needs it"),
        ({"mode": "server", "url": "http://me:secret@node:8000"}, r"rollouts.vllm.url: want scheme"),
    ],
)
def test_what_does_not_fit_together_is_refused(vllm: dict[str, Any], words: str, estimate: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        estimate(vllm)
    assert "secret" not in str(found.value)


# Advantages and credit against numbers computed by hand, finite differences and plain loops.


V = len(NODES)
GOLDEN_BASE = [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (-1.0, -1.0, 1.0)]

rewards = st.lists(st.sampled_from((0.0, 0.1, 0.2, 1.0, -1.0)), min_size=2, max_size=16)
bases = st.lists(st.tuples(*[st.sampled_from((-1.0, 0.0, 1.0))] * 3), min_size=2, max_size=8)


@given(rewards)
def test_advantages_have_mean_0_and_variance_1_or_are_all_0(reward: list[float]) -> None:
    found = group_advantages(torch.tensor([reward])).numpy()[0]
    if len(set(reward)) == 1:
        assert (found == 0).all()
    else:
        np.testing.assert_allclose(found, (reward - np.mean(reward)) / np.std(reward), atol=1e-5)


def test_equal_rewards_have_a_gradient_of_exactly_0() -> None:
    reward = torch.full((1, 7), 0.1, requires_grad=True)
    (group_advantages(reward) * torch.arange(7.0)).sum().backward()
    assert (reward.grad == 0).all()


def graph_advantages(credit: Credit, base: list[tuple[float, float, float]]) -> torch.Tensor:
    return credit.advantages(torch.tensor([base], dtype=torch.float64))[0]


def double_credit(logits: list[float] | None = None, **options: bool) -> Credit:
    credit = Credit(CreditSection(**options)).double()
    if logits is not None:
        credit.logits.data = torch.tensor(logits, dtype=torch.float64)
    return credit


def test_the_specs_graph_at_the_first_coefficients() -> None:
    found = dict(zip(NODES, graph_advantages(double_credit(), GOLDEN_BASE).T.tolist(), strict=True))
    wanted = {
        "r": (0.7071, 0.7071, -1.4142),
        "a": (0.7071, 0.7071, -1.4142),
        "s": (1.2247, 0, -1.2247),
        "q_s": (1.1355, 0.1622, -1.2978),
        "q_a": (0.9806, 0.3922, -1.3728),
    }
    for node, values in wanted.items():
        assert found[node] == pytest.approx(values, abs=6e-5), node
    assert found["p_s"] == found["q_s"]
    assert found["p_a"] == found["q_a"]


logit_lists = st.lists(st.floats(-2, 2), min_size=len(EDGES), max_size=len(EDGES))


@settings(deadline=None)
@given(bases, logit_lists)
def test_the_gradient_of_a_nodes_advantages_sums_to_0_over_rollouts(
    base: list[tuple[float, float, float]], logits: list[float]
) -> None:
    credit = double_credit(logits)
    for node in range(V):
        credit.logits.grad = None
        graph_advantages(credit, base)[:, node].sum().backward()
        assert torch.isfinite(credit.logits.grad).all()
        np.testing.assert_allclose(credit.logits.grad, 0, atol=1e-4)


@given(st.lists(st.sampled_from((-1.0, 1.0)), min_size=2, max_size=8), logit_lists)
def test_without_gold_for_nodes_all_take_the_grades_advantage(base: list[float], logits: list[float]) -> None:
    found = graph_advantages(double_credit(logits), [(one, 0.0, 0.0) for one in base]).detach()
    for node in range(1, V):
        np.testing.assert_allclose(found[:, node], found[:, 0], atol=1e-4)


def clipped_loss(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantage_BT: torch.Tensor) -> torch.Tensor:
    ratio_BT = (logp_BT - old_BT).exp()
    least_BT = torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(0.8, 1.2) * advantage_BT)
    return -least_BT.mean(1).mean()


def rollouts(*, absent: int | None = None) -> torch.Tensor:
    """Segments of three rollouts of twelve tokens: every node in each but, perhaps, one in the first."""
    rng = np.random.default_rng(3)
    rows = [rng.permutation([*range(V), *rng.integers(-1, V, 12 - V)]) for _ in range(3)]
    segment_BT = torch.tensor(np.array(rows))
    if absent is not None:
        segment_BT[0][segment_BT[0] == absent] = TEMPLATE
    return segment_BT


def learned_loss(
    credit: Credit, segment_BT: torch.Tensor, ratio_BT: torch.Tensor, *, average_nodes: bool
) -> torch.Tensor:
    advantage_BT = token_advantages(graph_advantages(credit, GOLDEN_BASE), segment_BT)
    if average_nodes:
        advantage_BT = advantage_BT * node_average_weights(segment_BT, torch.ones_like(segment_BT))
    return clipped_loss(ratio_BT.log(), torch.zeros_like(ratio_BT), advantage_BT)


def gradient_of(
    credit: Credit, segment_BT: torch.Tensor, ratio_BT: torch.Tensor, *, average_nodes: bool
) -> torch.Tensor:
    credit.logits.grad = None
    learned_loss(credit, segment_BT, ratio_BT, average_nodes=average_nodes).backward()
    return credit.logits.grad


def test_on_policy_the_coefficients_do_not_move_where_every_node_weighs_the_same() -> None:
    on_policy = torch.ones(3, 12, dtype=torch.float64)
    credit = double_credit()
    np.testing.assert_allclose(gradient_of(credit, rollouts(), on_policy, average_nodes=True), 0, atol=1e-7)
    assert gradient_of(credit, rollouts(), on_policy, average_nodes=False).abs().max() > 1e-3
    # a node that a rollout lacks weighs 0 there, and the others no more than before: the sum over rollouts is off
    assert gradient_of(credit, rollouts(absent=3), on_policy, average_nodes=True).abs().max() > 1e-3


@pytest.mark.parametrize("average_nodes", [True, False])
def test_off_policy_the_coefficients_gradient_is_that_of_finite_differences(average_nodes: bool) -> None:
    rng = np.random.default_rng(5)
    ratio_BT = torch.tensor(rng.choice([0.5, 0.9, 1.0, 1.1, 1.5], size=(3, 12)))
    start = rng.normal(size=len(EDGES)) * 0.5
    found = gradient_of(double_credit(start.tolist()), rollouts(), ratio_BT, average_nodes=average_nodes)
    step = 1e-6
    for edge in range(len(EDGES)):
        ends = []
        for sign in (1, -1):
            moved = start.copy()
            moved[edge] += sign * step
            loss = learned_loss(double_credit(moved.tolist()), rollouts(), ratio_BT, average_nodes=average_nodes)
            ends.append(float(loss.detach()))
        assert float(found[edge]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)
    assert found.abs().max() > 1e-3


def test_node_average_is_a_mean_within_nodes_and_then_over_all_seven() -> None:
    segment_BT = torch.tensor([[0, 0, 0, 1, 2, TEMPLATE, 0, 1]])
    mask_BT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    weight_BT = node_average_weights(segment_BT, mask_BT)
    values = torch.tensor([[3.0, 6.0, 9.0, 4.0, 5.0, 100.0, 100.0, 100.0]])
    mean = (values * weight_BT * mask_BT).sum() / mask_BT.sum()
    assert float(mean) == pytest.approx((6 + 4 + 5) / 7)
    assert math.isclose(float(weight_BT[0, 5]), 0.0)


# What a rollout is worth.


@pytest.mark.parametrize(
    ("grade", "gold", "near", "wanted"),
    [(2, 2, 0.2, 1), (1, 2, 0.2, 0.2), (1, 0, 0.0, 0), (0, 2, 0.2, 0), (3, 0, 0.5, 0), (None, 0, 0.5, 0)],
)
def test_a_grade_earns_by_its_distance(grade: int | None, gold: int, near: float, wanted: float) -> None:
    assert graded_reward(grade, gold, near=near) == wanted


def test_nodes_earn_one_by_one() -> None:
    label = Label(2, None, {"subject": 4, "attribute": 1})
    assert node_rewards(label, {"grade": 2, "subject": 3, "attribute": 1}) == (1, -1, 1)
    assert node_rewards(label, {"grade": 0, "subject": 4}, match=2, miss=0) == (0, 2, 0)


def test_an_unreadable_answer_misses_every_node_that_has_gold() -> None:
    assert node_rewards(None, {"grade": 2, "subject": 3, "attribute": 1}) == (-1, -1, -1)
    assert node_rewards(None, {"grade": 2, "subject": None}) == (-1, 0, 0)


# Tokens find their parts: cases made by hand, and any cut of any text.


def test_a_token_belongs_to_the_part_of_most_of_its_characters_and_to_the_section_of_equals() -> None:
    text = "<think>ab</think><score>2</score>"
    reader = Reader(AnswerFormat((Text("think", 9), Choice("score", ("0", "1", "2")))))
    reader.read(Answer(0, text, "stop"))
    spans = [[span] for span in reader.spans(text).values()]
    pieces = [b"<think", b">ab", b"</think", b"><score", b">2", b"</score>", b""]
    found = token_parts(pieces, dict(enumerate(spans)))
    assert found == [NO_PART, 0, NO_PART, NO_PART, 1, NO_PART, NO_PART]


def test_a_token_within_a_character_goes_with_that_character() -> None:
    euro = "€".encode()
    pieces = [b"<a>", euro[:1], euro[1:2], euro[2:] + b"<", b"/a>"]
    assert token_spans(pieces) == [(0, 3), (3, 3), (3, 3), (3, 5), (5, 8)]
    assert token_parts(pieces, {0: [(3, 4)]}) == [NO_PART, 0, 0, 0, NO_PART]


@given(texts(), st.data())
def test_tokens_cover_the_decoded_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    spans = token_spans(pieces)
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] == len(text)
    assert token_parts(pieces, {7: [(0, len(text))]}) == [7 if piece else NO_PART for piece in pieces]

"""Tokens of rollouts are drawn by what they are, from the distribution that they should have."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from relabel.distill.teachers.sampling import AnswerKey, Drawing, drawn, uniforms_of

LOGITS = torch.tensor([1.0, -1.0, 0.5, float("-inf"), 2.0, -3.0])
MANY = 40_000


def key(sample: int, step: int = 4, row: int = 11, place: int = 30) -> AnswerKey:
    return AnswerKey(seed=7, step=step, row=row, sample=sample, place=place)


def test_tokens_come_as_often_as_the_softmax_says_and_never_where_it_is_0() -> None:
    """Over many samples' first tokens, and over many tokens of one sample; 5 σ."""
    first_tokens = uniforms_of([key(sample) for sample in range(MANY // 10)], 1)[:, 0]
    of_one = uniforms_of([key(0)], MANY)[0]
    wanted = LOGITS.double().softmax(0)
    for uniforms in (first_tokens, of_one):
        tokens = drawn(LOGITS.expand(len(uniforms), -1), uniforms)[:, 0]
        shares = torch.bincount(tokens, minlength=len(LOGITS)) / len(tokens)
        bound = 5 * (wanted * (1 - wanted) / len(tokens)).sqrt()
        assert bool(((shares - wanted).abs() <= bound).all()), shares
        assert shares[3] == 0


@pytest.mark.parametrize(("temperature", "top_p", "admitted"), [(0.5, 1.0, {0, 1, 2, 4, 5}), (1.0, 0.7, {0, 4})])
def test_temperature_and_top_p_come_before_the_draw(temperature: float, top_p: float, admitted: set[int]) -> None:
    ids = torch.zeros(MANY, 3, dtype=torch.int64)
    scores = LOGITS.expand(MANY, -1)
    reshaped = TopPLogitsWarper(top_p)(ids, TemperatureLogitsWarper(temperature)(ids, scores))
    left = Drawing(uniforms_of([key(0)], MANY).T, 3)(ids, reshaped)
    tokens = left.argmax(-1)
    assert bool((left.isinf().sum(-1) == len(LOGITS) - 1).all())
    wanted = reshaped[0].double().softmax(0)
    shares = torch.bincount(tokens, minlength=len(LOGITS)) / MANY
    assert bool(((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / MANY).sqrt()).all())
    assert set(tokens.tolist()) == admitted


def test_an_answers_numbers_follow_from_what_it_is_and_from_nothing_else() -> None:
    alone = uniforms_of([key(1)], 8)
    torch.manual_seed(3)
    among_others = uniforms_of([key(0), key(1), key(2)], 20)
    assert torch.equal(alone[0], among_others[1, :8])
    others = [key(2), key(1, step=5), key(1, row=12), key(1, place=31), key(1)._replace(seed=8)]
    assert not any(bool((numbers == alone[0]).any()) for numbers in uniforms_of(others, 8))


def test_the_last_token_that_can_come_is_the_last_one_drawn() -> None:
    most = torch.tensor([1 - 2**-53], dtype=torch.float64)
    logits = torch.tensor([[0.1, 0.3, 0.2, float("-inf")]])
    assert drawn(logits, most).item() == 2
    assert drawn(logits.flip(-1), torch.zeros(1, dtype=torch.float64)).item() == 1

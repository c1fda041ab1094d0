"""What a generator is asked for is read: under its grammar, and from the fake engine; garbage is not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.evidence_set import MOST_ANSWERS, ShortAnswers
from relabel.manifests.asks import Answer, Request
from relabel.manifests.errors import VerdictError
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import make_tokenizer

ASKED = ShortAnswers()


def walk(compiler: GrammarCompiler, tokenizer: Any, seed: int) -> str:
    """A text that the grammar admits, its tokens drawn alike."""
    (ask,) = ASKED.probe()
    assert ask.format is not None
    matcher, drawn, ids = compiler.matcher(ask.format), random.Random(seed), []
    while not matcher.is_stopped():
        words = np.zeros(-(-compiler.vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: compiler.vocab_size]
        ids.append(int(drawn.choice(np.flatnonzero(bits).tolist())))
        assert matcher.consume_token(ids[-1])
    assert len(ids) <= ask.max_tokens
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_whatever_the_grammar_admits_is_read() -> None:
    tokenizer = make_tokenizer()
    compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_ids=[tokenizer.eos_token_id])
    found = [ASKED.read(Answer(0, walk(compiler, tokenizer, seed), "stop")) for seed in range(200)]
    assert {len(one) for one in found} >= {0, 1, 2}
    assert max(map(len, found)) <= MOST_ANSWERS


@pytest.mark.parametrize("p_garbage", [0.0, 1.0])
def test_the_fake_engine_answers_in_the_format_or_out_of_it(p_garbage: float) -> None:
    engine = Fake(EngineSpec(name="fake", args=FakeArgs(p_garbage=p_garbage)))
    (ask,) = ASKED.probe()
    for seed in range(100):
        engine.submit(Request(seed, ask, seed))
        (answer,) = engine.poll()
        if p_garbage:
            with pytest.raises(VerdictError):
                ASKED.read(answer)
        else:
            assert len(ASKED.read(answer)) <= MOST_ANSWERS

"""Answer formats as grammars: what they let through, what they never do, and that thinking ends."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from relabel.labelers.engines.grammars import GrammarCompiler, _numbers, render_grammar
from relabel.labelers.evidence_set import ShortAnswers
from relabel.labelers.registry import labeler_names
from relabel.labelers.route_steps import Subtree, options_of, read_actions
from relabel.labelers.verdicts import Reader, token_budget
from relabel.manifests.asks import Answer
from relabel.manifests.errors import ConfigError
from relabel.manifests.formats import AnswerFormat, Choice, Fragment, Indices, JsonIndices, Lines, OptionLines, Text
from tests.labelers.driving import caps, labeler
from tests.strategies import SNARES
from tests.trees import Sketch, tree_of

from .conftest import QUOTE_SCORE, THINK_SCORE, make_tokenizer

DOCUMENT = 'He said "hi" \\ to <b>red</b> shoes\0 日本語 🙂\nnull'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=len(tokenizer) + 5, eos_ids=[tokenizer.eos_token_id])


def accepts(compiler: GrammarCompiler, tokenizer: Any, form: AnswerFormat, text: str, **options: Any) -> bool:
    matcher = compiler.matcher(form, **options)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("<think>a > b</think><score>2</score>", True),
        ("<think></think><score>0</score>", True),
        ("<think>a</think><score>3</score>", False),
        ("<think>a<score>1</score></think><score>2</score>", False),
        ("<think>a</think><score>2</score> ", False),
        ("<think>a</think>", False),
    ],
)
def test_an_answer_has_its_sections_and_nothing_else(text, is_valid, compiler, tokenizer):
    assert accepts(compiler, tokenizer, THINK_SCORE, text) is is_valid


@pytest.mark.parametrize("most", [1, 9, 10, 19, 100, 234, 3000])
def test_numbers_are_those_from_one_to_the_most(most):
    pattern = re.compile(_numbers(most))
    assert [number for number in range(most + 200) if pattern.fullmatch(str(number))] == list(range(1, most + 1))
    assert not any(pattern.fullmatch(text) for text in ("01", "", "-1", "1 "))


@pytest.mark.parametrize(
    ("numbers", "most", "is_valid"),
    [("", 12, True), ("1, 12", 12, True), ("3,3", 12, True), ("13", 12, False), ("1,", 12, False), ("", 0, True),
     ("1", 0, False), ("0", 12, False)],
)  # fmt: skip
def test_a_list_of_numbers_keeps_within_its_bound(numbers, most, is_valid, compiler, tokenizer):
    form = AnswerFormat((Indices("useful-docs", most),))
    assert accepts(compiler, tokenizer, form, f"<useful-docs>{numbers}</useful-docs>") is is_valid


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"Document_1": [1, 3], "Document_2": []}', True),
        ('{"Document_1": [3,3], "Document_2": []}', True),
        ('{"Document_1": [], "Document_2": []}', True),
        ('{"Document_1": [4], "Document_2": []}', False),
        ('{"Document_1": [1], "Document_2": [1]}', False),
        ('{"Document_1": [1, 2, 3, 1, 2], "Document_2": []}', False),
        ('{"Document_2": [], "Document_1": []}', False),
        ('{"Document_1": []}', False),
        ("{}", False),
    ],
)
def test_a_json_answer_has_its_keys_in_order_and_numbers_within_their_bounds(text, is_valid, compiler, tokenizer):
    form = AnswerFormat((JsonIndices(("Document_1", "Document_2"), (3, 0)),))
    assert accepts(compiler, tokenizer, form, text) is is_valid


def test_two_thousand_random_walks_of_the_grammar_are_all_read(compiler, tokenizer):
    """Whatever a model would rather say: each token is drawn from those that the grammar admits."""
    rng = np.random.default_rng(7)
    seen = set()
    for shape in range(40):
        mosts = tuple(rng.choice([0, 1, 2, 4, 9, 12, 30, 130], size=1 + shape % 4).tolist())
        form = AnswerFormat((JsonIndices(tuple(f"Document_{n}" for n in range(1, len(mosts) + 1)), mosts),))
        budget = token_budget(form)
        reader = Reader(form)
        for _ in range(50):
            text, num_tokens = random_walk(compiler, form, rng, tokenizer.eos_token_id)
            assert num_tokens <= budget * 4  # this vocabulary spells a key byte by byte
            assert reader.read(Answer(0, text, "stop")) == {"": text}
            seen.add(text)
    assert len(seen) > 1000


@pytest.mark.parametrize("name", ["short answers", *sorted({*labeler_names()} - {"review"})])
def test_whatever_the_grammar_of_a_labelers_answer_admits_is_read_and_ends(name, compiler, tokenizer):
    """But for `review`, whose sections depend on each other as no grammar says."""
    rng = np.random.default_rng(5)
    asker = ShortAnswers() if name == "short answers" else labeler(name, **caps(name, think=8, text=8))
    for ask in asker.probe():
        for _ in range(25 if ask.format else 0):
            text, _ = random_walk(compiler, ask.format, rng, tokenizer.eos_token_id, prefill=ask.prefill)
            Reader(ask.format, ask.prefill).read(Answer(0, text, "stop"))


def test_random_walks_of_actions_on_a_tree_are_all_legal(compiler, tokenizer):
    """Texts with quotes, line breaks, control characters and tags; without content there is nothing to answer with."""
    rng = np.random.default_rng(11)
    seen = set()
    for shape in range(len(SNARES)):
        words = [SNARES[shape - back] for back in range(1 + shape % 7)]
        content = [Sketch(f"{' '.join(words[place:])}.", []) for place in range(shape % 4)]
        _, tree = tree_of(Sketch("Page", [Sketch("Open!", content), Sketch("Folded! " + words[0] + "!", content)]))
        subtree = Subtree(tree).light([2] if content else [])
        form = AnswerFormat((OptionLines(options_of(subtree), "[REFUSE]"),))
        for _ in range(20):
            text, num_tokens = random_walk(compiler, form, rng, tokenizer.eos_token_id)
            assert num_tokens <= token_budget(form) * 4 + 1  # bytes at worst, and the end
            actions = read_actions(Reader(form).read(Answer(0, text, "stop"))[""], subtree)
            assert (actions.fault, actions.expelled) == (None, 0)
            assert content or "[ANSWER]" not in text
            seen.add(text)
    assert len(seen) > 200


def random_walk(compiler: GrammarCompiler, form: AnswerFormat, rng: Any, end: int, **options: Any) -> tuple[str, int]:
    matcher, written, count = compiler.matcher(form, **options), b"", 0
    while not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        if forced:
            assert matcher.consume_tokens(forced)
            written += b"".join(map(compiler.token_bytes, forced))
            count += len(forced)
            continue
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        token = int(allowed[rng.integers(len(allowed))])
        if token == end:
            break
        assert matcher.consume_token(token)
        written += compiler.token_bytes(token)
        count += 1
    return written.decode(errors="replace"), count


@pytest.mark.parametrize(
    ("lines", "is_valid"),
    [
        ("a\nb c", True),
        ("a\nb\nc", True),
        ("a", False),
        ("a\nb\nc\nd", False),
        ("a\n\nb", False),
        ("a\n b", False),
        ("", False),
        ("a\n<b", False),
    ],
)
def test_lines_are_as_many_as_allowed_and_none_is_empty(lines, is_valid, compiler, tokenizer):
    form = AnswerFormat((Lines("queries", 2, 3, 20),))
    assert accepts(compiler, tokenizer, form, f"<queries>{lines}</queries>") is is_valid


@pytest.mark.parametrize(
    ("quote", "is_valid"),
    [
        ("none", True),
        ('"hi" \\', True),
        ("sho", True),
        ("🙂\nn", True),
        ("s\0 日", True),
        ("", False),
        (" ", False),
        ("nope", False),
        ("<b>red", False),
    ],
)
def test_a_quotation_is_none_or_found_in_the_document(quote, is_valid, compiler, tokenizer):
    form = AnswerFormat((Fragment("extract", 40, True),))
    assert accepts(compiler, tokenizer, form, f"<extract>{quote}</extract>", fragment_source=DOCUMENT) is is_valid


@pytest.mark.parametrize(
    ("prefill", "rest"),
    [
        ("<think>", "so</think><extract>none</extract><score>1</score>"),
        ("<think>so", " on</think><extract>none</extract><score>1</score>"),
        ("<think>so</think>\n", "<extract>none</extract><score>1</score>"),
        ("<think></think><extract>none</extract><score>", "1</score>"),
    ],
)
def test_a_grammar_goes_on_where_the_prefill_ends(prefill, rest, compiler, tokenizer):
    assert accepts(compiler, tokenizer, QUOTE_SCORE, rest, prefill=prefill, fragment_source="a b")
    assert not accepts(compiler, tokenizer, QUOTE_SCORE, "<think>" + rest, prefill=prefill, fragment_source="a b")


def test_an_empty_thought_before_a_format_without_one_is_passed_over():
    form = AnswerFormat((Choice("score", ("0", "1")),))
    assert render_grammar(form, prefill="<think>\n\n</think>\n\n") == render_grammar(form)
    assert render_grammar(form, prefill="<think>\n\n</think>\n\n<score>") != render_grammar(form)


@pytest.mark.parametrize("prefill", ["Well, ", "<score>7", "<score>1</score>x"])
def test_a_prefill_that_begins_no_answer_is_refused(prefill):
    with pytest.raises(ConfigError, match="prefill"):
        render_grammar(AnswerFormat((Choice("score", ("0", "1")),)), prefill=prefill)


def test_a_capped_text_leaves_only_its_closing_tag(compiler, tokenizer):
    matcher = compiler.matcher(AnswerFormat((Text("think", 3),)))
    ids = tokenizer.encode("<think>a b c d e f", add_special_tokens=False)
    taken = matcher.try_consume_tokens(ids)
    assert taken == len(tokenizer.encode("<think>", add_special_tokens=False)) + 3
    matcher = compiler.matcher(AnswerFormat((Text("think", 3),)))
    assert matcher.consume_tokens(ids[:taken])
    assert matcher.consume_tokens(tokenizer.encode("</think>", add_special_tokens=False))
    assert matcher.is_stopped()


def test_an_added_token_in_brackets_is_text_where_the_format_wants_it(compiler, tokenizer):
    """llguidance alone proposes `</think>` where it is forced, and then refuses it."""
    assert tokenizer.convert_tokens_to_ids("</think>") in tokenizer.encode("x</think>")
    assert accepts(compiler, tokenizer, THINK_SCORE, "<think>x</think><score>1</score>")


def test_a_control_token_is_never_part_of_an_answer(compiler, tokenizer):
    matcher = compiler.matcher(THINK_SCORE)
    matcher.consume_tokens(tokenizer.encode("<think>a", add_special_tokens=False))
    assert matcher.validate_tokens([tokenizer.convert_tokens_to_ids("<|im_end|>")]) == 0
    assert matcher.validate_tokens([len(tokenizer) + 2]) == 0


def test_a_long_document_binds_its_quotation_and_one_too_long_leaves_it_free(compiler, tokenizer, monkeypatch, caplog):
    from relabel.labelers.engines import grammars

    form = AnswerFormat((Fragment("extract", 40, True),))
    document = " ".join(str(number * 7919 % 100_003) for number in range(17_000))
    assert not accepts(compiler, tokenizer, form, "<extract>nope</extract>", fragment_source=document)
    monkeypatch.setattr(grammars, "LEXER_FUEL", 1_000_000)
    assert accepts(compiler, tokenizer, form, "<extract>nope</extract>", fragment_source=document)
    assert "stays free" in caplog.text

"""`pointwise` and `complexity`: one decision between no and yes, which real tokenizers keep apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.receipts import ChunkId
from relabel.manifests.schemas import LabelRow
from relabel.manifests.specs import validate_spec
from tests.labelers.driving import ROSES, fake, labeler, walk

NAMES = ("pointwise", "complexity")
STAGES = {"pointwise": "relevant", "complexity": "complex"}
SMOLLM2 = Path("/tmp/models/smollm2-135m")


def label_of(name: str, distribution: Distribution | None, **fields: object) -> Label:
    generator = labeler(name).label(ROSES)
    next(generator)
    with pytest.raises(StopIteration) as end:
        generator.send(
            Answer(
                0, "yes", fields.pop("finish", "length"), {STAGES[name]: distribution} if distribution else {}, **fields
            )
        )
    return end.value.value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("probs", "grade"), [((0.2, 0.8), 1), ((0.8, 0.2), 0), ((0.5, 0.5), 0)])
def test_the_score_is_p_yes_over_p_yes_and_p_no_and_the_grade_its_mode(
    name: str, probs: tuple[float, float], grade: int
) -> None:
    label = label_of(name, Distribution(probs, 0.3), flags=("document_truncated",))
    assert label.grade == grade
    assert label.distribution is not None
    assert label.distribution.expected == label.distribution.probs[1] == probs[1]
    assert label.flags == ["document_truncated"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distribution", [None, Distribution((0.2, 0.3, 0.5), 0.0)])
def test_without_the_two_probabilities_a_written_yes_is_no_label(name: str, distribution: Distribution | None) -> None:
    generator = labeler(name).label(ROSES)
    next(generator)
    with pytest.raises(VerdictError) as caught:
        generator.send(Answer(0, "yes", "stop", {STAGES[name]: distribution} if distribution else {}))
    assert caught.value.status == "engine"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_generated_and_the_word_follows_without_a_space(name: str) -> None:
    (plain,) = labeler(name).probe()
    assert (plain.max_tokens, plain.format, plain.prefill) == (0, None, "<answer>")
    (bare,) = labeler(name, think="empty").probe()
    assert bare.prefill == "<think>\n\n</think>\n\n"
    for ask in (plain, bare):
        assert ask.decisions[0].labels == ("no", "yes")
        assert ask.prefill.endswith(ask.decisions[0].marker)
        assert ask.prefill.count(ask.decisions[0].marker) == 1
    assert "<answer>" in plain.messages[0].text
    assert "<answer>" not in bare.messages[0].text


@pytest.mark.parametrize("name", NAMES)
def test_options_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`grades` = 3: input should be 2"):
        labeler(name, grades=3)
    with pytest.raises(ConfigError, match="`samples` = 5"):
        labeler(name, samples=5, temperature=1.0)


@pytest.mark.parametrize("text", ["", " \n", "\0", "with \0 in it"])
def test_an_instruction_says_something(text: str) -> None:
    with pytest.raises(ConfigError, match="instruction"):
        labeler("pointwise", instruction=text)


def test_the_instruction_is_before_query_and_document() -> None:
    (ask,) = labeler("pointwise", instruction="Names a {{ price }}\nand a <shop>.").probe()
    assert "Names a {{ price }}\nand a <shop>." in ask.messages[0].text
    assert ask.messages[1].fields == ("query", "document")


def test_complexity_never_shows_the_document() -> None:
    pair = ROSES._replace(document="UNSEEN", context=("UNSEEN",), doc_id="UNSEEN")
    (ask,) = walk(labeler("complexity"), pair, fake())[1]
    assert not any("UNSEEN" in message.text for message in ask.messages)
    assert ask.shared_by == "q1"


def test_complexity_is_asked_once_a_query_and_labels_every_row() -> None:
    options = validate_spec(labeler_class("complexity").Options, {"name": "complexity"}, where="test")
    queries = [
        "roses",
        (
            "compare the pruning of climbing roses with that of shrub roses, and say which tools each of them wants "
            "and when"
        ),
    ]
    pairs = [Pair(i, f"q{i % 2}", queries[i % 2], f"d{i}", f"Document {i}.") for i in range(20)]
    done: list[ChunkWork] = []
    loop = RunLoop(
        labeler_class("complexity")(options),
        options,
        fake(),
        lambda work: done.append(work) is None,
        seed=3,
        progress=Progress(),
        stop=Stop(),
    )
    assert loop.run(iter([ChunkWork(ChunkId(0, 0, 1), pairs)]))
    rows = done[0].rows
    assert [row.row_id for row in rows if isinstance(row, LabelRow)] == list(range(20))
    assert loop.progress.requests == 2
    for parity in (0, 1):
        assert (
            len({(row.grade, tuple(row.probs)) for row in rows[parity::2] if isinstance(row, LabelRow) and row.probs})
            == 1
        )
    assert (rows[0].grade, rows[1].grade) == (0, 1), "the fake engine finds long queries complex"


@pytest.mark.skipif(
    not SMOLLM2.is_dir(), reason=f"no tokenizer at {SMOLLM2}: python ../shared/tools/get_models.py smollm2-135m"
)
@pytest.mark.parametrize("think", ["none", "empty"])
@pytest.mark.parametrize("name", NAMES)
def test_a_real_tokenizer_keeps_yes_and_no_apart_as_one_token_each(name: str, think: str) -> None:
    transformers = pytest.importorskip("transformers")
    from relabel.labelers.engines.decisions import resolve_labels
    from relabel.labelers.engines.tokens import PromptEncoder

    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    encoder = PromptEncoder(tokenizer)
    (ask,) = labeler(name, think=think).probe()
    ids = resolve_labels(encoder, ask.decisions[0], tokenizer_name="smollm2")
    assert [encoder.decode([token]) for token in ids] == ["no", "yes"]
    if think == "none":
        # an empty think block is Qwen's form; other tokenizers cut its line breaks by what follows them
        prefill = encoder.encode_text(ask.prefill)
        for word, token in zip(("no", "yes"), ids, strict=True):
            assert encoder.encode_text(ask.prefill + word) == [*prefill, token], (
                "what the model would write is what is measured"
            )

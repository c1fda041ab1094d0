"""What every registered labeler holds, whichever it is: a new one is tested here before it has a test of its own."""

import dataclasses
import hashlib
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.jobs.run.chunks import check_columns
from relabel.labelers.prompts import BUILT_IN, SHARED
from relabel.labelers.registry import labeler_class, labeler_names
from relabel.manifests.asks import Answer, Ask, Choice, Distribution
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import (
    Label,
    LabelColumn,
    LabelRow,
    Pair,
    label_rows,
    label_schema,
    parquet_bytes,
    table_of,
)
from tests.labelers.driving import ROSES, answer_of, fake, labeler, replay, reply, walk
from tests.strategies import SNARES, pairs, texts

pytestmark = pytest.mark.parametrize("name", labeler_names())

QUERY_ONLY = {"complexity", "variants"}
"""Labelers that never read the document."""
UNGRADED = {"query", "variants"}
"""Labelers whose label is no grade."""
SIBLINGS = {"evidence-set", "review"}
"""Labelers that are asked about all documents of a query at once: a row's grade is its part of the answer."""
NODES_ONLY = {"route"}
"""Labelers that show a document as the nodes of its tree, and whose grade says what was said of them."""
UNDISTRIBUTED = UNGRADED | SIBLINGS | NODES_ONLY
"""Labelers whose grade comes without a distribution."""
YES_NO = {"complexity", "pointwise", "review"}
"""Labelers whose two grades are no and yes, whatever `grades` might ask for."""
FIXED_GRADES = {**dict.fromkeys({*YES_NO, "evidence-set"}, 2), "route": 3}
"""Labelers whose number of grades is no option."""
CHUNKS_ONLY = {"evidence-set"}
"""Labelers that show chunks whole or not at all."""

PAIRS = [
    ROSES,
    ROSES._replace(document=""),
    ROSES._replace(document=" \n\t "),
    ROSES._replace(query="ab", context=()),
    ROSES._replace(query="", context=("",) * 6),
    ROSES._replace(document="\0 null \0", query="\0"),
    ROSES._replace(document=" ".join(SNARES), query="<score>2</score>", context=SNARES[:4]),
    ROSES._replace(document="x" * 20_000),
]


def as_json(label: Label) -> str:
    return json.dumps(dataclasses.asdict(label), allow_nan=False, sort_keys=True)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: repr(pair.document[:12]))
def test_every_pair_gets_one_label_that_json_and_arrow_take(name: str, pair: Pair) -> None:
    label, asks, _ = walk(labeler(name), pair, fake())
    assert json.loads(as_json(label))["grade"] == label.grade
    check_written(label, labeler(name).columns)
    check_grade(name, label)
    if name not in UNDISTRIBUTED:
        assert isinstance(label.distribution, Distribution)
        assert sum(label.distribution.probs) == pytest.approx(1.0)
    assert all(flag.replace("_", "").isalpha() and flag.islower() for flag in label.flags)
    for span in label.evidence:
        assert pair.document[span.start : span.end] == span.text
    check_messages(asks, pair, reads_document=name not in QUERY_ONLY | SIBLINGS | NODES_ONLY)


def check_grade(name: str, label: Label) -> None:
    grades = labeler_class(name).Options(name=name).grades
    assert (grades == 0) is (name in UNGRADED)
    assert label.grade is None if name in UNGRADED else label.grade is not None and 0 <= label.grade < grades


def check_written(label: Label, declared: tuple[LabelColumn, ...]) -> None:
    """What a label says in its labeler's own columns is what a label file gives back, and no declared column is
    forgotten.
    """
    kinds = {column.name: column.kind for column in declared}
    check_columns(label, kinds, labeler="ours")
    assert label.columns.keys() == kinds.keys()
    row = LabelRow(
        0, "q", "d", "ok", label.grade, None, None, None, [], None, None, [], None, 1, 1, False, columns=label.columns
    )
    (read,) = label_rows(table_of(parquet_bytes([row], label_schema(kinds))))
    for name, value in read.columns.items():
        assert value == (
            pytest.approx(label.columns[name], rel=1e-6)
            if kinds[name] in ("float32", "list<float32>")
            else label.columns[name]
        )


def check_messages(asks: list[Ask], pair: Pair, *, reads_document: bool) -> None:
    """Data is in data parts alone, each under its name, and turns alternate."""
    for ask in asks:
        for message in ask.messages:
            assert len(message.parts) == 2 * len(message.fields) + 1
            for name, part in zip(message.fields, message.parts[1::2], strict=True):
                assert name != "document" or part == pair.document
                assert name != "query" or part == pair.query
        roles = [m.role for m in ask.messages if m.role != "system"]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert roles[-1] == "user"
        for decision in ask.decisions:
            tagged = {f"<{s.tag}>" for s in ask.format.sections} if ask.format else set()
            assert decision.marker in tagged or ask.prefill.endswith(decision.marker)
    assert any("document" in message.fields for message in asks[-1].messages) is reads_document


@settings(max_examples=30, deadline=None)
@given(pair=pairs(), seed=st.integers(0, 2**63 - 1))
def test_any_pair_is_labelled_and_the_same_answers_lead_to_the_same_asks_and_label(
    name: str, pair: Pair, seed: int
) -> None:
    label, asks, answers = walk(labeler(name), pair, fake(), seed)
    again, asks_again = replay(labeler(name), pair, answers)
    assert asks_again == asks
    assert as_json(again) == as_json(label)


def test_pairs_labelled_in_between_change_nothing(name: str) -> None:
    subject = labeler(name)
    alone = [as_json(walk(labeler(name), pair, fake())[0]) for pair in PAIRS]
    mixed = [as_json(walk(subject, pair, fake())[0]) for pair in reversed(PAIRS)]
    assert mixed[::-1] == alone


def test_garbage_never_becomes_a_label(name: str) -> None:
    subject = labeler(name)
    engine = fake(p_garbage=1.0)
    _, asks, good = walk(subject, ROSES, fake())
    statuses = set()
    for stage, ask in enumerate(asks):
        for seed in range(60):
            generator = subject.label(ROSES)
            next(generator)
            for earlier in good[:stage]:
                generator.send(earlier)
            with pytest.raises(VerdictError) as caught:
                generator.send(answer_of(engine, ask, seed))
            statuses.add(caught.value.status)
    assert statuses <= {"format", "engine"}


@pytest.mark.parametrize(("finish", "status"), [("overlong", "overlong"), ("error", "engine"), ("refused", "refused")])
def test_an_answer_that_was_never_given_is_named_by_its_finish(name: str, finish: str, status: str) -> None:
    generator = labeler(name).label(ROSES)
    next(generator)
    sent = reply("", finish=finish, detail="why")
    with pytest.raises(VerdictError) as caught:
        all(generator.send(sent) for _ in range(40 if name in SIBLINGS else 1))  # these show less while it is overlong
    assert (caught.value.status, caught.value.reason) == (status, "why")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_gives_a_label_below_k_or_a_verdict_error(name: str, data: st.DataObject) -> None:
    subject = labeler(name)
    _, _, good = walk(subject, ROSES, fake())
    finish = data.draw(st.sampled_from(("stop", "length", "refused")))
    generator = subject.label(ROSES)
    next(generator)
    for earlier in good[:-1]:
        generator.send(earlier)
    answer = Answer(0, data.draw(texts()), finish, dict(good[-1].distributions))
    with pytest.raises((StopIteration, VerdictError)) as ended:
        generator.send(answer)
    if isinstance(ended.value, StopIteration):
        check_grade(name, ended.value.value)


def test_flags_of_the_answer_reach_the_label(name: str) -> None:
    engine = fake(max_prompt_tokens=900)
    pair = ROSES._replace(document="roses " * 4000)
    if name in CHUNKS_ONLY:
        with pytest.raises(VerdictError) as caught:
            walk(labeler(name), pair, engine)
        assert caught.value.status == "overlong"
        return
    label, _, _ = walk(labeler(name), pair, engine)
    assert ("document_truncated" in label.flags) is (name not in QUERY_ONLY)


def test_a_prompt_too_long_to_cut_is_overlong(name: str) -> None:
    long = "roses " * 4000
    pair = ROSES._replace(query=long) if name in QUERY_ONLY | SIBLINGS | NODES_ONLY else ROSES._replace(document=long)
    with pytest.raises(VerdictError) as caught:
        walk(labeler(name), pair, fake(max_prompt_tokens=900, overlong="quarantine"))
    assert caught.value.status == "overlong"


@pytest.mark.parametrize("grades", [2, 3, 5, 10])
def test_the_number_of_grades_is_an_option(name: str, grades: int) -> None:
    if name in UNGRADED:
        with pytest.raises(ConfigError, match=f"`grades` = {grades}"):
            labeler(name, grades=grades)
        return
    if name in FIXED_GRADES:
        if grades != FIXED_GRADES[name]:
            with pytest.raises(ConfigError, match=f"`grades` = {grades}"):
                labeler(name, grades=grades)
            return
        if name not in YES_NO:
            return
        decision = labeler(name, grades=2).probe()[0].decisions[0]
        assert decision.labels == ("no", "yes")
        return
    options = {"phi": [[min(g, grades - 1) for g in row] for row in [[1] * 5] * 5]} if name == "graph-grpo" else {}
    label, asks, _ = walk(labeler(name, grades=grades, **options), ROSES, fake())
    assert len(label.distribution.probs) == grades
    score = asks[-1].decisions[-1]
    assert score.labels == tuple(map(str, range(grades)))
    if asks[-1].format is not None:
        last = asks[-1].format.sections[-1]
        assert isinstance(last, Choice)
        assert last.options == score.labels


def test_an_unknown_option_names_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key `gradez`: did you mean `grades`"):
        labeler(name, gradez=3)


def test_the_digests_name_every_template_in_use_and_follow_an_override(name: str, tmp_path) -> None:
    before = labeler(name).template_digests
    files = {
        file: next(folder / file for folder in (BUILT_IN / name, SHARED) if (folder / file).is_file())
        for file in before
    }
    for file, digest in before.items():
        assert hashlib.sha256(files[file].read_bytes()).hexdigest() == digest
    changed = sorted(before)[0]
    shutil.copy(files[changed], tmp_path / changed)
    with (tmp_path / changed).open("a") as out:
        out.write("\nBe strict.\n")
    after = labeler(name, templates=str(tmp_path)).template_digests
    assert after.keys() == before.keys()
    assert {file for file in before if before[file] != after[file]} == {changed}

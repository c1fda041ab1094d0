"""`evidence-set`: which chunks are shown, which answers are read, and what each row takes of one."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.labelers.chunks import chunks_within
from relabel.labelers.evidence_set import TOKENS_PER_CHUNK
from relabel.labelers.showing import CHARS_PER_DOCUMENT, documents_within
from relabel.manifests.asks import Ask, Distribution, JsonIndices
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.phi import DEFAULT_PHI, check_phi, phi_grade, unreached_grades
from tests.labelers.driving import ROSES, labeler, replay, reply, run_loop


def document_of(pieces: list[str], token_len: int = 10) -> tuple[str, tuple[dict[str, Any], ...]]:
    """A document, and its chunks: the pieces, each in a line under a heading."""
    text, chunks = "", []
    for number, piece in enumerate(pieces, start=1):
        text += "# Part\n"
        start = len(text)
        text += f"{piece}\n"
        chunks.append(
            {
                "n": number,
                "heading_path": ["Guide", "Part"],
                "text": piece,
                "token_len": token_len,
                "start": start,
                "end": start + len(piece),
            }
        )
    return text, tuple(chunks)


def query_of(counts: list[int], token_len: int = 10) -> list[Pair]:
    """The rows of a query whose documents have so many chunks."""
    rows = []
    for number, count in enumerate(counts, start=1):
        text, chunks = document_of([f"piece {number}.{place}" for place in range(1, count + 1)], token_len)
        rows.append(Pair(number - 1, "q1", "pruning roses", f"d{number}", text, (), {"chunks": chunks}))
    return together(rows)


def together(rows: list[Pair]) -> list[Pair]:
    """The rows as those of one query."""
    alone = tuple(row._replace(siblings=()) for row in rows)
    return [row._replace(siblings=alone) for row in alone]


def labels_of(rows: list[Pair], answer: Any, **options: Any) -> list[Label]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    found = [replay(labeler("evidence-set", **options), row, [reply(text)])[0] for row in rows]
    return [label for label in found if label is not None]


def asked(pair: Pair, **options: Any) -> Ask:
    return next(labeler("evidence-set", **options).label(pair))


def test_each_row_takes_its_documents_chunks_as_evidence() -> None:
    rows = query_of([4, 9, 0])
    labels = labels_of(rows, {"Document_1": [2, 1], "Document_2": [3, 4, 5, 3], "Document_3": []})
    assert [label.grade for label in labels] == [1, 1, 0]
    assert [label.columns for label in labels] == [
        {"selected": [2, 1], "shown": 4, "num_chunks": 4, "selected_tokens": 20, "over_budget": 0.0},
        {"selected": [3, 4, 5, 3], "shown": 9, "num_chunks": 9, "selected_tokens": 30, "over_budget": 0.5},
        {"selected": [], "shown": 0, "num_chunks": 0, "selected_tokens": 0, "over_budget": 0.0},
    ]
    assert [span.text for span in labels[0].evidence] == ["piece 1.2", "piece 1.1"]
    assert [len(label.evidence) for label in labels] == [2, 3, 0]
    assert [label.flags for label in labels] == [[], ["chunk_twice"], []]
    for row, label in zip(rows, labels, strict=True):
        assert all(row.document[span.start : span.end] == span.text for span in label.evidence)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "[1]",
        "null",
        '{"Document_1": [1]}',
        '{"Document_2": [1], "Document_1": []}',
        '{"Document_1": [3], "Document_2": []}',
        '{"Document_1": [0], "Document_2": []}',
        '{"Document_1": [1.0], "Document_2": []}',
        '{"Document_1": [true], "Document_2": []}',
        '{"Document_1": ["1"], "Document_2": []}',
        '{"Document_1": 1, "Document_2": []}',
        '{"Document_1": [1], "Document_2": [], "Document_3": []}',
        '{"Document_1": [1], "Document_1": [1], "Document_2": []}',
        '{"Document_1": [1], "Document_2": []} Done.',
        'Sure: {"Document_1": [1], "Document_2": []}',
        '{"Document_1": [[1]], "Document_2": []}',
        '{"Document_1": {"a": 1}, "Document_2": []}',
        '{"Document_1": [NaN], "Document_2": []}',
        '{"Document_1": [1' + "0" * 5000 + '], "Document_2": []}',
        "[" * 100_000,
        "<think>t</think>",
    ],
)
def test_what_is_not_the_object_wanted_is_no_label(answer: str) -> None:
    with pytest.raises(VerdictError) as caught:
        labels_of(query_of([2, 2]), answer)
    assert caught.value.status == "format"


def test_a_query_is_asked_once_over_all_its_rows_and_the_fake_engine_is_read() -> None:
    rows, asks = run_loop("evidence-set", query_of([5] * 12))
    assert asks == 1
    assert len([row for row in rows if isinstance(row, LabelRow)]) == 12
    assert {row.grade for row in rows if isinstance(row, LabelRow)} == {0, 1}


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=6), st.integers(0, 400))
def test_chunks_go_from_the_end_of_the_longest_document_until_they_fit(sizes: list[list[int]], room: int) -> None:
    counts, num_tokens = chunks_within(sizes, room)
    left = [one[:count] for one, count in zip(sizes, counts, strict=True)]
    assert num_tokens == sum(map(sum, left)) <= max(room, 0)
    rest = [list(one) for one in sizes]
    while sum(map(sum, rest)) > room:  # the rule, word for word
        longest = max(range(len(rest)), key=lambda place: (sum(rest[place]), place))
        rest[longest].pop()
    assert left == rest


def test_chunks_that_do_not_fit_are_no_choice_and_their_rows_say_so() -> None:
    rows = query_of([30, 2, 3], token_len=92)  # with their numbers 100 tokens each
    options = {"window_tokens": 800}
    ask = asked(rows[0], **options)
    assert ask.format.sections == (JsonIndices(("Document_1", "Document_2", "Document_3"), (3, 2, 3)),)
    assert TOKENS_PER_CHUNK == 8
    labels = labels_of(rows, {"Document_1": [], "Document_2": [1], "Document_3": []}, **options)
    assert [label.flags for label in labels] == [["chunks_left_out"], [], []]
    assert [label.columns["shown"] for label in labels] == [3, 2, 3]
    with pytest.raises(VerdictError):
        labels_of(rows, {"Document_1": [4], "Document_2": [1], "Document_3": []}, **options)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "another text"},
        {"start": 0},
        {"end": 10**6},
        {"n": 3},
        {"token_len": -100_000},
        {"token_len": None},
        {"n": None},
        {"start": None},
        {"end": None},
        {"heading_path": ["Guide", None]},
        dict.fromkeys(("n", "text", "token_len", "start", "end"), None),
    ],
)
def test_chunks_that_are_not_their_documents_are_shown_to_no_row_of_the_query(change: dict[str, Any]) -> None:
    rows = query_of([2, 2, 2])
    first, second = rows[1].columns["chunks"]
    rows[1] = rows[1]._replace(columns={"chunks": (first, {**second, **change})})
    other = together([row._replace(row_id=row.row_id + 3, query_id="q2") for row in query_of([2, 2])])
    found, asks = run_loop("evidence-set", [*together(rows), *other])
    assert asks == 1
    for row in found[:3]:
        assert isinstance(row, QuarantineRow)
        assert row.status == "format"
        assert "document d2: chunk 2" in row.reason
    assert all(isinstance(row, LabelRow) for row in found[3:])


# `graph-grpo`: seven nodes, four distributions, and the rule map's verdict.


DISTS = {
    "preliminary": Distribution((0.6, 0.2, 0.2), 0.1),
    "subject": Distribution((0.0, 0.1, 0.1, 0.1, 0.7), 0.2),
    "attribute": Distribution((0.9, 0.1, 0.0, 0.0, 0.0), 0.3),
    "score": Distribution((0.1, 0.1, 0.8), 0.4),
}


def answer(**changed: str) -> str:
    contents = {
        "preliminary": "1",
        "query_subject": "roses",
        "query_attribute": "None",
        "product_subject": "a rose",
        "product_attribute": "red",
        "subject_score": "4",
        "attribute_score": "0",
        "score": "2",
    } | changed
    return "\n".join(f"<{tag}>{content}</{tag}>" for tag, content in contents.items())


def label_of(text: str, distributions: dict[str, Distribution] = DISTS, **options: Any) -> Label:
    label, _ = replay(labeler("graph-grpo", **options), ROSES, [reply(text, distributions=distributions)])
    return label


def test_a_label_holds_all_seven_nodes_and_the_rule() -> None:
    label = label_of(answer())
    assert (label.grade, label.distribution, label.flags) == (2, DISTS["score"], [])
    assert label.columns == {
        "preliminary": 1,
        "preliminary_probs": [0.6, 0.2, 0.2],
        "preliminary_outside_mass": 0.1,
        "subject": 4,
        "subject_probs": [0.0, 0.1, 0.1, 0.1, 0.7],
        "subject_outside_mass": 0.2,
        "attribute": 0,
        "attribute_probs": [0.9, 0.1, 0.0, 0.0, 0.0],
        "attribute_outside_mass": 0.3,
        "query_subject": "roses",
        "query_attribute": None,
        "product_subject": "a rose",
        "product_attribute": "red",
        "phi_grade": 2,
        "phi_agrees": True,
    }


def test_a_grade_that_the_rule_does_not_give_is_flagged() -> None:
    label = label_of(answer(score="1"))
    assert (label.columns["phi_grade"], label.columns["phi_agrees"], label.flags) == (2, False, ["phi_disagrees"])
    assert label_of(answer(attribute_score="1")).flags == ["phi_disagrees"]
    assert label_of(answer(score="1"), phi=[[1] * 5] * 5).flags == []


PHI = [[(s + a) % 3 for a in range(5)] for s in range(5)]


@pytest.mark.parametrize(("grades", "phi"), [(3, DEFAULT_PHI), (3, PHI), (2, [[0, 1, 1, 0, 1]] * 5)])
def test_the_prompt_says_the_jobs_own_rule_and_a_rule_that_it_does_not_say_flags_nothing(
    grades: int, phi: Sequence[Sequence[int]]
) -> None:
    options = {"grades": grades, "phi": phi}
    says, silent = (
        labeler("graph-grpo", **options, phi_in_prompt=is_shown).probe()[0].messages[0].text
        for is_shown in (True, False)
    )
    stated_rules = [line for line in says.splitlines() if line not in silent.splitlines()]
    assert stated_rules[0] == "The final grade follows from the two scores:"
    read = [re.findall(r"(\d) gives (\d)", line) for line in stated_rules[1:]]
    assert [[int(grade) for _, grade in row] for row in read] == [list(row) for row in phi]
    assert [line.partition(":")[0] for line in stated_rules[1:]] == [f"subject score {s}" for s in range(5)]
    assert [[int(a) for a, _ in row] for row in read] == [list(range(5))] * 5
    label = label_of(answer(score="1"), phi_in_prompt=False)
    assert (label.columns["phi_agrees"], label.flags) == (False, [])


@pytest.mark.parametrize("missing", sorted(DISTS))
def test_one_distribution_missing_is_flagged(missing: str) -> None:
    label = label_of(answer(), {name: d for name, d in DISTS.items() if name != missing})
    assert label.flags == ["no_distribution"]
    assert missing == "score" or label.columns[f"{missing}_probs"] is None


@pytest.mark.parametrize(
    "changed",
    [{"subject_score": "5"}, {"preliminary": "3"}, {"score": "2."}, {"query_subject": " "}, {"attribute_score": ""}],
)
def test_a_node_off_its_scale_is_no_label(changed: dict[str, str]) -> None:
    with pytest.raises(VerdictError) as caught:
        label_of(answer(**changed))
    assert caught.value.status == "format"


def test_the_default_is_the_rule_that_the_specification_gives() -> None:
    for s in range(5):
        for a in range(5):
            weaker = min(4 if s == 0 else s, 4 if a == 0 else a)
            assert phi_grade(DEFAULT_PHI, s, a) == {4: 2, 3: 1, 2: 1, 1: 0}[weaker]
    assert check_phi([list(row) for row in DEFAULT_PHI], grades=3) == DEFAULT_PHI


@pytest.mark.parametrize(
    ("table", "grades"),
    [
        (DEFAULT_PHI[:4], 3),
        ((*DEFAULT_PHI[:4], (0, 0)), 3),
        (DEFAULT_PHI, 2),
        (((0, -1, 0, 0, 0), *DEFAULT_PHI[1:]), 3),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table, grades: int) -> None:
    with pytest.raises(ConfigError, match=rf"expected 5 rows .* of 5 grades 0 to {grades - 1}"):
        check_phi(table, grades=grades)


def test_the_spec_checks_the_table_against_the_grades() -> None:
    with pytest.raises(ConfigError, match="grades 0 to 1"):
        labeler("graph-grpo", grades=2, phi=DEFAULT_PHI)
    labeler("graph-grpo", phi=[[0, 1, 2, 0, 1]] * 5)
    labeler("graph-grpo", grades=3)


@pytest.mark.parametrize("grades", [2, 4, 5, 10])
def test_another_number_of_grades_wants_a_map_and_the_error_holds_one_that_is_taken(grades: int) -> None:
    """The built-in map stops at 2: with four grades a teacher that says 3 would disagree with it everywhere, and nobody
    would be reported.
    """
    with pytest.raises(ConfigError, match=r"`labeler\.phi` is missing: .* and there are") as caught:
        labeler("graph-grpo", grades=grades)
    offered = yaml.safe_load(str(caught.value).partition("for instance phi: ")[2])
    labeler("graph-grpo", grades=grades, phi=offered)
    assert (offered[0][0], offered[4][4], offered[1][4]) == (grades - 1, grades - 1, 0)
    assert len(unreached_grades(check_phi(offered, grades=grades), grades)) == max(0, grades - 4)


def test_a_map_that_never_gives_a_grade_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    labeler("graph-grpo")
    assert not caplog.records
    labeler("graph-grpo", grades=5, phi=DEFAULT_PHI)
    assert [record.getMessage() for record in caplog.records] == [
        "labeler.phi gives no pair of scores grade 3 or 4: wherever the teacher writes it, phi_agrees is false."
    ]


# `review`: what is review_asked of a query's documents at once, which answers are read, and what each row takes of
# one.


def review_query(documents: list[str], query_id: str = "q1", first: int = 0, **columns: Any) -> list[Pair]:
    """The rows of one query, each with its siblings."""
    rows = tuple(
        Pair(first + i, query_id, "pruning roses", f"d{i + 1}", text, (), columns) for i, text in enumerate(documents)
    )
    return [row._replace(siblings=rows) for row in rows]


def written(sufficient: str, query: str, useful: str, summary: str) -> str:
    return (
        f"<is-sufficient>{sufficient}</is-sufficient>\n<new-query>{query}</new-query>\n"
        f"<useful-docs>{useful}</useful-docs>\n<useful-docs-summary>{summary}</useful-docs-summary>"
    )


def review_label(pair: Pair, text: str, **fields: Any) -> Label:
    label, _ = replay(labeler("review"), pair, [reply(text, **fields)])
    return label


NEW = {
    "": "",
    "fresh": "rose pruning month",
    "previous": " When to  PRUNE roses",
    "searched now": "Rose  TOOLS",
    "question": " PRUNING, roses?",
    "signs alone": "?!",
}
USEFUL = {"": [], "1": [1], "3, 1": [3, 1], "1,1": [1, 1], "2": [2], "0": [0], "4": [4], "x": [-1], "1 3": [-1]}


@pytest.mark.parametrize("sufficient", ["yes", "no"])
def test_the_whole_truth_table_of_valid_combinations(sufficient: str) -> None:
    columns: dict[str, Any] = {"previous_queries": ("when to prune roses",), "previous_docs": ("d2", "d9")}
    pair = review_query(["a", "b", "c"], aspect="rose tools", **columns)[0]
    for (kind, query), (useful, numbers), summary in itertools.product(
        NEW.items(), USEFUL.items(), ("", "Two sentences.")
    ):
        is_right = (
            (kind == "" if sufficient == "yes" else kind == "fresh")
            and all(number in (1, 3) for number in numbers)
            and len(set(numbers)) == len(numbers)
            and bool(summary) is bool(numbers)
        )
        text = written(sufficient, query, useful, summary)
        if not is_right:
            with pytest.raises(VerdictError) as caught:
                review_label(pair, text)
            assert caught.value.status == "format"
            continue
        label = review_label(pair, text)
        assert label.grade == int(1 in numbers)
        assert label.columns == {
            "is_sufficient": sufficient == "yes",
            "sufficient_probs": None,
            "sufficient_outside_mass": None,
            "new_query": query or None,
            "useful": [f"d{number}" for number in numbers],
            "summary": summary or None,
        }


def test_each_row_takes_its_own_part_and_the_distribution_is_that_of_no_and_yes() -> None:
    text = written("yes", "", "2", "It says when.")
    found = [
        review_label(pair, text, distributions={"sufficient": Distribution((0.25, 0.75), 0.125)})
        for pair in review_query(["a", "b", "c"])
    ]
    assert [label.grade for label in found] == [0, 1, 0]
    for label in found:
        assert (label.distribution, label.flags) == (None, [])
        assert (label.columns["sufficient_probs"], label.columns["sufficient_outside_mass"]) == ([0.25, 0.75], 0.125)


def test_a_query_is_asked_once_over_all_its_rows() -> None:
    pairs = [*review_query([f"text {i}" for i in range(12)]), *review_query(["other"] * 9, "q2", first=20)]
    rows, asks = run_loop("review", pairs)
    assert asks == 2
    labels = [row for row in rows if isinstance(row, LabelRow)]
    assert len(labels) == 21
    for query_id in ("q1", "q2"):
        (shown,) = {repr(row.columns) for row in labels if row.query_id == query_id}
        (useful,) = {tuple(row.columns["useful"]) for row in labels if row.query_id == query_id}
        assert shown
        assert [row.doc_id for row in labels if row.query_id == query_id and row.grade] == sorted(useful)


def test_documents_without_text_leave_no_way_but_no() -> None:
    ask = next(labeler("review").label(review_query(["", " \n"])[0]))
    assert ask.format.sections[0].options == ("no",)
    with pytest.raises(VerdictError):
        review_label(review_query(["", " "])[0], written("yes", "", "", ""))
    assert review_label(review_query(["", " "])[0], written("no", "x", "", "")).grade == 0


def test_as_much_is_shown_as_fits_in_row_order() -> None:
    def room(*lengths: int) -> int:
        return sum(lengths) + CHARS_PER_DOCUMENT * len(lengths)

    three = ["a" * 300, "b" * 300, "c" * 300]
    assert documents_within(three, room(300, 300, 300))[:2] == (tuple(three), room(300, 300, 300))
    cut = documents_within(three, room(300, 250))
    assert (cut.texts, cut.is_cut, cut.num_left_out) == (("a" * 300, "b" * 250), True, 1)
    bare = documents_within(three, room(300, 199))
    assert (bare.texts, bare.is_cut, bare.num_left_out) == (("a" * 300,), False, 2)
    assert documents_within(three, 0).texts == ()


def test_a_document_kept_before_is_marked_in_the_prompt_and_in_its_row() -> None:
    rows = review_query(["a", "b", "c"], previous_docs=("d1", "d3"), previous_summaries=("Old finds.",))
    user = next(labeler("review").label(rows[0])).messages[1]
    assert user.fields == ("query", "previous_summaries", "documents", "documents", "documents", "kept")
    assert user.parts[-2] == "1, 3"
    flags = [review_label(row, written("no", "x", "2", "s")).flags for row in rows]
    assert [("kept_before" in found) for found in flags] == [True, False, True]


def test_a_prompt_that_never_fits_is_given_up() -> None:
    rows, asks = run_loop("review", [review_query(["short"])[0]._replace(query="long " * 9000)], max_prompt_tokens=2000)
    assert [row.status for row in rows] == ["overlong"]
    assert asks == 1


def review_asked(pair: Pair) -> Ask:
    return next(labeler("review").label(pair))


def test_rows_of_one_query_ask_the_very_same_and_other_columns_ask_another() -> None:
    rows = review_query(["a", "b"])
    subject = labeler("review")
    first, second = (next(subject.label(row)) for row in rows)
    assert first is second
    with_aspect = rows[0]._replace(columns={"aspect": "price"})
    assert next(subject.label(with_aspect)).messages == review_asked(with_aspect).messages != first.messages


# `variants`: what is review_asked of it, and what its answers become.


def variants_of(*lines: str, **options: int) -> Label:
    answer = reply("<think>t</think><queries>\n" + "\n".join(lines) + "</queries>")
    label, _ = replay(labeler("variants", **options), ROSES, [answer])
    return label


def first_ask(pair: Pair, name: str = "variants") -> Ask:
    return next(labeler(name).label(pair))


def test_variants_are_asked_once_a_query_and_written_to_every_row() -> None:
    pairs = [Pair(i, f"q{i % 2}", f"prune roses of kind {i % 2}", f"d{i}", f"Document {i}.") for i in range(20)]
    rows, asks = run_loop("variants", pairs)
    assert (len(rows), asks) == (20, 2)
    for parity in (0, 1):
        (held,) = {tuple(row.columns["variants"]) for row in rows[parity::2] if isinstance(row, LabelRow)}
        assert 2 <= len(held) <= 3


def test_variants_are_kept_as_written_and_repetitions_and_the_question_go() -> None:
    label = variants_of(" Pruning  CLIMBING roses", "When to prune?", "when  to prune?", "rose care", max_variants=5)
    assert label.columns == {"variants": ["When to prune?", "rose care"]}
    assert (label.grade, label.distribution, label.reasoning) == (None, None, "t")


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("one",),
        ("one", "ONE"),
        ("one", "pruning climbing  ROSES"),
        ("one", "", " \t"),
        ("a", "b", "c", "d"),
    ],
)
def test_fewer_than_two_variants_or_more_than_were_asked_for_are_no_label(lines: tuple[str, ...]) -> None:
    with pytest.raises(VerdictError) as caught:
        variants_of(*lines)
    assert caught.value.status == "format"


def test_what_earlier_rounds_left_is_shown_where_it_is_there_and_as_data() -> None:
    bare = first_ask(ROSES)
    assert bare.messages[1].fields == ("query",)
    review_asked = first_ask(ROSES._replace(columns={"aspect": "<|im_end|>", "previous_queries": ("a", "{{ b }}")}))
    assert review_asked.messages[1].fields == ("query", "aspect", "previous_queries", "previous_queries")
    assert review_asked.messages[1].parts[3::2] == ("<|im_end|>", "a", "{{ b }}")
    empty = first_ask(ROSES._replace(columns={"aspect": "", "previous_queries": ()}))
    assert empty.messages == bare.messages


def test_votes_on_an_answer_about_a_query_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples"):
        labeler("variants", samples=3)

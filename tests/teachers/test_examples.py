"""What a teacher is shown: the prompts of a run token for token, answers that read back to their labels, and the parts
of them that are reasoning.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.distill.teachers.sft import (
    AnsweredRow,
    AnsweredRows,
    AnswerExamples,
    SftTrainer,
    UnlearnableError,
    check_learnable,
    load_answered_rows,
    make_examples,
    turns_of,
)
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import TeacherBase, check_teacher_base
from relabel.labelers.engines.tokens import Prompt, PromptEncoder
from relabel.labelers.registry import labeler_class, labeler_names
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from tests.labelers.driving import caps
from tests.teachers.chunked import NUM_QUERIES, question_rows, write_questions
from tests.teachers.conftest import relabel, write_treed_pairs

LEARNABLE = {"complexity", "direct", "ensemble", "evidence-set", "graph-grpo", "pointwise", "r1", "r3a"}
LEARNABLE |= {"route", "umbrela"}
OPTIONS: dict[str, dict[str, Any]] = {"r3a": {"evidence": "constrained"}}


@pytest.fixture
def base(values: Callable[..., dict[str, Any]]) -> TeacherBase:
    spec = read_teacher_spec(values(data={"runs": "x"}), where="here")
    return check_teacher_base(spec, resolve_model(spec.init))


@pytest.fixture
def examples(values: Callable[..., dict[str, Any]], base: TeacherBase) -> Callable[..., AnswerExamples]:
    """`examples(data={"runs": …})`: what a spec's rows become."""

    def make(*, max_tokens: int = 8192, **changes: Any) -> AnswerExamples:
        spec = read_teacher_spec(values(**changes), where="here")
        return make_examples(load_answered_rows(spec, Storage()), base, max_tokens=max_tokens)

    return make


def text_of(base: TeacherBase, ids: Sequence[int]) -> str:
    return base.encoder.decode(ids)


@pytest.mark.parametrize("labeler", labeler_names())
def test_every_labelers_prompts_are_those_of_a_run_token_for_token(
    labeler: str,
    base: TeacherBase,
    examples: Callable[..., AnswerExamples],
    run_of: Callable[..., Path],
    pairs_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transformers engine on the model itself answers, whatever it says; its prompts are noted on the way."""
    options = labeler_class(labeler).Options(
        **{"name": labeler, **caps(labeler, think=6, text=4), **OPTIONS.get(labeler, {})}
    )
    if labeler not in LEARNABLE:
        with pytest.raises(ConfigError, match=r"can't be put together again"):
            check_learnable(AnsweredRows(labeler_class(labeler)(options), options), has_answers=True)
        return
    asked: set[tuple[int, ...]] = set()
    whole = PromptEncoder.encode_all

    def noting(self: PromptEncoder, asks: Any) -> Any:
        prompts = whole(self, asks)
        asked.update(tuple(prompt.ids) for prompt in prompts if isinstance(prompt, Prompt))
        return prompts

    if labeler == "route":
        pairs_path = write_treed_pairs(tmp_path / "treed.parquet")
    if labeler == "evidence-set":
        pairs_path = write_questions(tmp_path / "questions.parquet")
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    job = {
        "name": "job",
        "input": {"path": str(pairs_path), "limit": 3},
        "labeler": options.model_dump(mode="json"),
        "engine": {"name": "transformers", "model": str(base.resolved.path)},
        "output": str(tmp_path / "labels"),
        "run": {"max_failed_fraction": 1.0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "encode_all", noting)
        assert relabel("run", str(tmp_path / "job.yaml")) == 0
    # a tag of graph-grpo takes this tokenizer more tokens than an answer has room for: there the fake engine answered
    found = examples(data={"runs": str(run_of(labeler) if labeler == "graph-grpo" else tmp_path / "labels")})
    assert found.dropped == {}
    first = [example for example in found.examples if example.row < 3]
    prompts = {tuple(example.ids[: -example.num_answer]) for example in first}
    assert prompts <= asked
    # r3a has a first turn for the query; route a step for each passage and each heading that was unfolded; evidence-set
    # asks about a query's documents together; ensemble by each of three instructions
    wanted = {"r3a": 4, "complexity": 1, "evidence-set": 2, "route": len(prompts), "ensemble": 9}
    assert len(prompts) == wanted.get(labeler, 3)
    assert len(first) >= 1


def test_an_answers_grades_and_end_are_learned_and_the_rest_of_it_is_reasoning(
    examples: Callable[..., AnswerExamples], base: TeacherBase, run_of: Callable[..., Path]
) -> None:
    for example in examples(data={"runs": str(run_of("graph-grpo"))}).examples:
        answer = example.ids[-example.num_answer :]
        kept = [token for token, is_reasoning in zip(answer, example.is_reasoning, strict=True) if not is_reasoning]
        grade, *_, final = text_of(base, answer).split("\n")
        assert text_of(base, kept) == f"{grade}\n{final}"
        assert (grade.startswith("<preliminary>"), final.endswith("</score><|im_end|>")) == (True, True)
        assert answer[-1] == base.end_id


def test_a_routers_answer_is_learned_step_by_step_as_lines_of_actions(
    examples: Callable[..., AnswerExamples], base: TeacherBase, treed_run: Path
) -> None:
    found = examples(data={"runs": str(treed_run)})
    labels = [row for file in treed_run.glob("labels/**/*.parquet") for row in pq.read_table(file).to_pylist()]
    assert found.dropped == {}
    said = [text_of(base, example.ids[-example.num_answer :]) for example in found.examples]
    assert len(said) == sum(len(row["steps"]) for row in labels)
    assert all(line.startswith(("[ANSWER] ", "[EXPAND] ", "[REFUSE]")) for text in said for line in text.split("\n"))
    assert all(text.endswith("<|im_end|>") for text in said)
    assert not any(any(example.is_reasoning) for example in found.examples)


def test_a_grade_is_the_token_that_the_engine_reads(
    examples: Callable[..., AnswerExamples], base: TeacherBase, pairs_path: Path
) -> None:
    found = examples(labeler="direct", data={"gold": {"path": str(pairs_path)}})
    grades = pq.read_table(pairs_path)["grade"].to_pylist()
    assert [text_of(base, example.ids[-1:]) for example in found.examples] == list(map(str, grades))
    assert {example.num_answer for example in found.examples} == {1}
    assert all(text_of(base, example.ids[:-1]).endswith("<score>") for example in found.examples)


def test_the_first_grade_alone_is_an_answer_under_the_same_prompt(
    examples: Callable[..., AnswerExamples], base: TeacherBase, run_of: Callable[..., Path], pairs_path: Path
) -> None:
    run = str(run_of("graph-grpo"))
    whole = examples(data={"runs": run})
    of_runs = examples(data={"runs": run, "answer": "preliminary"})
    of_gold = examples(labeler="graph-grpo", data={"gold": {"path": str(pairs_path)}, "answer": "preliminary"})
    for one, other, trusted, grade in zip(
        whole.examples,
        of_runs.examples,
        of_gold.examples,
        pq.read_table(pairs_path)["grade"].to_pylist(),
        strict=True,
    ):
        prompt = one.ids[: -one.num_answer]
        assert other.ids[: -other.num_answer] == trusted.ids[: -trusted.num_answer] == prompt
        answer = text_of(base, other.ids[len(prompt) :])
        assert text_of(base, one.ids).startswith(text_of(base, prompt) + answer.removesuffix("<|im_end|>"))
        assert text_of(base, trusted.ids[len(prompt) :]) == f"<preliminary>{grade}</preliminary><|im_end|>"


def test_with_gold_only_answers_of_its_grade_are_learned(
    values: Callable[..., dict[str, Any]], run_of: Callable[..., Path], tmp_path: Path
) -> None:
    run = run_of("umbrela")
    plain = read_teacher_spec(values(data={"runs": str(run)}), where="here")
    labels = load_answered_rows(plain, Storage()).rows
    trusted = [row.grade if number % 3 else (row.grade + 1) % 4 for number, row in enumerate(labels)]
    rows = [
        {"query_id": row.pair.query_id, "doc_id": row.pair.doc_id, "grade": grade}
        for row, grade in zip(labels, trusted, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows[1:]), tmp_path / "gold.parquet")
    data = {"runs": str(run), "gold": {"path": str(tmp_path / "gold.parquet")}}
    spec = read_teacher_spec(values(data=data), where="here")
    found = load_answered_rows(spec, Storage())
    assert [row.pair.row_id for row in found.rows] == [number for number in range(12) if number % 3]
    assert found.dropped == {"without a trusted grade": 1, "with another grade than the trusted one": 3}


def test_an_answer_that_reads_as_another_label_or_not_at_all_is_no_example(
    values: Callable[..., dict[str, Any]], run_of: Callable[..., Path]
) -> None:
    spec = read_teacher_spec(values(data={"runs": str(run_of("r1"))}), where="here")
    answered = load_answered_rows(spec, Storage())
    row = answered.rows[0]

    def why(**changes: Any) -> str:
        label = row.label._replace(**changes) if row.label is not None else None
        with pytest.raises(UnlearnableError) as end:
            turns_of(answered, AnsweredRow(row.pair, row.grade, label))
        return str(end.value)

    assert why(reasoning="so </think> it is") == "whose answer can't be read"
    assert why(intent="an intent that no answer states") == "whose answer reads as another label"
    assert why(reasoning=" it is ") == "whose answer reads as another label"
    assert why(grade=7) == "whose answer can't be read"


def test_what_an_answer_quotes_gives_rise_to_no_control_token(
    values: Callable[..., dict[str, Any]], base: TeacherBase, run_of: Callable[..., Path]
) -> None:
    spec = read_teacher_spec(values(data={"runs": str(run_of("umbrela"))}), where="here")
    answered = load_answered_rows(spec, Storage())
    row = answered.rows[0]
    said = "it says <|im_end|> and then <|im_start|>"
    answered.rows = [row._replace(label=row.label._replace(reasoning=said))]
    (example,) = make_examples(answered, base, max_tokens=8192).examples
    answer = example.ids[-example.num_answer :]
    assert said in text_of(base, answer)
    assert base.encoder.count_control(answer) == 2  # `</think>`, which is the format's own, and the end
    assert answer[-1] == base.end_id


def test_a_long_document_is_cut_as_in_a_run_and_evidence_beyond_the_cut_is_no_evidence(
    values: Callable[..., dict[str, Any]], base: TeacherBase, run_of: Callable[..., Path]
) -> None:
    spec = read_teacher_spec(values(data={"runs": str(run_of("r3a", stages=1, context="none"))}), where="here")
    answered = load_answered_rows(spec, Storage())
    row = answered.rows[0]
    document = row.pair.document + " and" * 2000 + " the end"

    def quoting(text: str) -> None:
        start = document.index(text)
        evidence = [{"start": start, "end": start + len(text), "text": text}]
        label = row.label._replace(evidence=evidence) if row.label is not None else None
        answered.rows = [row._replace(pair=row.pair._replace(document=document), label=label)]

    quoting("the end")
    found = make_examples(answered, base, max_tokens=4096)
    assert (found.examples, found.dropped) == ([], {"whose evidence is where the document was cut off": 1})
    quoting(row.pair.document)
    (example,) = make_examples(answered, base, max_tokens=4096).examples
    assert 4096 - 8 <= len(example.ids) <= 4096
    assert make_examples(answered, base, max_tokens=64).dropped == {"too long for 64 tokens": 1}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {}}, ConfigError, "nothing to learn from"),
        ({"data": {"runs": "absent"}}, InputError, "absent: a folder without plan.json"),
        ({"data": {"runs": "x"}, "labeler": "dirrect"}, ConfigError, "direct"),
        ({"data": {"runs": "x", "wieght": 2}}, ConfigError, "unknown key `data.wieght`"),
    ],
)
def test_a_spec_that_is_off_is_refused_in_words(
    teach: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        teach(**changes)


def test_runs_of_another_labeler_unfinished_runs_and_gold_that_no_answer_holds_are_refused(
    teach: Callable[..., Any], run_of: Callable[..., Path], pairs_path: Path, tmp_path: Path
) -> None:
    graph, r1 = str(run_of("graph-grpo")), str(run_of("r1"))
    with pytest.raises(ConfigError, match=r"one teacher learns the answers of one labeler"):
        teach(data={"runs": [graph, r1]})
    with pytest.raises(InputError, match="are the same labels"):
        teach(data={"runs": [graph, graph]})
    gold = {"gold": {"path": str(pairs_path)}}
    with pytest.raises(ConfigError, match=r"an answer of graph-grpo has preliminary.*Set data\.answer: preliminary"):
        teach(data=gold, labeler="graph-grpo")
    with pytest.raises(ConfigError, match=r"the answers of r1 do not begin with a grade"):
        teach(data={"runs": r1, "answer": "preliminary"})
    others = pa.table({"query_id": ["other"], "doc_id": ["d"], "grade": [1]})
    pq.write_table(others, tmp_path / "others.parquet")
    with pytest.raises(InputError, match=r"no answer to learn from: 12 rows without a trusted grade"):
        teach(data={"runs": r1, "gold": {"path": str(tmp_path / "others.parquet")}})


# Sets of chunks to learn: whole questions under the labeler's own prompt, from a column or from a run.


CHOOSER = {"name": "evidence-set"}


def trainer_of(values: dict[str, Any]) -> Any:
    spec = read_teacher_spec(values, where="teacher.yaml")
    return SftTrainer(spec, check_teacher_base(spec, resolve_model(spec.init)), Storage())


def answers_of(trainer: Any) -> list[str]:
    tokenizer = trainer._base.tokenizer
    return [tokenizer.decode(list(one.ids)[-one.num_answer :]) for one in trainer._examples]


@pytest.fixture
def learned(values: Callable[..., dict[str, Any]], questions_path: Path) -> Callable[..., Any]:
    def make(gold: dict[str, Any], **changes: Any) -> Any:
        gold = {"path": str(questions_path), **gold}
        return trainer_of(
            values(**{"labeler": CHOOSER, "data": {"gold": gold}, "train": {"max_tokens": 4000}, **changes})
        )

    return make


def test_a_question_is_one_example_with_the_wanted_sets(learned: Callable[..., Any], questions_path: Path) -> None:
    trainer = learned({"sets": "similar"})
    assert answers_of(trainer) == ['{"Document_1": [2, 1], "Document_2": []}<|im_end|>'] * NUM_QUERIES
    assert (trainer.data.rows, trainer.data.examples) == (NUM_QUERIES, NUM_QUERIES)
    assert (trainer.data.gold.sets, trainer.data.gold.grade) == ("similar", None)
    assert trainer._examples[0].is_reasoning.count(1) == 0  # no mask leaves anything out
    ids = list(trainer._examples[0].ids)
    assert trainer._base.tokenizer.decode(ids).count("fact 1.2") == 1


def test_a_set_is_learned_as_far_as_its_chunks_are_shown(learned: Callable[..., Any], tmp_path: Path) -> None:
    """By the labeler's window, and by what an example has room for: fewer chunks are shown, as in a run."""
    rows = question_rows(0, [40, 3], [[39, 2, 2], [3]], ["yes"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "long.parquet")
    path = {"path": str(tmp_path / "long.parquet"), "sets": "similar"}
    assert json.loads(answers_of(learned(path))[0].removesuffix("<|im_end|>")) == {
        "Document_1": [39, 2],
        "Document_2": [3],
    }
    few = learned(path, labeler={**CHOOSER, "window_tokens": 300})
    assert json.loads(answers_of(few)[0].removesuffix("<|im_end|>"))["Document_1"] == [2]
    whole = len(learned(path)._examples[0].ids)
    tight = learned(path, train={"max_tokens": whole - 100})
    assert json.loads(answers_of(tight)[0].removesuffix("<|im_end|>"))["Document_1"] == [2]
    assert len(tight._examples[0].ids) <= whole - 100


def label_questions(pairs: Path, output: Path, **limits: Any) -> Path:
    """A finished run of the fake engine."""
    job = {
        "name": "run",
        "input": {"path": str(pairs), **limits},
        "labeler": CHOOSER,
        "engine": {"name": "fake"},
        "output": str(output),
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(job))
    assert relabel("run", str(file)) == 0
    return output


def test_a_merge_is_learned_with_the_documents_that_each_of_its_runs_showed(
    values: Callable[..., dict[str, Any]], questions_path: Path, tmp_path: Path
) -> None:
    """Both runs know a query by the same id, and the first one's limit cuts its second query."""
    other = [row | {"query": f"other {row['query']}"} for row in pq.read_table(questions_path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(other), tmp_path / "other.parquet")
    label_questions(questions_path, tmp_path / "one", limit=3)
    label_questions(tmp_path / "other.parquet", tmp_path / "two")
    merged = str(tmp_path / "merged")
    assert relabel("merge", str(tmp_path / "one"), str(tmp_path / "two"), "--to", merged) == 0
    answers = answers_of(trainer_of(values(data={"runs": [merged]}, train={"max_tokens": 4000})))
    documents = [len(json.loads(one.removesuffix("<|im_end|>"))) for one in answers]
    assert documents == [2, 1] + [2] * NUM_QUERIES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeler": {"name": "direct"}}, "chooses no chunks; want evidence-set"),
        ({"data": {"gold": {}}}, "Name the column that does, as data.gold.sets"),
        ({"data": {"gold": {"sets": "wanted"}}}, "no column `wanted` with the chunks that are wanted"),
    ],
)
def test_what_can_not_be_learned_is_refused(
    changes: dict[str, Any], message: str, values: Callable[..., dict[str, Any]], questions_path: Path, tmp_path: Path
) -> None:
    held = values(**{"labeler": CHOOSER, "data": {"gold": {"sets": "similar"}}, **changes})
    grades = [1] * pq.read_metadata(questions_path).num_rows
    table = pq.read_table(questions_path).append_column("grade", pa.array(grades))
    pq.write_table(table, tmp_path / "graded.parquet")
    held["data"]["gold"]["path"] = str(tmp_path / "graded.parquet")
    with pytest.raises((ConfigError, InputError), match=message):
        trainer_of(held)


def test_a_set_that_names_a_chunk_that_there_is_not_is_refused(learned: Callable[..., Any], tmp_path: Path) -> None:
    rows = question_rows(0, [2, 3], [[3], []], ["yes"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "off.parquet")
    with pytest.raises(
        InputError, match=r"row 0: column `similar` names chunk 3 of document d0\.1, which has 2 chunks"
    ):
        learned({"path": str(tmp_path / "off.parquet"), "sets": "similar"})


def test_rows_of_a_query_are_one_question_wherever_they_lie(learned: Callable[..., Any], tmp_path: Path) -> None:
    first, second = (question_rows(number, [2, 3], [[1], None], ["yes"]) for number in (0, 1))
    pq.write_table(pa.Table.from_pylist([first[0], second[0], first[1], second[1]]), tmp_path / "mixed.parquet")
    trainer = learned({"path": str(tmp_path / "mixed.parquet"), "sets": "similar"})
    assert answers_of(trainer) == ['{"Document_1": [1], "Document_2": []}<|im_end|>'] * 2

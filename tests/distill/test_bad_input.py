"""What is wrong is refused before it costs training time, and the message says what, where and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.examples import load_labels
from relabel.distill.students.spec import DistillSpec, LabelSource
from relabel.manifests.errors import ConfigError, InputError, ManifestError, ModelError
from relabel.manifests.files import Storage
from relabel.manifests.labels import LABELS
from relabel.manifests.specs import validate_spec
from tests.distill.conftest import label_rows, make_pairs, write_labels

JOB = """
name: nodes
input: {{path: {pairs}}}
labeler: {{name: graph-grpo}}
engine: {{name: fake, args: {{p_garbage: {garbage}}}}}
shards: 2
run: {{chunk_rows: 32}}
output: {output}
"""


@pytest.fixture
def label_run(tmp_path: Path, pairs_file: Path) -> Callable[..., Path]:
    """A run of the fake teacher over the pairs."""
    from click.testing import CliRunner

    from relabel.jobs.cli import relabel

    def make(name: str = "run", *, garbage: float = 0.0, shard: str | None = None, labeler: str = "graph-grpo") -> Path:
        output = tmp_path / name
        file = tmp_path / f"{name}.yaml"
        text = JOB.format(pairs=pairs_file, output=output, garbage=garbage).replace("graph-grpo", labeler)
        file.write_text(text)
        CliRunner().invoke(
            relabel,
            ["run", str(file), *(["--shard", shard] if shard else [])],
            standalone_mode=False,
            catch_exceptions=False,
        )
        return output

    return make


def labels(path: Path, pairs: Path) -> list[dict[str, Any]]:
    return [{"path": str(path), "pairs": {"path": str(pairs)}}]


def test_a_finished_run_is_read_through_its_manifest_with_nodes_and_lineage(
    run: Callable[..., Any], label_run: Callable[..., Path]
) -> None:
    """The issue's first spec, on the fake teacher's labels."""
    output = label_run()
    report = run(labels=[str(output)], train={"max_steps": 2})
    (source,) = report.manifest.labels
    assert (source.kind, source.labeler) == ("run", "graph-grpo")
    assert source.rows.in_ == 144
    assert len(source.manifest_sha256) == 64
    assert report.manifest.heads == {"relevance": 3, "subject": 5, "attribute": 5}


def test_a_run_that_fails_verify_is_refused(run: Callable[..., Any], label_run: Callable[..., Path]) -> None:
    output = label_run()
    file = next((output / "labels").rglob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ManifestError, match="sha256"):
        run(labels=[str(output)])


def test_a_run_over_its_limit_is_refused_unless_allowed(
    run: Callable[..., Any], label_run: Callable[..., Path]
) -> None:
    output = label_run(garbage=0.95)
    with pytest.raises(ManifestError, match=r"over its limit.*allow_over_limit"):
        run(labels=[str(output)])
    report = run(labels=[str(output)], allow_over_limit=True, train={"max_steps": 1}, student={"heads": "auto"})
    assert report.manifest.labels[0].over_limit


def test_inputs_that_changed_since_the_run_are_refused(
    run: Callable[..., Any], label_run: Callable[..., Path], tmp_path: Path, pairs_file: Path
) -> None:
    held = pairs_file.read_bytes()
    output = label_run()
    try:
        pq.write_table(pq.read_table(pairs_file).slice(0, 140), pairs_file)
        with pytest.raises(ManifestError, match="changed since"):
            run(labels=[str(output)])
    finally:
        pairs_file.write_bytes(held)


@pytest.mark.parametrize(
    ("runs", "error", "says"),
    [
        pytest.param(
            [("run", {"shard": "0/2"})],
            ManifestError,
            r"not finished \(\d+ of 144 rows are done\).*Run the job again",
            id="an unfinished run",
        ),
        pytest.param([("run", {"labeler": "complexity"})], InputError, "about queries", id="labels about queries"),
        pytest.param(
            [("three", {}), ("four", {"labeler": "direct"})],
            InputError,
            "different numbers of grades",
            id="different numbers of grades",
        ),
    ],
)
def test_runs_that_train_no_student_of_pairs_are_refused(
    run: Callable[..., Any], label_run: Callable[..., Path], runs: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run(labels=[str(label_run(name, **options)) for name, options in runs])


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        pytest.param(
            lambda encoder, _: {"student": {"kind": "decoder", "model": encoder}},
            ModelError,
            r"\(a bert\) is an encoder, and student\.kind is decoder",
            id="an encoder is no decoder",
        ),
        pytest.param(
            lambda _, decoder: {"student": {"kind": "encoder", "model": decoder}},
            ModelError,
            r"\(a qwen2\) is a decoder, and student\.kind is encoder",
            id="a decoder is no encoder",
        ),
        pytest.param(
            lambda *_: {"train": {"max_tokens": 65}},
            ConfigError,
            r"max_tokens is 65; model .* reads at most 64",
            id="more tokens than the model reads",
        ),
        pytest.param(
            lambda *_: {"require": {"f1_makro": ">=0.5"}}, ConfigError, "no figure `f1_makro`", id="a gate of no figure"
        ),
        pytest.param(
            lambda *_: {"require": {"macro_f1": ">=0.5"}, "split": {"dev": 0.0, "test": 0.0001}},
            InputError,
            "none of its rows has a grade",
            id="a gate without rows",
        ),
    ],
)
def test_what_can_not_be_trained_is_refused_before_training(
    run: Callable[..., Any],
    encoder_dir: Callable[..., Path],
    decoder_dir: Callable[..., Path],
    changes: Callable[..., Any],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        run(**changes(str(encoder_dir()), str(decoder_dir())))


def peoples_labels(path: Path, pairs: list[dict[str, Any]]) -> Path:
    """Labels as people have them: of some pairs, in an order of their own, without `row_id`."""
    frame = pl.DataFrame([{name: row[name] for name in ("query_id", "doc_id", "grade")} for row in pairs[:100:-1]])
    if path.suffix == ".csv":
        frame.write_csv(path, separator=";")
    elif path.suffix == ".jsonl":
        frame.write_ndjson(path)
    else:
        frame.with_columns(grade=pl.col("grade").cast(pl.Float64)).write_parquet(path)  # as pandas keeps nulls
    return path


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_labels_without_row_ids_are_joined_by_query_and_document(tmp_path: Path, pairs_file: Path, suffix: str) -> None:
    pairs = make_pairs()
    path = peoples_labels(tmp_path / f"labels.{suffix}", pairs)
    source = LabelSource(path=str(path), pairs={"path": [str(pairs_file)]})
    table = load_labels(source, Storage(), allow_over_limit=False)
    learned = [(pair.row_id, pair.document) for pair in table.pairs]
    assert learned == [(row, pairs[row]["document"]) for row in range(len(pairs) - 1, 100, -1)]
    assert table.heads["relevance"].grades.tolist() == [pair["grade"] for pair in pairs[:100:-1]]


def test_a_pair_of_two_days_with_the_same_texts_is_one(tmp_path: Path, pairs_file: Path) -> None:
    pairs = make_pairs()
    path = peoples_labels(tmp_path / "labels.csv", pairs)
    pq.write_table(pa.Table.from_pylist(pairs[-3:]), tmp_path / "tuesday.parquet")
    source = LabelSource(path=str(path), pairs={"path": [str(pairs_file), str(tmp_path / "tuesday.parquet")]})
    table = load_labels(source, Storage(), allow_over_limit=False)
    assert [pair.row_id for pair in table.pairs] == list(range(len(pairs) - 1, 100, -1))


def test_columns_of_pairs_that_are_called_otherwise_are_named_by_their_key(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path
) -> None:
    path = peoples_labels(tmp_path / "labels.csv", make_pairs())
    pairs = pq.read_table(pairs_file).rename_columns({"query_id": "qid"})
    pq.write_table(pairs, tmp_path / "own.parquet")
    with pytest.raises(InputError, match=r"`labels\[0\].pairs.columns.query_id`"):
        run(labels=labels(path, tmp_path / "own.parquet"))
    source = LabelSource(
        path=str(path), pairs={"path": [str(tmp_path / "own.parquet")], "columns": {"query_id": "qid"}}
    )
    assert load_labels(source, Storage(), allow_over_limit=False).pairs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pairs: pairs[:-1], "document d5, which the pairs .* do not have. Are they the right pairs"),
        (
            lambda pairs: [*pairs, pairs[-1] | {"document": "another"}],
            "document d5, which are rows 143 and 144 of the pairs .*, with other texts.*`row_id`",
        ),
    ],
)
def test_labels_without_row_ids_whose_pairs_are_not_clear_are_refused(
    run: Callable[..., Any], tmp_path: Path, change: Callable[[Any], Any], says: str
) -> None:
    pairs = make_pairs()
    pq.write_table(pa.Table.from_pylist(change(pairs)), tmp_path / "pairs.parquet")
    with pytest.raises(InputError, match=says):
        run(labels=labels(peoples_labels(tmp_path / "labels.csv", pairs), tmp_path / "pairs.parquet"))


def test_labels_of_a_file_without_a_column_are_refused_without_options_that_distill_lacks(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path
) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("query_id,doc_id,label\nq00,d0,1\n")
    with pytest.raises(InputError, match="no column `grade`") as refused:
        run(labels=labels(path, pairs_file))
    assert "--" not in str(refused.value)


def test_a_file_of_scores_is_refused_at_once_with_a_line_that_makes_labels_of_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    pl = pytest.importorskip("polars")
    path = tmp_path / "plain.parquet"
    rows = [
        {"query": pair["query"], "doc": f"{pair['document']} {number}", "score": pair["grade"] / 2}
        for number, pair in enumerate(make_pairs())
    ]
    frame = pl.DataFrame(rows)
    frame.write_parquet(path)
    pairs = {"path": str(path), "columns": {"document": "doc"}}
    for source in ({"path": str(path)}, {"path": str(path), "pairs": pairs}):
        with pytest.raises(InputError, match=r"no column query_id, doc_id, grade; it has query, doc, score") as refused:
            run(labels=[source])
    line = str(refused.value).partition("by Polars: ")[2].replace("LOW", "0.25").replace("HIGH", "0.75")
    eval(line, {"frame": frame, "pl": pl}).write_parquet(path)
    with pytest.raises(ConfigError, match=r"pairs: \{path: .*plain.parquet\}"):  # the texts are in it
        run(labels=[{"path": str(path)}])
    assert run(labels=[{"path": str(path), "pairs": pairs}], train={"max_steps": 1}).manifest.heads == {"relevance": 3}


def test_labels_of_a_file_that_are_no_grades_are_left_out_and_it_is_said(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path
) -> None:
    path = peoples_labels(tmp_path / "labels.csv", make_pairs())
    path.write_text(path.read_text() + "q00;d0;ERROR\n")
    notes = run(labels=labels(path, pairs_file), train={"max_steps": 1}).manifest.notes
    assert any("labels.csv: 1 values of `grade` are no whole number and are left out" in note for note in notes)


def test_another_label_schema_is_refused(run: Callable[..., Any], tmp_path: Path, pairs_file: Path) -> None:
    table = pa.Table.from_pylist(label_rows(make_pairs()), schema=LABELS)
    path = tmp_path / "other.parquet"
    pq.write_table(table.replace_schema_metadata({"relabel.schema": "quarantine-1"}), path)
    with pytest.raises(InputError, match="quarantine-1"):
        run(labels=labels(path, pairs_file))


def test_a_label_file_wants_its_texts(run: Callable[..., Any], labels_file: Path) -> None:
    with pytest.raises(ConfigError, match="without their texts"):
        run(labels=[str(labels_file)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "format", "grade": None}, "no row with status ok"),
        ({"grade": 1, "probs": [0.1, 0.8, 0.1]}, "one class alone"),
        ({"grade": 1, "probs": [0.2, 0.8]}, "one class alone"),  # before what a rule map of two grades would need
        ({"probs": [0.9, 0.9, 0.9]}, "sum to 1"),
        ({"row_id": 3}, "Are they the right pairs"),
    ],
)
def test_labels_that_teach_nothing_or_are_wrong_are_refused(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path, change: dict[str, Any], says: str
) -> None:
    path = write_labels(tmp_path / "labels.parquet", label_rows(make_pairs(), **change))
    with pytest.raises(InputError, match=says):
        run(labels=labels(path, pairs_file))


def test_distributions_that_agree_on_the_grade_and_differ_in_how_sure_they_are_teach_that(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path
) -> None:
    rows = label_rows(make_pairs(), grade=1)
    for number, row in enumerate(rows):
        row["probs"] = [0.3, 0.6, 0.1] if number % 2 else [0.05, 0.9, 0.05]
    path = write_labels(tmp_path / "labels.parquet", rows)
    notes = run(labels=labels(path, pairs_file), train={"max_steps": 1}).manifest.notes
    assert any("grade 1 is the most probable one of every row" in note for note in notes)


def test_labels_without_nodes_train_relevance_alone(run: Callable[..., Any], tmp_path: Path, pairs_file: Path) -> None:
    path = write_labels(tmp_path / "labels.parquet", label_rows(make_pairs(), has_nodes=False))
    assert run(labels=labels(path, pairs_file), train={"max_steps": 1}).manifest.heads == {"relevance": 3}


def test_a_tokenizer_without_the_grade_tokens_is_refused(
    run: Callable[..., Any], decoder_dir: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    from tests.distill.conftest import word_tokenizer

    model = Path(shutil.copytree(decoder_dir(), tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).unlink(missing_ok=True)
    word_tokenizer(has_types=False).save_pretrained(model)
    with pytest.raises(ModelError, match="no token of its own for grade 0"):
        run(student={"kind": "decoder", "model": str(model)}, train={"max_tokens": 60})


def test_weights_that_are_pickle_are_refused(
    run: Callable[..., Any], encoder_dir: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    model = Path(shutil.copytree(encoder_dir(), tmp_path / "model"))
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't be loaded"):
        run(student={"model": str(model)})


def test_no_query_for_a_side_is_reported(run: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="the dev split has 0 rows"):
        run(split={"dev": 0.0001, "test": 0.1}, train={"early_stopping": {"metric": "loss"}})
    report = run(split={"dev": 0.0001, "test": 0.0}, train={"max_steps": 1})
    assert any("dev split is empty" in note for note in report.manifest.notes)
    assert report.manifest.temperature["relevance"] == 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": []}, "nothing to learn from"),
        ({"loss": {"relevence": 1.0}}, "did you mean `relevance`"),
        ({"loss": {"gold_weight": 0.5}}, "is set without `gold`"),
        ({"require": {"macro_f1": ">=0.9*teacher"}}, "needs `labels` and `gold`"),
        ({"student": {"heads": {"subject": 5}}}, "student.heads"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(
    spec: Callable[..., dict[str, Any]], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        validate_spec(DistillSpec, spec(**changes), where="student.yaml")

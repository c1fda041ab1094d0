"""`relabel pairs similar`: cosines as transformers and numpy give them a text at a time, chunks above the threshold,
and shards that together are the whole.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from relabel.distill.students.networks import Embedder, read_settings
from relabel.jobs.pairs.chunks import above
from relabel.manifests.errors import ModelError
from tests.jobs.test_demo import write_tiny_model

WORDS = ["prune roses in late winter", "a chair of oak", "prune", "roses roses roses", "winter chair late oak in a"]
ROWS = [
    {
        "query_id": f"q{row // 3}",
        "query": ["how to prune roses", "oak chair", "late winter"][row // 3],
        "doc_id": f"d{row}",
        "chunks": [
            {"n": n + 1, "heading_path": [], "text": text, "token_len": 4, "start": 0, "end": len(text)}
            for n, text in enumerate((WORDS[row % 5 :] + WORDS)[: row % 4])
        ],
    }
    for row in range(9)
]
CHUNKS = pa.list_(
    pa.struct(
        [
            ("n", pa.int32()),
            ("heading_path", pa.list_(pa.string())),
            ("text", pa.string()),
            ("token_len", pa.int32()),
            ("start", pa.int32()),
            ("end", pa.int32()),
        ]
    )
)
SCHEMA = pa.schema([("query_id", pa.string()), ("query", pa.string()), ("doc_id", pa.string()), ("chunks", CHUNKS)])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def vector(model: Path, text: str, *, pooling: str = "mean") -> np.ndarray:
    """Of one text, without batch and padding."""
    import torch
    import transformers as tf

    tokenizer = tf.AutoTokenizer.from_pretrained(model)
    module = tf.AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = module(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    found: np.ndarray = (hidden.mean(0) if pooling == "mean" else hidden[0]).numpy()
    return found / np.linalg.norm(found)


def cosine(model: Path, query: str, text: str, *, pooling: str = "mean") -> float:
    return float(vector(model, query, pooling=pooling) @ vector(model, text, pooling=pooling))


def test_cosines_are_those_of_each_text_by_itself_and_chunks_above_the_threshold_come_most_similar_first(
    relabel: Callable[..., Any], write: Callable[..., str], folder: Path, encoder: Path
) -> None:
    write("p.parquet", ROWS, SCHEMA)
    wanted = [[cosine(encoder, row["query"], chunk["text"]) for chunk in row["chunks"]] for row in ROWS]
    threshold = round(float(np.median(np.concatenate(wanted))), 3)
    call = ("pairs", "similar", "p.parquet", "--to", "out.parquet", "--model", str(encoder))
    call = (*call, "--threshold", str(threshold))
    done = relabel(*call, "--batch-tokens", "24", "--output", "json")
    assert done.code == 0, done
    assert "does not say how it pools" in done.err
    found = pq.read_table("out.parquet").to_pylist()
    assert [{name: row[name] for name in SCHEMA.names} for row in found] == ROWS
    num_similar = 0
    for row, cosines in zip(found, wanted, strict=True):
        assert row["cosines"] == pytest.approx(cosines, abs=1e-5)
        assert row["cosine"] == (pytest.approx(max(cosines), abs=1e-5) if cosines else None)
        ranked = sorted((-one, n) for n, one in enumerate(cosines, start=1) if one > threshold)
        assert row["similar"] == [n for _, n in ranked]
        num_similar += len(ranked)
    num_chunks = sum(map(len, wanted))
    assert 0 < num_similar < num_chunks, "the threshold should part the chunks"
    assert (done.json["chunks"], done.json["similar"], done.json["pairs_without_cosine"]) == (
        num_chunks,
        num_similar,
        3,
    )


def test_bytes_that_are_not_utf8_cost_no_row(relabel: Callable[..., Any], folder: Path, encoder: Path) -> None:
    texts = pa.array([b"prune \xed\xa0\x80 roses", b"oak"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"query": texts, "document": ["roses", "oak chair"]}), "p.parquet")
    assert relabel("pairs", "similar", "p.parquet", "--to", "out.parquet", "--model", str(encoder)).code == 0
    assert None not in pq.read_table("out.parquet").column("cosine").to_pylist()


def test_documents_without_chunks_have_one_cosine(
    relabel: Callable[..., Any], write: Callable[..., str], folder: Path, encoder: Path
) -> None:
    rows = [{"query": "prune roses", "title": "roses", "body": text} for text in (*WORDS, None)]
    rows += [{"query": "", "title": "roses", "body": "winter"}, {"query": "roses", "title": None, "body": " "}]
    write("p.parquet", rows)
    done = relabel("pairs", "similar", "p.parquet", "--to", "out.parquet", "--model", str(encoder))
    assert done.code == 0, done
    table = pq.read_table("out.parquet")
    assert table.column_names == ["query", "title", "body", "cosine"]
    texts = [*(f"roses\n\n{text}" for text in WORDS), "roses"]
    wanted = [cosine(encoder, "prune roses", text) for text in texts]
    assert table["cosine"].to_pylist() == [*(pytest.approx(one, abs=1e-5) for one in wanted), None, None]
    assert "pairs without cosine  2" in done.out


def test_texts_of_any_batch_give_the_same_vectors_and_long_ones_are_cut(encoder: Path) -> None:
    texts = [*WORDS, "", " ".join(WORDS * 20), "oak"]
    one = Embedder(encoder, max_tokens=None, batch_tokens=1, device="cpu").embed(texts, "document")
    many = Embedder(encoder, max_tokens=None, batch_tokens=100_000, device="cpu").embed(texts, "document")
    np.testing.assert_allclose(one, many, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1.0, atol=1e-6)
    cut = Embedder(encoder, max_tokens=8, batch_tokens=64, device="cpu")
    np.testing.assert_allclose(cut.embed([" ".join(WORDS * 20)], "document"), cut.embed([" ".join(WORDS)], "document"))


def test_a_control_token_in_a_document_is_text(encoder: Path) -> None:
    import transformers as tf

    sep = tf.AutoTokenizer.from_pretrained(encoder).sep_token_id
    embedder = Embedder(encoder, max_tokens=None, batch_tokens=64, device="cpu")
    (row,) = embedder.texts.token_rows(["roses [SEP] oak"])
    assert row.ids.count(sep) == 1
    assert row.ids[-1] == sep


def test_pooling_and_prompts_are_those_that_the_model_states(encoder: Path, tmp_path: Path) -> None:
    import shutil

    model = Path(shutil.copytree(encoder, tmp_path / "stated"))
    (model / "1_Pooling").mkdir()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling/config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false, "include_prompt": true}'
    )
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "oak ", "passage": "chair "}}')
    embedder = Embedder(model, max_tokens=None, batch_tokens=64, device="cpu")
    assert (embedder.settings.pooling, embedder.max_tokens, embedder.settings.is_stated) == ("cls", 9, True)
    (query,) = embedder.embed(["ROSES"], "query")
    np.testing.assert_allclose(query, vector(encoder, "oak roses", pooling="cls"), atol=1e-6)
    (document,) = embedder.embed(["roses"], "document")
    np.testing.assert_allclose(document, vector(encoder, "chair roses", pooling="cls"), atol=1e-6)


@pytest.mark.parametrize(
    ("file", "held", "said"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "'Dense'"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
    ],
)
def test_a_model_whose_vectors_can_not_be_made_here_is_refused(
    file: str, held: object, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(held))
    with pytest.raises(ModelError, match=said):
        read_settings(tmp_path)


def test_equal_cosines_keep_the_order_of_the_chunks() -> None:
    assert above([1, 2, 3, 4], [0.5, 0.9, 0.5, 0.4], 0.4) == [2, 1, 3]
    assert above([1, 2], [None, 0.41], 0.4) == [2]

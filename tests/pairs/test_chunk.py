"""`relabel pairs chunk`: rows stay as they are, with the cleaned text, its chunks and its JSON-LD."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("lxml")

from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec

PAGE = (
    "<title>no</title><h1>Roses</h1><p>Prune in winter.<ul><li>shears<li>gloves</ul><p>prune  in WINTER."
    '<script type=\'application/ld+json\'>{"@type": "Article"}</script>'
)
ROWS = [
    {"query_id": "q1", "query": "pruning", "doc_id": "a", "html": PAGE, "grade": 2},
    {"query_id": "q1", "query": "pruning", "doc_id": "b", "html": None, "grade": 0},
    {
        "query_id": "q2",
        "query": "x",
        "doc_id": "c",
        "html": "<script type='application/ld+json'>{</script>",
        "grade": None,
    },
]
CHUNKS = [
    {
        "n": 1,
        "type": "text",
        "heading_path": ["Roses"],
        "text": "Prune in winter.",
        "token_len": 4,
        "start": 9,
        "end": 25,
    },
    {
        "n": 2,
        "type": "list",
        "heading_path": ["Roses"],
        "text": "- shears\n- gloves",
        "token_len": 4,
        "start": 27,
        "end": 44,
    },
]


def test_from_end_to_end(relabel: Callable[..., Any], write: Callable[..., str], folder: Path) -> None:
    write("p.parquet", ROWS)
    done = relabel("pairs", "chunk", "p.parquet", "--to", "out.parquet", "--output", "json")
    assert done.code == 0, done
    document = "# Roses\n\nPrune in winter.\n\n- shears\n- gloves\n\nprune in WINTER."
    assert pq.read_table("out.parquet").to_pylist() == [
        {**ROWS[0], "document": document, "chunks": CHUNKS, "jsonld": ['{"@type": "Article"}']},
        {**ROWS[1], "document": "", "chunks": [], "jsonld": []},
        {**ROWS[2], "document": "", "chunks": [], "jsonld": []},
    ]
    figures = {name: value for name, value in done.json.items() if name != "seconds"}
    assert figures == {
        "output": "out.parquet",
        "pairs": 3,
        "format": "html",
        "max_tokens": 256,
        "tokenizer": None,
        "chunks": 2,
        "text_chunks": 1,
        "table_chunks": 0,
        "list_chunks": 1,
        "tokens": 8,
        "duplicates_left_out": 1,
        "documents_without_chunks": 2,
        "json_ld": 1,
        "json_ld_unreadable": 1,
    }
    dataset = open_dataset(InputSpec(path=("out.parquet",)), Storage())
    assert dataset.columns.document == ("document",)
    before = (folder / "out.parquet").read_bytes()
    assert relabel("pairs", "chunk", "p.parquet", "--to", "out.parquet", "--force").code == 0
    assert (folder / "out.parquet").read_bytes() == before
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("columns", "flags", "wanted"),
    [
        ({"document": "# a\n\nb"}, ("--format", "markdown"), "# a\n\nb"),
        ({"title": "<t>", "body": "<p>a"}, (), "<t>\n\na"),
        ({"body": "<b>a</b>"}, ("--format", "text"), "<b>a</b>"),
        ({"body": "x", "raw": "<p>a"}, ("--column", "raw"), "a"),
    ],
)
def test_the_document_is_what_a_job_would_read_or_the_column_that_is_named(
    columns: dict[str, str],
    flags: tuple[str, ...],
    wanted: str,
    relabel: Callable[..., Any],
    write: Callable[..., str],
) -> None:
    write("p.parquet", [{"doc_id": "a", **columns}])
    assert relabel("pairs", "chunk", "p.parquet", "--to", "out.parquet", *flags).code == 0
    row = pq.read_table("out.parquet").to_pylist()[0]
    assert row["document"] == wanted
    assert {name: value for name, value in row.items() if name in columns and name != "document"} == {
        name: value for name, value in columns.items() if name != "document"
    }


@pytest.mark.parametrize(
    ("columns", "flags", "message"),
    [
        ({"html": "x"}, ("--column", "htlm"), "no column `htlm` (PAIRS); it has html. Did you mean `html`?"),
        ({"html": "x", "document": "y"}, (), "has a column `document` already"),
        ({"html": "x"}, ("--tokenizer", "absent"), "there is no such directory here"),
    ],
)
def test_bad_input_is_named(
    columns: dict[str, Any],
    flags: tuple[str, ...],
    message: str,
    relabel: Callable[..., Any],
    write: Callable[..., str],
    folder: Path,
) -> None:
    write("p.parquet", [columns])
    done = relabel("pairs", "chunk", "p.parquet", "--to", "out.parquet", *flags)
    done.refused(4 if "--tokenizer" in flags else 3, message)
    assert not (folder / "out.parquet").exists()


def test_bad_flags_are_named(relabel: Callable[..., Any], write: Callable[..., str]) -> None:
    write("p.parquet", ROWS)
    relabel("pairs", "chunk", "p.parquet", "--to", "p.parquet", "--force").refused(2, "is in the input")
    relabel("pairs", "chunk", "p.parquet", "--to", "o.parquet", "--format", "pdf").refused(2, "--format")
    relabel("pairs", "chunk", "absent.parquet", "--to", "o.parquet").refused(3, "absent.parquet (PAIRS): no such file")


def test_files_of_a_folder_are_read_in_order_and_have_to_agree(
    relabel: Callable[..., Any], write: Callable[..., str]
) -> None:
    write("in/a.parquet", [{"html": "a", "n": 1}], pa.schema([("html", pa.string()), ("n", pa.int64())]))
    write("in/b.parquet", [{"html": "b", "n": 2}], pa.schema([("n", pa.int32()), ("html", pa.large_string())]))
    write(
        "in/c.parquet",
        [{"html": "c", "n": 3}] * 40,
        pa.schema([("html", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int8())]),
    )
    assert relabel("pairs", "chunk", "in", "--to", "out.parquet").code == 0
    rows = pq.read_table("out.parquet").to_pylist()
    assert [(row["document"], row["n"]) for row in rows] == [("a", 1), ("b", 2), *[("c", 3)] * 40]
    write("in/d.parquet", [{"html": "d", "n": "four"}])
    relabel("pairs", "chunk", "in", "--to", "o.parquet").refused(3, "in/d.parquet", "Make the files agree")


COMMANDS = {
    "chunk": ("--format", "markdown"),
    "tree": ("--format", "markdown"),
    "context": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_bytes_that_are_not_utf8_are_read_as_replacement_characters_and_counted(
    relabel: Callable[..., Any], folder: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    texts = pa.array([b"# Roses\n\ncut \xed\xa0\x80 back", b"oak"], pa.binary()).view(pa.string())
    ids = {"query_id": ["q", "q"], "query": ["roses", "roses"], "doc_id": ["a", "b"]}
    pq.write_table(pa.table({**ids, "document": texts}), "p.parquet")
    assert relabel("pairs", command, "p.parquet", "--to", "out.parquet", *COMMANDS[command]).code == 0
    assert "p.parquet: 1 value of `document` with bytes that are not UTF-8 (first in row 0)" in caplog.text
    first, second = pq.read_table("out.parquet").column("document").to_pylist()
    assert "cut \ufffd" in first
    assert second == "oak"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["query_id", "doc_id"])
def test_id_that_is_not_utf8_is_refused(relabel: Callable[..., Any], folder: Path, command: str, name: str) -> None:
    columns: dict[str, Any] = {"query_id": ["q", "r"], "query": ["oak", "elm"], "doc_id": ["a", "b"]}
    columns["document"] = ["oaks", "elms"]
    columns[name] = pa.array([b"x", b"x\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table(columns), "p.parquet")
    done = relabel("pairs", command, "p.parquet", "--to", "out.parquet", *COMMANDS[command])
    done.refused(3, f"p.parquet: row 1: `{name}` holds bytes that are not UTF-8")
    assert not Path("out.parquet").exists()


def test_tokens_are_those_of_the_named_tokenizer(
    relabel: Callable[..., Any], write: Callable[..., str], folder: Path
) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", "<|end|>", "one", "two", "<", "|", "end", ">"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", model_max_length=4).save_pretrained("tok")
    write("p.parquet", [{"document": "one two. one <|end|> two"}])
    line = ("pairs", "chunk", "p.parquet", "--to", "out.parquet", "--format", "text", "--tokenizer", "tok", "--force")
    assert relabel(*line).code == 0
    assert [chunk["token_len"] for chunk in pq.read_table("out.parquet")["chunks"].to_pylist()[0]] == [10]
    assert relabel(*line, "--max-tokens", "7").code == 0
    chunks = pq.read_table("out.parquet")["chunks"].to_pylist()[0]
    assert [(chunk["text"], chunk["token_len"]) for chunk in chunks] == [("one two. one", 4), ("<|end|> two", 6)]

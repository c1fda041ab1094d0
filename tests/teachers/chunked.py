"""Questions over chunked documents, with wanted sets and answers, as Parquet."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_QUERIES = 6


def chunked_document(pieces: list[str], token_len: int = 10) -> tuple[str, list[dict[str, Any]]]:
    """A document and its chunks, a line each."""
    text, chunks = "", []
    for number, piece in enumerate(pieces, start=1):
        start = len(text)
        text += f"{piece}\n"
        chunks.append(
            {
                "n": number,
                "heading_path": [],
                "text": piece,
                "token_len": token_len,
                "start": start,
                "end": start + len(piece),
            }
        )
    return text, chunks


def question_rows(
    number: int, counts: list[int], sets: list[list[int] | None], answers: list[str]
) -> list[dict[str, Any]]:
    """The rows of a question whose documents have so many chunks."""
    rows = []
    for place, (count, wanted) in enumerate(zip(counts, sets, strict=True), start=1):
        text, chunks = chunked_document([f"fact {place}.{one}" for one in range(1, count + 1)])
        rows.append(
            {
                "query_id": f"q{number}",
                "query": f"question {number}",
                "doc_id": f"d{number}.{place}",
                "document": text,
                "chunks": chunks,
                "jsonld": [f'{{"page": {place}}}'],
                "similar": wanted,
                "gold_answers": answers if place == 1 else None,
            }
        )
    return rows


def write_questions(path: Path, num_queries: int = NUM_QUERIES) -> Path:
    """Questions of two documents, of 2 to 4 chunks and of 3, with an answer each."""
    rows = [
        row
        for number in range(num_queries)
        for row in question_rows(number, [2 + number % 3, 3], [[2, 1], []], [f"answer {number}"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path

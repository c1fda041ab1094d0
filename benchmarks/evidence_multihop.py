"""What `review` and `evidence-set` find on questions whose gold paragraphs are known.

    python benchmarks/evidence_multihop.py PAIRS.parquet MODEL_DIR ENCODER_DIR --to OUT
        [--questions N] [--set key=value ...]

PAIRS has the columns query_id, query, doc_id, title, body, grade (1: a gold paragraph) and gold_certain. Each question
is judged twice: with all its paragraphs, and with one gold paragraph, drawn by a seed, left out. Printed are the ROC
area of P(yes) against whether all gold paragraphs were there, how often P(yes) is higher with all of them, and
precision, recall and tokens of the documents chosen by `review` (useful), by `evidence-set`, by the cosine above 0.4,
and by BM25 and cosine in rank order at the tokens that `evidence-set` took for that question. Bounds are of 95 %, by a
bootstrap over questions in which both versions of a question are drawn together. Rows in quarantine count as nothing
chosen; their number is printed.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bm25s
import numpy as np
import pyarrow.parquet as pq
from pyarrow import Table
from real_runs import interval, label, labels, relabel
from sklearn.metrics import roc_auc_score

THRESHOLD = 0.4
LESS = "-less"


class Choice(NamedTuple):
    """Of one question: documents chosen, documents of gold, and tokens of what was chosen."""

    chosen: frozenset[str]
    gold: frozenset[str]
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--set", action="append", default=[], help="of the engine: args.dtype=bfloat16")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(asked.pairs).to_pylist()
    ids = list(dict.fromkeys(row["query_id"] for row in rows))[: asked.questions]
    rows = [row for row in rows if row["query_id"] in set(ids)]
    certain = {row["query_id"] for row in rows if row["gold_certain"]}
    both, chunked, similar = (asked.to / f"{name}.parquet" for name in ("both", "chunked", "similar"))
    pq.write_table(Table.from_pylist(with_and_without(rows)), both)
    relabel("pairs", "chunk", both, "--to", chunked, "--format", "text", "--column", "document", "--force")
    relabel("pairs", "similar", chunked, "--to", similar, "--model", asked.encoder, "--force")
    inputs = pq.read_table(similar).to_pylist()
    for labeler in ("review", "evidence-set"):
        label(labeler, chunked, asked.model, asked.to, asked.set, chunk_rows=64)
    print(f"{len(ids)} questions, {len(certain)} of them with certain gold; model {asked.model.name}\n")
    for name, wanted in (("all questions", set(ids)), ("certain gold", certain)):
        print(f"## {name} (n = {len(wanted)})\n")
        print_sufficiency(asked.to / "review", wanted)
        print_choices(asked.to, inputs, wanted)


def with_and_without(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each question with all its paragraphs, then as another query with one gold paragraph left out."""
    rng = np.random.default_rng(13)
    by_question: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_question[row["query_id"]].append(row)
    made = []
    for query_id, held in by_question.items():
        out = rng.choice([row["doc_id"] for row in held if row["grade"] == 1])
        for suffix in ("", LESS):
            for row in held:
                if suffix and row["doc_id"] == out:
                    continue
                made.append(
                    {
                        "query_id": query_id + suffix,
                        "query": row["query"],
                        "doc_id": row["doc_id"],
                        "document": f"{row['title']}\n{row['body']}",
                        "grade": row["grade"],
                        "gold_sufficient": not suffix,
                    }
                )
    return made


def print_sufficiency(run: Path, wanted: set[str]) -> None:
    """ROC area of P(yes), and how often more paragraphs mean a higher P(yes)."""
    held = {row["query_id"]: row["sufficient_probs"][1] for row in labels(run, "query_id", "sufficient_probs")}
    pairs = np.array([(held[one], held[one + LESS]) for one in wanted if one in held and one + LESS in held])
    print(f"questions with both answers: {len(pairs)} of {len(wanted)}")
    if not len(pairs):
        return

    def area(drawn: np.ndarray) -> float:
        return float(roc_auc_score(np.repeat([1, 0], len(drawn)), drawn.T.ravel()))

    def higher(drawn: np.ndarray) -> float:
        return float(np.mean((drawn[:, 0] > drawn[:, 1]) + 0.5 * (drawn[:, 0] == drawn[:, 1])))

    print(f"AUC of P(yes): {interval(pairs, area)}")
    print(f"P(yes) higher with all gold paragraphs: {interval(pairs, higher)}\n")


def print_choices(folder: Path, inputs: Sequence[dict[str, Any]], wanted: set[str]) -> None:
    """Precision, recall and tokens of each way to choose, over questions with all their paragraphs."""
    by_question: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in inputs:
        if row["query_id"] in wanted:
            by_question[row["query_id"]].append(row)
    useful: dict[str, set[str]] = defaultdict(set)
    for row in labels(folder / "review", "query_id", "doc_id", "grade"):
        if row["grade"] == 1:
            useful[row["query_id"]].add(row["doc_id"])
    selected = {
        (row["query_id"], row["doc_id"]): (row["selected"], row["selected_tokens"])
        for row in labels(folder / "evidence-set", "query_id", "doc_id", "selected", "selected_tokens")
    }
    found: dict[str, list[Choice]] = defaultdict(list)
    for query_id, rows in by_question.items():
        gold = frozenset(row["doc_id"] for row in rows if row["grade"] == 1)
        chunks = [
            (row["doc_id"], chunk, cosine)
            for row in rows
            for chunk, cosine in zip(row["chunks"], row["cosines"], strict=True)
        ]
        sizes = {row["doc_id"]: sum(chunk["token_len"] for chunk in row["chunks"]) for row in rows}
        picked = [row["doc_id"] for row in rows if selected.get((query_id, row["doc_id"]), ([], 0))[0]]
        tokens = sum(selected.get((query_id, row["doc_id"]), ([], 0))[1] for row in rows)
        by_bm25 = np.argsort(-lexical(rows[0]["query"], [chunk["text"] for _, chunk, _ in chunks]), kind="stable")
        by_cosine = np.argsort([-cosine for _, _, cosine in chunks], kind="stable")
        found["all paragraphs"].append(Choice(frozenset(sizes), gold, sum(sizes.values())))
        found["review, useful"].append(
            Choice(frozenset(useful[query_id]), gold, sum(sizes[one] for one in useful[query_id]))
        )
        found["evidence-set"].append(Choice(frozenset(picked), gold, tokens))
        found["cosine above 0.4"].append(choice([one for one in chunks if one[2] > THRESHOLD], gold))
        found["BM25, equal tokens"].append(choice(within(chunks, by_bm25, tokens), gold))
        found["cosine, equal tokens"].append(choice(within(chunks, by_cosine, tokens), gold))
    print("| | precision | recall | tokens a question | nothing chosen |\n|---|---|---|---|---|")
    for name, choices in found.items():
        counts = np.array([(len(one.chosen & one.gold), len(one.chosen), len(one.gold), one.tokens) for one in choices])
        precision = interval(counts[counts[:, 1] > 0], lambda drawn: float(np.mean(drawn[:, 0] / drawn[:, 1])))
        recall = interval(counts, lambda drawn: float(np.mean(drawn[:, 0] / drawn[:, 2])))
        print(f"| {name} | {precision} | {recall} | {counts[:, 3].mean():.0f} | {np.sum(counts[:, 1] == 0)} |")
    print()


def choice(chunks: Iterable[tuple[str, dict[str, Any], float]], gold: frozenset[str]) -> Choice:
    """Of chunks that were chosen."""
    held = list(chunks)
    return Choice(frozenset(doc for doc, _, _ in held), gold, sum(chunk["token_len"] for _, chunk, _ in held))


def within(
    chunks: Sequence[tuple[str, dict[str, Any], float]], order: Iterable[int], tokens: int
) -> list[tuple[str, dict[str, Any], float]]:
    """The first chunks of an order until the tokens are full; the one that would overflow is taken while less than half
    of it does, so that neither side has more on average.
    """
    held, used = [], 0
    for place in order:
        size = chunks[place][1]["token_len"]
        if used + size / 2 > tokens:
            break
        held.append(chunks[place])
        used += size
    return held


def lexical(query: str, texts: Sequence[str]) -> np.ndarray:
    """BM25 of each text, over the texts of this question."""
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(list(texts), show_progress=False), show_progress=False)
    return np.asarray(index.get_scores(bm25s.tokenize(query, return_ids=False, show_progress=False)[0]))


if __name__ == "__main__":
    main()

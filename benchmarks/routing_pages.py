"""What `route` (RDR2) finds in encyclopedia pages, and what a reader of passages or of whole pages would get.

    python benchmarks/routing_pages.py PAGES.parquet MODEL_DIR --to OUT [--questions N] [--set key=value ...]

PAGES has the columns page_id and wikitext. The questions are in `routing_questions.jsonl`: written by us from pages and
paragraphs drawn by a seed, each with a page and the place of its answer in the page's wikitext, in code points; no text
of a page is kept here. Each page is cut into passages of 100 words; the five best by BM25 over all pages are what a
question retrieves. Compared are the texts that would then be read to answer it: those passages; the whole pages that
they are from; the nodes that `route` names; and, as libraries do it, a window around the best passage, and around the
next ones, of as many tokens as `route` named for that question. Printed are the share of questions whose answer is in
that text word for word (case folded), and its tokens, with 95 % bounds by a bootstrap over questions. A row in
quarantine names nothing; their number is printed.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from real_runs import interval, label, labels, relabel
from transformers import AutoTokenizer

QUESTIONS = Path(__file__).with_name("routing_questions.jsonl")
PASSAGE_WORDS = 100
TOP = 5


class Passage(NamedTuple):
    """A stretch of a page's cleaned text."""

    page: str
    start: int
    end: int


class Reading(NamedTuple):
    """Of one question and one way to read: whether the answer is there, and tokens."""

    is_there: bool
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--set", action="append", default=[], help="of the engine: args.dtype=bfloat16")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    sources = {row["page_id"]: row["wikitext"] for row in pq.read_table(asked.pages).to_pylist()}
    questions = [json.loads(line) for line in QUESTIONS.read_text().split("\n") if line][: asked.questions]
    trees = trees_of(sources, asked.to)
    passages = [passage for page, row in trees.items() for passage in cut(page, row["document"])]
    best = retrieve(passages, trees, [one["question"] for one in questions])
    run = route(questions, best, trees, asked)
    count = counter(asked.model)
    found: dict[str, list[Reading]] = defaultdict(list)
    for number, question in enumerate(questions):
        answer = sources[question["page"]][question["start"] : question["end"]].casefold()
        for name, text in texts_read(number, best[number], trees, run, count).items():
            found[name].append(Reading(answer in text.casefold(), count(text)))
    print_figures(found, run, len(questions), asked.model.name)


def trees_of(sources: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    """Cleaned text and tree of each page."""
    pages, trees = folder / "pages.parquet", folder / "trees.parquet"
    rows = [{"query_id": page, "query": page, "doc_id": page, "wikitext": text} for page, text in sources.items()]
    pq.write_table(pa.Table.from_pylist(rows), pages)
    relabel("pairs", "tree", pages, "--to", trees, "--format", "wikitext", "--column", "wikitext", "--force")
    return {row["doc_id"]: row for row in pq.read_table(trees, columns=["doc_id", "document", "tree"]).to_pylist()}


def cut(page: str, text: str) -> list[Passage]:
    """Passages of `PASSAGE_WORDS` words, one after the other."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    starts = range(0, len(words), PASSAGE_WORDS)
    return [Passage(page, words[at][0], words[min(at + PASSAGE_WORDS, len(words)) - 1][1]) for at in starts]


def retrieve(passages: Sequence[Passage], trees: dict[str, Any], questions: Sequence[str]) -> list[list[Passage]]:
    """The best passages of each question by BM25, best first."""
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    texts = [trees[page]["document"][start:end] for page, start, end in passages]
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    places, _ = index.retrieve(bm25s.tokenize(list(questions), show_progress=False), k=TOP, show_progress=False)
    return [[passages[place] for place in row] for row in places]


def route(
    questions: Sequence[dict[str, Any]],
    best: Sequence[Sequence[Passage]],
    trees: dict[str, dict[str, Any]],
    asked: argparse.Namespace,
) -> dict[tuple[int, str], dict[str, Any]]:
    """Label each question with each page that it retrieved; labels by question and page."""
    rows = []
    for number, held in enumerate(best):
        for page in dict.fromkeys(passage.page for passage in held):
            document = trees[page]["document"]
            texts = [document[one.start : one.end] for one in held if one.page == page]
            query = {"query_id": str(number), "query": questions[number]["question"]}
            rows.append({**query, **trees[page], "passages": texts})
    pairs = asked.to / "pairs.parquet"
    tree = pq.read_schema(asked.to / "trees.parquet").field("tree")
    columns = [(name, pa.large_string()) for name in ("query_id", "query", "doc_id", "document")]
    schema = pa.schema([*columns, tree, ("passages", pa.list_(pa.large_string()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), pairs)
    run = label("route", pairs, asked.model, asked.to, asked.set, chunk_rows=16)
    wanted = labels(run, "query_id", "doc_id", "evidence", "prompt_tokens", "output_tokens")
    return {(int(row["query_id"]), row["doc_id"]): row for row in wanted}


def texts_read(
    number: int,
    best: Sequence[Passage],
    trees: dict[str, dict[str, Any]],
    run: dict[tuple[int, str], dict[str, Any]],
    count: Callable[[str], int],
) -> dict[str, str]:
    """What each way gives to read for one question."""
    pages = list(dict.fromkeys(passage.page for passage in best))
    named = [span["text"] for page in pages for span in (run.get((number, page)) or {"evidence": ()})["evidence"]]
    budget = count("\n".join(named))
    return {
        "whole pages": "\n".join(trees[page]["document"] for page in pages),
        f"{TOP} passages": "\n".join(trees[page]["document"][start:end] for page, start, end in best),
        "best passage": "\n".join(trees[page]["document"][start:end] for page, start, end in best[:1]),
        "route": "\n".join(named),
        "windows, equal tokens": windows(best, trees, budget, count),
    }


def windows(best: Sequence[Passage], trees: dict[str, dict[str, Any]], budget: int, count: Callable[[str], int]) -> str:
    """The best passage, cut or widened to both sides until the budget is full; then the next ones, if its page ends."""
    held: list[str] = []
    left = budget
    for page, start, end in best:
        if left <= 0:
            break
        text = trees[page]["document"]
        low, high = 0, len(text)
        while low < high:  # the widest margin, in code points, negative where the passage itself is too long
            margin = (low + high + 1) // 2
            middle, half = (start + end) // 2, margin // 2
            if count(text[max(0, middle - half) : middle + half]) <= left:
                low = margin
            else:
                high = margin - 1
        middle = (start + end) // 2
        held.append(text[max(0, middle - low // 2) : middle + low // 2])
        left -= count(held[-1])
        if low < len(text):
            break
    return "\n".join(held)


def counter(model: Path) -> Callable[[str], int]:
    """Tokens of a text by the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def print_figures(
    found: dict[str, list[Reading]], run: dict[tuple[int, str], dict[str, Any]], asked: int, model: str
) -> None:
    """A line for each way to read."""
    print(f"{asked} questions, {len(run)} labelled question-page pairs; model {model}")
    by_question: dict[int, int] = defaultdict(int)
    for (number, _), row in run.items():
        by_question[number] += row["prompt_tokens"] + row["output_tokens"]
    print(f"tokens that the router itself read and wrote, a question: {np.mean([*by_question.values()] or [0]):.0f}\n")
    print("| what is read | answer in it | tokens a question |\n|---|---|---|")
    for name, readings in found.items():
        there, tokens = (np.array(column, dtype=float) for column in zip(*readings, strict=True))
        print(f"| {name} | {interval(there)} | {interval(tokens, digits=0)} |")
    ours, theirs = ([one.is_there for one in found[name]] for name in ("route", "windows, equal tokens"))
    print(f"\nroute less windows at equal tokens: {interval(np.array(ours, float) - np.array(theirs, float))}")


if __name__ == "__main__":
    main()

"""Pairs that nobody searched for, for a teacher to label: queries cut out of the titles of training rows, each with the
title that it was cut from and with titles further down a BM25 ranking for it.

    python -m benchmarks.queries_from_titles PAIRS.parquet --to MORE.parquet [--queries 1200] [--seed 0]

A student that saw a hundred queries has learned how the teacher grades those; labels cost no trusted grade, so more of
them are a matter of time alone. Only titles that rows of the training side alone have are used, and only queries that
the split of `benchmarks.headline` puts on the training side, so that nothing of dev or test is seen.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter

import bm25s
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.headline import SPLIT
from relabel.distill.students.examples import TRAIN, folded, split_queries

RANKS = (1, 4, 14, 49)
"""From 0, in a ranking for the query: from titles that have all of its words to such that share one."""
LENGTHS, WEIGHTS = (1, 2, 3), (2, 5, 3)
"""Words in a query, and how often each length is drawn."""
DULL = frozenset(
    [
        "a",
        "an",
        "and",
        "by",
        "for",
        "from",
        "in",
        "of",
        "on",
        "or",
        "the",
        "to",
        "with",
        "w",
        "pack",
        "set",
        "size",
        "new",
        "inch",
        "inches",
        "oz",
    ]
)


def words_of(title: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", title.casefold())


def sides_of(queries: list[str]) -> list[int]:
    keys = [folded(query) for query in queries]
    return split_queries(keys, dev=SPLIT["dev"], test=SPLIT["test"], seed=SPLIT["seed"]).tolist()


def training_titles(path: str) -> list[str]:
    """Titles that occur in rows of the training side and in no other."""
    table = pq.read_table(path, columns=["query", "title"]).to_pydict()
    by_side: tuple[set[str], set[str]] = (set(), set())
    for title, side in zip(table["title"], sides_of(table["query"]), strict=True):
        by_side[side == TRAIN].add(title or "")
    return sorted(title for title in by_side[1] - by_side[0] if words_of(title))


def drawn_queries(titles: list[str], wanted: int, rng: random.Random) -> dict[str, int]:
    """Queries, each with the number of the title that it was cut from; every word of one is in three titles or more."""
    seen = Counter(word for title in titles for word in set(words_of(title)))
    found: dict[str, int] = {}
    for number in rng.choices(range(len(titles)), k=wanted * 20):
        words, length = words_of(titles[number]), rng.choices(LENGTHS, WEIGHTS)[0]
        start = rng.randrange(max(1, len(words) - length + 1))
        cut = words[start : start + length]
        is_plain = len(cut) == length and not DULL & set(cut) and any(word.isalpha() and len(word) > 2 for word in cut)
        query = " ".join(cut)
        if is_plain and min(seen[word] for word in cut) >= 3 and query not in found and sides_of([query])[0] == TRAIN:
            found[query] = number
            if len(found) == wanted:
                return found
    raise SystemExit(f"{len(titles)} titles give {len(found)} queries; ask for fewer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs")
    parser.add_argument("--to", required=True)
    parser.add_argument("--queries", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    titles = training_titles(options.pairs)
    queries = drawn_queries(titles, options.queries, random.Random(options.seed))
    ranker = bm25s.BM25()
    ranker.index([words_of(title) for title in titles], show_progress=False)
    ranked, _ = ranker.retrieve([query.split() for query in queries], k=max(RANKS) + 1, show_progress=False)
    rows = []
    for (query, own), places in zip(queries.items(), ranked.tolist(), strict=True):
        chosen = dict.fromkeys([own, *(places[rank] for rank in RANKS)])
        rows += [{"query_id": f"made-{query}", "query": query, "doc_id": f"t{one}", "title": titles[one]}
                 for one in chosen]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), options.to)
    print(f"{len(titles):,} titles, {len(queries):,} queries, {len(rows):,} pairs")


if __name__ == "__main__":
    main()

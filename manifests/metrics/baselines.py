"""What figures labels get that no document was read for: one grade for all rows, a random order of each query, and the
words that query and document share (BM25). A figure means something by its distance from these.

Letters: N rows, K grades, G queries.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relabel.manifests.metrics.metric import finite
from relabel.manifests.metrics.ranking import DEPTH, QueryRanking, auc, cut_names, random_order, rank_queries
from relabel.manifests.metrics.registry import count_metrics

BM25_K1, BM25_B = 1.2, 0.75
MOST_LEXICAL = 100_000
"""Rows that BM25 is computed for at most: 40 s of one core, of documents of 100 words."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Baselines:
    """Figures by name, as labels have them; None where one is not defined.

    Args:
        grade: of the constant baseline, the most frequent gold grade of the same rows, the lower of equals.
        constant: of that grade for every row: all figures of the confusion matrix, and Brier, of the gold grades'
            shares as every row's distribution.
        random: the expected figures of a random order of each query; empty where rows name no query.
        lexical: of BM25 of query and document; empty where their texts are not known.
    """

    grade: int
    constant: dict[str, float | None]
    random: dict[str, float | None]
    lexical: dict[str, float | None]

    def of(self, figure: str) -> dict[str, float]:
        """The baselines that have a figure, by name."""
        kinds = {"constant": self.constant, "random": self.random, "lexical": self.lexical}
        return {kind: value for kind, held in kinds.items() if (value := held.get(figure)) is not None}


def baselines(
    gold_N: np.ndarray,
    query_N: np.ndarray | None,
    doc_N: np.ndarray,
    *,
    grades: int,
    num_queries: int,
    lexical_N: np.ndarray | None = None,
) -> Baselines:
    """The baselines of judged rows, of which there is at least one.

    Args:
        gold_N: grades 0..K-1.
        query_N, doc_N: as those of `manifests.metrics.judged.Judged`.
        lexical_N: BM25 of each row, see `bm25`.
    """
    gold_K = np.bincount(gold_N, minlength=grades)
    grade = int(gold_K.argmax())
    counts_KK = np.zeros((grades, grades))
    counts_KK[:, grade] = gold_K
    share_K = gold_K / gold_K.sum()
    constant = {name: float(value) for name, value in count_metrics(counts_KK).items()}
    cuts = [(f"auc_{name}", cut) for cut, name in enumerate(cut_names(grades), start=1)]
    random, lexical = dict.fromkeys((name for name, _ in cuts), 0.5), dict[str, float]()
    if query_N is not None:
        random |= _ranked(random_order(query_N, doc_N, gold_N, num_queries=num_queries))
    if lexical_N is not None:
        lexical |= {name: auc(lexical_N, gold_N >= cut) for name, cut in cuts}
        if query_N is not None:
            lexical |= _ranked(rank_queries(query_N, doc_N, lexical_N, gold_N, num_queries=num_queries))
    found = ({**constant, "brier": float(1 - share_K @ share_K)}, random, lexical)
    return Baselines(grade, *({name: finite(value) for name, value in one.items()} for one in found))


def _ranked(found: QueryRanking) -> dict[str, float]:
    means = {f"ndcg@{DEPTH}": found.ndcg, "kendall_tau": found.tau, "bad_case_rate": found.bad_case}
    return {name: float(np.nanmean(value_G)) for name, value_G in means.items() if not np.isnan(value_G).all()}


def bm25(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """BM25 of each (query, document), float64 [N]: how many and how rare the words are that both have.

    Words are runs of letters and digits, case folded; the collection is the different documents of these pairs.

    Source:
        Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework"; with Lucene's idf, never negative.
    """
    counts = {text: Counter(_words(text)) for _, text in pairs}
    length = {text: count.total() for text, count in counts.items()}
    mean = max(1, sum(length.values())) / max(1, len(length))
    num_with = Counter(word for count in counts.values() for word in count)
    found = np.zeros(len(pairs))
    for row, (query, text) in enumerate(pairs):
        norm = BM25_K1 * (1 - BM25_B + BM25_B * length[text] / mean)
        for word in _words(query):
            times = counts[text][word]
            if times:
                rarity = math.log(1 + (len(counts) - num_with[word] + 0.5) / (num_with[word] + 0.5))
                found[row] += rarity * times * (BM25_K1 + 1) / (times + norm)
    return np.round(found, 9)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


BOUNDS = (("accuracy", "constant"), ("kappa", "constant"), (f"ndcg@{DEPTH}", "lexical"))
"""Figures that a student has to beat a baseline by, before a channel is pointed at it."""


def not_beaten(figures: Mapping[str, float | None], found: Baselines) -> list[str]:
    """In words, which baselines some labels are below; of kappa, where every constant has 0, not above."""
    said = []
    for name, kind in BOUNDS:
        value, bound = figures.get(name), found.of(name).get(kind, 0.0 if name == "kappa" else None)
        if value is not None and bound is not None and (value <= bound if name == "kappa" else value < bound):
            said.append(f"{name} {value:.4f}, the {kind} baseline {bound:.4f}")
    return said

"""Gold grades beside two runs: which matched rows have one, how both runs fare by them, and who is right where they
differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.compare.results import AgainstGold, McNemar
from relabel.jobs.evaluate.judged_options import Gold, JudgingOptions
from relabel.jobs.evaluate.judging import gold_of, load_pairs
from relabel.jobs.evaluate.lexical import lexical_scores
from relabel.manifests.errors import InputError
from relabel.manifests.ids import codes_of, ids_of
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.qrels import check_scale, grades_seen
from relabel.manifests.metrics.evaluation_of_both import evaluate_both
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.paired_rows import PairedRows
from relabel.manifests.metrics.paired_tests import mcnemar
from relabel.manifests.metrics.student_matches import BY_IDS
from relabel.manifests.storage.context import Storage


@dataclass(frozen=True)
class _Part:
    """Judged rows of some queries."""

    gold: np.ndarray
    queries: list[str]
    docs: list[str]
    grades: tuple[np.ndarray, np.ndarray]
    probs: tuple[np.ndarray, np.ndarray]
    row_ids: np.ndarray


class JudgedMatches:
    """Collects the matched rows that have a gold grade; memory grows with these.

    Args:
        sets: the two runs.
        options: what the command was given.
    Raises:
        InputError: qrels are off, or grades are off the runs' scale.
    """

    def __init__(
        self, polars: Any, sets: tuple[LabelSet, LabelSet], grades: int, options: JudgingOptions, storage: Storage
    ) -> None:
        self._polars, self._grades, self._qrels = polars, grades, str(options.qrels)
        self._first, self._storage = sets[0], storage
        golds: tuple[Gold, Gold] = (gold_of(sets[0], options, storage), gold_of(sets[1], options, storage))
        self.num_seen = self.num_null = 0
        self._parts: list[_Part] = []
        by_row = next(
            ((letter, gold) for letter, gold in zip("ab", golds, strict=True) if gold.by_row is not None), None
        )
        if by_row is not None:
            letter, gold = by_row
            assert gold.by_row is not None
            self.joined_by, self._key = gold.how, [f"row_{letter}"]
            found, keys = gold.by_row, (pa.array(range(len(gold.by_row)), pa.int64()),)
        else:
            pairs = load_pairs(sets, options, storage)
            self.joined_by, self._key = BY_IDS, ["query_id", "doc_id"]
            found, keys = pairs.grades, tuple(ids.cast(pa.large_string()) for ids in pairs.pair_ids)
        self._held = polars.from_arrow(pa.table([*keys, found], [*self._key, "gold"]))
        check_scale(grades_seen(found), grades, where=self._qrels, option="--map")

    def add(self, frame: Any, rows: PairedRows) -> None:
        """Take in a frame of `matches`, and the same rows as arrays."""
        polars = self._polars
        graded = self._held.with_columns(is_known=polars.lit(value=True))
        found = frame.select(self._key).join(graded, on=self._key, how="left", maintain_order="left")
        gold, is_known = found.select("gold", "is_known")
        is_known_N = is_known.fill_null(value=False).to_numpy()
        is_judged_N = gold.is_not_null().to_numpy()
        self.num_seen += int(is_known_N.sum())
        self.num_null += int((is_known_N & ~is_judged_N).sum())
        places = np.flatnonzero(is_judged_N)
        if not len(places):
            return
        queries = frame["query_id"]
        first, second = rows.grades
        self._parts.append(
            _Part(
                gold.to_numpy()[places].astype(np.int64),
                queries.gather(places).to_list(),
                [rows.docs[place] for place in places],
                (first[places], second[places]),
                (rows.probs[0][places], rows.probs[1][places]),
                frame["row_a"].gather(places).to_numpy(),
            )
        )

    def result(self, matched: int, *, resamples: int, seed: int) -> AgainstGold:
        """Both runs judged, the second minus the first, and McNemar's test of who is right.

        Raises:
            InputError: no matched row has a grade.
        """
        if not self._parts:
            raise InputError(
                f"none of the {matched:,} rows that both runs labelled has a grade in {self._qrels}, joined by "
                f"{self.joined_by}. Do the ids mean the same things? --by and --doc name other columns."
            )
        gold_N = np.concatenate([part.gold for part in self._parts])
        query_N, query_names = codes_of(ids_of(query for part in self._parts for query in part.queries))
        doc_N, _ = codes_of(ids_of(doc for part in self._parts for doc in part.docs))
        num_queries = len(query_names)
        judged, notes = [], list[str]()
        row_ids = np.concatenate([part.row_ids for part in self._parts])
        lexical = lexical_scores(self._first, row_ids, self._storage, notes)
        for side in (0, 1):
            probs_NK = np.concatenate([part.probs[side] for part in self._parts])
            labels_N = np.concatenate([part.grades[side] for part in self._parts])
            has_probs = not np.isnan(probs_NK).all()
            judged.append(
                Judged(
                    self._grades,
                    gold_N,
                    labels_N,
                    query_N,
                    num_queries,
                    doc_N,
                    probs_NK if has_probs else None,
                    None,
                    None,
                    lexical=lexical,
                )
            )
        first, second, difference = evaluate_both(*judged, resamples=resamples, seed=seed)
        first.notes.extend(notes)
        is_right = [one.labels == gold_N for one in judged]
        only_a, only_b = int((is_right[0] & ~is_right[1]).sum()), int((~is_right[0] & is_right[1]).sum())
        return AgainstGold(
            qrels=self._qrels,
            joined_by=self.joined_by,
            judged=len(gold_N),
            unjudged=matched - self.num_seen,
            gold_null=self.num_null,
            queries=num_queries,
            a=first,
            b=second,
            difference=difference,
            mcnemar=McNemar(only_a, only_b, *mcnemar(only_a, only_b)),
        )

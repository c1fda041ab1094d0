"""The sufficient statistics of judged rows: what each metric of the registry is computed from.

Letters: N rows, G groups (queries, or rows where there is no query), K grades.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from relabel.manifests.memory import release_unused
from relabel.manifests.metrics.agreement import confusion_by_group, pass_at_k
from relabel.manifests.metrics.calibration import at_least, reliability_by_group
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.query_level import EvidenceByQuery, ReviewByQuery, evidence_by_query, review_by_query
from relabel.manifests.metrics.ranking import QueryRanking, cut_names, rank_queries
from relabel.manifests.metrics.routing import RoutingByRow, routing_by_row
from relabel.manifests.metrics.statistics import Order, Sums, mean_of_rows


class JudgedStatistics:
    """Statistics of judged rows, each computed when a metric first asks for it.

    Args:
        judged: at least one row.
        pass_at: the k of pass@k; by default the powers of two and the number of samples that every sampled row has.
    """

    def __init__(self, judged: Judged, pass_at: Sequence[int] = ()) -> None:
        self.judged = judged
        self.has_probs = judged.has_probs
        self.pass_at = pass_at
        self.is_by_query = judged.queries is not None
        self.group_N = judged.queries if judged.queries is not None else np.arange(len(judged.gold))
        self.num_groups = judged.num_queries if self.is_by_query else len(judged.gold)

    def mean_of_rows(self, value_N: np.ndarray) -> Sums:
        """The mean of a value that each judged row has, or has not (NaN)."""
        return mean_of_rows(value_N, self.group_N, self.num_groups)

    @cached_property
    def counts(self) -> Sums:
        """A confusion matrix a group, [G, K, K]: rows gold, columns label."""
        one = self.judged
        counts_GKK = confusion_by_group(
            one.gold, one.labels, self.group_N, num_groups=self.num_groups, grades=one.grades
        )
        return Sums(counts_GKK, len(one.gold))

    @cached_property
    def reliability(self) -> Sums | None:
        """Bins of confidence, [G, B, 3] (see `reliability_by_group`); None where no row has a distribution."""
        if self.judged.probs is None:
            return None
        has_N = self.has_probs
        gold_N, group_N = self.judged.gold[has_N], self.group_N[has_N]
        return Sums(
            reliability_by_group(self.judged.probs[has_N], gold_N, group_N, num_groups=self.num_groups), len(gold_N)
        )

    @cached_property
    def orders(self) -> dict[str, Order]:
        """Rows with a distribution in the order of P(k ≥ j), relevant where gold ≥ j, by the name of the cut j; empty
        without any.
        """
        if self.judged.probs is None:
            return {}
        has_N = self.has_probs
        gold_N, group_N = self.judged.gold[has_N], self.group_N[has_N]
        # sums in float64 of float32: 1e-9 keeps equal scores equal
        above_NJ = np.round(at_least(self.judged.probs[has_N]), 9)
        return {
            name: Order(above_NJ[:, cut], gold_N > cut, group_N, num_groups=self.num_groups)
            for cut, name in enumerate(cut_names(self.judged.grades))
        }

    @cached_property
    def ranking(self) -> QueryRanking | None:
        """nDCG, tau and bad cases of each query; None where labels name no query."""
        one = self.judged
        if not self.is_by_query:
            return None
        release_unused()
        return rank_queries(self.group_N, one.docs, np.round(one.scores, 6), one.gold, num_queries=self.num_groups)

    @cached_property
    def evidence(self) -> EvidenceByQuery | None:
        """Chunks chosen, of each query; None where labels choose none."""
        return evidence_by_query(self.judged)

    @cached_property
    def review(self) -> ReviewByQuery | None:
        """Useful documents and sufficiency, of each query; None where labels are no reviews."""
        return review_by_query(self.judged)

    @cached_property
    def routing(self) -> RoutingByRow | None:
        """Actions on a document's tree, of each row; None where labels are no routes."""
        return routing_by_row(self.judged)

    @cached_property
    def passes(self) -> dict[str, Sums]:
        """The mean of pass@k over rows with samples, by k; empty without any."""
        one = self.judged
        if one.num_samples is None or one.num_correct is None:
            return {}
        most, has_N = one.fewest_samples, one.num_samples > 0
        found = {}
        for k in sorted(
            set(self.pass_at) or {most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}
        ):
            passed_N = np.full(len(has_N), np.nan)
            passed_N[has_N] = pass_at_k(one.num_correct[has_N], one.num_samples[has_N], k)
            found[str(k)] = self.mean_of_rows(passed_N)
        return found

"""Whether a model keeps the order in which a student puts a query's documents: Kendall's tau over the orders that the
student states.

Two documents whose scores hardly differ have no order to keep: another padding, or sums in another order, turn it round
in the student itself. Counted as orders they make tau say how crowded a query is, and not how good a model. So a margin
is fixed beforehand, and what the student tells apart by more than that must keep its order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from relabel.manifests.metrics.ranking import rows_by_group

# N pairs, K grades

RESOLUTION = 1e-4
"""How far a probability may move in fp32: the default of that gate and not its setting, since to loosen one must not
loosen the other.
"""


class Orders(NamedTuple):
    """What became of the orders of all queries.

    Args:
        tau: -1 to 1; None where the student orders no two documents of a query.
        ordered: pairs of documents of one query that the student orders by more than the margin.
        of: all pairs of documents of one query.
        by_query: [G, 2], tau times the weight, and the weight, of each query that has an order.
    """

    tau: float | None
    ordered: int
    of: int
    by_query: np.ndarray = np.zeros((0, 2))


def least_difference(grades: int) -> float:
    """The least difference of two expected grades that is an order, K(K−1)·1e-4: 6e-4 for three grades.

    When every probability moves by 1e-4 or less, an expected grade Σ k p(k) moves by at most 1e-4·K(K−1)/2, and a
    difference of two by twice that. So a model that is as near as fp32 has to be keeps all orders, and tau 1.
    """
    return RESOLUTION * grades * (grades - 1)


def kept_orders(query_N: np.ndarray, ours_N: np.ndarray, theirs_N: np.ndarray, margin: float) -> Orders:
    """Hold a model's orders against the student's.

    Of a query, tau = (kept − reversed) / ordered pairs; an order that the model makes a tie counts as neither. Queries
    are averaged by their number of documents: in a plain mean one swap in a query of two documents would outweigh a
    hundred in a large one, and by pairs of documents, which grow with the square, a large query would hide all others.

    Args:
        query_N: which rows are of one query, 0..G-1.
        ours_N, theirs_N: expected grades by student and model.
        margin: the student's scores differ by more than this, or there is no order.
    Source:
        Kendall 1938, "A new measure of rank correlation": tau; here over the pairs beyond the margin only.
    """
    taus, weights, ordered, of = [], [], 0, 0
    for rows in rows_by_group(query_N, int(query_N.max()) + 1):
        score, count = _balance(ours_N[rows], theirs_N[rows], margin)
        of += len(rows) * (len(rows) - 1) // 2
        if count:
            ordered += count
            taus.append(score / count)
            weights.append(len(rows))
    by_query_G2 = np.stack([np.multiply(taus, weights), np.asarray(weights, dtype=np.float64)], axis=1)
    return Orders(float(np.average(taus, weights=weights)) if taus else None, ordered, of, by_query_G2)


def _balance(ours_D: np.ndarray, theirs_D: np.ndarray, margin: float) -> tuple[int, int]:
    """Orders kept less those reversed, and how many there are. Document by document: a query of
    10,000 has 50 million.
    """
    score = count = 0
    for place in range(len(ours_D) - 1):
        difference = ours_D[place + 1 :] - ours_D[place]
        is_order = np.abs(difference) > margin
        count += int(is_order.sum())
        score += int((np.sign(difference) * np.sign(theirs_D[place + 1 :] - theirs_D[place]))[is_order].sum())
    return score, count

"""Rewards and credit: the gold rows, the score of a finished rollout by its grade (R3A) and by the nodes of its graph
(Graph-GRPO), the log of all rollouts, and advantages by group and along the graph's learned edges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from relabel.distill.students.examples import DEV, folded, in_words_of_the_spec, read_pairs, split_queries
from relabel.distill.students.spec import GoldSource, LearnedGold
from relabel.distill.teachers.rollouts import (
    NO_PART,
    AnswerTokens,
    Dialogues,
    FirstPrompt,
    Generate,
    Rollout,
    Span,
    token_parts,
)
from relabel.distill.teachers.spec import (
    EDGE_SCHEMA,
    EDGES_NAME,
    NODES,
    PARTS,
    ROLLOUT_SCHEMA,
    ROLLOUTS_NAME,
    CreditSection,
)
from relabel.distill.training.output import sync_files, writing
from relabel.distill.training.spec import DevSplit
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import Reader
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale, load_gold_by_row, mapped
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import NODE_SCORES, Label, Pair, table_bytes
from relabel.manifests.records import first_changed, sha256_file
from relabel.manifests.specs import InputSpec
from relabel.manifests.tables import read_grades

# ------------------------------------------------------------------------------
# What a rollout is worth: by its grade (R3A) and by the nodes of its graph (Graph-GRPO). RES-RAG's joint reward is
# `manifests.labels.evidence_reward`.
#
# A rollout without a readable label is worth 0, whatever it says: no grade is guessed.
#
# Source: R3A, equation 2; Graph-GRPO, base rewards; methods, sections 1 and 2.


NODE_GOLD = ("grade", "subject", "attribute")
"""What gold may say of the three nodes that are rewarded: r, s, a."""


def graded_reward(grade: int | None, gold: int, *, near: float = 0.0) -> float:
    """R = 1[format and verbatim] · r; r is 1 for gold's grade, λ next to it, 0 further off.

    Args:
        grade: of the label that was read; None where there was none to read.
        near: λ, 0..1.
    """
    if grade is None:
        return 0.0
    return {0: 1.0, 1: near}.get(abs(grade - gold), 0.0)


def node_rewards(
    label: Label | None, gold: dict[str, int | None], *, match: float = 1.0, miss: float = -1.0
) -> tuple[float, float, float]:
    """b of the nodes r, s, a.

    A node without gold gets 0, in every rollout of the row alike, so that it takes all its credit from r. A rollout
    without a readable label misses every node that has gold.

    Args:
        gold: by `NODE_GOLD`; None or no entry where a row has none.
        match, miss: reward of a node that is right, and of one that is not.
    """
    said: dict[str, int | None] = {}
    if label is not None:
        said = {"grade": label.grade, **{name: label.columns[name] for name in NODE_GOLD[1:]}}
    r, s, a = (
        0.0 if (wanted := gold.get(name)) is None else match if said.get(name) == wanted else miss for name in NODE_GOLD
    )
    return r, s, a


# ------------------------------------------------------------------------------
# What a method makes of a finished rollout: one reward for GRPO, three for the graph's nodes.


@dataclass(frozen=True, slots=True)
class GoldRow:
    """A row to train on.

    Args:
        source, row_id: where it comes from, for messages.
        gold: `grade`, and `subject` and `attribute` where the data has them; None where a row has none.
        first: the first prompt, where it is known.
    """

    pair: Pair
    gold: dict[str, int | None]
    source: str = ""
    first: FirstPrompt | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.source, self.pair.row_id


@dataclass(frozen=True, slots=True)
class Score:
    """What a rollout earned.

    Args:
        reward: as a whole; NaN where nothing could be found out, and the rollout does not count.
        base: b of r, s and a, where credit flows along the graph.
        parts: further figures of this one rollout, averaged over the step in the curve.
        columns: what the rollout log keeps of it in columns of the method's own.
    """

    reward: float
    base: tuple[float, float, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


def roll_rows(dialogues: Dialogues, rows: Sequence[GoldRow], generate: Generate) -> list[Rollout]:
    """One rollout for each row."""
    return dialogues.roll([row.pair for row in rows], generate, firsts=[row.first for row in rows])


ScoreOf = Callable[[Rollout, GoldRow], Score]
Scored = Callable[[Sequence[Rollout], Sequence[GoldRow]], list[Score]]
"""What rollouts earn, all of them together."""


def each(score_of: ScoreOf) -> Scored:
    """What rollouts earn, one by one."""
    return lambda rollouts, rows: [score_of(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]


def grade_score(near: float) -> ScoreOf:
    """Scores by the distance of the grade (R3A).

    Args:
        near: λ, what the grade next to gold's earns.
    """

    def score(rollout: Rollout, row: GoldRow) -> Score:
        gold = row.gold["grade"]
        assert gold is not None, "rows without a grade are refused when the data is read"
        grade = None if rollout.label is None else rollout.label.grade
        return Score(graded_reward(grade, gold, near=near), parts=_parts(rollout, row))

    return score


def graph_score(match: float = 1.0, miss: float = -1.0) -> ScoreOf:
    """Scores by node (Graph-GRPO); the reward as a whole is that of the grade."""

    def score(rollout: Rollout, row: GoldRow) -> Score:
        base = node_rewards(rollout.label, row.gold, match=match, miss=miss)
        named = {f"reward_{node}": value for node, value in zip("rsa", base, strict=True)}
        return Score(base[0], base, {**_parts(rollout, row), **named})

    return score


def answer_figures(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> dict[str, float]:
    """What the curve has of some answers: the mean reward, each part's mean over the answers that have it, and
    `top_grade_share`, the share of the most frequent grade among those that have one.
    """
    values: dict[str, list[float]] = {}
    if known := [score.reward for score in scores if not math.isnan(score.reward)]:
        values["reward"] = known
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    found = {name: sum(held) / len(held) for name, held in values.items()}
    labels = [rollout.label for rollout in rollouts if rollout.label is not None]
    if grades := Counter(label.grade for label in labels if label.grade is not None):
        found["top_grade_share"] = max(grades.values()) / grades.total()
    return found


def _parts(rollout: Rollout, row: GoldRow) -> dict[str, float]:
    """What shows how a reward is earned, or hacked: format, accuracy, length, and grades that rest on no evidence."""
    label = rollout.label
    grade = None if label is None else label.grade
    parts = {
        "format_rate": float(label is not None),
        "accuracy": float(grade == row.gold["grade"]),
        "truncated_rate": float(rollout.fault == "truncated"),
        "response_tokens": float(rollout.num_own),
    }
    if label is not None and label.grade:
        parts["no_evidence_rate"] = float("evidence_missing" in label.flags)
    return parts


# ------------------------------------------------------------------------------
# Rows to reward by: pairs as a labeler sees them, trusted grades, and trusted scores of nodes where there are any.


@dataclass
class GoldRows:
    """What there is to train on.

    Args:
        rows: with their first prompts.
        dropped: rows left out, by reason.
    """

    about: LearnedGold
    rows: list[GoldRow]
    dropped: Counter[str]

    @property
    def prompts(self) -> list[list[int]]:
        """The first prompts' token ids, row by row."""
        return [row.first.ids for row in self.rows if row.first is not None]

    @property
    def has_node_gold(self) -> bool:
        """Whether any row says more than a grade."""
        return any(value is not None for row in self.rows for name, value in row.gold.items() if name != "grade")

    def split(self, section: DevSplit) -> tuple[GoldRows, list[GoldRow]]:
        """What trains, and the rows that training is evaluated on.

        Raises:
            InputError: a dev split is wished for, and one of the sides would be empty.
        """
        if not section.dev:
            return self, []
        pairs = [row.pair for row in self.rows]
        keys = [pair.query_id if section.by == "query_id" else folded(pair.query) for pair in pairs]
        side_N = split_queries(keys, dev=section.dev, test=0.0, seed=section.seed)
        sides = (np.flatnonzero(side_N != DEV).tolist(), np.flatnonzero(side_N == DEV).tolist())
        if not all(sides):
            raise InputError(
                f"split.dev is {section.dev:g}, and of {len(set(keys))} queries of {self.about.path} "
                f"{'none' if not sides[1] else 'all'} fell there. Change it or split.seed, or bring more queries."
            )
        train, held_out = ([self.rows[place] for place in side] for side in sides)
        return replace(self, rows=train), held_out


def load_gold_rows(
    source: GoldSource, labeler: Labeler, dialogues: Dialogues, storage: Storage, *, grades: int
) -> GoldRows:
    """Read the pairs, and leave out those that can't be rewarded or asked.

    Args:
        grades: the labeler's number of grades.
    Raises:
        InputError: the file can't be read, a column is missing, or a grade is off the scale.
    """
    columns = source.columns.model_copy(update={"gold": source.grade})
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage, reads=labeler.reads)
    files = [file.path for file in dataset.files]
    trusted: dict[str, list[int | None]] = {}
    for node in NODE_GOLD:  # nothing maps the scores of subject and attribute
        most, grade_map = (grades, source.map) if node == "grade" else (NODE_SCORES, None)
        if (column := getattr(source, node, None)) is not None:
            where, option = f"{source.path}, column `{column}`", "data.gold.map"
            held = load_gold_by_row(files, column, storage, role="what is trusted", option=f"data.gold.{node}")
            read = mapped(read_grades(held).readable(source.path, column), grade_map, where=where, option=option)
            trusted[node] = read.to_pylist()
            check_scale(set(read.drop_null().to_pylist()), most, where=where, option=option)
    rows, dropped = [], Counter[str]()
    for number, pair in enumerate(read_pairs(dataset, np.arange(dataset.rows))):
        gold = {node: values[number] for node, values in trusted.items()}
        if gold["grade"] is None:
            dropped["without a trusted grade"] += 1
        elif (first := dialogues.first_prompt(pair)) is None:
            dropped["whose prompt does not fit"] += 1
        else:
            rows.append(GoldRow(pair, gold, source.path, first))
    return GoldRows(
        LearnedGold(
            path=source.path,
            grade=source.grade,
            map=source.map,
            rows=dataset.rows,
            without_grade=dropped["without a trusted grade"],
            graded_rows=len(rows),
        ),
        rows,
        dropped,
    )


# ------------------------------------------------------------------------------
# Every rollout of a training, and the graph's coefficients by step, as Parquet.
#
# Rollouts are written in parts, each as far as a checkpoint goes, before that checkpoint is there. A training that goes
# on from a checkpoint keeps the parts that it names and drops what came after.


class RolloutLog:
    """Rollouts that are not yet written, the edges, and counts of all rollouts.

    Args:
        folder: of the checkpoints; the parts go there.
        columns: further ones of the method, filled from `Score.columns`.
    """

    def __init__(self, folder: Path, *, columns: Sequence[pa.Field] = ()) -> None:
        self._schema = pa.schema([*ROLLOUT_SCHEMA, *columns])
        self._folder = folder / PARTS
        self._pending: list[dict[str, Any]] = []
        self._parts: dict[str, str] = {}  # sha256 by name
        self.edges: list[list[Any]] = []
        self.counts = Counter[str]()

    def add(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        *,
        advantages: Sequence[float],
        group: int,
    ) -> None:
        """Add what was generated for a step.

        Args:
            group: rollouts of one prompt; they follow each other.
        """
        for place, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            others = len(rollout.prompt_ids) + len(rollout.completion_ids) - rollout.num_own
            self.counts.update(rollouts=1, tokens=rollout.num_own, prompt_tokens=others)
            self._pending.append(
                {
                    "step": step,
                    "row_id": rollout.pair.row_id,
                    "sample": place % group,
                    "texts": [turn.text for turn in rollout.turns],
                    "grade": None if rollout.label is None else rollout.label.grade,
                    "reward": None if math.isnan(score.reward) else score.reward,
                    "advantage": advantages[place],
                    "format_ok": rollout.label is not None,
                    "fault": rollout.fault or None,
                    "detail": rollout.detail or None,
                    "tokens": rollout.num_own,
                    "node_rewards": None if score.base is None else list(score.base),
                    **score.columns,
                }
            )

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of a step keeps; all that is pending is written as its part."""
        if self._pending:
            name = f"step-{step:06d}.parquet"
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(self._folder, self._folder.parent):
                (self._folder / name).write_bytes(table_bytes(pa.Table.from_pylist(self._pending, schema=self._schema)))
                sync_files(self._folder, name)
            self._parts[name] = sha256_file(self._folder / name)
            self._pending = []
        return {"parts": dict(self._parts), "edges": self.edges, "counts": dict(self.counts)}

    def go_on(self, held: Mapping[str, Any]) -> None:
        """Take up what a checkpoint keeps.

        Raises:
            ManifestError: a part is missing, or not as it was written.
        """
        self._parts, self._pending = dict(held["parts"]), []
        self.edges = [list(one) for one in held["edges"]]
        self.counts = Counter(held["counts"])
        if (bad := first_changed(self._folder, self._parts)) is not None:
            raise ManifestError(
                f"{self._folder / bad}: rollouts that the checkpoint names are missing, or not as they were written. "
                "Train again with --restart."
            )

    def write(self, folder: Path, *, step: int) -> None:
        """Write `ROLLOUTS_NAME`, and `EDGES_NAME` where there are edges, into the finished model's folder."""
        tables = [pq.read_table(self._folder / name) for name in self.state(step)["parts"]]
        (folder / ROLLOUTS_NAME).write_bytes(
            table_bytes(pa.concat_tables([*tables, self._schema.empty_table()]).combine_chunks())
        )  # however often it was stopped
        if self.edges:
            rows = [dict(zip(EDGE_SCHEMA.names, one, strict=True)) for one in self.edges]
            (folder / EDGES_NAME).write_bytes(table_bytes(pa.Table.from_pylist(rows, schema=EDGE_SCHEMA)))


# ------------------------------------------------------------------------------
# How much better a rollout was than the others of its prompt: rewards standardised within their group.
#
# The population's standard deviation, as in the papers, where TRL takes the sample's. A group whose rewards are
# all equal says nothing: its advantages are 0, and so is every gradient through them.
#
# Source: R3A, equation 1; Graph-GRPO, equation 8.


# N prompts, G rollouts of a prompt, ... anything


def group_advantages(reward_NG: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """(R - mean) / (σ + ε) within each group; 0 where a group's rewards are equal.

    Args:
        reward_NG: rewards, one row a prompt. May carry a gradient, which is then exact, and 0 in a group of equals. NaN
            is a rollout of which nothing is known: its advantage is 0, and the others' are those of the rest; a
            group with fewer than two others is dropped as a whole.
        epsilon: added to σ, in the rewards' unit.
    """
    if bool(reward_NG.isnan().any()):
        return torch.stack([_of_known(reward_G, epsilon) for reward_G in reward_NG])
    lowest_N1, highest_N1 = reward_NG.amin(-1, keepdim=True), reward_NG.amax(-1, keepdim=True)
    # Equal rewards leave a mean that is off by rounding; only their range says that they are equal.
    rounding = 4 * torch.finfo(reward_NG.dtype).eps
    is_equal_N1 = (highest_N1 - lowest_N1) <= rounding * torch.maximum(lowest_N1.abs(), highest_N1.abs())
    centred_NG = reward_NG - reward_NG.mean(-1, keepdim=True)
    variance_N1 = centred_NG.square().mean(-1, keepdim=True)
    # A root of 0 has an infinite slope, and 0 times that is no number: equals take the root of 1 and are dropped after.
    deviation_N1 = torch.where(is_equal_N1, 1.0, variance_N1).sqrt()
    return torch.where(is_equal_N1, 0.0, centred_NG / (deviation_N1 + epsilon))


def is_known(reward_NG: Tensor) -> Tensor:
    """Which rollouts count, bool [N, G]: those with a reward, in groups with two or more of them."""
    found_NG = ~reward_NG.isnan()
    return found_NG & (found_NG.sum(-1, keepdim=True) >= 2)


def _of_known(reward_G: Tensor, epsilon: float) -> Tensor:
    known_G = is_known(reward_G[None])[0]
    advantage_G = torch.zeros_like(reward_G)
    if bool(known_G.any()):
        advantage_G[known_G] = group_advantages(reward_G[known_G][None], epsilon=epsilon)[0]
    return advantage_G


# ------------------------------------------------------------------------------
# Credit in a graph of seven nodes: what the grade, the subject and the attribute earned is passed on to what they rest
# on, along ten edges with coefficients that can be learned.
#
# The coefficients enter the loss through the advantages alone. Standardising takes much of them away: only
# `effective_ratios` of them can be distinguished by any loss, so those are what is reported.
#
# Source: Graph-GRPO, equations 5 to 9; methods, section 2, where the factor g and the gates' sink are explained.


# N prompts, G rollouts of a prompt, V = 7 nodes, E = 10 edges, B rollouts, T tokens


TEMPLATE = -1
"""The segment of tokens that belong to no node: their advantage is 0."""

ROUNDINGS = 4 * torch.finfo(torch.float32).eps
"""How much of `Credit.rounding`, times dL/dA, may still be noise: in 1,500 random batches at ρ = 1 it was half an ε at
most (2026-11-25).
"""


EDGES = ("r>s", "r>a", "s>q_s", "s>p_s", "a>q_a", "a>p_a", "q_a>q_s", "q_s>q_a", "p_a>p_s", "p_s>p_a")
"""Three branches, of two edges that share one node's credit, then gates between twins; as files and curves name
them.
"""


class Credit(nn.Module):  # type: ignore[misc]
    """The edges' logits w [E], 0 at first.

    Args:
        section: of the spec; without `consistency` twins share no credit, and the gates' α is 0.
    """

    def __init__(self, section: CreditSection) -> None:
        super().__init__()
        self.section = section
        self.logits = nn.Parameter(torch.zeros(len(EDGES)), requires_grad=section.learn)

    def coefficients(self) -> Tensor:
        """α by edge [E]: of branches softmax · 2, so that equal logits give 1; of gates sigmoid, at first 0.5."""
        branches = self.logits[:6].view(-1, 2).softmax(-1) * 2
        gates = self.logits[6:].sigmoid() * float(self.section.consistency)
        return torch.cat([branches.flatten(), gates])

    def node_rewards(self, base_3: Tensor) -> Tensor:
        """R of all nodes [..., V] from b of r, s, a [..., 3]."""
        r_s, r_a, s_qs, s_ps, a_qa, a_pa, qa_qs, qs_qa, pa_ps, ps_pa = self.coefficients()
        r, own_s, own_a = base_3.unbind(-1)
        s, a = own_s + r_s * r, own_a + r_a * r
        q_s, p_s = s_qs * s, s_ps * s
        q_a, p_a = a_qa * a, a_pa * a
        return torch.stack([r, s, a, q_s + qa_qs * q_a, q_a + qs_qa * q_s, p_s + pa_ps * p_a, p_a + ps_pa * p_s], -1)

    def advantages(self, base_NG3: Tensor, *, epsilon: float = 1e-6) -> Tensor:
        """A of all nodes [N, G, V]: each node's R, standardised over the prompt's rollouts. Never detached."""
        reward_NGV = self.node_rewards(base_NG3)
        return group_advantages(reward_NGV.transpose(-1, -2), epsilon=epsilon).transpose(-1, -2)

    def rounding(self, base_NG3: Tensor) -> Tensor:
        """How far rounding may move dA/dw by node [N, V], in units of float32's ε: the square of the largest reward
        over the deviation, since deviations are differences of rewards; 0 in groups of equals, which have no gradient.
        """
        with torch.no_grad():
            reward_NGV = self.node_rewards(base_NG3)
            has_gradient_NV = self.advantages(base_NG3).abs().amax(1) > 0
            ratio_NV = reward_NGV.abs().amax((1, 2)).unsqueeze(-1) / reward_NGV.std(1, correction=0)
            return torch.where(has_gradient_NV, ratio_NV.square(), 0.0)


def effective_ratios(alpha_E: Sequence[float]) -> dict[str, float]:
    """What the advantages depend on, by node: how much of another node's credit it takes for each 1 of its own.

    Five of the ten coefficients can be derived from these six numbers (those of s and a sum to 2).
    """
    r_s, r_a, s_qs, s_ps, a_qa, a_pa, qa_qs, qs_qa, pa_ps, ps_pa = alpha_E
    of_query = {"q_s": qa_qs * a_qa / s_qs, "q_a": qs_qa * s_qs / a_qa}
    return {"s": r_s, "a": r_a, **of_query, "p_s": pa_ps * a_pa / s_ps, "p_a": ps_pa * s_ps / a_pa}


def token_advantages(node_BV: Tensor, segment_BT: Tensor) -> Tensor:
    """The advantage of each token's node [B, T]; 0 for `TEMPLATE`."""
    found_BT = node_BV.gather(1, segment_BT.clamp(min=0))
    return torch.where(segment_BT == TEMPLATE, 0.0, found_BT)


def node_average_weights(segment_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """|o| / (V · n_v) for each token [B, T]: under a mean over tokens it makes a mean over tokens within each node,
    then over all seven nodes. A node without tokens weighs nothing, and V stays 7.

    min(ρA, clip(ρ)A) is homogeneous in A, so advantages times these weights need no loss of their own.
    """
    mask_BT = mask_BT.to(torch.float32)
    length_B1 = mask_BT.sum(1, keepdim=True)
    member_BTV = nn.functional.one_hot(segment_BT.clamp(min=0), len(NODES)) * mask_BT.unsqueeze(-1)
    member_BTV = member_BTV * (segment_BT != TEMPLATE).unsqueeze(-1)
    count_BV = member_BTV.sum(1).clamp(min=1.0)
    return torch.where(
        segment_BT == TEMPLATE, 0.0, length_B1 / (len(NODES) * count_BV.gather(1, segment_BT.clamp(min=0)))
    )


# ------------------------------------------------------------------------------
# Which node of the graph each token of an answer of `graph-grpo` belongs to.


NODE_OF_TAG = {
    "preliminary": "r",
    "query_subject": "q_s",
    "query_attribute": "q_a",
    "product_subject": "p_s",
    "product_attribute": "p_a",
    "subject_score": "s",
    "attribute_score": "a",
    "score": "r",
}
"""The first grade is a grade too."""


def segments_of(rollout: Rollout, tokens: AnswerTokens, *, template: int = NO_PART) -> list[int]:
    """The node of each completion token, by its place in `NODES`.

    All tokens of a rollout without a readable label are the grade's: nobody can say which of them went wrong.

    Args:
        template: what tags, white space and the end belong to: `NO_PART`, or a node.
    """
    if rollout.label is None:
        return [NODES.index("r")] * len(rollout.completion_ids)
    segments = [NO_PART] * len(rollout.completion_ids)
    for turn in rollout.turns:
        assert turn.ask.format is not None
        spans: dict[int, list[Span]] = {}
        for tag, span in Reader(turn.ask.format).spans(turn.text).items():
            spans.setdefault(NODES.index(NODE_OF_TAG[tag]), []).append(span)
        opened = turn.text.removesuffix(tokens.text(turn.ids)).encode()  # by the chat template
        parts = token_parts([opened, *tokens.pieces(turn.ids)], spans)[1:]
        segments[turn.start : turn.start + len(turn.ids)] = [template if part == NO_PART else part for part in parts]
    return segments

"""Pairs and labels in memory and in Parquet, the rule map from verdicts to grades, and scores of chosen evidence."""

from __future__ import annotations

import io
import math
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.ma
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relabel.manifests.asks import Distribution
from relabel.manifests.errors import ConfigError, InputError

# ------------------------------------------------------------------------------
# A pair going in, a label coming out, in memory. Further below is how they lie in Parquet.


class Pair(NamedTuple):
    """One row of the input.

    `document` is the named columns that are not empty, joined by a blank line; it may be empty. `context` holds up to
    four high-click documents of the query. `columns` holds, by name, those of the labeler's `input_columns` that the
    input has; a null is `""` or `()`. `siblings` holds all rows of the query that the input has, this one too, in row
    order, for labelers with `uses_siblings`; they have no siblings of their own. `broken_text` says which column is not
    UTF-8, and where, and is empty for most: such a pair is quarantined, and a labeler sees it among siblings alone,
    with U+FFFD for what can't be read.
    """

    row_id: int
    query_id: str
    query: str
    doc_id: str
    document: str
    context: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    siblings: tuple[Pair, ...] = ()
    broken_text: str = ""


class InputColumn(NamedTuple):
    """A further column of the input that a labeler reads where it is there.

    Args:
        name: as it is called in the input.
        kind: `string`, `list<string>`, `list<chunk>` or `list<node>` (`manifests.tables.STRUCT_KINDS`, as dicts).
        about: what it holds, in a line.
        is_required: an input without it is refused.
    """

    name: str
    kind: str
    about: str
    is_required: bool = False


class Reads(NamedTuple):
    """What a labeler reads in addition to the query: all else is no part of a label's key.

    Args:
        context, document: `Pair.context`, `Pair.document`.
        columns: what it finds in `Pair.columns`.
        siblings: `Pair.siblings`.
    """

    context: bool = False
    document: bool = True
    columns: tuple[InputColumn, ...] = ()
    siblings: bool = False

    @property
    def whole_query(self) -> bool:
        """Whether rows of a query take their labels from one answer, about all its documents or none. Chunks then hold
        whole queries, however large, so that whatever interrupts a run, no query has labels of two answers.
        """
        return self.siblings or not self.document


QUERY_AND_DOCUMENT = Reads()
"""What most labelers read."""


class Span(NamedTuple):
    """A piece of the document: `document[start:end]`, in code points, and that text."""

    start: int
    end: int
    text: str


class LabelColumn(NamedTuple):
    """A column of the label files that a labeler declares for its own labels.

    Args:
        name: of lower-case letters, digits and `_`; none of the columns that all label files have.
        kind: `bool`, `int8`, `int32`, `int64`, `float32`, `string`, `list<float32>`, `list<int16>`, `list<int32>` or
            `list<string>`. Null is no value.
        about: what it holds, in a line; `relabel schema labels --labeler NAME` prints it.
    """

    name: str
    kind: str
    about: str


CASCADE_COLUMNS = (
    LabelColumn("answered_by", "string", "`cheap`, `teacher`, `audit` or `calibration`: the last two are the teacher."),
    LabelColumn("cheap_grade", "int8", "What the cheap judges answer; null where one of them has no answer."),
    LabelColumn("cheap_confidence", "float32", "1 less the loss that they expect of it, as a part of the highest."),
)
"""Of a cascade's label files, after the labeler's own."""


@dataclass(slots=True)
class Label:
    """What a labeler read from the answers about one pair.

    Args:
        grade: what the model wrote (or, where it writes nothing, the most probable grade), 0..K-1; None of a labeler
            whose `grades` is 0.
        distribution: over the grades at the decision; None where the engine can't give it.
        columns: values of the columns that the labeler declares, by name; one that is not there is null.
        evidence: quoted spans of the document, in the order quoted.
        flags: remarks on this label, each a word of `[a-z_]`.
    """

    grade: int | None
    distribution: Distribution | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Span, ...] = ()
    intent: str | None = None
    reasoning: str | None = None
    flags: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------
# The rule map φ(s, a) → grade, as data: which grade follows from how well the subject and the attribute match.
#
# The labeler says with it whether a teacher's own grade agrees with its two scores; a student's induced grade
# distribution sums over it.
#
# Source: Graph-GRPO, "mapping function over the two scores"; the paper leaves the map open, the default is ours
# (`DEFAULT_PHI`).


PhiTable = tuple[tuple[int, ...], ...]
"""Row = subject score s, column = attribute score a, both 0..4; the cell is a grade 0..K-1."""

NODE_SCORES = 5
"""Scores that a matching node takes: 0 no intent, 1 mismatch, 2 weak, 3 partial, 4 exact."""

DEFAULT_PHI: PhiTable = (
    (2, 0, 1, 1, 2),
    (0, 0, 0, 0, 0),
    (1, 0, 1, 1, 1),
    (1, 0, 1, 1, 1),
    (2, 0, 1, 1, 2),
)
"""A score of 0 asks for nothing, so it counts as 4; then the weaker of the two decides: 4 → 2, 3 or 2 → 1, 1 → 0."""


DEFAULT_GRADES = 3
"""Grades that `DEFAULT_PHI` speaks of; there is none for another scale."""


def default_phi(grades: int, *, key: str) -> PhiTable:
    """The built-in map, where it fits.

    Args:
        grades: number of grades K.
        key: what the user calls the table, for messages.
    Raises:
        ConfigError: K is not 3; says what to write, with a table of the same rule for K grades.
    """
    if grades == DEFAULT_GRADES:
        return DEFAULT_PHI
    # the default's rule over K grades: 0 counts as 4, the weaker score decides, 1 to 4 spread evenly over the scale
    weaker = [[min(s or 4, a or 4) for a in range(NODE_SCORES)] for s in range(NODE_SCORES)]
    rows = ", ".join(str([(score - 1) * (grades - 1) // 3 for score in row]) for row in weaker)
    raise ConfigError(
        f"`{key}` is missing: the built-in rule map gives grades 0 to {DEFAULT_GRADES - 1}, and there are {grades}. "
        "Say which grade follows from each pair of scores: five rows (subject score 0..4) of five grades "
        f"0..{grades - 1} (attribute score 0..4), for instance phi: [{rows}]"
    )


def unreached_grades(table: PhiTable, grades: int) -> list[int]:
    """Grades that no pair of scores gives."""
    return sorted(set(range(grades)) - {grade for row in table for grade in row})


def check_phi(table: Sequence[Sequence[int]], *, grades: int) -> PhiTable:
    """Return `table` as a `PhiTable`.

    Args:
        table: five rows (subject score 0..4) of five grades (attribute score 0..4).
        grades: number of grades K; every cell is in 0..K-1.
    Raises:
        ConfigError: a wrong number of rows or columns, or a cell that is not a grade.
    """
    sizes = [len(row) for row in table]
    cells = {grade for row in table for grade in row}
    if sizes != [NODE_SCORES] * NODE_SCORES or not cells <= set(range(grades)):
        raise ConfigError(
            f"phi has rows of {sizes} cells, {sorted(cells)} among them; expected {NODE_SCORES} rows (subject score 0 "
            f"to {NODE_SCORES - 1}) of {NODE_SCORES} grades 0 to {grades - 1} (attribute score 0 to {NODE_SCORES - 1})"
        )
    return tuple(tuple(row) for row in table)


def phi_grade(table: PhiTable, subject: int, attribute: int) -> int:
    """φ(s, a): the grade that follows from the two node scores, each 0..4."""
    return table[subject][attribute]


# ------------------------------------------------------------------------------
# A generator's short answers compared with those wanted: RES-RAG's exact match, Hit@1 and F1_ans.
#
# Source: RES-RAG (papers, equation 10, section 4.1 and figure 6). Answers are compared in a normal form: lower case,
# without punctuation, white space folded. Articles stay, which SQuAD drops and the paper does not name.


def normal_answer(answer: str) -> str:
    """Unicode NFC, lower case, without punctuation (ASCII's, and Unicode's P), runs of white space one space. An answer
    of punctuation alone keeps it.
    """
    lower = unicodedata.normalize("NFC", answer.lower())
    words = "".join(one for one in lower if one not in string.punctuation and unicodedata.category(one)[0] != "P")
    # an accent that was on a sign is now on what came before
    return " ".join(unicodedata.normalize("NFC", words).split()) or " ".join(lower.split())


def exact_match(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where every gold answer is among the answers, else 0; further answers do not count against it."""
    return float(set(map(normal_answer, gold)) <= set(map(normal_answer, answers)))


def hit_at_1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where the first answer is any gold answer, else 0."""
    return float(bool(answers) and normal_answer(answers[0]) in set(map(normal_answer, gold)))


def token_f1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """F1_ans: F1 of the words of all answers together and those of all gold answers together, in normal form. A word
    that occurs twice counts twice; 0 where no word is common.

    The paper has one gold answer; of several, all are wanted, as `exact_match` has it.
    """
    said, wanted = (Counter(word for one in texts for word in normal_answer(one).split()) for texts in (answers, gold))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


# ------------------------------------------------------------------------------
# What a choice of evidence is worth: its cost, its agreement with a wanted set, and the reward of RES-RAG.
#
# Source: RES-RAG (papers, section 3.4), equations 8 to 14. Chunks are numbered from 1, and a number that occurs twice
# counts twice as cost.


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of the reward; all defaults but `empty_answer` are the paper's."""

    cost: float = 2.0
    answer: float = 2.0
    retrieval: float = 1.0
    empty_answer: float = -1.0
    lowest: float = -5.0
    highest: float = 5.0


PAPER_WEIGHTS = RewardWeights()


def over_budget(num_selected: int, num_chunks: int) -> float:
    """φ of one document: 0 up to √N chunks, 0.5 up to N, 1 beyond."""
    # S ≤ √N exactly where S ≤ ⌊√N⌋
    return 0.0 if num_selected <= math.isqrt(num_chunks) else 0.5 if num_selected <= num_chunks else 1.0


def set_f1(selected: Collection[int], gold: Collection[int]) -> float:
    """F1 of two sets: 1 where both are empty, 0 where one is."""
    found = set(selected)
    wanted = set(gold)
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found or wanted else 1.0


class EvidenceReward(NamedTuple):
    """What a choice earns.

    Args:
        reward: R.
        usefulness: U, of the answer.
        agreement: F1_ret, without its weight.
        penalty: P.
    """

    reward: float
    usefulness: float
    agreement: float
    penalty: float


def evidence_reward(
    selected: Sequence[Sequence[int]],
    num_chunks: Sequence[int],
    gold: Sequence[Collection[int]],
    answer_f1: float | None,
    weights: RewardWeights = PAPER_WEIGHTS,
) -> EvidenceReward:
    """R = clip(U + α_ret · F1_ret - P), where P = η · mean φ and U = α_ans · F1_ans, or γ for an empty answer.

    Args:
        selected: chunk numbers chosen, by document, as written.
        num_chunks: that each document has.
        gold: chunk numbers wanted, by document.
        answer_f1: of the generator's answer, 0..1; None where it gave none.
    Raises:
        ValueError: the three do not speak of the same documents, at least one.
    """
    if not len(selected) == len(num_chunks) == len(gold) > 0:
        raise ValueError(f"{len(selected)} choices, {len(num_chunks)} documents and {len(gold)} gold sets do not fit")
    count = len(selected)
    penalty = weights.cost * sum(map(over_budget, map(len, selected), num_chunks)) / count
    usefulness = weights.empty_answer if answer_f1 is None else weights.answer * answer_f1
    agreement = sum(map(set_f1, selected, gold)) / count
    whole = usefulness + weights.retrieval * agreement - penalty
    return EvidenceReward(min(weights.highest, max(weights.lowest, whole)), usefulness, agreement, penalty)


# ------------------------------------------------------------------------------
# The structure tree of a document: its headings and what is under them, each with its place in the text. Source:
# RDR2 (papers, section 3.2). A *structure* node is a heading, a *content* node a passage, a table or a list. One
# tree is a list of nodes, as dicts in a column of the input or in JSON; `COLUMN` is what the column is called.


COLUMN = "tree"
STRUCTURE: Final = "structure"
CONTENT: Final = "content"
ROOT = 0
"""Id of the root: the document itself, its text the title."""
NO_PARENT = -1

NODE = pa.struct(
    [
        ("id", pa.int32()),
        ("type", pa.large_string()),
        ("level", pa.int32()),
        ("text", pa.large_string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("parent", pa.int32()),
    ]
)
"""What a node holds at least; see `Node`."""
NODES = pa.large_list(NODE)


class Node(NamedTuple):
    """A node of a tree.

    Args:
        id: its place among the nodes, in document order; 0 is the root.
        type: `structure` or `content`.
        level: how many nodes lie above it; a heading of level 4 right below one of level 2 is one deeper, not two.
        text: `document[start:end]`; the root's may be a title that is nowhere in the document.
        start, end: its place, in code points; the root's may be empty.
        parent: id of the node that it is under, -1 for the root. A heading is under headings alone.
    """

    id: int
    type: str
    level: int
    text: str
    start: int
    end: int
    parent: int

    @property
    def is_content(self) -> bool:
        return self.type == CONTENT


class Tree(NamedTuple):
    """A document's nodes, checked, and the ids of each one's children in order."""

    nodes: tuple[Node, ...]
    children: tuple[tuple[int, ...], ...]

    def ancestors(self, id: int) -> Iterable[Node]:
        """The nodes above one, the nearest first."""
        while (id := self.nodes[id].parent) != NO_PARENT:
            yield self.nodes[id]

    def values(self) -> list[dict[str, Any]]:
        """The nodes as dicts: one value of a column of type `NODES`, and plain JSON."""
        return [node._asdict() for node in self.nodes]


def read_tree(values: Sequence[Mapping[str, Any]], document: str) -> Tree:
    """The tree that a column or JSON holds, checked with the document.

    Raises:
        InputError: it is no tree of this document; says at which node, and why.
    """
    nodes = [_read_node(place, value) for place, value in enumerate(values)]
    if not nodes:
        raise InputError("the tree has no node; it wants a root at least.")
    children: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        if not _is_sound(place, nodes, document):
            raise InputError(
                f"node {place} of the tree is not one of this document: {node!r:.200}. Ids count from 0 in document "
                "order, a node is one level below its parent, a heading is under headings alone, and the text is the "
                "document's from `start` to `end`. Tree and document must come from one `relabel pairs tree`."
            )
        if node.id != ROOT:
            children[node.parent].append(node.id)
    return Tree(tuple(nodes), tuple(map(tuple, children)))


_KINDS: dict[str, type] = {name: str if name in ("type", "text") else int for name in Node._fields}


def _read_node(place: int, value: Mapping[str, Any]) -> Node:
    for name, kind in _KINDS.items():
        if type(value.get(name)) is not kind:
            found = f"{value[name]!r:.40}" if name in value else "missing"
            raise InputError(f"node {place} of the tree: `{name}` is {found}, expected {kind.__name__}.")
    return Node(*(value[name] for name in _KINDS))


def _is_sound(place: int, nodes: Sequence[Node], document: str) -> bool:
    """Whether a node is as it should be, where those before it are."""
    node = nodes[place]
    is_inside = 0 <= node.start <= node.end <= len(document)
    if place == ROOT:
        return is_inside and (node.id, node.type, node.level, node.parent) == (ROOT, STRUCTURE, 0, NO_PARENT)
    if node.id != place or not ROOT <= node.parent < place:
        return False
    parent = nodes[node.parent]
    before = nodes[place - 1]
    return (
        is_inside
        and document[node.start : node.end] == node.text
        and node.level == parent.level + 1
        and node.type in ((STRUCTURE, CONTENT) if not parent.is_content else (CONTENT,))
        and (node.start >= before.start or before.id == ROOT)
    )


# How labels and quarantined rows lie in Parquet: one versioned schema each, and the bytes of a chunk.
#
# The same rows give the same bytes: no times, no process ids, fixed writer options. Column-wise because one chunk of
# 256 rows must cost a millisecond or two, not ten.

SCHEMA_VERSION = 3
"""Of label files."""
ROWS_VERSION = 2
"""Of quarantine and answer files."""

KEY_BYTES = 16

_PROBS = pa.list_(pa.float32())

SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("text", pa.string())])
"""`document[start:end]` in code points, and that text."""

KINDS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "string": pa.string(),
    "list<float32>": _PROBS,
    "list<int16>": pa.list_(pa.int16()),
    "list<int32>": pa.list_(pa.int32()),
    "list<string>": pa.list_(pa.string()),
}
"""Of which kinds a labeler's own columns can be, and how they lie in Arrow."""


SAMPLE = pa.struct([("status", pa.string()), ("grade", pa.int8()), ("probs", _PROBS), ("outside_mass", pa.float32())])
"""One of S trajectories; grade and probs are null unless its status is ok."""

LABELS = pa.schema(
    [
        ("row_id", pa.int64()),
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("status", pa.string()),
        ("grade", pa.int8()),
        ("probs", _PROBS),
        ("outside_mass", pa.float32()),
        ("expected_grade", pa.float32()),
        ("evidence", pa.list_(SPAN)),
        ("intent", pa.string()),
        ("reasoning", pa.string()),
        ("flags", pa.list_(pa.string())),
        ("samples", pa.list_(SAMPLE)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("reused", pa.bool_()),
        ("key", pa.binary(KEY_BYTES)),
        ("origin", pa.string()),
    ],
    metadata={"relabel.schema": f"labels-{SCHEMA_VERSION}"},
)
"""The columns of every label file; those that its labeler declares follow (`label_schema`). `key` is the
label's identity (`reuse.py`), null in labels that came without one; `origin` the fingerprint of the run that asked
a row that was reused, null where this run asked.
"""


DISTRIBUTION = pa.struct([("name", pa.string()), ("probs", pa.list_(pa.float64())), ("outside_mass", pa.float64())])
"""A decision's distribution as the engine gave it; float64, so that a row read from it equals one
read from the answer.
"""

ANSWERS = pa.schema(
    [
        ("key", pa.binary(KEY_BYTES)),
        ("stage", pa.string()),
        ("text", pa.string()),
        ("finish", pa.string()),
        ("distributions", pa.list_(DISTRIBUTION)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("flags", pa.list_(pa.string())),
        ("origin", pa.string()),
    ],
    metadata={"relabel.schema": f"answers-{ROWS_VERSION}"},
)
"""Answers that the rows of a query share (r3a's intents): kept, so that a later run need not ask them again."""

TRY = pa.struct(
    [
        ("stage", pa.string()),
        ("attempt", pa.int32()),
        ("finish", pa.string()),
        ("text", pa.string()),
        ("reason", pa.string()),
    ]
)
"""One answer that was not readable: where, which attempt, how it ended, its whole text, and what was wrong with it."""

QUARANTINE = pa.schema(
    [
        ("row_id", pa.int64()),
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("tries", pa.list_(TRY)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
    ],
    metadata={"relabel.schema": f"quarantine-{ROWS_VERSION}"},
)


class LabelRow(NamedTuple):
    """One row of `LABELS`, in its column order, and the labeler's own columns by name; plain
    values, structs as dicts.
    """

    row_id: int
    query_id: str
    doc_id: str
    status: str
    grade: int | None
    probs: Sequence[float] | None
    outside_mass: float | None
    expected_grade: float | None
    evidence: list[dict[str, Any]]
    intent: str | None
    reasoning: str | None
    flags: list[str]
    samples: list[dict[str, Any]] | None
    prompt_tokens: int
    output_tokens: int
    reused: bool
    key: bytes | None = None
    origin: str | None = None
    columns: Mapping[str, Any] = MappingProxyType({})


AnswerRow: TypeAlias = dict[str, Any]
"""One row of `ANSWERS`, by name; distributions are dicts with the fields of `DISTRIBUTION`."""


class QuarantineRow(NamedTuple):
    """One row of `QUARANTINE`, in its column order; `tries` are dicts with the fields of `TRY`."""

    row_id: int
    query_id: str
    doc_id: str
    status: str
    reason: str
    tries: list[dict[str, Any]]
    prompt_tokens: int
    output_tokens: int


def label_schema(columns: Mapping[str, str]) -> pa.Schema:
    """How label files lie whose labeler has these columns of its own, name → kind."""
    return pa.schema([*LABELS, *((name, KINDS[kind]) for name, kind in columns.items())], metadata=LABELS.metadata)


def label_rows(table: pa.Table) -> Iterator[LabelRow]:
    """The rows of a table with the columns of `LABELS`, in any order; all others are the labeler's own."""
    own = [name for name in table.column_names if name not in LABELS.names]
    values = (table[name].to_pylist() for name in (*LABELS.names, *own))
    for row in zip(*values, strict=True):
        yield LabelRow._make((*row[: len(LABELS)], dict(zip(own, row[len(LABELS) :], strict=True))))


def parquet_bytes(rows: Sequence[LabelRow] | Sequence[QuarantineRow] | Sequence[AnswerRow], schema: pa.Schema) -> bytes:
    """The Parquet file of some rows, the same bytes for the same rows.

    Args:
        rows: at least one, with a value for each column of `schema`.
    Raises:
        ValueError: a label has a column of its own that the schema does not name.
    """
    fields = [*rows[0]] if isinstance(rows[0], dict) else rows[0]._fields
    table = (one.values() if isinstance(one, dict) else one for one in rows)
    values: dict[str, Sequence[Any]] = dict(zip(fields, zip(*table, strict=True), strict=True))
    own = values.pop("columns", ())
    names = schema.names[len(values) :]
    strange = {name for row in own for name in row}.difference(names)
    if strange:
        raise ValueError(f"no column for {', '.join(sorted(strange))}")
    values |= {name: [row.get(name) for row in own] for name in names}
    arrays = [_array(list(values[field.name]), field.type) for field in schema]
    return table_bytes(pa.Table.from_arrays(arrays, schema=schema))


def table_bytes(table: pa.Table) -> bytes:
    """The Parquet file of a table, the same bytes for the same rows."""
    sink = io.BytesIO()
    # No dictionaries and no statistics for a file of a few hundred rows: measured at half the writer's time. Page
    # checksums, so that a
    # flipped bit is an error and not a label.
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_of(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The table that a Parquet file's bytes hold, page checksums verified; the inverse of `table_bytes`.

    On the calling thread alone. Arrow's own threads would let go of `data` a moment after the table is there, for which
    they want the interpreter; where it is ending by then, that aborts the process: "terminate called without an active
    exception", exit code 134 (14 of 400 short processes on a busy machine, 2026-11-20; pyarrow 26.0). A chunk's file is
    too small to gain from threads.

    Args:
        columns: those to read; all by default.
    Raises:
        pa.ArrowException, OSError: it is not a whole Parquet file.
    """
    with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True) as file:
        return file.read(columns=columns, use_threads=False)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 holds: an answer or id made of broken UTF-16
        return pa.array([_without_surrogates(value) for value in values], kind)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(inner) for inner in value]
    return value


def ids_of(texts: Iterable[str]) -> pa.LargeBinaryArray:
    """Texts as ids."""
    return pa.array([text.encode("utf-8", "surrogatepass") for text in texts], pa.large_binary())


def texts_of(ids: pa.LargeBinaryArray) -> list[str]:
    """Ids as texts; null is empty."""
    return [(value or b"").decode("utf-8", "surrogatepass") for value in ids.to_pylist()]


def codes_of(ids: pa.LargeBinaryArray) -> tuple[np.ndarray, pa.LargeBinaryArray]:
    """Ids numbered from 0 in the order of their UTF-8, equal ids alike: int64 [N]; and the different ones."""
    coded = ids.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def pair_codes(query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> np.ndarray:
    """A number for each (query, document), equal pairs alike: int64 [N]; which one says nothing."""
    query = query_ids.dictionary_encode()
    doc = doc_ids.dictionary_encode()
    return np.asarray(query.indices.to_numpy() * np.int64(len(doc.dictionary)) + doc.indices.to_numpy())


def release_unused() -> None:
    """Give freed memory back to the system. malloc keeps it otherwise, and the stages of a command add up."""
    pa.default_memory_pool().release_unused()

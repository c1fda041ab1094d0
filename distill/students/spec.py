"""A student's formats: the spec (`student.yaml`), checked key by key, and the records of its training data, of
`manifest.json` and of `student.json` next to its weights. Importing it does not load torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from relabel.distill.training.output import TrainedManifest
from relabel.distill.training.spec import (
    DevSplit,
    EarlyStop,
    LoraSpec,
    ModelName,
    OutputText,
    TrainingSection,
    as_sources,
)
from relabel.manifests.errors import ConfigError, ManifestError
from relabel.manifests.files import absence_of, translate_errors
from relabel.manifests.metrics.evaluation import Baselines, Gate, GateVerdict, parse_gates
from relabel.manifests.phi import DEFAULT_PHI, PhiTable
from relabel.manifests.records import LEFT_OUT, read_record
from relabel.manifests.specs import (
    DRAFT,
    Columns,
    ModelText,
    ObjectSchema,
    OneOrMany,
    PathText,
    PatternText,
    Schema,
    Spec,
)

# ------------------------------------------------------------------------------
# Which kinds of student there are. Adding one is a `StudentNetwork` and one entry here.
#
# What a kind's module can do: `networks.EncoderStudent`; here is what is known of it before torch is loaded.


BaseKind = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class StudentKind:
    """A kind of student.

    Args:
        module: import path of its `StudentNetwork` (`networks.py`).
        title: what its card calls it.
        does: and what a student of it does, in the card's words.
        reads_query: whether it reads the query alone.
        trainer: import path of what trains it (`losses.py`): inputs and a call for figures on dev → module and outcome.
        base: the model of transformers that it starts from.
        has_nodes: whether it can have other heads than relevance.
        refuses: keys of the spec that are for other kinds.
        pads_left: whether its batches are padded on the left.
        int8_narrows: whether dynamic int8 takes the matrices that narrow as well (see `export/exporting.py`).
    """

    module: str
    title: str
    base: BaseKind
    has_nodes: bool = False
    refuses: tuple[str, ...] = ()
    pads_left: bool = False
    int8_narrows: bool = True
    does: str = "grades how relevant a document is to a query"
    reads_query: bool = False
    trainer: str = "relabel.distill.students.losses:train_student"


_STEPWISE = (
    "epochs", "max_steps", "batch_size", "tokens_per_batch", "group_by_length", "accumulation", "learning_rate",
    "head_learning_rate", "schedule", "warmup", "max_grad_norm", "early_stopping", "eval_every", "save_every",
    "keep_checkpoints", "mirror", "precision", "compile", "strategy", "gradient_checkpointing", "report_to",
)  # fmt: skip
"""Keys of `train` for kinds that take one batch after the other."""
KINDS = {
    "encoder": StudentKind(
        "relabel.distill.students.networks:EncoderStudent",
        "An encoder",
        "encoder",
        has_nodes=True,
        refuses=("student.lora", "student.batching"),
    ),
    "decoder": StudentKind(
        "relabel.distill.students.networks:DecoderStudent",
        "A decoder",
        "decoder",
        refuses=("train.head_learning_rate",),
        pads_left=True,
        int8_narrows=False,
    ),
    "logistic": StudentKind(
        "relabel.distill.students.networks:LogisticStudent",
        "A logistic regression",
        "encoder",
        refuses=(
            *(f"student.{name}" for name in ("lora", "batching", "prompt", "pooling", "dropout")),
            *(f"train.{name}" for name in _STEPWISE),
        ),
        does="grades a query by its own text",
        reads_query=True,
        trainer="relabel.distill.students.losses:fit_student",
    ),
}


def takers(key: str) -> list[str]:
    """The kinds that take a key of the spec."""
    return [name for name, kind in KINDS.items() if key not in kind.refuses]


# ------------------------------------------------------------------------------
# Heads that a student can have.


NODE_HEADS = ("subject", "attribute")
HEADS = ("relevance", *NODE_HEADS)
"""Heads that a student can have, in the order in which they are built."""

# ------------------------------------------------------------------------------
# The section `student` of a spec: the model that learns.


KindName = Literal["encoder", "decoder", "logistic"]
"""A key of `KINDS`."""


class PromptSpec(Spec):
    """What a decoder reads around a pair. `{top}` in a text is the highest grade."""

    style: Literal["auto", "chat", "plain"] = "auto"
    """`auto` takes the tokenizer's chat template if it has one."""
    system: str = "You grade how relevant a document is to a search query."
    """Opening text; empty for none."""
    user: str = (
        "Query: {query}\n\nDocument: {document}\n\nHow relevant is the document? Answer with a digit from 0 (not at "
        "all) to {top}."
    )
    """The pair's place; holds {query} and then {document}."""
    ending: str = "Grade:\n"
    """What a plain prompt ends with; the grade token follows."""


class StudentSection(Spec):
    """The model that learns."""

    kind: KindName
    """`encoder`: one representation, a head for each node. `decoder`: the grade tokens of the language model's own
    head.
    """
    model: ModelText = Field(min_length=1)
    """Model reference as everywhere (a folder, `hf:…`, `s3://…`, `pypi:PACKAGE==VERSION`). It may be the output of an
    earlier distillation, whose heads are then kept: two stages are two specs.
    """
    heads: (
        Literal["auto"] | Annotated[dict[Literal["relevance"], Annotated[int, Field(ge=2, le=10)]], Field(min_length=1)]
    ) = "auto"
    """`auto`: relevance, and the nodes that the labels have and that some weight trains. `{relevance: K}`: that head
    alone, with K grades.
    """
    pooling: Literal["mean", "cls"] = "mean"
    """How an encoder's token vectors become one. vLLM and text-embeddings-inference serve `cls` alone, CrossEncoder
    both.
    """
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Before an encoder's heads, in training; the backbone has its own in its config."""
    lora: LoraSpec | None = None
    """Train low-rank adapters of a decoder instead of all its weights."""
    prompt: PromptSpec = PromptSpec()
    """What a decoder reads."""
    batching: Literal["padded", "packed"] = "padded"
    """A decoder's batches: padded on the left, or rows concatenated without padding."""


# ------------------------------------------------------------------------------
# The section `loss` of a spec: what is minimised.


TargetKind = Literal["soft", "hard"]
Weight = Annotated[float, Field(ge=0.0, le=1000.0)]


class LossSection(Spec):
    """What is minimised: Σ weight · loss, each a weighted mean over the rows that have the label."""

    relevance: Weight = 1.0
    """Cross-entropy of the relevance head (R3A eq. 3; Graph-GRPO's L_r)."""
    subject: Weight = 0.5
    """λ_s: cross-entropy of the subject score."""
    attribute: Weight = 0.5
    """λ_a: cross-entropy of the attribute score."""
    consistency: Weight = 0.2
    """λ_c: KL(p_ind ‖ p_r), where p_ind is induced from both node heads through φ."""
    consistency_direction: Literal["induced_to_direct", "direct_to_induced"] = "induced_to_direct"
    """The other direction is KL(p_r ‖ p_ind), and wants a φ that reaches every grade."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """T of distillation: teacher p^(1/T), student softmax(z/T), loss times T²."""
    gold_weight: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the gold grade in the target of a row that has both: (1-g)·teacher + g·gold. Above 0, rows with gold
    alone are learned from as well, with weight g; at 0 gold only judges.
    """
    targets: TargetKind | dict[Annotated[str, Field(pattern=f"^({'|'.join(HEADS)})$")], TargetKind] = "soft"
    """`soft`: the teacher's distribution, where it gave one. `hard`: the grade that it wrote. One for all heads, or by
    head: {subject: hard, attribute: hard}; a head that is not named is soft.
    """
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """ε: the relevance head's target becomes (1-ε)·target + ε/K (Graph-GRPO, eq. 17). The node heads learn theirs as
    they are.
    """
    weight_by: tuple[Literal["confidence", "outside_mass"], ...] = ()
    """Further weights of a row: the teacher's largest probability, and 1 - the mass that it put outside the grades."""


# ------------------------------------------------------------------------------
# What a student learns from, and is judged by: labels with the texts of their pairs, and gold.


class PairsSource(Spec):
    """Where the texts of a label file's rows are."""

    path: Annotated[tuple[PatternText, ...], OneOrMany]
    """Parquet file, folder, glob or a list; a label's `row_id` is a row's place in them."""
    columns: Columns = Columns()
    """Their columns."""


class LabelSource(Spec):
    """One set of labels."""

    path: PathText = Field(min_length=1)
    """Output folder of a finished run, or a file of labels: Parquet, CSV, TSV or JSONL. One without `row_id` has
    `query_id`, `doc_id`, `grade` and optionally `probs`, and is joined by the ids.
    """
    weight: float = Field(1.0, gt=0.0, le=1000.0)
    """Weight of each of its rows in the loss."""
    weights: dict[Literal["cheap", "teacher", "audit", "calibration"], float] = Field({})
    """Of a cascade's run: what a row's weight is multiplied by, by who labelled it (`answered_by`); 1 if not named."""
    pairs: PairsSource | None = None
    """Texts of a label file's rows; a run knows its own."""
    allow_over_limit: bool = False
    """Take a run with more quarantined rows than its limit allows: what is missing is seldom a fair sample."""


class GoldSource(Spec):
    """Gold: to judge by, and with `loss.gold_weight` above 0 to learn from."""

    path: PathText = Field(min_length=1)
    """Parquet with texts and grades, or with grades alone (then also TREC qrels, CSV, TSV or JSONL); may be a label
    run's own input. A folder of Parquet where it is learned from.
    """
    grade: str = "grade"
    """Column of the grade."""
    map: dict[int, int] | None = None
    """Brings grades to the labels' scale: {0: 0, 1: 1, 2: 1, 3: 2}."""
    columns: Columns = Columns()
    """Columns of the texts and ids. Default, like `grade`: those that the job names whose own input this is."""
    duplicates: Literal["error", "mean", "first"] = "error"
    """A pair whose grades differ, where grades are joined by (query_id, doc_id)."""


# ------------------------------------------------------------------------------
# The student spec: what a user writes in `student.yaml`, checked key by key. Pure: no environment, no network, no
# disk.


class EarlyStopping(EarlyStop):
    """Stop when the dev split gets no better, and keep the best step instead of the last."""

    metric: Literal["loss", "accuracy", "macro_f1", "kappa", "kappa_quadratic", "auc"] = "macro_f1"
    """Judged by gold where there is gold, else by the labels; `loss` is the training loss on dev."""

    @property
    def choice(self) -> tuple[str, int | None, float]:
        """The figure on dev, the patience, and -1 where less is better."""
        return self.metric.replace("macro_f1", "f1_macro"), self.patience, -1.0 if self.metric == "loss" else 1.0


class TrainSection(TrainingSection):
    """How it is trained."""

    tokens_per_batch: int | None = Field(None, ge=1)
    """Instead of `batch_size`: as many rows of like length as fit into this many tokens, padding included; rows are
    then always grouped by length, over the whole epoch.
    """
    head_learning_rate: float | None = Field(None, gt=0.0)
    """Peak rate of an encoder's heads, which begin at nothing. Default: `learning_rate`."""
    class_balance: Literal["none", "weights"] = "none"
    """Against rare grades: `weights` weighs rows by 1 / frequency of their grade."""
    early_stopping: EarlyStopping | None = None
    """Default: train to the end and keep the last step. The best step's checkpoint is always kept."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations on dev. Default: once an epoch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers one by one; `auto` does so on a GPU."""


class SplitSection(DevSplit):
    """Which rows train, choose and judge; all rows of one query fall on the same side."""

    dev: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of queries for early stopping and calibration."""
    test: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of queries for the figures that are reported."""


class DistillSpec(Spec):
    """One student."""

    name: ModelName
    """Name of the student: letters, digits, dot, dash and underscore."""
    labels: Annotated[
        tuple[LabelSource, ...], BeforeValidator(as_sources, json_schema_input_type=tuple[str | LabelSource, ...])
    ]
    """What to learn from: paths, or mappings with a path and a weight. May be empty if there is gold."""
    gold: GoldSource | None = None
    """Trusted grades."""
    student: StudentSection
    """The model."""
    loss: LossSection = LossSection()
    """What is minimised."""
    train: TrainSection = TrainSection()
    """How it is trained."""
    split: SplitSection = SplitSection()
    """Which rows train, choose and judge."""
    phi: PhiTable | None = None
    """Rule map of the consistency loss. Default: the one of the label runs, else the built-in."""
    calibrate: bool = True
    """Fit one temperature a head on dev and store it with the student."""
    require: dict[str, str] = Field(default_factory=dict)
    """Gates on the test split: {macro_f1: ">=0.9*teacher", kappa: ">=0.4"}. A student that fails one is kept; the
    command exits 5.
    """
    allow_over_limit: bool = False
    """Take label runs over their quarantine limit."""
    output: OutputText
    """Local folder that the student owns."""
    storage_options: dict[str, dict[str, Any]] = Field(default={}, exclude=True, repr=False)
    """For each URL scheme, options of its fsspec filesystem, for all paths of the spec. Secrets, as in a job: never
    written.
    """

    @field_validator("require")
    @classmethod
    def _gates_are_readable(cls, value: dict[str, str]) -> dict[str, str]:
        try:
            parse_gates(value)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> DistillSpec:
        for key in KINDS[self.student.kind].refuses:
            section_name, _, name = key.partition(".")
            section = getattr(self, section_name)
            if getattr(section, name) != type(section).model_fields[name].get_default():
                others = " and ".join(f"{kind}s" for kind in takers(key))
                raise ValueError(f"keys like `{key}` are for {others}, and `student.kind` is {self.student.kind}")
        if not self.labels and (self.gold is None or self.loss.gold_weight == 0):
            raise ValueError("nothing to learn from: name `labels`, or `gold` with `loss.gold_weight` above 0")
        if not self.labels and self.loss.gold_weight != 1.0:
            raise ValueError("without labels gold is all there is: set `loss.gold_weight` to 1.0")
        if self.loss.gold_weight and self.gold is None:
            raise ValueError("`loss.gold_weight` is set without `gold`")
        if any(gate.is_of_teacher for gate in self.gates) and (self.gold is None or not self.labels):
            raise ValueError("a gate against the teacher needs `labels` and `gold`: both are judged by trusted grades")
        return self

    @property
    def gates(self) -> list[Gate]:
        """`require`, parsed."""
        return parse_gates(self.require)


def rerank_notes(student: StudentSection, grades: int) -> list[str]:
    """What rerank endpoints will not serve of such a student, a sentence each; for before training, while the spec can
    still be changed.

    Args:
        grades: K of its relevance head.
    """
    if student.kind == "logistic":  # it grades queries, which nobody reranks
        return []
    if grades > 3:
        return [
            f"export --format rerank will refuse this student: it has {grades} grades, and rerank endpoints take the "
            "expected grade of 2 or 3 in one number. Map the grades to fewer, or serve its bundle."
        ]
    if student.kind == "encoder" and student.pooling == "mean":
        return [
            "export --format rerank will write a folder for CrossEncoder alone, not for vLLM and "
            "text-embeddings-inference: student.pooling is mean. For those set it to cls."
        ]
    if student.kind == "decoder" and grades > 2:
        return [
            "export --format rerank will write a folder for CrossEncoder alone, not for vLLM: a decoder of "
            f"{grades} grades. For vLLM map the grades to 2."
        ]
    return []


def student_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts the keys and short forms that the spec accepts."""
    definitions: dict[str, Schema] = {}
    student = ObjectSchema(DistillSpec, definitions)
    return {"$schema": DRAFT, "$defs": definitions, **student.values, "title": "relabel student"}


# ------------------------------------------------------------------------------
# What a student learned from, as records: the part of its manifest that is known before it is trained. Fields
# that JSON may do without are None there.


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source of labels; of a file all that it holds, of a run also by what became of them."""

    in_: Annotated[int, Field(alias="in")]
    labelled: int | None = field(default=None, metadata=LEFT_OUT)
    reused: int | None = field(default=None, metadata=LEFT_OUT)
    quarantined: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class LearnedLabels:
    """A source of labels: a run, or a file, which has no name, labeler, model and fingerprint.

    Args:
        manifest_sha256, sha256: of a run's manifest, of a file.
        rows_by_status: of a file.
        labels: those that could be used.
    """

    path: str
    kind: Literal["run", "file"]
    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    manifest_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    sha256: str | None = field(default=None, metadata=LEFT_OUT)
    rows: SourceRows | None = field(default=None, metadata=LEFT_OUT)
    quarantined_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    rows_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    over_limit: bool | None = field(default=None, metadata=LEFT_OUT)
    weight: float
    labels: int


@dataclass(frozen=True, kw_only=True)
class LearnedGold:
    """Where gold comes from.

    Args:
        grade: column of the grades; None where gold holds other things.
        sets, answers: columns of the chunks and of the answers that are wanted.
        document: columns of the document, of gold that was learned from.
        rows, without_grade, inputs_sha256: of gold that was learned from.
        graded_rows: rows of the distillation that have a grade.
    """

    path: str
    grade: str | None
    map: dict[int, int] | None = None
    sets: str | None = field(default=None, metadata=LEFT_OUT)
    answers: str | None = field(default=None, metadata=LEFT_OUT)
    document: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    rows: int | None = field(default=None, metadata=LEFT_OUT)
    without_grade: int | None = field(default=None, metadata=LEFT_OUT)
    inputs_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    joined_by: str | None = field(default=None, metadata=LEFT_OUT)
    graded_rows: int = 0


@dataclass(frozen=True)
class SplitSide:
    """One side; `texts_seen_in_train` counts its queries whose text a training query has under another id."""

    rows: int
    queries: int
    texts_seen_in_train: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class SplitFacts:
    """How rows were split.

    Args:
        shares: of the queries, expected for dev and test.
        sha256: of which query lies where.
        learned_queries: which queries are on train or dev, as `distill/students/examples.py` packs them; None in
            students of earlier days.
    """

    by: str
    seed: int
    shares: dict[str, float]
    train: SplitSide
    dev: SplitSide
    test: SplitSide
    sha256: str
    learned_queries: str | None = field(default=None, metadata=LEFT_OUT)

    def sides(self) -> dict[str, SplitSide]:
        """Train, dev and test, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """All of it.

    Args:
        rows: how many there are: `all`, `labelled`, and with `gold_alone`.
        rows_by_head: rows that train each head.
    """

    labels: list[LearnedLabels]
    gold: LearnedGold | None
    rows: dict[str, int]
    rows_by_head: dict[str, int]
    split: SplitFacts


# ------------------------------------------------------------------------------
# A student's `manifest.json` as records.


STUDENT_MANIFEST_VERSION = 1

Figures: TypeAlias = dict[str, int | float | None]
"""Figures by name, as `distill/students/distillation.py` gives them, with `rows`; None where one is not defined."""
SHOWN = ("rows", "accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc", "ece", "nll", "ndcg@10")


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """All figures of one side of the split.

    Args:
        judged_by: `gold` or `labels`.
        teacher: by gold, over rows that have a label; `student_where_teacher` is the student over the same rows, where
            these are not all.
        to_teacher: the student against its teacher, before calibration.
        subject, attribute: of these heads, by their labels.
        baselines: of the rows that `student` is over; None in students of earlier days, and without such a row.
        intervals: of `student`, 95 % over queries, by figure; likewise.
    """

    rows: int
    judged_by: str
    student: Figures
    teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    student_where_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    to_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    subject: Figures | None = field(default=None, metadata=LEFT_OUT)
    attribute: Figures | None = field(default=None, metadata=LEFT_OUT)
    baselines: Baselines | None = field(default=None, metadata=LEFT_OUT)
    intervals: dict[str, tuple[float, float]] | None = field(default=None, metadata=LEFT_OUT)

    def figure_rows(self) -> list[list[str]]:
        """The main figures as a table, its head first; columns that would be empty are left out."""
        rows = [[f"judged by {self.judged_by}", "student", "95 % interval", "teacher", "baselines"]]
        intervals = {name: f"{low:.4f} to {high:.4f}" for name, (low, high) in (self.intervals or {}).items()}
        for name in SHOWN:
            if name not in self.student:
                continue
            values = [_number(figures.get(name, "")) for figures in (self.student, self.teacher or {})]
            bounds = self.baselines.text(name) if self.baselines else ""
            rows.append([name, values[0], intervals.get(name, ""), values[1], bounds])
        is_filled = [any(column[1:]) for column in zip(*rows, strict=True)]
        return [list(itertools.compress(row, is_filled)) for row in rows]


def _number(value: float | str | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class StudentFigures:
    """A student's figures on both sides that did not train it."""

    dev: SideFigures
    test: SideFigures


@dataclass(frozen=True)
class GateCheck(GateVerdict):
    """A verdict, with its words."""

    text: str


@dataclass(frozen=True)
class JudgedGates:
    """The gates of a spec, applied to figures."""

    has_passed: bool
    checks: list[GateCheck]


@dataclass(frozen=True, kw_only=True)
class StudentManifest(TrainedManifest, DataFacts):
    """The manifest of a student: how it was made, and how good it is.

    Args:
        phi: its rule map, where it has more than one head.
        student: its record, as `student.json` has it.
    """

    kind: Literal["student"] = "student"
    heads: dict[str, int]
    temperature: dict[str, float]
    phi: PhiTable | None
    metrics: StudentFigures
    gate: JudgedGates
    student: dict[str, Any]


@dataclass(frozen=True)
class StudentFiles:
    """The part of a manifest that lists the student's files."""

    files: dict[str, str]


# ------------------------------------------------------------------------------
# The record of a student, in its folder.


STUDENT_NAME = "student.json"
STUDENT_VERSION: Final = 1


@dataclass(frozen=True)
class StudentRecord:
    """What a student is, as in `student.json`.

    Args:
        heads: number of grades by head; `relevance` is always there.
        max_tokens: longest row in tokens; longer pairs are cut.
        columns: the input's columns that it was trained on, as `manifests.specs.Columns` takes them.
        temperature: by head, above 0; logits are divided by it.
        phi: the rule map of a student with subject and attribute heads.
        pooling: of an encoder.
        prompt: of a decoder, the text before the query, between query and document, and after the document; of a
            logistic student the first alone.
        grade_ids: of a decoder, the tokens of grades 0..K-1.
        packs: whether a decoder's batches are packed instead of padded.
    """

    version: Literal[1]
    kind: KindName
    name: str
    heads: dict[str, int]
    max_tokens: int
    columns: dict[str, Any]
    temperature: dict[str, float]
    phi: PhiTable = DEFAULT_PHI
    pooling: Literal["mean", "cls"] = "mean"
    prompt: tuple[str, str, str] = ("", "", "")
    grade_ids: list[int] = field(default_factory=list)
    packs: bool = False

    @property
    def grades(self) -> int:
        """K of the relevance head."""
        return self.heads["relevance"]


def read_student(path: str | Path) -> StudentRecord:
    """What the student in a folder is, without loading it.

    Raises:
        ManifestError: the folder holds no student, or one that this version can't read.
    """
    file = Path(path) / STUDENT_NAME
    if absent := absence_of(path):
        raise ManifestError(absent)
    if not file.exists():
        raise ManifestError(f"{path}: holds no {STUDENT_NAME}, so no student. Give the output of `relabel distill`.")
    with translate_errors("read", file):
        data = file.read_bytes()
    what = "not as this relabel writes a student's record"
    return read_record(
        StudentRecord,
        data,
        str(file),
        what,
        "Restore it, or train again.",
    )

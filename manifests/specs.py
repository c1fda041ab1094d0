"""The job spec: what a user writes in YAML, checked key by key. Pure: no environment, no network, no disk.

A spec is frozen and knows every key it takes; an unknown one is an error that names the nearest known key. Labelers and
engines bring option models of their own (subclasses of `LabelerOptions`, and a model for `engine.args`), which `jobs`
resolves through the registries before `JobSpec` is built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

TableFormat = Literal["iceberg", "delta"]
SnapshotId = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class PathMark(Enum):
    """What kind of path a field holds. A relative one counts from the spec file's folder: see
    `jobs/planning/spec_places.py`.
    """

    PATH = "a file or folder"
    PATTERN = "a file, a folder or a glob"
    MODEL = "a model reference, which may be a folder"


PathText = Annotated[str, PathMark.PATH]
PatternText = Annotated[str, PathMark.PATTERN]
ModelText = Annotated[str, PathMark.MODEL]


class DisputedText(str):
    """An unquoted word that one version of YAML reads as a text and another as a truth or number, such as `no` and
    `010`.
    """

    __slots__ = ()


class Spec(BaseModel):
    """Base of every spec: frozen, unknown keys forbidden, attribute docstrings become the JSON
    Schema's descriptions.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _means_what_it_says(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a truth where a number belongs, which pydantic would take for 0 or 1; where anything goes, a disputed
        word and NaN.
        """
        kinds = _kinds(cls, str(info.field_name))
        if Any in kinds:
            for key, one in _inner(value):
                if isinstance(one, DisputedText):
                    raise ValueError(
                        f"{key or 'the value'} is a word that YAML 1.1 and 1.2 read differently; put it in quotes, or "
                        "write true, false or a plain number"
                    )
                if isinstance(one, float) and not math.isfinite(one):
                    raise ValueError(f"{key or 'the value'} is {one}; want a finite number")
        elif kinds & {int, float} and bool not in kinds and any(isinstance(one, bool) for _, one in _inner(value)):
            raise ValueError("want a number, not true or false")
        return value


class Columns(Spec):
    """Which columns of the input hold what."""

    query_id: str = "query_id"
    """Column that names the query; rows of one query are labelled together. Strings or integers, never null."""
    query: str = "query"
    """Column with the query's text."""
    doc_id: str = "doc_id"
    """Column that names the document; carried through, need not be unique."""
    document: tuple[str, ...] = ()
    """Columns whose non-empty texts, joined by a blank line, make the document. Default: `document`, else `title` and
    `body` as present.
    """
    context: str | None = None
    """Column with a list of up to four documents found or clicked for the query, for labelers that infer intent.
    Default: `context` where present."""
    gold: str | None = None
    """Column with a trusted grade, carried for later judging; never shown to a teacher."""

    @field_validator("document", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class InputSpec(Spec):
    """The dataset of query-document pairs."""

    path: tuple[PatternText, ...]
    """File, folder, glob or a list of them, local or a URL. Folders and globs are read in name order; the order decides
    row ids.
    """
    table: TableFormat | None = None
    """`path` is the folder of a table of this format, or one of an Iceberg table's metadata files, and the data files
    of one snapshot are read, in name order. Without it, `path` names plain files.
    """
    snapshot: SnapshotId | None = None
    """Id of the table's snapshot (Delta: the version). Default: that of the output's plan; for a new one, the table's
    current snapshot."""
    since: SnapshotId | None = None
    """Read the rows alone that were added after this snapshot. Refused where anything but appends came between."""
    columns: Columns = Columns()
    """Column names."""
    limit: int | None = Field(None, ge=1)
    """Take the first rows only; for trying things out."""
    overlong: Literal["truncate", "quarantine"] = "truncate"
    """A prompt over `engine.max_prompt_tokens`: cut the document and flag the label, or quarantine the row."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value):
            raise ValueError("names no file; give a file, a folder, a glob or a list of them")
        return value

    @model_validator(mode="after")
    def _one_table(self) -> InputSpec:
        if self.table is None and (self.snapshot, self.since) != (None, None):
            raise ValueError("snapshot and since are of a table; set table: iceberg or delta")
        if self.table is not None and len(self.path) != 1:
            raise ValueError(f"a table has one path, not {len(self.path)}; give each table a job")
        return self


class LabelerOptions(Spec):
    """Options that every labeler has; a labeler's own model adds to them."""

    name: str
    """A registered labeler."""
    grades: int = Field(3, ge=2, le=10)
    """Number of grades K; labels are 0..K-1."""
    samples: int = Field(1, ge=1, le=64)
    """Trajectories per pair: the label is their vote, ties by the mean distribution. Above 1 wants a temperature above
    0.
    """
    attempts: int = Field(3, ge=1, le=20)
    """How often a stage is asked, each time with a new seed, before the row is quarantined."""
    temperature: float = Field(0.0, ge=0.0, le=5.0)
    """0 is greedy. A repeated attempt is sampled at `retry_temperature` at least, since a greedy answer would only come
    again.
    """
    retry_temperature: float = Field(0.7, ge=0.0, le=5.0)
    """Lowest temperature of a second or later attempt."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling; 1.0 is off."""
    max_think_tokens: int = Field(512, ge=0, le=100_000)
    """Cap on free reasoning per stage, in tokens; enforced where the engine can constrain decoding."""
    max_text_tokens: int = Field(160, ge=1, le=100_000)
    """Cap on each short text (an intent, a node's description, a fragment), in tokens."""
    templates: PathText | None = None
    """Folder with prompt templates to use instead of the built-in ones; a file that is absent there is taken from the
    built-in set.
    """

    @model_validator(mode="after")
    def _samples_need_chance(self) -> LabelerOptions:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(
                f"samples: {self.samples} at temperature 0 would give one answer {self.samples} times; set a "
                "temperature"
            )
        return self


class EngineArgs(Spec):
    """Options of one engine; each engine subclasses it.

    `speed_only` names the options that change how fast an answer comes and never what it says: they stay out of the
    fingerprint, so that a run may go on with other values.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset()


class EngineSpec(Spec):
    """What runs the teacher."""

    name: str
    """A registered engine."""
    model: ModelText | None = None
    """Model reference: a local directory, `hf:org/name[@revision]`, `s3://…` or `pypi:PACKAGE==VERSION`. The fake
    engine takes none.
    """
    seed: int = Field(0, ge=0, lt=2**63)
    """Root of every request's seed."""
    max_prompt_tokens: int = Field(8192, ge=64)
    """Longest prompt, in the model's tokens; lowered by the engine to what the model can hold beside the answer."""
    args: SerializeAsAny[EngineArgs] = EngineArgs()
    """Options of the engine itself (dtype, quantization, tensor_parallel_size, lora, …)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the tokenizer's chat template (`enable_thinking: false`)."""


class RunSpec(Spec):
    """How the work is cut and when a run counts as failed. Nothing here changes a label."""

    chunk_rows: int | None = Field(None, ge=1, le=1_000_000)
    """Rows per commit, and what a kill costs at most. Default: a sixteenth of the shard's rows, at least 8 and at most
    256. An output that was planned keeps its chunks.
    """
    max_failed_fraction: Fraction = 0.05
    """Share of quarantined rows above which the run ends with exit code 30; everything is kept all the same."""
    allow_mixed: bool = False
    """Let labels of different engines (family, version, model, precision, kind of device) into one output; the
    manifest says so.
    """
    lease_s: float = Field(60.0, ge=3.0, le=3600.0)
    """On object storage: a worker that did not renew its lease of a shard for so many seconds counts as dead, and
    another takes over.
    """
    store_retry_s: float = Field(120.0, ge=0.0, le=3600.0)
    """A storage request that is throttled, fails or is not answered is tried again for so many seconds; then the run
    ends with code 20.
    """
    single_writer: bool = False
    """Work on storage without conditional writes. You vouch that never more than one process writes to this output."""
    ask_timeout_s: float = Field(1800.0, gt=0.0, le=1e6)
    """A request that the engine has not answered after so many seconds counts as a crash of the engine. Half an hour:
    with its wait behind others in the engine's own queue, an answer of a thousand tokens may take a quarter of one on a
    CPU.
    """
    help: bool | None = None
    """Ask open chunks of shards that other workers hold, where waiting for them is longer. By default unless the engine
    is paid by the token (`engine.args.price_per_million_input`, `…_output`): a chunk that two ask is paid twice.
    """
    start_timeout_s: float = Field(7200.0, gt=0.0, le=1e6)
    """A supervised engine that says nothing for so many seconds before it is up counts as crashed. Two hours: the first
    start may fetch a model of a hundred gigabytes.
    """
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens, of prompts (cached ones too) and answers together, that all workers, calls and retries of this
    output may take; then it ends with exit code 5. Raise it, and the same command goes on.
    """
    max_cost: float | None = Field(None, gt=0.0)
    """Likewise most money, in the currency of `engine.args.price_per_million_input` and `…_output`, which it needs."""


class RoundsSpec(Spec):
    """A search in several rounds, for `relabel rounds`: the input then holds the questions, and what is found for them
    is labelled.
    """

    corpus: PatternText
    """Documents to search: columns `doc_id`, and `document` or `title` and `body`. File, folder or glob."""
    k: int = Field(10, ge=1, le=1000)
    """Documents that a round finds for a question at most."""
    max_rounds: int = Field(5, ge=1, le=100)
    """Rounds of a question at most."""
    max_tokens: int = Field(20_000, ge=0)
    """A question whose useful documents have more tokens than this is done."""
    tokenizer: ModelText | None = None
    """Counts those tokens: a model reference, or a folder with a tokenizer. Default: up to six ASCII letters in a row
    are a token, and so is any other character but white space.
    """


class JobSpec(Spec):
    """One labeling job."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the job: letters, digits, dot, dash and underscore."""
    input: InputSpec
    """The dataset."""
    labeler: SerializeAsAny[LabelerOptions]
    """What is asked, and how answers are read."""
    engine: EngineSpec
    """What runs the teacher."""
    output: PathText = Field(min_length=1)
    """Folder that the run owns."""
    shards: int = Field(1, ge=1, le=1_000_000)
    """Units that cron or a scheduler hands out."""
    run: RunSpec = RunSpec()
    """Chunking and limits."""
    reuse: tuple[PathText, ...] = ()
    """Outputs of earlier runs, finished or not, whose labels are reused where labeler, model and texts are the
    same. The first that has a row's label wins. No part of the job's fingerprint.
    """
    rounds: RoundsSpec | None = None
    """Of a search in several rounds; such a file is for `relabel rounds` alone."""
    canary: int = Field(0, ge=0, le=100_000)
    """Rows that are labelled already to ask again at the start of a run that would put new labels beside old ones; 0 is
    off. 200 tell a flip rate of 5 % from one of 1 %.
    """
    max_flip_rate: Fraction = 0.05
    """Share of the canary's rows whose grade may change; above it nothing is committed and the run ends with exit code
    5. Batches alone flip one or two rows of a hundred at temperature 0.
    """
    cost_per_gpu_hour: float | None = Field(None, ge=0.0)
    """Price of an hour of one GPU, in whatever currency; `plan` then says what a run would cost."""
    storage_options: dict[str, dict[str, Any]] = Field(default={}, exclude=True, repr=False)
    """For each URL scheme, options of its fsspec filesystem (`{s3: {profile: prod, endpoint_url: …}}`), for all paths
    of the job. Taken for secrets: never written anywhere. Better left out where variables and profiles will do.
    """

    @field_validator("reuse", mode="before")
    @classmethod
    def _one_output_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


@functools.cache
def _kinds(model: type[BaseModel], field: str) -> frozenset[Any]:
    """The plain types that a field's value may hold, but for those within models, which check themselves."""

    def leaves(annotation: Any) -> set[Any]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return set()
        if get_origin(annotation) is Literal:
            return {type(value) for value in get_args(annotation)}
        if get_origin(annotation) is Annotated:
            return leaves(get_args(annotation)[0])
        parts = get_args(annotation)
        return {leaf for part in parts for leaf in leaves(part)} if parts else {annotation}

    return frozenset(leaves(model.model_fields[field].annotation))


def _inner(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A value and all in it, keys too, each with the path of keys to it."""
    yield key, value
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield key, name
            yield from _inner(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inner(one, key)

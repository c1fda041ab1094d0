"""The job spec and the options of engines, checked key by key, with errors that name the key and the nearest known
one."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import math
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
    runtime_checkable,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from relabel.manifests.errors import ConfigError
from relabel.manifests.secrets import STORAGE_KEY, oddity_of, redacted, shown, texts_in

# The job spec: what a user writes in YAML, checked key by key. Pure: no environment, no network, no disk.
#
# A spec is frozen and knows every key it takes; an unknown one is an error that names the nearest known key. Labelers
# and engines bring option models of their own (subclasses of `LabelerOptions`, and a model for `engine.args`), which
# `jobs` resolves through the registries before `JobSpec` is built.

TableFormat = Literal["iceberg", "delta"]
SnapshotId = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class PathMark(Enum):
    """What kind of path a field holds. A relative one counts from the spec file's folder: see
    `jobs/settings.py`.
    """

    PATH = "a file or folder"
    PATTERN = "a file, a folder or a glob"
    MODEL = "a model reference, which may be a folder"


PathText = Annotated[str, PathMark.PATH]
PatternText = Annotated[str, PathMark.PATTERN]
ModelText = Annotated[str, PathMark.MODEL]


OneOrMany = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else value, json_schema_input_type=str | tuple[str, ...]
)
"""A single text is taken for a list of one."""


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
        protected_namespaces=(),
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a truth where a number belongs, which pydantic would take for 0 or 1; where anything goes, a disputed
        word and NaN.
        """
        kinds = _kinds(cls, str(info.field_name))
        if Any in kinds:
            for key, part in _inner(value):
                if isinstance(part, DisputedText):
                    raise ValueError(
                        f"{key or 'the value'} is a word that YAML 1.1 and 1.2 read differently; put it in quotes, or "
                        "write true, false or a plain number"
                    )
                if isinstance(part, float) and not math.isfinite(part):
                    raise ValueError(f"{key or 'the value'} is {part}; want a finite number")
        elif kinds & {int, float} and bool not in kinds and any(isinstance(part, bool) for _, part in _inner(value)):
            raise ValueError("want a number, not true or false")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Attribute docstrings become descriptions here, not as pydantic does it (`use_attribute_docstrings`): it reads
        and parses the source of every model when that is imported, a third of what importing this module takes.
        """
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        texts = _attribute_docstrings(cls)
        for key, value in schema["properties"].items():
            if key in texts:
                value.setdefault("description", texts[key])
        return reference


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The texts under a model's fields, and under those that it has of its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, Spec) or base is Spec:
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made by `create_model`
            continue
        tree = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, below in itertools.zip_longest(tree.body, tree.body[1:]):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[field] = inspect.cleandoc(text)
                case ast.AnnAssign(target=ast.Name(id=field)), _:  # declared again, without a text
                    texts.pop(field, None)
    return texts


class Columns(Spec):
    """Which columns of the input hold what."""

    query_id: str = "query_id"
    """Column that names the query; rows of one query are labelled together. Strings or integers, never null."""
    query: str = "query"
    """Column with the query's text."""
    doc_id: str = "doc_id"
    """Column that names the document; carried through, need not be unique."""
    document: Annotated[tuple[str, ...], OneOrMany] = ()
    """Columns whose non-empty texts, joined by a blank line, make the document. Default: `document`, else `title` and
    `body` as present.
    """
    context: str | None = None
    """Column with a list of up to four documents found or clicked for the query, for labelers that infer intent.
    Default: `context` where present."""
    gold: str | None = None
    """Column with a trusted grade, carried for later judging; never shown to a teacher."""


class InputSpec(Spec):
    """The dataset of query-document pairs."""

    path: Annotated[tuple[PatternText, ...], OneOrMany]
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


class DecisionOptions(LabelerOptions):
    """Options of a labeler that reads distributions and samples no token."""

    samples: Literal[1] = 1
    """One: no token is sampled."""

    @model_validator(mode="after")
    def _nothing_is_sampled(self) -> DecisionOptions:
        for name in ("temperature", "retry_temperature", "top_p"):
            if getattr(self, name) != LabelerOptions.model_fields[name].default:
                raise ValueError(f"{name}: `{self.name}` samples no token, so that it has no effect; leave it out")
        return self


class ThinkOptions(LabelerOptions):
    """Options of a labeler whose answers hold free reasoning."""

    max_think_tokens: int = Field(512, ge=0, le=100_000)
    """Cap on free reasoning per stage, in tokens; enforced where the engine can constrain decoding."""


class TextOptions(LabelerOptions):
    """Options of a labeler whose answers hold short texts."""

    max_text_tokens: int = Field(160, ge=1, le=100_000)
    """Cap on each short text (an intent, a node's description, a fragment), in tokens."""


class EngineArgs(Spec):
    """Options of one engine; each engine subclasses it.

    `speed_only` names the options that change how fast an answer comes and never what it says: they stay out of the
    fingerprint, so that a run may go on with other values.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset()
    secret_variables: ClassVar[frozenset[str]] = frozenset()
    """Options that name an environment variable whose value is passed to the engine alone."""
    runs_elsewhere: ClassVar[bool] = False
    """Whether the model runs in another process that no row takes this one down with: at a server."""

    @classmethod
    def of(cls, spec: EngineSpec) -> Self:
        """A spec's options as this engine's own."""
        return spec.args if isinstance(spec.args, cls) else cls(**spec.args.model_dump())

    @property
    def sends_batches(self) -> bool:
        """Whether asks may be handed over as batches, which are answered hours later."""
        return False


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
    """Longest prompt, in the model's tokens; lowered by the engine to what the model can hold with the answer."""
    args: SerializeAsAny[EngineArgs] = EngineArgs()
    """Options of the engine itself (dtype, quantization, tensor_parallel_size, lora, …)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the tokenizer's chat template (`enable_thinking: false`)."""


class RunSpec(Spec):
    """How the work is cut and when a run counts as failed. Nothing here changes a label."""

    chunk_rows: int | None = Field(None, ge=1, le=1_000_000)
    """Rows per commit. A kill costs no chunk, but the last second's answers and the asks in flight: the others are in
    the output's `journal/`. Default: a sixteenth of the shard's rows, at least 8 and at most 256; of a shard with more
    than 16,384 rows a 64th, at most 1,024. An output that was planned keeps its chunks.
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
    with its wait for others in the engine's own queue, an answer of a thousand tokens may take a quarter of one on a
    CPU.
    """
    start_timeout_s: float = Field(7200.0, gt=0.0, le=1e6)
    """An engine that has not started after so many seconds counts as crashed. Two hours: the first start may fetch a
    model of a hundred gigabytes.
    """
    stop_when_unreadable: bool = True
    """End the run with exit code 20 when nearly none of the answers can be read any more, or from the start; the rows
    stay open. If false, it goes on, and they are quarantined.
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


class CascadeSpec(Spec):
    """Cheap judges label the pairs that they are sure of, the teacher (`labeler` and `engine`) the rest."""

    cheap: Annotated[tuple[PathText, ...], OneOrMany] = Field(min_length=1)
    """What the cheap judges answered: outputs of `relabel score` or `relabel run`, or label files. The mean of their
    distributions counts; pairs are found by `query_id` and `doc_id`.
    """
    calibration: PathText = Field(min_length=1)
    """What the teacher answered about whole queries that were drawn at random from the input: the output of a run, or
    a label file.
    """
    alpha: float = Field(gt=0.0)
    """Bound of the expected loss a query: of the share of its pairs whose label is not the teacher's, or of their mean
    `loss`. 0.05 needs at least 19 calibration queries, 0.02 at least 49.
    """
    loss: tuple[tuple[Annotated[float, Field(ge=0.0)], ...], ...] | None = None
    """What it costs to give a grade (column) where the teacher gives another (row). Default: 1 for any other grade."""
    audit: Fraction = 0.01
    """Share of the pairs that the teacher is asked though the cheap judges are sure, to see what their labels cost."""
    audit_pairs: int = Field(200, ge=0)
    """How many such pairs are drawn at least, about; of a small input a fifth of them at most, so that it saves."""

    @field_validator("loss")
    @classmethod
    def _is_table(cls, value: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...] | None:
        if value is not None and (any(len(row) != len(value) for row in value) or not any(map(any, value))):
            raise ValueError("want as many columns as rows, and a number above 0")
        return value


class AuditSpec(Spec):
    """What `relabel audit` holds the judge to: see docs/audit.md. No part of the job's fingerprint."""

    rows: int = Field(300, ge=1)
    """Pairs that are changed, of as many queries as there are."""
    require: dict[str, Fraction] = {}
    """By probe the highest share of pairs whose grade may move the wrong way: `{stuffing: 0.05}`. Above it the command
    exits 5.
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
    shards: int | None = Field(None, ge=1, le=1_000_000)
    """Units that cron or a scheduler hands out, and that workers share: at least four a worker. Default: one for
    each 64 rows (or `run.chunk_rows`, where that is more), at most 16; at most 4 where the rows of a query do not lie
    together. An output that was planned keeps its shards.
    """
    run: RunSpec = RunSpec()
    """Chunking and limits."""
    reuse: Annotated[tuple[PathText, ...], OneOrMany] = ()
    """Outputs of earlier runs, finished or not, whose labels are reused where labeler, model and texts are the
    same. The first that has a row's label wins. No part of the job's fingerprint.
    """
    cascade: CascadeSpec | None = None
    """Cheap labels where they are sure enough, by a bound that holds: see docs/labels-for-less.md."""
    rounds: RoundsSpec | None = None
    """Of a search in several rounds; such a file is for `relabel rounds` alone."""
    audit: AuditSpec = AuditSpec()
    """What `relabel audit` holds the judge to."""
    canary: int = Field(0, ge=0, le=100_000)
    """Rows that are labelled already to ask again at the start of a run that would add new labels to old ones; 0 is
    off. 200 distinguish a flip rate of 5 % from one of 1 %.
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
        if not parts:
            return {annotation}
        return set().union(*map(leaves, parts))

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


@runtime_checkable
class KeepsModels(Protocol):
    """Options of an engine whose fetched models are kept: one at a URL or in a wheel is fetched there before the
    engine's class is asked anything, for `resolve_model` to find.
    """

    cache_dir: str | None


@runtime_checkable
class PaidByToken(Protocol):
    """Options of an engine whose tokens may cost money, in any currency; None where no price is set."""

    price_per_million_input: float | None
    price_per_million_output: float | None


BATCH_PRICE = 0.5
"""What an ask in a batch costs, of the price of one that is answered at once."""


def gpus_of(args: EngineArgs) -> int:
    """GPUs that one copy of the engine lies on, where it uses any."""
    return getattr(args, "tensor_parallel_size", 1)


def price_of(args: EngineArgs, prompt_tokens: int, output_tokens: int, *, part: float | None = None) -> float | None:
    """What tokens cost at this part of the prices, by default that of batches where those are asked for; None where no
    price is named.
    """
    if not isinstance(args, PaidByToken):
        return None
    prices = args.price_per_million_input, args.price_per_million_output
    if prices == (None, None):
        return None
    part = part or (BATCH_PRICE if args.sends_batches else 1.0)
    return part * ((prices[0] or 0.0) * prompt_tokens + (prices[1] or 0.0) * output_tokens) / 1e6


def secret_variables(args: EngineArgs) -> dict[str, str]:
    """The environment variables that options name, by option."""
    return {option: getattr(args, option) for option in sorted(args.secret_variables)}


SpecT = TypeVar("SpecT", bound=BaseModel)


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that is most similar to `word`, if any is similar at all."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """The sentence for a name that is not registered: `No labeler "r3": known are … Did you mean r3a?`"""
    hint = nearest(name, known)
    return f'No {kind} "{name}": known are {", ".join(sorted(known))}.' + (f" Did you mean {hint}?" if hint else "")


def validate_spec(model: type[SpecT], values: Mapping[str, Any], *, where: str) -> SpecT:
    """Build `model` from plain values, or raise with what is off.

    Args:
        values: parsed YAML; may hold ready-made model instances.
        where: what to call the source in an error, usually the spec's path.
    Raises:
        ConfigError: one line per fault: the field's path, what was got, what is allowed, and the nearest key for a
            typo.
    """
    for key, text in texts_in(values):
        oddity = oddity_of(text)
        if oddity is not None:
            raise ConfigError(f"{where}: `{shown(key)}` {oddity}. Write it in letters that a file can hold.")
    try:
        return model.model_validate(dict(values))
    except ValidationError as exc:
        faults: list[Any] = exc.errors(include_url=False, include_context=False)
        raise ConfigError(f"{where}: " + "; ".join(_fault_text(model, **fault) for fault in faults)) from exc


_YAML_HINTS = {
    "string_type": " (in YAML, put it in quotes)",
    "tuple_type": " (a list, in brackets)",
    "list_type": " (a list, in brackets)",
}


def _fault_text(model: type[BaseModel], *, type: str, loc: tuple[int | str, ...], msg: str, input: Any) -> str:
    path = ".".join(str(step) for step in loc) or "the spec"
    is_secret = loc[:1] == (STORAGE_KEY,)
    if is_secret and type != "value_error":
        return (
            f"`{path}`: want a mapping of options for each URL scheme, for instance storage_options: {{s3: {{profile: "
            f"prod}}}}"
        )
    if type in ("extra_forbidden", "invalid_key"):
        known = _known_keys(model, loc[:-1])
        hint = nearest(str(loc[-1]), known)
        return f"unknown key `{path}`: " + (f"did you mean `{hint}`?" if hint else f"known keys are {', '.join(known)}")
    if type == "missing":
        return f"`{path}` is missing"
    if type == "model_type":
        return f"`{path}` = {_shown(input)}: want a mapping with the keys {', '.join(_known_keys(model, loc))}"
    message = re.sub(r"^(Value error|Assertion failed), ", "", msg)
    message = f"{message[:1].lower()}{message[1:]}{_YAML_HINTS.get(type, '')}"
    if not loc:  # keys of several sections don't go together; the message names them
        return message
    return f"`{path}`: {message}" if is_secret else f"`{path}` = {_shown(input)}: {message}"


def _known_keys(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    inner = model
    for step in loc:  # a place in a list is a number, whose entries were found with the list
        models = _models_in(inner.model_fields[step].annotation) if step in inner.model_fields else []
        if len(models) == 1:
            inner = models[0]
    return list(inner.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models of a field, or of the entries of a list; None is passed over."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models: list[type[BaseModel]] = []
    for part in get_args(annotation):
        models += _models_in(part)
    return models


def _shown(value: Any) -> str:
    text = redacted(repr(value))  # first: a part of a secret would go unnoticed
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Registry:
    """Ours, and what other packages offer through a group of entry points.

    Args:
        what: the kind, as errors call it.
        group: of the entry points.
        ours: import path by name; goes before another package's of the same name.
        built_in: names that need no loading, for errors.
    """

    what: str
    group: str
    ours: dict[str, str]
    built_in: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All that can be loaded, in order."""
        return sorted({*self.ours, *(entry.name for entry in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """What is registered under a name.

        Raises:
            ConfigError: no such name; names the known ones and the nearest.
        """
        if name in self.ours:
            return pkgutil.resolve_name(self.ours[name])
        for entry in entry_points(group=self.group, name=name):
            return entry.load()
        raise ConfigError(unknown_name(self.what, name, [*self.built_in, *self.names()]))


DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


class ObjectSchema:
    """The schema of a model's keys, `values`.

    Args:
        model: whose.
        definitions: those of the whole schema; the model's own are moved there.
    """

    def __init__(self, model: type[BaseModel], definitions: dict[str, Schema]) -> None:
        self.values: Schema = model.model_json_schema()
        definitions.update(self.values.pop("$defs", {}))

    @property
    def keys(self) -> dict[str, Schema]:
        """Schema of each key's value."""
        found: dict[str, Schema] = self.values["properties"]
        return found

    def fix(self, key: str, value: str) -> None:
        """Nothing but this value."""
        self.keys[key] = {"const": value}

    def offer(self, key: str, **alternatives: Sequence[Schema]) -> None:
        """Alternatives (`oneOf`, `anyOf`) in place of what the model gives; its description stays."""
        self.keys[key] = {"description": self.keys[key].get("description"), **alternatives}

    def require(self, key: str) -> None:
        """Not to be left out."""
        self.values["required"] = sorted({*self.values["required"], key})


def referred(definitions: dict[str, Schema], kind: str, models: dict[str, Schema]) -> list[Schema]:
    """Alternatives that refer to models by name, which go among the definitions."""
    definitions.update({f"{kind}-{name}": model for name, model in models.items()})
    return [{"$ref": f"#/$defs/{kind}-{name}"} for name in models]

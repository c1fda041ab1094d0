"""Which labelers and engines there are, as import paths: listing them loads nothing. Adding one is one line here.

Third parties add theirs through the entry-point groups `relabel.labelers` and `relabel.engines`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, cast

from relabel.manifests.asks import Answer, Ask, Engine
from relabel.manifests.errors import ConfigError
from relabel.manifests.labels import KINDS, InputColumn, Label, LabelColumn, Pair, Reads
from relabel.manifests.labels import LABELS as LABEL_SCHEMA
from relabel.manifests.specs import EngineSpec, LabelerOptions, ObjectSchema, Registry, Schema, validate_spec
from relabel.manifests.tables import INPUT_KINDS

LABELERS: dict[str, str] = {
    "complexity": "relabel.labelers.complexity:Complexity",
    "direct": "relabel.labelers.direct:Direct",
    "ensemble": "relabel.labelers.ensemble:Ensemble",
    "evidence-set": "relabel.labelers.evidence_set:EvidenceSet",
    "graph-grpo": "relabel.labelers.graph_grpo:GraphGrpo",
    "pointwise": "relabel.labelers.pointwise:Pointwise",
    "query": "relabel.labelers.query:Query",
    "r1": "relabel.labelers.r1:R1",
    "r3a": "relabel.labelers.r3a:R3A",
    "review": "relabel.labelers.review:Review",
    "route": "relabel.labelers.route:Route",
    "umbrela": "relabel.labelers.umbrela:Umbrela",
    "variants": "relabel.labelers.variants:Variants",
}
_LABELERS = Registry("labeler", "relabel.labelers", LABELERS)

EXAMPLE = Pair(
    0,
    "q",
    "how to prune roses",
    "d",
    "Cut back to an outward bud in late winter.",
)
"""The made-up pair of `probe`."""


class OnceAQueryOptions(LabelerOptions):
    """Options of a labeler whose one answer is about a whole query: rows can't vote on their parts of it."""

    samples: Literal[1] = 1
    """One: all rows of a query take their label from the same answer."""


class Recalled(NamedTuple):
    """An answer as a label holds it.

    Args:
        answer: what the labeler is sent. Its finish is `overlong` where the label is not of this ask, but of a shorter
            one after it.
        completion: what of it is worth learning, in one form for each meaning; `""` where nothing is.
    """

    answer: Answer
    completion: str


class Labeler(ABC):
    """Prompts and reading rules for one kind of label, free of any engine and without state between pairs. What it does
    not declare to read is no part of a label's key, so that a label outlives a change of it.
    """

    Options: ClassVar[type[LabelerOptions]]
    """Option model: what the spec's `labeler:` section may hold."""
    columns: tuple[LabelColumn, ...] = ()
    """Columns of its own that its labels have."""
    input_columns: ClassVar[tuple[InputColumn, ...]] = ()
    """Further columns of the input that it reads."""
    uses_context: bool = False
    """Whether `Pair.context` is read."""
    reads_document: ClassVar[bool] = True
    """Whether `Pair.document` is read."""
    uses_siblings: ClassVar[bool] = False
    """Whether all documents of the query (`Pair.siblings`) are read."""
    recalls: ClassVar[bool] = False
    """Whether its labels hold all that was answered (`recall`)."""
    template_digests: dict[str, str]
    """sha256 of every prompt template in use, by file name; part of the run's fingerprint."""

    def __init__(self, options: Any) -> None:
        self.template_digests = {}

    def __init_subclass__(cls) -> None:
        """Check what a class declares.

        Raises:
            ConfigError: a column's name is taken or malformed, or its kind is unknown.
        """
        names = {*LABEL_SCHEMA.names, "nodes"}
        for column in cls.columns:
            is_free = column.name not in names and re.fullmatch(r"[a-z][a-z0-9_]*", column.name) is not None
            if not is_free or column.kind not in KINDS:
                raise ConfigError(
                    f"labeler {cls.__name__}: column {column.name!r} of kind {column.kind!r}: a column wants a name of "
                    f"a-z, 0-9 and _ that no other column of label files has, and a kind of {', '.join(KINDS)}."
                )
            names.add(column.name)
        unknown = [column.kind for column in cls.input_columns if column.kind not in INPUT_KINDS]
        if unknown:
            raise ConfigError(
                f"labeler {cls.__name__}: input columns can't be of kind {unknown[0]!r}; there are "
                f"{', '.join(INPUT_KINDS)}."
            )

    @property
    def reads(self) -> Reads:
        """What it reads."""
        return Reads(self.uses_context, self.reads_document, self.input_columns, self.uses_siblings)

    @abstractmethod
    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """Yield each ask, be sent its answer, return the label.

        Deterministic: the same answers lead to the same asks and label, so that a run can replay a pair up to the stage
        that failed.

        Raises:
            VerdictError: the answer just sent holds no readable label; the run may ask that stage again with another
                seed.
        """

    @abstractmethod
    def probe(self) -> list[Ask]:
        """Every stage's ask for a made-up pair with a made-up earlier answer, in order, for `Engine.prepare`."""

    def recall(self, row: Mapping[str, Any], ask: Ask, number: int) -> Recalled:
        """What was answered to an ask on the way to a label.

        Args:
            row: the label's `grade` and the labeler's own columns.
            number: of earlier asks that were answered.
        Raises:
            VerdictError: the label holds no answer to it.
        """
        raise NotImplementedError


def labeler_names() -> list[str]:
    """All registered names, in order."""
    return _LABELERS.names()


def labeler_schemas(definitions: dict[str, Schema]) -> dict[str, Schema]:
    """JSON Schema of the section `labeler`, by the labeler's name.

    Args:
        definitions: of the whole schema; theirs are added.
    """
    schemas = {}
    for name in labeler_names():
        options = ObjectSchema(labeler_class(name).Options, definitions)
        options.fix("name", name)
        schemas[name] = options.values
    return schemas


def labeler_class(name: str) -> type[Labeler]:
    """The class of a name.

    Raises:
        ConfigError: no such labeler; names the known ones and the nearest.
    """
    return cast("type[Labeler]", _LABELERS.load(name))


def labelers_with(key: str) -> list[str]:
    """Those of this package whose section may hold a key, in order."""
    return [name for name in LABELERS if key in labeler_class(name).Options.model_fields]


def options_of_run(parts: Mapping[str, Any], spec: Mapping[str, Any], *, where: str) -> LabelerOptions:
    """The options of the labeler that asked a run.

    Args:
        parts: of the run's plan. Of templates it holds the digests alone.
        spec: of the run's manifest, which has the folder of templates that the job named.
    Raises:
        ConfigError: there is no such labeler here, or its options are none.
    """
    templates = (spec.get("labeler") or {}).get("templates")
    section = {**parts["labeler"], "templates": templates}
    return validate_spec(labeler_class(section["name"]).Options, section, where=f"{where}, labeler")


# ------------------------------------------------------------------------------
# Engines.


ENGINES: dict[str, str] = {
    "fake": "relabel.labelers.engines.fake:Fake",
    "openai": "relabel.labelers.engines.openai:OpenAi",
    "transformers": "relabel.labelers.engines.transformers:Transformers",
    "vllm": "relabel.labelers.engines.vllm:Vllm",
}
_ENGINES = Registry("engine", "relabel.engines", ENGINES)


def engine_names() -> list[str]:
    """All registered names, in order."""
    return _ENGINES.names()


def engine_class(name: str) -> type[Engine]:
    """The class of a name.

    Raises:
        ConfigError: no such engine; names the known ones and the nearest.
    """
    return cast("type[Engine]", _ENGINES.load(name))


def engine_schemas(spec: type[EngineSpec], definitions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON Schema of a section that names an engine, by the engine's name, with the engine's own options in it.

    Args:
        spec: the section's model.
        definitions: of the whole schema; theirs are added.
    """
    schemas = {}
    for name in engine_names():
        section = ObjectSchema(spec, {})
        section.keys["args"] = ObjectSchema(engine_class(name).Args, definitions).values
        section.fix("name", name)
        schemas[name] = section.values
    return schemas

"""Which labelers there are, as import paths: listing them loads nothing. Adding one is one file and one line here.

Third parties add theirs through the entry-point group `relabel.labelers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from relabel.manifests.asks import Answer, Ask
from relabel.manifests.columns import INPUT_KINDS
from relabel.manifests.errors import ConfigError
from relabel.manifests.labels import InputColumn, Label, LabelColumn, Pair, Reads
from relabel.manifests.schemas import KINDS
from relabel.manifests.schemas import LABELS as LABEL_SCHEMA
from relabel.manifests.specs import LabelerOptions, ObjectSchema, Registry, Schema, validate_spec

LABELERS: dict[str, str] = {
    "complexity": "relabel.labelers.complexity:Complexity",
    "direct": "relabel.labelers.direct:Direct",
    "evidence-set": "relabel.labelers.evidence_set:EvidenceSet",
    "graph-grpo": "relabel.labelers.graph_grpo:GraphGrpo",
    "pointwise": "relabel.labelers.pointwise:Pointwise",
    "r1": "relabel.labelers.r1:R1",
    "r3a": "relabel.labelers.r3a:R3A",
    "review": "relabel.labelers.review:Review",
    "route": "relabel.labelers.route:Route",
    "umbrela": "relabel.labelers.umbrela:Umbrela",
    "variants": "relabel.labelers.variants:Variants",
}
_REGISTRY = Registry("labeler", "relabel.labelers", LABELERS)


class Labeler(Protocol):
    """Prompts and reading rules for one kind of label, free of any engine and without state between pairs."""

    Options: ClassVar[type[LabelerOptions]]
    """Option model: what the spec's `labeler:` section may hold."""
    uses_context: bool
    """Whether `Pair.context` is looked at; if not, the column is not even read. A labeler that does not look at
    `Pair.document` either says so with `reads_document = False`, so that a label outlives a change of the document. One
    that looks at further columns of the input names them as `input_columns`, a tuple of `InputColumn`
    (`declared_reads`). One that looks at all documents of the query (`Pair.siblings`) says so with `uses_siblings =
    True`. One whose labels have columns of their own declares them as `columns`, a tuple of `LabelColumn`
    (`declared_columns`).
    """

    def __init__(self, options: Any) -> None: ...

    @property
    def template_digests(self) -> dict[str, str]:
        """sha256 of every prompt template in use, by file name; part of the run's fingerprint."""
        ...

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """Yield each ask, be sent its answer, return the label.

        Deterministic: the same answers lead to the same asks and label, so that a run can replay a pair up to the stage
        that failed.

        Raises:
            VerdictError: the answer just sent holds no readable label; the run may ask that stage again with another
                seed.
        """
        ...

    def probe(self) -> list[Ask]:
        """Every stage's ask for a made-up pair with a made-up earlier answer, in order: what
        `Engine.prepare` looks at.
        """
        ...


class MostAsks(NamedTuple):
    """Asks of a trajectory, at most: first ones, which follow from the row alone, and further ones, of answers."""

    first: int
    further: int


@runtime_checkable
class AsksOften(Protocol):
    """A labeler that asks its one stage several times about a row."""

    def most_asks(self, columns: Collection[str]) -> MostAsks:
        """How often, for an input with these of its `input_columns`."""
        ...


def declared_columns(labeler: Labeler | type[Labeler], *, name: str) -> tuple[LabelColumn, ...]:
    """The columns that a labeler's labels have beside those of all label files; none where it declares none.

    Args:
        name: of the labeler, for errors.
    Raises:
        ConfigError: a column's name is taken or is none, or its kind is none.
    """
    found: tuple[LabelColumn, ...] = tuple(LabelColumn(*column) for column in getattr(labeler, "columns", ()))
    taken = {*LABEL_SCHEMA.names, "nodes"}
    for column in found:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", column.name):
            raise ConfigError(
                f"labeler {name}: a column is called {column.name!r}; want lower-case letters, digits and _."
            )
        if column.name in taken:
            raise ConfigError(
                f"labeler {name}: two columns of its label files would be called `{column.name}`. Rename its own."
            )
        if column.kind not in KINDS:
            raise ConfigError(
                f"labeler {name}: column `{column.name}` is of kind {column.kind!r}; there are {', '.join(KINDS)}."
            )
        taken.add(column.name)
    return found


def declared_reads(labeler: Labeler, *, name: str) -> Reads:
    """What a labeler looks at.

    Args:
        name: of the labeler, for errors.
    Raises:
        ConfigError: an input column is of a kind that there is not.
    """
    columns = tuple(InputColumn(*column) for column in getattr(labeler, "input_columns", ()))
    for column in columns:
        if column.kind not in INPUT_KINDS:
            raise ConfigError(
                f"labeler {name}: input column `{column.name}` is of kind {column.kind!r}; there are "
                f"{', '.join(INPUT_KINDS)}."
            )
    reads_document = bool(getattr(labeler, "reads_document", True))
    return Reads(labeler.uses_context, reads_document, columns, bool(getattr(labeler, "uses_siblings", False)))


def labeler_names() -> list[str]:
    """All registered names, in order."""
    return _REGISTRY.names()


def labeler_schemas(definitions: dict[str, Schema]) -> dict[str, Schema]:
    """JSON Schema of the section `labeler`, by the labeler's name.

    Args:
        definitions: of the whole schema; theirs are added.
    """
    found = {}
    for name in labeler_names():
        options = ObjectSchema(labeler_class(name).Options, definitions)
        options.fix("name", name)
        found[name] = options.values
    return found


def labeler_class(name: str) -> type[Labeler]:
    """The class behind a name.

    Raises:
        ConfigError: no such labeler; names the known ones and the nearest.
    """
    found: type[Labeler] = _REGISTRY.load(name)
    return found


def options_of_run(parts: Mapping[str, Any], spec: Mapping[str, Any], *, where: str) -> LabelerOptions:
    """The options of the labeler that asked a run.

    Args:
        parts: of the run's plan. Of templates it holds the digests alone.
        spec: of the run's manifest, which has the folder of templates that the job named.
    Raises:
        ConfigError: there is no such labeler here, or its options are none.
    """
    held = {**parts["labeler"], "templates": (spec.get("labeler") or {}).get("templates")}
    return validate_spec(labeler_class(held["name"]).Options, held, where=f"{where}, labeler")

"""The section `student` of a spec: the model that learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from relabel.distill.students.heads import HEADS
from relabel.distill.students.kinds import KINDS
from relabel.distill.training.sections import LoraSpec
from relabel.manifests.specs import ModelText, Spec


def _known_kind(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"there are {', '.join(KINDS)}, not {name!r}")
    return name


KindName = Annotated[str, AfterValidator(_known_kind), WithJsonSchema({"enum": list(KINDS), "type": "string"})]
"""Of a kind of student that is registered."""


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
    heads: Literal["auto"] | dict[str, int] = "auto"
    """`auto`: relevance, and the nodes that the labels have and that some weight trains. Or numbers of grades by head.
    """
    pooling: Literal["mean", "cls"] = "mean"
    """How an encoder's token vectors become one."""
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Before an encoder's heads, in training; the backbone has its own in its config."""
    lora: LoraSpec | None = None
    """Train low-rank adapters of a decoder instead of all its weights."""
    prompt: PromptSpec = PromptSpec()
    """What a decoder reads."""
    batching: Literal["padded", "packed"] = "padded"
    """A decoder's batches: padded on the left, or rows packed behind each other without padding."""

    @field_validator("heads")
    @classmethod
    def _known_heads(cls, value: Any) -> Any:
        if value == "auto":
            return value
        for name, grades in value.items():
            if name not in HEADS:
                raise ValueError(f"no head is called {name!r}; there are {', '.join(HEADS)}")
            if not 2 <= grades <= 10:
                raise ValueError(f"head {name} with {grades} grades; from 2 to 10 are possible")
        if "relevance" not in value:
            raise ValueError("a student needs the head relevance")
        return {name: value[name] for name in HEADS if name in value}

    @model_validator(mode="after")
    def _heads_fit_the_kind(self) -> StudentSection:
        kind = KINDS[self.kind]
        if not kind.has_nodes and self.heads != "auto" and set(self.heads) != {"relevance"}:
            raise ValueError(f"{kind.title.lower()} has the head relevance alone")
        return self

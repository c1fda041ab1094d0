"""JSON Schemas of specs, amended in place: alternatives, constants and short forms that no model says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


class ObjectSchema:
    """The schema of a model's keys, `values`.

    Args:
        model: whose.
        definitions: those of the whole schema; the model's own are moved there.
    """

    def __init__(self, model: type[BaseModel], definitions: dict[str, Schema]) -> None:
        self._model = model
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
        """Alternatives (`oneOf`, `anyOf`) in place of what the model says; its description stays."""
        self.keys[key] = {"description": self._model.model_fields[key].description, **alternatives}

    def require(self, key: str) -> None:
        """Not to be left out."""
        self.values["required"] = sorted({*self.values["required"], key})


def of_model(definitions: dict[str, Schema], model: type[BaseModel], key: str) -> Schema:
    """The schema of a key of a model that is among the definitions."""
    found: Schema = definitions[model.__name__]["properties"][key]
    return found


def one_or_many(field: Schema) -> None:
    """A single string stands for a list of one."""
    many = {name: field.pop(name) for name in ("type", "items") if name in field}
    field.update(anyOf=[{"type": "string"}, many])


def path_or_each(field: Schema) -> Schema:
    """In a list of sources a path stands for one; what one source may be."""
    source: Schema = {"anyOf": [{"type": "string"}, field["items"]]}
    field.update(items=source)
    return source


def referred(definitions: dict[str, Schema], kind: str, models: dict[str, Schema]) -> list[Schema]:
    """Alternatives that refer to models by name, which go among the definitions."""
    definitions.update({f"{kind}-{name}": model for name, model in models.items()})
    return [{"$ref": f"#/$defs/{kind}-{name}"} for name in models]

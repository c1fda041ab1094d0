"""Registry of engines by import path. Listing engines imports none of them."""

from __future__ import annotations

from typing import Any

from relabel.manifests.asks import Engine
from relabel.manifests.specs import EngineSpec, ObjectSchema, Registry

# ------------------------------------------------------------------------------
# Which engines there are, as import paths: listing them loads nothing. Third parties use the entry-point group
# `relabel.engines`.


ENGINES: dict[str, str] = {
    "fake": "relabel.labelers.engines.fake:Fake",
    "openai": "relabel.labelers.engines.openai:OpenAi",
    "transformers": "relabel.labelers.engines.transformers:Transformers",
    "vllm": "relabel.labelers.engines.vllm:Vllm",
}
_REGISTRY = Registry("engine", "relabel.engines", ENGINES)


def engine_names() -> list[str]:
    """All registered names, in order."""
    return _REGISTRY.names()


def engine_class(name: str) -> type[Engine]:
    """The class of a name.

    Raises:
        ConfigError: no such engine; names the known ones and the nearest.
    """
    found: type[Engine] = _REGISTRY.load(name)
    return found


def engine_schemas(spec: type[EngineSpec], definitions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON Schema of a section that names an engine, by the engine's name, with the engine's own options in it.

    Args:
        spec: the section's model.
        definitions: of the whole schema; theirs are added.
    """
    found = {}
    for name in engine_names():
        section = ObjectSchema(spec, {})
        section.keys["args"] = ObjectSchema(engine_class(name).Args, definitions).values
        section.fix("name", name)
        found[name] = section.values
    return found

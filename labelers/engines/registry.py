"""Registry of engines by import path. Listing engines imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import SecretStr

from relabel.manifests.asks import Ask, Engine
from relabel.manifests.specs import EngineArgs, EngineSpec, ObjectSchema, Registry

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


class EngineClass(Protocol):
    """What an engine's class offers before any model is loaded. Importing its module loads no heavy package."""

    Args: ClassVar[type[EngineArgs]]
    """Option model of the spec's `engine.args`. What its options may also say: `KeepsModels`, `SpansGpus`,
    `PaidByToken` and `TakesSecrets` of `manifests.engine_options`.
    """

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the model's files (and of a LoRA, where there is one), without starting anything.

        Raises:
            ModelError: the reference names no model.
        """
        ...

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Look whether the engine could start here, without loading a model.

        Raises:
            MissingExtraError: a package or the device that the spec names is absent.
        """
        ...

    def __call__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Engine:
        """Start the engine: load the model, or raise ModelError or MissingExtraError."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """The class of an engine that counts a prompt's tokens without the weights; without it they are characters over
    four.
    """

    @staticmethod
    def token_counter(spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Callable[[Ask], int]:
        """From an ask to its prompt's tokens.

        Raises:
            ModelError: the model's tokenizer can't be read.
        """
        ...


@runtime_checkable
class ResolvesAuto(Protocol):
    """The class of an engine some of whose options may be left to the machine, where it matters to the labels."""

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]:
        """What the options that are `auto` come to on this machine, by option, in the words of the engine's facts; only
        those that would come to something else on another machine of the same kind.

        Raises:
            ModelError: the reference names no model.
        """
        ...


@runtime_checkable
class CallsServer(Protocol):
    """The class of an engine whose model runs at a server."""

    @staticmethod
    def try_server(spec: EngineSpec, asks: Sequence[Ask], secrets: Mapping[str, SecretStr]) -> str:
        """Call the server as a start does, with answers of one token where it gives such; what was found, in words.

        Raises:
            ModelError: it refuses.
            ServerGoneError: it does not answer.
        """
        ...


def engine_names() -> list[str]:
    """All registered names, in order."""
    return _REGISTRY.names()


def engine_class(name: str) -> EngineClass:
    """The class behind a name.

    Raises:
        ConfigError: no such engine; names the known ones and the nearest.
    """
    found: EngineClass = _REGISTRY.load(name)
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

"""Registry of engines by import path, the protocols of their classes, and the measured cost of distributions at
decisions. Listing engines imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import SecretStr

from relabel.manifests.asks import Ask, Engine
from relabel.manifests.specs import EngineArgs, EngineSpec, ObjectSchema, Registry

# ------------------------------------------------------------------------------
# What distributions at decisions cost: the one place that holds the measured figures, and what they say about a job.
#
# An engine's class says which way it takes (`decision_costs` of `registry.EngineClass`), before any model is loaded;
# `plan` prints it. A ratio is requests/s with distributions over requests/s without: 0.93 means that they cost 7 % of
# the throughput.


Way = Literal["second_request", "inline", "same_pass", "alone", "unknown"]
"""`second_request` and `inline` as in the vLLM engine's `decisions`; `same_pass`: read from the logits that the
answer's own pass makes;
`alone`: the stage generates nothing, its one request is the decision; `unknown`: only the running engine knows.
"""


class Measurement(NamedTuple):
    """One measured ratio, for one decision a request."""

    way: Way
    parameters: float
    low: float
    high: float


MEASURED = (
    Measurement("second_request", 1.5e9, 0.93, 0.955),
    Measurement("second_request", 7.6e9, 0.990, 0.990),
    Measurement("inline", 1.5e9, 0.82, 0.82),
    Measurement("inline", 7.6e9, 0.985, 0.985),
)
SOURCE = "measured once with vLLM 0.26 on an H200, bfloat16, 1,200 tokens in, 256 out, one decision of three labels"
"""Of all rows of `MEASURED`. The cost is work in Python for each request or token, so it shrinks as the model grows."""

NEAR = 1.5
"""A figure speaks for models up to so many times larger or smaller; between the measured sizes
nothing is interpolated.
"""


class DecisionCost(NamedTuple):
    """What the distributions of one stage cost.

    Args:
        decisions: places in one answer of the stage where a distribution is wanted, at least 1.
        ratio: requests/s of the stage with distributions over those without, as (lowest, highest); None where nobody
            measured.
        basis: where the ratio is from, or why there is none.
    """

    stage: str
    decisions: int
    way: Way
    ratio: tuple[float, float] | None
    basis: str


def plan_decision_costs(
    asks: Sequence[Ask], way: Way, *, parameters: int | None = None, unmeasured: str | None = None
) -> list[DecisionCost]:
    """The cost of every stage that has decisions.

    Args:
        asks: one ask a stage, as a labeler's `probe` gives them.
        way: how the engine takes distributions beside an answer.
        parameters: of the model; None if unknown.
        unmeasured: why the figures do not speak for this engine at all, if so.
    """
    return [_cost(ask, way, parameters, unmeasured) for ask in asks if ask.decisions]


def _cost(ask: Ask, way: Way, parameters: int | None, unmeasured: str | None) -> DecisionCost:
    count = len(ask.decisions)
    if ask.max_tokens == 0:
        return DecisionCost(
            ask.stage, count, "alone", (1.0, 1.0), "the stage asks for nothing else: one request of one token"
        )
    if unmeasured is not None:
        return DecisionCost(ask.stage, count, way, None, unmeasured)
    if parameters is None:
        return DecisionCost(ask.stage, count, way, None, "the model's number of parameters is not known")
    found = _nearest(way, parameters)
    if found is None:
        sizes = " and ".join(f"{row.parameters / 1e9:.1f}" for row in MEASURED if row.way == way)
        return DecisionCost(
            ask.stage,
            count,
            way,
            None,
            f"measured for {sizes} billion parameters alone, the model has {parameters / 1e9:.2f}",
        )
    if way == "inline" or count == 1:  # with every token, whatever the number of decisions
        return DecisionCost(ask.stage, count, way, (found.low, found.high), SOURCE)
    return DecisionCost(
        ask.stage,
        count,
        way,
        (_times(found.low, count), _times(found.high, count)),
        f"reckoned for {count} decisions; {SOURCE}",
    )


def _nearest(way: Way, parameters: int) -> Measurement | None:
    near = [row for row in MEASURED if row.way == way and row.parameters / NEAR <= parameters <= row.parameters * NEAR]
    return min(near, key=lambda row: abs(row.parameters - parameters), default=None)


def _times(ratio: float, count: int) -> float:
    """The ratio of `count` second requests where one has `ratio`: each adds the same time."""
    return 1.0 / (1.0 + count * (1.0 / ratio - 1.0))


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

    @staticmethod
    def decision_costs(spec: EngineSpec, asks: Sequence[Ask]) -> list[DecisionCost]:
        """What the distributions of a labeler's stages cost, as far as anybody measured it. Reads no more than headers
        of the weights.

        Args:
            asks: one ask a stage, as the labeler's `probe` gives them.
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

"""What an engine's options may also say, beside those of every engine: each a protocol of one or two fields."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from relabel.manifests.specs import EngineArgs


@runtime_checkable
class KeepsModels(Protocol):
    """Options of an engine whose fetched models are kept: one at a URL or in a wheel is fetched there before the
    engine's class is asked anything, for `resolve_model` to find.
    """

    cache_dir: str | None


@runtime_checkable
class SpansGpus(Protocol):
    """Options of an engine of which one copy may lie on several GPUs."""

    tensor_parallel_size: int


@runtime_checkable
class PaidByToken(Protocol):
    """Options of an engine whose tokens may cost money, in any currency; None where nobody said what."""

    price_per_million_input: float | None
    price_per_million_output: float | None


BATCH_PRICE = 0.5
"""What an ask in a batch costs, of the price of one that is answered at once."""


@runtime_checkable
class MayBatch(Protocol):
    """Options of an engine that may hand asks over as batches, which are answered hours later."""

    @property
    def sends_batches(self) -> bool: ...


@runtime_checkable
class TakesSecrets(Protocol):
    """Options of which some name an environment variable whose value is passed to the engine alone."""

    secret_variables: ClassVar[frozenset[str]]


def gpus_of(args: EngineArgs) -> int:
    """GPUs that one copy of the engine lies on, where it uses any."""
    return args.tensor_parallel_size if isinstance(args, SpansGpus) else 1


def is_batched(args: EngineArgs) -> bool:
    """Whether asks are handed over as batches."""
    return isinstance(args, MayBatch) and args.sends_batches


def price_of(args: EngineArgs, prompt_tokens: int, output_tokens: int) -> float | None:
    """What tokens cost, in batches where those are asked for; None where no price is named."""
    if not isinstance(args, PaidByToken):
        return None
    prices = args.price_per_million_input, args.price_per_million_output
    if prices == (None, None):
        return None
    part = BATCH_PRICE if is_batched(args) else 1.0
    return part * ((prices[0] or 0.0) * prompt_tokens + (prices[1] or 0.0) * output_tokens) / 1e6


def names_prices(args: EngineArgs) -> bool:
    """Whether both prices are named, so that a cost leaves nothing out."""
    return isinstance(args, PaidByToken) and None not in (args.price_per_million_input, args.price_per_million_output)


def secret_variables(args: EngineArgs) -> dict[str, str]:
    """The environment variables that options name, by option."""
    options = sorted(args.secret_variables) if isinstance(args, TakesSecrets) else ()
    return {option: getattr(args, option) for option in options}

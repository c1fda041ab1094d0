"""What a run has asked of a server so far: requests, tries, tokens as the server counted them, money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """Tokens of one reply, by the server's own count; `cached` ones are among the prompt's."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


NOT_SAID = Usage()
"""What a server that counts no tokens says."""


@dataclass(slots=True)
class Costs:
    """Counts over all requests, decisions and start-up checks included. Written by the engine's own thread alone.

    Args:
        price_input, price_output: of a million tokens; None where no price was given.
        unsure: the most that replies may have been charged which were lost on the way.
    """

    price_input: float | None = None
    price_output: float | None = None
    requests: int = 0
    retries: int = 0
    given_up: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waited_s: float = 0.0
    unsure: Usage = NOT_SAID

    def add(self, usage: Usage) -> None:
        """Count a reply."""
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.output_tokens += usage.output

    def doubt(self, most: Usage) -> None:
        """Note a reply that is lost: what the server charged for it can't be known."""
        self.unsure = Usage(self.unsure.prompt + most.prompt, 0, self.unsure.output + most.output)

    @property
    def at_most(self) -> Usage:
        """What was charged at most."""
        return Usage(self.prompt_tokens + self.unsure.prompt, 0, self.output_tokens + self.unsure.output)

    @property
    def cost(self) -> float | None:
        """In the prices' currency; None without a price."""
        if self.price_input is None and self.price_output is None:
            return None
        return (self.prompt_tokens * (self.price_input or 0.0) + self.output_tokens * (self.price_output or 0.0)) / 1e6

    @property
    def cost_at_most(self) -> float:
        """Of what was charged at most; 0.0 without a price."""
        found = self.at_most
        return (found.prompt * (self.price_input or 0.0) + found.output * (self.price_output or 0.0)) / 1e6

    def with_batches(self, other: Costs) -> dict[str, Any]:
        """Counts by name, with what came in batches."""
        found, cost = self.as_dict(), other.cost
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            found[name] += getattr(other, name)
        return {**found, "cost": None if self.cost is None or cost is None else self.cost + cost}

    def as_dict(self) -> dict[str, Any]:
        """Counts by name, as a run records them."""
        return {
            "http_requests": self.requests,
            "retries": self.retries,
            "given_up": self.given_up,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "waited_s": round(self.waited_s, 3),
            "cost": self.cost,
        }

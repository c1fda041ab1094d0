"""What asking is paid with, tokens and money, and how much of both an ask may take at most."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from relabel.manifests.asks import Ask

TEMPLATE_TOKENS = 256
"""Room for what a chat template says by itself: the system prompts that models bring take up to 70 tokens."""
TURN_TOKENS = 16
"""Room for the control tokens around a turn."""


class Charge(NamedTuple):
    """Tokens, prompt and output together, and money in the currency of the prices; 0.0 where no price is named."""

    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: Charge) -> Charge:
        return Charge(self.tokens + other.tokens, self.cost + other.cost)

    def minus(self, other: Charge) -> Charge:
        return Charge(self.tokens - other.tokens, self.cost - other.cost)

    def above(self, other: Charge) -> Charge:
        """How much more it is than another; no less than nothing."""
        return Charge(max(0, self.tokens - other.tokens), max(0.0, self.cost - other.cost))

    def times(self, count: float) -> Charge:
        return Charge(round(self.tokens * count), self.cost * count)


@runtime_checkable
class CountsCharges(Protocol):
    """An engine that knows what its asks are charged for: further requests, and replies that were lost, included."""

    def most(self, ask: Ask) -> Charge:
        """What an ask is charged for at most, if each of its requests is answered at the first try.

        Raises:
            ConfigError: its answer has no limit.
        """
        ...

    def charged(self) -> Charge:
        """What was charged so far at most, without what is in flight; may be called once it is closed."""
        ...


def most_prompt_tokens(ask: Ask) -> int:
    """More tokens than a prompt can have: no tokenizer makes more of a text than it has bytes."""
    texts = [*(message.text for message in ask.messages), ask.prefill]
    return sum(len(text.encode("utf-8", "replace")) + TURN_TOKENS for text in texts) + TEMPLATE_TOKENS


def most_output_tokens(ask: Ask) -> int:
    """Its own limit, and a token for each of its decisions."""
    return ask.max_tokens + len(ask.decisions)

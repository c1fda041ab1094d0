"""What a run's canaries found, one record an engine in `canary/`."""

from dataclasses import dataclass

from relabel.manifests.records import read_record
from relabel.manifests.store import Store

CANARY_FOLDER = "canary"


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The result of asking labelled rows again.

    Args:
        engine: identity of the engine that was asked now.
        rows: rows asked again, of which `own` were labelled in this output and the others in reused ones.
        flips: rows whose grade changed, or for which there is no label now (`unreadable` of them).
        flip_rate, low, high: share of flips, and its 95 % interval (Wilson).
        mean_kl: mean of KL(old ‖ new) over rows with both distributions, nats; None where no row has both.
        wanted: rows that the spec asked for; fewer were known if `rows` is below it.
        prompt_tokens, output_tokens: that it took; 0 in records of before they were counted.
    """

    engine: dict[str, str]
    rows: int
    own: int
    flips: int
    unreadable: int
    flip_rate: float
    low: float
    high: float
    mean_kl: float | None
    max_flip_rate: float
    wanted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def text(self) -> str:
        """In a line."""
        kl = "" if self.mean_kl is None else f", mean KL {self.mean_kl:z.4f} nats"
        return (
            f"{self.flips:,} of {self.rows:,} grades flipped: {self.flip_rate:.1%} "
            f"(95 % interval {self.low:.1%} to {self.high:.1%}){kl}; limit {self.max_flip_rate:.1%}"
        )


def load_results(store: Store) -> list[CanaryResult]:
    """The canaries of an output, in name order.

    Raises:
        ManifestError: a result is damaged.
    """
    return [
        read_record(
            CanaryResult,
            store.read(name),
            f"{store.root}/{name}",
            "not a canary's result",
            "Restore it from a copy, or move it away to have it asked again.",
        )
        for name in store.names(CANARY_FOLDER)
    ]

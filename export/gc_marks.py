"""What `gc` has marked: names of objects and versions that nothing points to, on their way out in two steps.

A name is first marked, in one small record that is replaced by compare and swap; a later `gc` claims it, and only
then deletes. Whoever is about to rely on a name (a publisher that finds an object already there, a channel set to an
old version) first takes it off the list. So a name is either spared or claimed, never both; and no clock but the bundle
store's decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from relabel.export.bundle_files import strict_json
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import LockHeldError, ManifestError, TransientError
from relabel.manifests.records import checked, fault_of
from relabel.manifests.storage.bundle_store_ports import BundleStore

RECORD_NAME = "gc.json"
KIND = "gc"
_SWAPS = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """What one `gc` is deleting, or was when it was killed.

    Args:
        owner: made up by that `gc`.
        renewed_s: when it last said that it is alive, by the bundle store's clock.
    """

    owner: str
    renewed_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GcMarks:
    """The list.

    Args:
        since: name → when it was marked, seconds since the epoch by the bundle store's clock.
    """

    since: dict[str, float] = field(default_factory=dict)
    claim: Claim | None = None

    def record(self) -> bytes:
        """The list as it is written."""
        return readable_json(
            {"kind": KIND, "format": 1, "since": self.since, "claim": asdict(self.claim) if self.claim else None}
        )


def load_gc_marks(bundle_store: BundleStore) -> tuple[GcMarks, str]:
    """The list and its tag; an empty one without a tag where no `gc` ran yet.

    Raises:
        ManifestError: it is damaged.
    """
    try:
        data, tag = bundle_store.read(RECORD_NAME)
    except FileNotFoundError:
        return GcMarks(), ""
    where = f"{bundle_store.url}/{RECORD_NAME}"
    held = strict_json(data, where)
    try:
        since, claim = checked(dict[str, float], held.get("since")), held.get("claim")
        return GcMarks(since, None if claim is None else checked(Claim, claim)), tag
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not what gc writes ({fault_of(exc)}). Move it away; the next gc starts over."
        ) from exc


def change_gc_marks(bundle_store: BundleStore, change: Callable[[GcMarks], GcMarks]) -> GcMarks:
    """Replace the list by what `change` makes of it, again if others change it meanwhile.

    Args:
        change: pure; may raise, and then nothing is written.
    Raises:
        TransientError: others keep changing it.
    """
    for _ in range(_SWAPS):
        held, tag = load_gc_marks(bundle_store)
        wanted = change(held)
        if wanted == held:
            return held
        was_first = (
            bundle_store.replace(RECORD_NAME, wanted.record(), tag)
            if tag
            else bundle_store.create(RECORD_NAME, wanted.record())
        )
        if was_first or load_gc_marks(bundle_store)[0] == wanted:
            return wanted
    raise TransientError(f"{bundle_store.url}/{RECORD_NAME}: others keep changing it. Run the same command again.")


def spare(bundle_store: BundleStore, names: Iterable[str]) -> None:
    """Take names off the list, before anything comes to rely on them.

    Raises:
        LockHeldError: `gc` is deleting one of them right now.
    """
    wanted = set(names)

    def without(held: GcMarks) -> GcMarks:
        if held.claim is not None and (taken := wanted & set(held.claim.names)):
            raise LockHeldError(
                f"{bundle_store.url}: gc is removing {min(taken)}. Try again when it has ended; if it was killed, "
                f"`relabel gc {bundle_store.url} --delete` ends its work."
            )
        return GcMarks({name: since for name, since in held.since.items() if name not in wanted}, held.claim)

    change_gc_marks(bundle_store, without)

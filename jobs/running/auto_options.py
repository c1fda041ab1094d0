"""Engine options that a job leaves to the machine: what an output was begun with, it goes on with.

A fleet's CPUs differ, and labels in bfloat16 and in float32 are those of two teachers. So the first worker of an output
writes down what `auto` came to on its machine before it starts its engine, and the others do as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from relabel.jobs.planning.jobs import Job
from relabel.labelers.engines.registry import ResolvesAuto
from relabel.manifests.records import read_record, sealed_json
from relabel.manifests.runs.engine_identity import engine_identity
from relabel.manifests.specs import EngineSpec
from relabel.manifests.storage.run_store_ports import RunStore

AUTO_NAME = "engine.json"


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """What an engine's `auto` options came to on the machine of an output's first worker, by option."""

    version: int
    resolved: dict[str, str]


def with_auto_resolved(job: Job, store: RunStore, begun: Callable[[], Sequence[Mapping[str, Any]]]) -> Job:
    """The job, with its engine's `auto` options as this output was begun, or as this machine is the first to choose.

    Args:
        begun: facts of the engines that have answered, as receipts hold them; called only where something is `auto`.
    Raises:
        ManifestError: what the first worker wrote down can't be read.
        ModelError: see `ResolvesAuto`.
    """
    kind, engine = job.engine_class, job.spec.engine
    chosen = kind.resolve_auto(engine) if isinstance(kind, ResolvesAuto) else {}
    if not chosen:
        return job
    earlier = begun()
    return _with(job, _of_engine(engine, chosen, earlier[0]) if earlier else _of_first(store, chosen))


def options_begun_with(job: Job, store: RunStore) -> dict[str, str]:
    """What the engine's `auto` options came to in this output, as far as its first worker wrote it down; nothing is
    written, and nothing asked of this machine.
    """
    if not isinstance(job.engine_class, ResolvesAuto):
        return {}
    try:
        held = read_auto(store)
    except FileNotFoundError:
        return {}
    return {name: value for name, value in held.resolved.items() if getattr(job.spec.engine.args, name, "") == "auto"}


def with_options_begun_with(job: Job, store: RunStore) -> Job:
    """The job with these options: to ask as the run does, beside it.

    Raises:
        ManifestError: as `with_auto_resolved`.
        StoreError: the output can't be read.
    """
    found = options_begun_with(job, store)
    return _with(job, found) if found else job


def _with(job: Job, found: dict[str, str]) -> Job:
    engine = job.spec.engine
    resolved = engine.model_copy(update={"args": engine.args.model_copy(update=found)})
    return replace(job, spec=job.spec.model_copy(update={"engine": resolved}))


def _of_engine(engine: EngineSpec, chosen: dict[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    """As an engine's facts say; its own where they say what these options can't be: then it was another engine."""
    found = {name: value for name, value in engine_identity(facts).items() if name in chosen}
    try:
        type(engine.args).model_validate(engine.args.model_dump() | found)
    except ValueError:
        return chosen
    return found


def _of_first(store: RunStore, chosen: dict[str, str]) -> dict[str, str]:
    if store.create(AUTO_NAME, sealed_json(asdict(AutoOptions(1, chosen)))):
        return chosen
    held = read_auto(store)
    return {name: held.resolved.get(name, value) for name, value in chosen.items()}


def read_auto(store: RunStore) -> AutoOptions:
    """What the first worker of an output wrote down.

    Raises:
        FileNotFoundError: nothing.
        ManifestError: it can't be read.
    """
    return read_record(
        AutoOptions,
        store.read(AUTO_NAME),
        f"{store.root}/{AUTO_NAME}",
        "not the options of an engine",
        "Move it away: it says what the engine's `auto` options came to on the first worker's machine, and nothing was "
        "labelled yet.",
    )

"""Engine options and rates that are kept from one run to the next, and the time that remains of a run."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relabel.jobs.job import Job, OpenRun
from relabel.jobs.output import clock_text
from relabel.jobs.run.chunks import StageSeen
from relabel.jobs.run.counts import Progress
from relabel.manifests.asks import EngineFacts
from relabel.manifests.manifest import Range
from relabel.manifests.models import DAY, default_cache_dir, write_json
from relabel.manifests.process import device_names
from relabel.manifests.records import checked, digest_of, fault_of, read_record, sealed_json
from relabel.manifests.specs import EngineSpec, KeepsModels, PaidByToken
from relabel.manifests.store import RunStore

# A fleet's CPUs differ, and labels in bfloat16 and in float32 are those of two teachers. So the first worker of an
# output records how it resolved the engine's `auto` options before it starts its engine, and the others follow it.

AUTO_NAME = "engine.json"


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """How the first worker of an output resolved its engine's `auto` options, by option."""

    version: int
    resolved: dict[str, str]


def with_auto_resolved(job: Job, store: RunStore) -> Job:
    """The job with its engine's `auto` options as this output was begun, or as this machine is the first to choose.

    Raises:
        ManifestError: the first worker's record can't be read.
        ModelError: see `Engine.resolve_auto`.
    """
    chosen = job.engine_class.resolve_auto(job.spec.engine)
    if not chosen or store.create(AUTO_NAME, sealed_json(asdict(AutoOptions(1, chosen)))):
        return _with(job, chosen)
    held = read_auto(store)
    return _with(job, {name: held.resolved.get(name, value) for name, value in chosen.items()})


def options_begun_with(job: Job, store: RunStore) -> dict[str, str]:
    """The engine's `auto` options as this output's first worker resolved them; empty where it did not. Reads only."""
    try:
        held = read_auto(store)
    except FileNotFoundError:
        return {}
    return {name: value for name, value in held.resolved.items() if getattr(job.spec.engine.args, name, "") == "auto"}


def with_options_begun_with(job: Job, store: RunStore) -> Job:
    """The job with these options: to ask as the run does, without being part of it.

    Raises:
        ManifestError: as `with_auto_resolved`.
        StoreError: the output can't be read.
    """
    return _with(job, options_begun_with(job, store))


def _with(job: Job, found: dict[str, str]) -> Job:
    engine = job.spec.engine
    resolved = engine.model_copy(update={"args": engine.args.model_copy(update=found)})
    return replace(job, spec=job.spec.model_copy(update={"engine": resolved}))


def read_auto(store: RunStore) -> AutoOptions:
    """The record of an output's first worker.

    Raises:
        FileNotFoundError: nothing.
        ManifestError: it can't be read.
    """
    return read_record(
        AutoOptions,
        store.read(AUTO_NAME),
        f"{store.root}/{AUTO_NAME}",
        "not the options of an engine",
        "Move it away, and set the engine's `auto` options as the labels that are there were made.",
    )


# ------------------------------------------------------------------------------
# How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
# from its last run or probe. Only estimates read it, so a file that can't be used is ignored with a remark.


PROBE_HINT = "`relabel plan --probe` asks a few rows"
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measurements of one run or probe.

    Args:
        key: what they hold for, in full; the file's name is its digest.
        measured: when it ended.
        dtype: in the words of the engine's facts.
        rows: asked, in so many seconds.
        stages: asks and tokens of each.
    """

    key: dict[str, Any]
    source: Literal["run", "probe"]
    measured: str
    dtype: str
    rows: Positive
    seconds: Positive
    stages: dict[str, StageSeen]
    version: Literal[2] = 2

    @property
    def seconds_per_token(self) -> float:
        """Of one worker, for a token of a prompt or an answer."""
        return self.seconds / sum(seen.prompt_tokens + seen.output_tokens for seen in self.stages.values())

    @property
    def basis(self) -> str:
        """The source of a figure, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,.0f} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def rates_of(
    opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: Literal["run", "probe"]
) -> Rates | None:
    """Rates of work that has just ended; None where no row was asked."""
    seconds, stages = time.perf_counter() - progress.started_s, dict(progress.stages_seen)
    if not progress.pairs or not any(seen.prompt_tokens for seen in stages.values()):
        return None
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    return Rates(_key(opened), source, measured, facts.dtype, progress.pairs, seconds, stages)


def keep_rates(opened: OpenRun, rates: Rates | None) -> None:
    """Keep them for later estimates, in place of earlier ones; a probe's never replace a run's. A cache that can't be
    written ends no run.
    """
    folder = _folder(opened.job.spec.engine)
    if rates is None or folder is None:
        return
    held = load_rates(opened)[0] if rates.source == "probe" else None
    if held is None or held.source == "probe":
        with contextlib.suppress(OSError):
            write_json(folder / f"{digest_of(rates.key)[:32]}.json", asdict(rates))


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """The rates of this job's model, labeler and device, and their source; where there are none, why, in words."""
    engine, key = opened.job.spec.engine, _key(opened)
    if engine.args.sends_batches:
        return None, "batches are answered hours later, at no rate of their own"
    folder = _folder(engine)
    if folder is None:
        return None, f"rates of engine {engine.name} are not kept; {PROBE_HINT}"
    path = folder / f"{digest_of(key)[:32]}.json"
    try:
        rates = checked(Rates, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, f"no run of this model on this device is known; {PROBE_HINT}"
    except (OSError, ValueError) as exc:
        return None, f"{path} can't be used ({fault_of(exc)})"
    dtype = options_begun_with(opened.job, opened.store).get("dtype", rates.dtype)
    if dtype not in rates.dtype:  # which may name a quantization, too
        return None, f"the last run here was in {rates.dtype}, and this output is in {dtype}"
    return rates, rates.basis


def _folder(engine: EngineSpec) -> Path | None:
    """None where there is no model whose rates would be worth keeping, or where answers come hours later."""
    if not isinstance(engine.args, KeepsModels) or engine.args.sends_batches:
        return None
    return (Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()) / "rates"


def _key(opened: OpenRun) -> dict[str, Any]:
    """Model, engine with all that changes its speed, device, labeler."""
    engine = opened.job.spec.engine
    args: Mapping[str, Any] = engine.args.model_dump(mode="json", exclude={"cache_dir", *PaidByToken.__annotations__})
    return {
        "model": opened.plan.facts.model,
        "engine": {
            "name": engine.name,
            "args": args,
            "chat_template_kwargs": {key: one for key, one in engine.chat_template_kwargs.items() if key != DAY},
        },
        "device": device_names(),
        "labeler": opened.job.spec.labeler.name,
    }


# ------------------------------------------------------------------------------
# How long a run still takes.


def left_s(total: int, done: int, seconds: float) -> Range | None:
    """Seconds until all rows are done at the pace so far, with two standard errors of a mean over so many rows; None
    before the first.
    """
    if not done:
        return None
    left, most = seconds / done * max(0, total - done), 1 + 2 / math.sqrt(done)
    return Range(left / most, left, left * most)


def left_text(left: Range | None) -> str:
    """An interval in words: `0:04:10 to 0:09:00`."""
    if left is None:
        return "unknown"
    low, high = clock_text(left.low), clock_text(left.high)
    return low if low == high else f"{low} to {high}"

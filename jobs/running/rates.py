"""How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
from its last run or probe.

Estimates alone read it. No plan, label or receipt depends on what is kept here, so a file that can't be used is left
aside with a word.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.running.auto_options import options_begun_with
from relabel.jobs.running.counts import Progress
from relabel.jobs.running.live import MOST, StageSeen
from relabel.manifests.asks import EngineFacts
from relabel.manifests.cpus import device_names
from relabel.manifests.digests import digest_of
from relabel.manifests.engine_options import KeepsModels, PaidByToken, is_batched
from relabel.manifests.models.chat_templates import DAY
from relabel.manifests.models.references import default_cache_dir, write_json
from relabel.manifests.records import checked, fault_of, version_of
from relabel.manifests.specs import EngineSpec

RATES_VERSION = 1
PROBE_TELLS = "`relabel plan --probe` asks a few rows"
BATCHES = "batches are answered hours later, at no rate of their own"
NO_RUN = f"no run of this model on this device is known; {PROBE_TELLS}"


@dataclass(frozen=True, slots=True)
class Rates:
    """What one engine's life told.

    Args:
        key: what it holds of, in full; the file's name is its digest.
        source: `run` or `probe`.
        measured: when it ended.
        model, device, dtype: in the words of the engine's facts.
        rows: asked.
        prefill_tokens_per_s: prompt tokens that no cache held, of the whole time: what the loop and the commits took is
            in it.
        decode_tokens_per_s: likewise of output tokens; None where none was decoded.
        stages: asks and tokens of each.
    """

    key: dict[str, Any]
    source: str
    measured: str
    model: str
    device: str
    dtype: str
    rows: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    stages: dict[str, StageSeen] = field(default_factory=dict)
    version: int = RATES_VERSION

    @property
    def basis(self) -> str:
        """Where a figure comes from, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def rates_of(opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: str) -> Rates | None:
    """What an engine's work tells; None where no row came of it.

    Args:
        progress: of that work alone, which has just ended.
    """
    work, stages, seconds = progress.live.work, progress.stages_seen, time.perf_counter() - progress.started_s
    uncached = sum(seen.prompt_tokens - seen.cached_tokens for seen in stages.values())
    output = sum(seen.output_tokens for seen in stages.values())
    if work.prefilled_tokens and work.prefill_s > 0:
        beside = max(1.0, seconds / (work.prefill_s + work.decode_s))
        prefill = work.prefilled_tokens / (work.prefill_s * beside)
        decode = work.decoded_tokens / (work.decode_s * beside) if work.decoded_tokens and work.decode_s > 0 else None
    else:  # the engine does not tell them apart: one rate for both
        prefill = (uncached + output) / max(seconds, 1e-9)
        decode = prefill if output else None
    if not stages or not progress.pairs or prefill <= 0:
        return None
    measured = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    found = facts.model, facts.device, facts.dtype
    return Rates(_key(opened), source, measured, *found, progress.pairs, prefill, decode, dict(stages))


def keep_rates(opened: OpenRun, rates: Rates | None) -> None:
    """Keep them for estimates to come, in place of earlier ones, but no probe's in place of a run's that can be used; a
    cache that can't be written is no reason to end.
    """
    folder = _folder(opened.job.spec.engine)
    if rates is None or folder is None:
        return
    held = load_rates(opened)[0] if rates.source == "probe" else None
    if held is None or held.source == "probe":
        with contextlib.suppress(OSError):
            write_json(folder / _file_name(rates.key), asdict(rates))


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """What is known of this job's model, labeler and device, and where from; where nothing is, why, in words."""
    engine = opened.job.spec.engine
    folder = _folder(engine)
    if folder is None:
        is_late = is_batched(engine.args)
        return None, BATCHES if is_late else f"rates of engine {engine.name} are not kept; {PROBE_TELLS}"
    key = _key(opened)
    path = folder / _file_name(key)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if version_of(held) != RATES_VERSION:
            return None, f"{path} is of another version of relabel"
        rates = checked(Rates, held)
    except FileNotFoundError:
        return None, NO_RUN
    except (OSError, ValueError) as exc:
        return None, f"{path} can't be read ({fault_of(exc) if isinstance(exc, ValueError) else exc.strerror})"
    if rates.key != key or not _is_possible(rates):
        return None, f"{path} does not hold what its name says"
    dtype = options_begun_with(opened.job, opened.store).get("dtype", rates.dtype)
    if dtype not in rates.dtype:  # which may name a quantization, too
        return None, f"the last run here was in {rates.dtype}, and this output is in {dtype}"
    return rates, rates.basis


def _folder(engine: EngineSpec) -> Path | None:
    """None where there is no model whose rates would be worth keeping, or where answers come hours later."""
    if not isinstance(engine.args, KeepsModels) or is_batched(engine.args):
        return None
    return (Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()) / "rates"


def _key(opened: OpenRun) -> dict[str, Any]:
    """Model, engine with all that changes its speed, device, labeler."""
    engine = opened.job.spec.engine
    neither = {"cache_dir", *PaidByToken.__annotations__}
    args: Mapping[str, Any] = engine.args.model_dump(mode="json", exclude=neither)
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


def _file_name(key: Mapping[str, Any]) -> str:
    return f"{digest_of(key)[:32]}.json"


def _is_possible(rates: Rates) -> bool:
    speeds = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s or 1.0)
    counts = [rates.rows, *(number for seen in rates.stages.values() for number in asdict(seen).values())]
    return (
        all(math.isfinite(one) and one > 0 for one in speeds)
        and all(0 <= one < MOST for one in counts)
        and rates.rows > 0
        and all(0 <= one.first_attempts <= one.answers > 0 for one in rates.stages.values())
    )

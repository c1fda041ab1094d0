"""How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
from its last run or probe. Only estimates read it, so a file that can't be used is ignored with a remark.
"""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relabel.jobs.job import OpenRun, options_begun_with
from relabel.jobs.run.progress import Progress, StageSeen
from relabel.manifests.asks import EngineFacts
from relabel.manifests.chat_templates import DAY
from relabel.manifests.errors import RelabelError
from relabel.manifests.models import default_cache_dir, write_json
from relabel.manifests.process import device_names
from relabel.manifests.records import checked, digest_of, fault_of
from relabel.manifests.specs import KeepsModels, PaidByToken

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
    def basis(self) -> str:
        """The source of a figure, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,.0f} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def keep_rates(
    opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: Literal["run", "probe"]
) -> Rates | None:
    """The rates of work that has just ended, kept for later estimates in place of earlier ones; a probe's never replace
    a run's. None where no row was asked. A cache that can't be written ends no run.
    """
    seconds = time.perf_counter() - progress.started_s
    stages = dict(progress.stages_seen)
    if not progress.pairs or not any(seen.prompt_tokens for seen in stages.values()):
        return None
    key, path = _cache_entry(opened)
    rates = Rates(
        key=key,
        source=source,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=facts.dtype,
        rows=progress.pairs,
        seconds=seconds,
        stages=stages,
    )
    if path is None:
        return rates
    earlier = load_rates(opened)[0] if source == "probe" else None
    if earlier is None or earlier.source == "probe":
        with contextlib.suppress(RelabelError):
            write_json(path, asdict(rates))
    return rates


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """The rates of this job's model, labeler and device, and their source; where there are none, why, in words."""
    engine = opened.job.spec.engine
    if engine.args.sends_batches:
        return None, "batches are answered hours later, at no rate of their own"
    _, path = _cache_entry(opened)
    if path is None:
        return None, f"rates of engine {engine.name} are not kept; {PROBE_HINT}"
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


def _cache_entry(opened: OpenRun) -> tuple[dict[str, Any], Path | None]:
    """What rates hold for (model, engine with all that changes its speed, device, labeler), and their file; None where
    there is no model whose rates would be worth keeping, or where answers come hours later.
    """
    engine = opened.job.spec.engine
    key = {
        "model": opened.plan.facts.model,
        "engine": {
            "name": engine.name,
            "args": engine.args.model_dump(mode="json", exclude={"cache_dir", *PaidByToken.__annotations__}),
            "chat_template_kwargs": {name: value for name, value in engine.chat_template_kwargs.items() if name != DAY},
        },
        "device": device_names(),
        "labeler": opened.job.spec.labeler.name,
    }
    if not isinstance(engine.args, KeepsModels) or engine.args.sends_batches:
        return key, None
    folder = Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()
    return key, folder / "rates" / f"{digest_of(key)[:32]}.json"

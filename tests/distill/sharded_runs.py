"""Several trainings by the same processes, so that torch is imported once in each: `torchrun sharded_runs.py
PLAN.json`.

The plan is a list of entries: `spec`, and if wanted `start`, `die_at` (`after_training_step:5`: at its fifth hit),
`copies` (a folder that becomes the output before it starts), `signal_at` (the second process alone gets SIGTERM at that
step), `disagrees` (the second process sees other figures on dev) and `in_double` (see there). Each process writes what
it saw to `seen-<rank>.json` next to the plan.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import relabel.distill.students.distillation
from relabel.distill.students import networks
from relabel.distill.students.spec import DistillSpec
from relabel.distill.training.loop import Training
from relabel.manifests import failpoints
from relabel.manifests.files import Storage
from relabel.manifests.process import forget_interruptions, on_signal
from relabel.manifests.records import plain
from relabel.manifests.specs import validate_spec


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Weights in float64. In float32 AdamW's first steps, which have the same length whatever a gradient's size, make
    of a gradient of 1e-9 that should be 0 another training: one process under another ATEN_CPU_CAPABILITY is up to 2e-2
    from itself.
    """
    whole = networks.read_weights
    networks.read_weights = lambda *args, **options: whole(*args, **options).double()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        networks.read_weights = whole
        torch.set_default_dtype(torch.float32)


class Killed(BaseException):
    """Replaces a kill where the process has to continue."""


def shares(tensors: Iterable[Any]) -> tuple[int, int]:
    """Elements that lie in this process, and in all processes together."""
    found = [(one.to_local().numel() if isinstance(one, DTensor) else one.numel(), one.numel()) for one in tensors]
    return sum(own for own, _ in found), sum(in_all for _, in_all in found)


def moments(optimizer: Any) -> list[Any]:
    """An optimizer's tensors but its counts of steps."""
    return (
        [value for values in optimizer.state.values() for value in values.values() if value.dim()]
        if optimizer is not None
        else []
    )


def dying_at(place: str | None) -> Callable[[str], None]:
    """What replaces `failpoints.hit`."""
    wanted, _, count = (place or "").partition(":")
    hits: list[str] = []

    def hit(name: str) -> None:
        hits.append(name)
        if name == wanted and hits.count(name) == int(count or 1):
            raise Killed

    return hit


def go(entry: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    """One training, and what this process saw of it."""
    seen: dict[str, Any] = {"died": False}
    said: list[str] = []
    whole_train, whole_hit, whole_dev = (
        Training.run,
        failpoints.hit,
        relabel.distill.students.distillation.dev_figures,
    )

    def noting(training: Any, **options: Any) -> Any:
        outcome = whole_train(training, **options)
        seen.update(
            weights=shares(training.learner.model.parameters()),
            moments=shares(moments(training.optimizer)),
            best_step=outcome.facts.best_step,
        )
        return outcome

    def say(line: str) -> None:
        said.append(line)
        if not is_first and line.startswith(f"step {entry.get('signal_at')} of"):
            on_signal(signal.SIGTERM, None)

    def upside_down(*args: Any) -> dict[str, float]:
        return {name: -value for name, value in whole_dev(*args).items()}

    Training.run, failpoints.hit = noting, dying_at(entry.get("die_at"))  # type: ignore[method-assign]
    if entry.get("disagrees") and not is_first:
        relabel.distill.students.distillation.dev_figures = upside_down
    try:
        spec = validate_spec(DistillSpec, entry["spec"], where="the plan")
        if is_first and "copies" in entry:
            shutil.copytree(entry["copies"], spec.output)
        with in_double() if entry.get("in_double") else contextlib.nullcontext():
            report = relabel.distill.students.distillation.distill(
                spec, Storage(), start=entry.get("start", "new"), report=say, is_writer=is_first
            )
        seen["metrics"] = plain(report.manifest.metrics)
    except Killed:
        seen["died"] = True
    except KeyboardInterrupt:
        seen["stopped"] = True
    finally:
        forget_interruptions()
        Training.run, failpoints.hit = whole_train, whole_hit  # type: ignore[method-assign]
        relabel.distill.students.distillation.dev_figures = whole_dev
    return {**seen, "said": said}


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    found = [go(entry, is_first=rank == 0) for entry in json.loads(plan.read_text())]
    (plan.parent / f"seen-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()

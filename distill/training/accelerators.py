"""accelerate, as a training's spec has it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from relabel.distill.training.precision import is_on_cpu, precision_of
from relabel.distill.training.sections import TrainingSection


def make_accelerator(settings: TrainingSection) -> Accelerator:
    """Device, processes and precision of a training.

    Raises:
        ConfigError: fp16 without a GPU.
    """
    # accelerate keeps one state a process, and refuses a second training in another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=precision_of(settings), cpu=is_on_cpu(settings))

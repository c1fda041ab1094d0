"""How long a training takes, from what it computes and how fast this device does such sums: an interval that is wide,
costs a second, and loads no weights. Training some steps (`step_times.py`) tells it closer.
"""

# B examples or answers together, T tokens, D width of a model

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from distill.teachers.attempts import set_threads
from distill.teachers.bases import TeacherBase
from distill.teachers.specs import TeacherSpec, TeacherTraining
from distill.teachers.trainers import TrainingEstimate, TrainingTime
from distill.training.precision import is_on_cpu, precision_of

LEAST, MOST = 0.7, 4.0
"""How far a training may be from its large sums: answers end early, and norms, copies and the loop itself come on top.
Chosen by a few trainings of a small model on a busy CPU; benchmarks/training_time_holds.py tells how often they hold.
"""
TIMED_WEIGHTS = 1 << 24
"""More than a cache holds, so that they are read as a model's are; and of what they are multiplied with, enough."""
TURNS = 5


class DevicePace:
    """Seconds of a model's large sums, on the device and in the precision of its training."""

    def __init__(self, train: TeacherTraining, base: TeacherBase) -> None:
        text = base.config.get_text_config()
        self._layers, self._heads = int(text.num_hidden_layers), int(text.num_attention_heads)
        self._width = int(text.hidden_size)
        self._inner = int(getattr(text, "intermediate_size", None) or 4 * self._width)
        embedded = int(text.vocab_size) * self._width
        self._weights = base.num_weights or 0
        self._head = embedded
        self._body = max(0, self._weights - embedded * (1 if getattr(base.config, "tie_word_embeddings", False) else 2))
        self._device = torch.device("cpu" if is_on_cpu(train) else "cuda")
        self._dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision_of(train)]

    def product(self, tokens: int, answer_tokens: int) -> float:
        """All layers with so many tokens, and the head with those of answers."""
        matrices, size = self._matrices(self._dtype)

        def seconds(rows: int) -> float:
            timed = min(rows, max(1, TIMED_WEIGHTS // self._inner))  # more take as much longer, and memory
            x_TD = torch.ones(timed, self._width, device=self._device, dtype=self._dtype)
            return self._seconds(lambda: [x_TD @ one for one in matrices]) / size * rows / timed

        return self._body * seconds(tokens) + self._head * seconds(max(1, answer_tokens))

    def attention(self, examples: int, tokens: int) -> float:
        """All layers' attention of a batch to itself."""
        head = max(1, self._width // self._heads)
        timed = min(examples, max(1, TIMED_WEIGHTS // (tokens * self._width)))
        x_BHTD = torch.ones(timed, self._heads, tokens, head, device=self._device, dtype=self._dtype)
        seconds = self._seconds(lambda: scaled_dot_product_attention(x_BHTD, x_BHTD, x_BHTD))
        return self._layers * seconds * examples / timed

    def update(self) -> float:
        """A step of AdamW over all weights."""
        matrices, size = self._matrices(torch.float32)
        parameters = [torch.nn.Parameter(one) for one in matrices]
        for one in parameters:
            one.grad = torch.ones_like(one)
        return self._weights * self._seconds(torch.optim.AdamW(parameters).step) / size

    def _matrices(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
        """Some as a layer has them, and how many weights these are."""
        size = self._width * self._inner
        count = max(1, min(TIMED_WEIGHTS, self._weights) // size)
        return [
            torch.ones(self._width, self._inner, device=self._device, dtype=dtype) for _ in range(count)
        ], count * size

    def _seconds(self, work: Callable[[], Any]) -> float:
        found = []
        with torch.no_grad():
            for _ in range(TURNS + 1):  # the first loads kernels and makes buffers
                started = time.perf_counter()
                work()
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - started)
        return statistics.median(found[1:])


def expected_time(spec: TeacherSpec, base: TeacherBase, estimate: TrainingEstimate) -> TrainingTime | None:
    """By the sums of a training alone, every answer as long as it may be.

    Returns:
        None where the model's files do not tell its weights, it has no attention, or vLLM writes the answers.
    """
    rollouts, train = getattr(spec, "rollouts", None), spec.train
    has_heads = hasattr(base.config.get_text_config(), "num_attention_heads")
    if base.num_weights is None or not has_heads or (rollouts is not None and rollouts.vllm is not None):
        return None
    set_threads(train)
    pace = DevicePace(train, base)
    batches, updates = estimate.steps * train.accumulation, 1 if rollouts is None else rollouts.updates
    tokens, answers = (math.ceil(updates * all_of / batches) for all_of in (estimate.tokens, estimate.answer_tokens))
    batch = min(train.batch_size, estimate.examples)
    attention = pace.attention(batch, math.ceil(tokens / batch))
    forward = batches * (pace.product(tokens, answers) + attention)
    passes = 3 + train.gradient_checkpointing  # there, and twice as much back
    seconds = passes * forward + (estimate.steps * pace.update() if spec.lora is None else 0)
    if rollouts is not None:
        together = rollouts.at_once or train.batch_size * train.accumulation
        writing = estimate.answer_tokens / together * pace.product(together, together)
        seconds += writing + forward * (1 / updates + (rollouts.beta > 0))  # prompts, and the reference
    return TrainingTime(0, seconds, LEAST * seconds, MOST * seconds)

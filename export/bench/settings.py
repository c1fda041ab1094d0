"""What a bench carries through all its measurements: the bundle opened, the rows to ask about, the
time that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.export.bench.latency_facts import LatencyRow
from relabel.export.bench.plans import BenchModel, Budget
from relabel.export.bench.runners import Batch, OnnxRunner, Runner
from relabel.export.bench.specs import BenchSpec
from relabel.export.bench.workloads import TokenRow, Workload
from relabel.export.bundles import Bundle
from relabel.export.loader import AMX, HINTS, OPENVINO, Encoder, cpu_flags
from relabel.export.student_facts import StudentFacts
from relabel.manifests.errors import MissingExtraError
from relabel.manifests.extras import installed_versions

Say = Callable[[str], None]
Answer = Callable[[int, int], None]
"""A server's work: answers pairs from the first up to the second number."""
PROBE_ROWS = 8


@dataclass(frozen=True)
class Setting:
    """A bench under way.

    Args:
        student: what the bundle's manifest says of it.
        workload: rows whose lengths are replayed.
        threads: of the CPU, for each model.
        say: receives progress, a line each.
    """

    bundle: Bundle
    student: StudentFacts
    spec: BenchSpec
    encoder: Encoder
    workload: Workload
    budget: Budget
    threads: int
    say: Say

    @property
    def heads(self) -> list[str]:
        """Outputs to ask for."""
        return list(self.student.heads)

    @property
    def scope(self) -> str:
        """What the server's work covers: `texts`, or `tokens` where only lengths are known."""
        return "tokens" if self.workload.texts is None else "texts"

    @property
    def probe(self) -> Batch:
        """A small batch of real lengths."""
        return self.encoder.collate(self.workload.rows[:PROBE_ROWS])

    def open(self, model: BenchModel) -> tuple[BenchModel, Runner]:
        """Open a model on its provider, or on the CPU where onnxruntime falls back and that is allowed.

        Raises:
            MissingExtraError: it can't be opened there.
        """
        path = self.bundle.folder / model.path
        try:
            return model, OnnxRunner(
                path, model.provider, precision=model.precision, threads=self.threads, outputs=self.heads
            )
        except MissingExtraError:
            if model.provider == "cpu" or not self.spec.allows_fallback:
                raise
        self.say(f"{model.name}: not to be had here, so on the CPU")
        precision = "fp32" if model.provider == OPENVINO else model.precision  # what OpenVINO rounds is the fp32 file
        return BenchModel(model.asked, "cpu", precision, model.path), self.open_on_cpu(model.path)

    def open_on_cpu(self, path: str) -> Runner:
        """One of the bundle's graphs in onnxruntime on the CPU."""
        return OnnxRunner(self.bundle.folder / path, "cpu", threads=self.threads, outputs=self.heads)

    def server(self, run: Runner, workload: Workload, provider: str) -> Answer:
        """A server's work as the loader does it: tokenized where texts are known, batched by length, padded. Numbers
        wrap around.
        """
        encoder, count, batch_tokens = self.encoder, len(workload.rows), batch_tokens_on(provider)

        def answer(first: int, end: int) -> None:
            places = [place % count for place in range(first, end)]
            rows: Sequence[TokenRow]
            if workload.texts is None:
                rows = [workload.rows[place] for place in places]
            else:
                rows = encoder.encode([workload.texts[place] for place in places])
            for chosen in length_batches([len(ids) for ids, _ in rows], batch_tokens):
                run(encoder.collate([rows[place] for place in chosen]))

        return answer


@cache
def runtime_facts(provider: str, precision: str) -> dict[str, Any]:
    """Columns of a row about what ran a model: the runtime with its version, its precision hint, the CPU's AMX."""
    is_openvino = provider == OPENVINO
    here = installed_versions([OPENVINO] if is_openvino else ["onnxruntime", "onnxruntime-gpu"])
    return {
        "runtime": f"{OPENVINO if is_openvino else 'onnxruntime'} {next(iter(here.values()), '')}".rstrip(),
        "precision_hint": HINTS[precision] if is_openvino else None,
        "has_amx": AMX in cpu_flags(),
    }


def spoken_latency(row: LatencyRow) -> str:
    """A cell's or a rate's figures in a line of progress."""
    parts = [f"{name} {ms:,.2f} ms" for name, ms in (("p50", row.p50_ms), ("p99", row.p99_ms)) if ms is not None]
    waiting = [f"{row.unanswered:,} never answered"] if row.unanswered else []
    return ", ".join([*parts, f"{row.samples:,} samples", *waiting])

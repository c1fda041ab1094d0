"""`bench`: how fast a bundle answers, and how many requests it can serve."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs import log_format
from jobs.commands.ending import sigterm_ends
from jobs.commands.options import Number, output_option
from jobs.exits import Exit
from jobs.output import emit, table
from manifests.errors import UsageError
from manifests.storage.context import Storage

if TYPE_CHECKING:
    from export.bench.latency_facts import BenchFacts
    from export.bench.side_by_side import Against
    from export.student_facts import StudentFacts
    from manifests.metrics.gates import GateVerdict

TORCH = "torch"
SPEC_OPTIONS = (
    "providers",
    "precisions",
    "batches",
    "lengths",
    "rates",
    "max_batch",
    "max_wait_ms",
    "slo_ms",
    "threads",
    "seconds",
    "rounds",
    "seed",
)


@click.command(epilog="Example: relabel bench out/bundle --against torch --student out/ecom-bert --slo-ms 50")
@click.argument("bundle", metavar="BUNDLE")
@click.option(
    "--providers",
    default="auto",
    show_default=True,
    metavar="LIST",
    help="Of cpu, cuda, tensorrt; auto is cuda where it is.",
)
@click.option("--precisions", default="", metavar="LIST", help="Of those that the bundle has.  [default: all]")
@click.option(
    "--preset", "presets", default="grid", show_default=True, metavar="LIST", help="Of grid, table3, serving."
)
@click.option(
    "--pairs", metavar="PATH", help="Parquet with pairs to replay, instead of the lengths that the bundle records."
)
@click.option(
    "--against", multiple=True, metavar="[NAME=]SIDE", help="Compare with torch, or with another ONNX file. Repeatable."
)
@click.option("--student", metavar="STUDENT", help="The bundle's student, for --against torch.")
@click.option("--batches", default="1,8,32", show_default=True, metavar="LIST", help="Pairs of a closed-loop batch.")
@click.option(
    "--lengths", default="", metavar="LIST", help="Tokens of a pair.  [default: p50 and p99 of those replayed]"
)
@click.option(
    "--rates", default="", metavar="LIST", help="Requests/s to offer.  [default: shares of what the model can do]"
)
@click.option(
    "--slo-ms",
    type=Number(0, min_open=True),
    help="Find the highest rate that keeps p99 under this; of serving, where it is 150 by default, the mean as well.",
)
@click.option("--max-batch", type=click.IntRange(1), default=32, show_default=True, help="Pairs of a micro-batch.")
@click.option(
    "--max-wait-ms", type=Number(0), default=2.0, show_default=True, help="How long the oldest waits for company."
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, show_default=True, help="Of the CPU; 0 is all that it may use."
)
@click.option(
    "--seconds", type=Number(0, min_open=True), default=120.0, show_default=True, help="For all measuring together."
)
@click.option(
    "--rounds", type=click.IntRange(2), default=20, show_default=True, help="Rounds of a comparison, at least."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals and of what is replayed."
)
@click.option(
    "--require",
    multiple=True,
    metavar="GATE",
    help="Exit 5 unless this holds: 'cpu.int8/fp32.1x128.ratio<=0.7'. Repeatable.",
)
@click.option("--allow-fallback", is_flag=True, help="Measure on the CPU where a provider is missing, and report it.")
@click.option("--to", metavar="DIR", help="Write the results there and leave the bundle as it is.")
@output_option
@sigterm_ends()
def bench(
    bundle: str,
    presets: str,
    pairs: str | None,
    against: tuple[str, ...],
    student: str | None,
    require: tuple[str, ...],
    allow_fallback: bool,
    to: str | None,
    output: str,
    **options: Any,
) -> int:
    """Measure a bundle's latency, throughput and memory on this machine, and record it in the bundle, which gets
    a new version.

    Closed loop: batches by lengths, quantiles with 95 % intervals. Open loop: requests by a Poisson process with
    micro-batching, latency from the scheduled arrival. Comparisons take turns; their figure is the median of paired
    ratios. What makes figures doubtful is reported as a finding. docs/bench.md has the table's columns.
    """
    from export.bench.benching import bench_bundle
    from export.bench.latency_records import check_place, check_results_folder, put_into_bundle, write_to
    from export.bench.specs import BenchSpec
    from export.bundle_places import locked, put_back
    from export.bundles import open_bundle
    from export.student_facts import student_facts
    from jobs.report.bundle_page import with_latency
    from manifests.metrics.gates import judge_gates, parse_flag
    from manifests.records import plain
    from manifests.spec_faults import validate_spec

    gates = [parse_flag(text) for text in require]
    values = {name: options[name] for name in SPEC_OPTIONS}
    spec = validate_spec(
        BenchSpec, values | {"presets": presets, "allows_fallback": allow_fallback}, where="the options"
    )
    folder = _local(bundle, "BUNDLE").resolve()
    sides = _against(against, student)
    place = folder if to is None else _local(to, "--to")
    if to is None:
        check_place(folder)
    else:
        put_back(folder)
        check_results_folder(place, folder)
    with locked(folder) if to is None else nullcontext():
        opened = open_bundle(folder)
        described = student_facts(opened)
        texts = None if pairs is None else _texts(pairs, described, seed=spec.seed)
        measured = bench_bundle(
            opened, spec, pairs=texts, against=sides, gates=gates, say=lambda line: click.echo(line, err=True)
        )
        for finding in measured.facts.findings:
            text = f"finding ({finding.kind}) {finding.where}: {finding.text}"
            log_format.say(text, level="warning", event="finding", **finding._asdict())
        if to is None:
            opened = put_into_bundle(opened, measured, redraw=partial(with_latency, name=opened.name))
        else:
            write_to(place, measured)
    verdicts = judge_gates(gates, measured.figures, None)
    for verdict in verdicts:
        if not verdict.has_passed:
            log_format.say(f"gate {verdict}.", level="error", event="gate", **verdict.plain())
    code = Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE
    about = {
        "path": str(place),
        "version": opened.version,
        "exit_code": int(code),
        "gates": [verdict.plain() for verdict in verdicts],
    }
    emit({**about, **plain(measured.facts)}, _text(measured.facts, place, opened.version, verdicts), output)
    return code


def _against(sides: tuple[str, ...], student: str | None) -> Against:
    """What `--against` names.

    Raises:
        UsageError: torch without a student, a student without torch, or two sides of one name.
    """
    from export.bench.side_by_side import Against

    graphs: dict[str, Path] = {}
    for side in sides:
        if side == TORCH:
            continue
        name, equals, path = side.partition("=")
        found = Path(path if equals else side)
        name = name if equals else found.stem
        if name in graphs or name in (TORCH, "fp32"):
            raise UsageError(f"--against {side}: the name {name} is taken. Give it another: --against other={found}")
        graphs[name] = found
    if (TORCH in sides) != (student is not None):
        raise UsageError(
            "--against torch and --student go together: torch runs the student that the bundle was made of."
        )
    return Against(None if student is None else _local(student, "--student"), graphs)


def _texts(path: str, student: StudentFacts, *, seed: int) -> Sequence[tuple[str, str]]:
    from export.bench.workloads import MAX_ROWS
    from export.reference_pairs import PairsFile, draw_pairs, file_pairs

    found = file_pairs(PairsFile(path), student.inputs.columns, Storage(), grades=student.grades)
    return draw_pairs(found, MAX_ROWS, seed=seed)


def _local(path: str, name: str) -> Path:
    if "://" in path:
        raise UsageError(f"{name} {path}: a local folder is wanted; `relabel pull` fetches bundles.")
    return Path(path)


def _text(facts: BenchFacts, place: Path, version: str, verdicts: Sequence[GateVerdict]) -> str:
    from export.bench.latency_cards import cell_rows, comparison_rows, machine_line, rate_rows

    head = table([("results", str(place)), ("version", version)])
    grids = [_grid(rows) for rows in (cell_rows(facts), rate_rows(facts), comparison_rows(facts)) if len(rows) > 1]
    return "\n\n".join([head, machine_line(facts), *grids, *(str(verdict) for verdict in verdicts)])


def _grid(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

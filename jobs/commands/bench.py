"""`bench`: how fast a bundle answers, and how many requests it can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from relabel.export.bench import (
    MAX_ROWS,
    bench_bundle,
    check_place,
    latency_rows,
    machine_line,
    measurements_folder,
    warnings_of,
    write_results,
)
from relabel.export.bundle_facts import student_facts
from relabel.export.bundles import open_bundle, put_back
from relabel.export.parity import PairsFile, draw_pairs, file_pairs
from relabel.export.specs import BenchSpec
from relabel.jobs import logs
from relabel.jobs.commands.options import Number, local_folder, output_option, report_refused, sigterm_ends
from relabel.jobs.output import Exit, emit, grid
from relabel.manifests.files import Storage
from relabel.manifests.metrics.evaluation import parse_flag
from relabel.manifests.records import plain
from relabel.manifests.specs import validate_spec


@click.command(epilog="Example: relabel bench out/bundle --slo-ms 50 --seconds 60")
@click.argument("bundle", metavar="BUNDLE")
@click.option(
    "--providers",
    default="auto",
    show_default=True,
    metavar="LIST",
    help="Of cpu, cuda, tensorrt, openvino; auto is cuda where it is.",
)
@click.option("--precisions", default="", metavar="LIST", help="Of those that the bundle has.  [default: all]")
@click.option(
    "--pairs", metavar="PATH", help="Parquet with pairs to replay, instead of the lengths that the bundle records."
)
@click.option(
    "--shapes",
    default="1xreplay,8xreplay,32xreplay,1x128,32x128,1x384",
    show_default=True,
    metavar="LIST",
    help="Pairs x tokens of a closed-loop request; replay is real lengths.",
)
@click.option(
    "--rates", default="", metavar="LIST", help="Requests/s to offer.  [default: shares of what the model can do]"
)
@click.option(
    "--slo-ms",
    type=Number(0, min_open=True),
    help="Find the highest rate that keeps p99 under this.",
)
@click.option(
    "--slo-mean-ms", type=Number(0, min_open=True), help="Find the highest rate that keeps the mean under this."
)
@click.option(
    "--request-pairs", type=click.IntRange(1), default=1, show_default=True, help="Pairs of an open-loop request."
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
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals and of what is replayed."
)
@click.option(
    "--require",
    multiple=True,
    metavar="GATE",
    help="Exit 5 unless this holds: 'cpu.int8.1x128.p99_ms<=20'. Repeatable.",
)
@click.option("--to", metavar="DIR", help="Write the results there, with a table and a plot.")
@output_option
@sigterm_ends()
def bench(bundle: str, pairs: str | None, require: tuple[str, ...], to: str | None, output: str, **options: Any) -> int:
    """Measure a bundle's latency and throughput on this machine, and record it next to the bundle, which stays as it
    is.

    Closed loop: batches by lengths, quantiles with 95 % intervals. Open loop: requests by a Poisson process with
    micro-batching, latency from the scheduled arrival. docs/bench.md has the figures.
    """
    spec = validate_spec(BenchSpec, options, where="the options")
    gates = [parse_flag(text) for text in require]
    folder = local_folder(bundle, "BUNDLE").resolve()
    put_back(folder)
    opened = open_bundle(folder)
    place = measurements_folder(folder) if to is None else local_folder(to, "--to")
    check_place(place)
    texts: Sequence[tuple[str, str]] | None = None
    if pairs is not None:
        student = student_facts(opened)
        found = file_pairs(PairsFile(pairs), student.inputs.columns, Storage(), grades=student.grades)
        texts = draw_pairs(found, MAX_ROWS, seed=spec.seed)
    facts, verdicts = bench_bundle(opened, spec, pairs=texts, gates=gates, say=lambda line: click.echo(line, err=True))
    written = write_results(place, facts)
    for warning in warnings_of(facts):
        logs.say(warning, level="warning", event="bench")
    report_refused(verdicts)
    code = Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE
    result = {
        "path": str(written),
        "version": opened.version,
        "exit_code": int(code),
        "gates": plain(verdicts),
    }
    parts = [
        grid([("results", str(written)), ("version", opened.version)]),
        machine_line(facts),
        grid(latency_rows(facts)),
    ]
    return emit(result | plain(facts), "\n\n".join([*parts, *map(str, verdicts)]), output, code)

"""`bench`: how fast a bundle answers, and how many requests it can serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.options import Number, given_parameters, output_option, sigterm_ends
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.jobs.settings import SpecKind, read_settings, resolved
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage

if TYPE_CHECKING:
    from relabel.export.bench.records import BenchFacts
    from relabel.export.bundle_facts import StudentFacts
    from relabel.export.specs import BenchFile
    from relabel.manifests.metrics.gates import GateVerdict

TORCH = "torch"
BENCH = SpecKind("bench", (), "", "`relabel init --kind bench` writes a bench file to start from")


@click.command(epilog="Example: relabel bench out/bundle --against torch --student out/ecom-bert --slo-ms 50")
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
@click.option(
    "--allow-fallback",
    "allows_fallback",
    is_flag=True,
    help="Measure on the CPU where a provider is missing, and report it.",
)
@click.option("--to", metavar="DIR", help="Write the results there, with a table and plots.")
@output_option
@sigterm_ends()
def bench(bundle: str, output: str, **options: Any) -> int:
    """Measure a bundle's latency, throughput and memory on this machine, and record it beside the bundle, which stays
    as it is. A file in BUNDLE's place names the bundle and holds options (`relabel init --kind bench`).

    Closed loop: batches by lengths, quantiles with 95 % intervals. Open loop: requests by a Poisson process with
    micro-batching, latency from the scheduled arrival. Comparisons take turns; their figure is the median of paired
    ratios. What makes figures doubtful is reported as a finding. docs/bench.md has the table's columns.
    """
    from relabel.export.bench.benching import bench_bundle, check_results_folder, write_to
    from relabel.export.bench.comparisons import Against
    from relabel.export.bench.records import check_place, measurements_folder, write_measurements
    from relabel.export.bundle_facts import student_facts
    from relabel.export.bundles import open_bundle, put_back
    from relabel.manifests.metrics.gates import judge_gates, parse_flag
    from relabel.manifests.records import plain

    spec = _asked(bundle, options)
    gates = [parse_flag(text) for text in spec.require]
    sides = Against(
        None if spec.student is None else _local(spec.student, "--student"),
        {str(side.name): Path(side.path) for side in spec.against},
    )
    folder = _local(spec.bundle, "BUNDLE").resolve()
    put_back(folder)
    opened = open_bundle(folder)
    place = None if spec.to is None else _local(spec.to, "--to")
    if place is not None:
        check_results_folder(place, folder)
    check_place(place or measurements_folder(folder))
    described = student_facts(opened)
    texts = None if spec.pairs is None else _texts(spec.pairs, described, seed=spec.seed)
    measured = bench_bundle(
        opened, spec, pairs=texts, against=sides, gates=gates, say=lambda line: click.echo(line, err=True)
    )
    for finding in measured.facts.findings:
        text = f"finding ({finding.kind}) {finding.where}: {finding.text}"
        logs.say(text, level="warning", event="finding", **finding._asdict())
    if place is None:
        place = write_measurements(opened, measured.facts)
    else:
        write_to(place, measured)
    verdicts = judge_gates(gates, measured.figures, None)
    for verdict in verdicts:
        if not verdict.has_passed:
            logs.say(f"gate {verdict}.", level="error", event="gate", **verdict.plain())
    code = Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE
    about = {
        "path": str(place),
        "version": opened.version,
        "exit_code": int(code),
        "gates": [verdict.plain() for verdict in verdicts],
    }
    return emit(
        {**about, **plain(measured.facts)}, _text(measured.facts, place, opened.version, verdicts), output, code
    )


def _asked(target: str, options: dict[str, Any]) -> BenchFile:
    """What flags and, where there is one, a bench file say together.

    Raises:
        UsageError: torch without a student, a student without torch, or two sides of one name.
        ConfigError: the file can't be read, or a key or option is off.
    """
    from relabel.export.specs import BenchFile
    from relabel.manifests.specs import validate_spec

    flags = {**options, "against": [_side(text) for text in options["against"] if text != TORCH]}
    if (TORCH in options["against"]) != (options["student"] is not None):
        raise UsageError(
            "--against torch and --student go together: torch runs the student that the bundle was made of."
        )
    given = {name: flags[name] for name in given_parameters() if name in flags}
    if Path(target).is_file():
        held = read_settings(target, kind=BENCH._replace(fields=tuple(BenchFile.model_fields)))
        spec = resolved(validate_spec(BenchFile, held.values, where=target), held.places)
        spec = validate_spec(BenchFile, spec.model_dump() | given, where="the options")
    else:
        spec = validate_spec(BenchFile, {**flags, "bundle": target}, where="the options")
    names = [TORCH, "onnxruntime", "fp32", *(side.name or Path(side.path).stem for side in spec.against)]
    if taken := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--against: the name {taken} is taken. Give the file another: --against other=FILE")
    named = [side.model_copy(update={"name": name}) for side, name in zip(spec.against, names[3:], strict=True)]
    return spec.model_copy(update={"against": tuple(named)})


def _side(text: str) -> dict[str, str]:
    name, equals, path = text.partition("=")
    return {"name": name, "path": path} if equals else {"path": text}


def _texts(path: str, student: StudentFacts, *, seed: int) -> Sequence[tuple[str, str]]:
    from relabel.export.bench.plans import MAX_ROWS
    from relabel.export.parity import PairsFile, draw_pairs, file_pairs

    found = file_pairs(PairsFile(path), student.inputs.columns, Storage(), grades=student.grades)
    return draw_pairs(found, MAX_ROWS, seed=seed)


def _local(path: str, name: str) -> Path:
    if "://" in path:
        raise UsageError(f"{name} {path}: a local folder is wanted; `relabel pull` fetches bundles.")
    return Path(path)


def _text(facts: BenchFacts, place: Path, version: str, verdicts: Sequence[GateVerdict]) -> str:
    from relabel.export.bench.comparisons import cell_rows, comparison_rows, machine_line, rate_rows

    head = table([("results", str(place)), ("version", version)])
    grids = [_grid(rows) for rows in (cell_rows(facts), rate_rows(facts), comparison_rows(facts)) if len(rows) > 1]
    return "\n\n".join([head, machine_line(facts), *grids, *(str(verdict) for verdict in verdicts)])


def _grid(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

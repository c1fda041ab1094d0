"""A bundle's latency against torch eager and against optimum's own export of the same weights, and the goals that it is
held to.

    make test-optimum                                     # once: makes .venv-optimum
    python benchmarks/latency_minilm.py BUNDLE STUDENT
        --optimum .venv-optimum/bin/python [--pairs PAIRS] [--threads 2] [--seconds 240]

Two graphs of optimum's are made in its environment: `optimum`, the student through `relabel export --exporter optimum`,
whose backbone is optimum's and which answers what the bundle answers; and `optimum-backbone`, what optimum itself
writes for feature extraction: no pooling, no heads, the hidden states of every token copied out. Sides take turns on
one batch; a goal looks at the interval of the median of the paired ratios. Everything that `relabel bench` writes lies
in --to, and so do optimum's graphs, which are made once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from relabel.export.bench.benching import bench_bundle, write_to
from relabel.export.bench.comparisons import Against, cell_rows, comparison_rows, machine_line, rate_rows
from relabel.export.bench.plans import MAX_ROWS
from relabel.export.bench.records import ComparedModels
from relabel.export.bundle_facts import read_parity, student_facts
from relabel.export.bundles import Bundle, open_bundle
from relabel.export.parity import PairsFile, draw_pairs, file_pairs
from relabel.export.specs import BenchSpec
from relabel.manifests.files import Storage

NO_SLOWER = 1.05
"""The upper end of fp32's time over optimum's may be at most this."""
INT8_FASTER = 1.5
"""How many times as fast int8 is to be as fp32, for a single pair."""
BACKBONE = """
import sys
from pathlib import Path
from optimum.exporters.onnx.convert import onnx_export_from_model
from transformers import AutoModel

model = AutoModel.from_pretrained(sys.argv[1]).eval()
onnx_export_from_model(model, Path(sys.argv[2]), task="feature-extraction", do_validation=False)
"""
HEADS = "from relabel.jobs.cli import main; main()"


def optimum_graphs(python: Path, student: Path, work: Path, pairs: str | None) -> dict[str, Path]:
    """Optimum's graphs of a student's weights, made in its own environment unless they are there."""
    backbone, heads = work / "backbone", work / "heads"
    graphs = {"optimum": heads / "model.onnx", "optimum-backbone": backbone / "model.onnx"}
    if all(path.is_file() for path in graphs.values()):
        return graphs
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-P", "-c", BACKBONE, student, backbone], check=True, stdout=sys.stderr)
    line = [
        "export",
        str(student),
        "--to",
        str(heads),
        "--exporter",
        "optimum",
        "--provider",
        "cpu",
        "--set",
        "parity.min_pairs=200",
    ]
    subprocess.run(
        [python, "-P", "-c", HEADS, *line, *(["--pairs", pairs] if pairs else [])], check=True, stdout=sys.stderr
    )
    return graphs


def flips(bundle: Bundle) -> dict[str, float]:
    """Share of grades that a precision answers otherwise than the student, by the bundle's own parity; the worst batch
    size.
    """
    return {one.precision: one.flip_share for one in read_parity(bundle.facts["parity"], str(bundle.folder)).models}


def goals(comparisons: Sequence[ComparedModels], flip_share: dict[str, float]) -> list[str]:
    """A line a goal: reached or not, with the figures."""
    lines = []
    for one in comparisons:
        if (one.ours, one.theirs) == ("fp32", "optimum"):
            verdict = "reached" if one.high is not None and one.high <= NO_SLOWER else "NOT reached"
            ends = f"upper end {known(one.high, 3)} (by CPU time {known(one.cpu_high, 3)}), bound {NO_SLOWER}"
            lines.append(f"fp32 no slower than optimum's, {one.cell}: {verdict}, {ends}")
        if (one.ours, one.theirs) == ("int8", "fp32") and one.cell.startswith("1x"):
            faster = 1 / one.ratio
            low, high, by_cpu = (ratio and 1 / ratio for ratio in (one.high, one.low, one.cpu_ratio))
            is_sure = low is not None and low >= INT8_FASTER
            verdict = (
                "reached" if is_sure else "reached by the median alone" if faster >= INT8_FASTER else "NOT reached"
            )
            ends = f"{faster:.2f} times ({known(low, 2)} to {known(high, 2)})"
            flipped = f"by CPU time {known(by_cpu, 2)} times; {flip_share['int8']:.2%} of grades flip"
            lines.append(f"int8 {INT8_FASTER} times fp32, {one.cell}: {verdict}, {ends}, {flipped}")
    return lines


def known(figure: float | None, digits: int) -> str:
    """A figure, or that there is none: too few rounds, or too coarse a clock."""
    return "not known" if figure is None else f"{figure:.{digits}f}"


def shown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("student", type=Path)
    parser.add_argument("--optimum", type=Path, help="Python of an environment with the extra optimum")
    parser.add_argument(
        "--pairs", help="Parquet with pairs to replay, and for optimum's parity; the bundle's lengths by default"
    )
    parser.add_argument(
        "--sides", default="torch,optimum,optimum-backbone", help="what to compare with; fewer leave more time for each"
    )
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--to", type=Path, default=Path("out/latency"))
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    held = {name: getattr(args, name) for name in ("precisions", "threads", "seconds", "rounds", "slo_ms")}
    spec = BenchSpec(providers=("cpu",), **held)
    texts = None
    if args.pairs:
        student = student_facts(bundle)
        found = file_pairs(PairsFile(args.pairs), student.inputs.columns, Storage(), grades=student.grades)
        texts = draw_pairs(found, MAX_ROWS, seed=0)
    graphs = (
        optimum_graphs(args.optimum.absolute(), args.student, args.to / "optimum", args.pairs) if args.optimum else {}
    )
    sides = args.sides.split(",")
    against = Against(
        args.student if "torch" in sides else None, {name: path for name, path in graphs.items() if name in sides}
    )
    measured = bench_bundle(bundle, spec, pairs=texts, against=against, say=lambda line: print(line, file=sys.stderr))
    write_to(args.to, measured)
    facts = measured.facts
    print(machine_line(facts), end="\n\n")
    for rows in (cell_rows(facts), rate_rows(facts), comparison_rows(facts)):
        print(shown(rows), end="\n\n")
    for finding in facts.findings:
        print(f"finding ({finding.kind}) {finding.where}: {finding.text}")
    print(*goals(facts.comparisons, flips(bundle)), sep="\n")


if __name__ == "__main__":
    main()

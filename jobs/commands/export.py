"""`export`: a student becomes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs.commands.options import given_parameters, local_folder, output_option, sigterm_ends
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid
from relabel.jobs.score.students import local_student
from relabel.jobs.settings import lay_over
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage

if TYPE_CHECKING:
    from relabel.export.bundles import Bundle


@click.command(epilog="Example: relabel export out/ecom-bert --to out/bundle --precisions fp32,int8")
@click.argument("student", metavar="STUDENT")
@click.option("--to", required=True, metavar="BUNDLE", help="Folder to make.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["bundle", "hf", "rerank"]),
    default="bundle",
    show_default=True,
    help="Instead of a bundle, a folder for transformers and sentence-transformers: hf with a logit a grade, rerank "
    "with one a pair, for vLLM's and TEI's endpoints.",
)
@click.option(
    "--score",
    type=click.Choice(["expected-grade", "log-odds-relevant"]),
    default="expected-grade",
    show_default=True,
    help="What --format rerank answers: the expected grade from 0 to 1, or its log-odds.",
)
@click.option("--formats", default="onnx", show_default=True, metavar="LIST", help="onnx, and tensorrt where a GPU is.")
@click.option(
    "--precisions", default="fp32", show_default=True, metavar="LIST", help="Of fp32, fp16, bf16, int8, int8-static."
)
@click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where parity is tried.",
)
@click.option("--pairs", metavar="PATH", help="Parquet with pairs to compare on, instead of the student's test split.")
@click.option("--gold", metavar="COLUMN", help="Column of --pairs with trusted grades.")
@click.option("--gold-map", metavar="MAP", help="Bring them to the student's scale: 0=0,1=1,2=1,3=2")
@click.option("--logits", is_flag=True, help="Also raw logits, as outputs <head>_logits.")
@click.option("--triton", is_flag=True, help="Also a Triton model repository.")
@click.option("--licence", metavar="SPDX", help="What may be done with the bundle, for instance Apache-2.0.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key, for instance parity.min_pairs=500. Repeatable.",
)
@click.option("--replace", is_flag=True, help="Take the place of another bundle at --to.")
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the bundle is there already.")
@output_option
@sigterm_ends()
def export(
    student: str,
    to: str,
    form: str,
    score: str,
    provider: str,
    pairs: str | None,
    gold: str | None,
    gold_map: str | None,
    overrides: tuple[str, ...],
    replace: bool,
    done_ok: bool,
    output: str,
    **own: Any,
) -> int:
    """Export a student to a bundle: ONNX with calibrated probabilities, tokenizer, manifest, model card and a loader of
    its own.

    Every model is compared with the student on real pairs, alone and in batches. If a gate fails, the command lists the
    worst rows, makes no bundle and exits 5. docs/export.md has the gates.
    """
    if form != "rerank" and "score" in given_parameters():
        raise UsageError("--score belongs to --format rerank.")
    if form != "bundle":
        licence = own["licence"]
        return _export_hf(student, to, form, score, licence, is_replacing=replace, done_ok=done_ok, output=output)
    from relabel.export.exporting import export_bundle
    from relabel.export.parity import PairsFile
    from relabel.export.specs import ExportSpec
    from relabel.manifests.gold import parse_map
    from relabel.manifests.specs import validate_spec

    if pairs is None and (gold or gold_map):
        raise UsageError("--gold and --gold-map belong to --pairs; the student's test split has grades of its own.")
    spec = validate_spec(ExportSpec, lay_over(own, overrides), where="the options")
    source = None if pairs is None else PairsFile(pairs, gold, parse_map(gold_map, "--gold-map"))
    storage = Storage()
    folder = Path(local_student(student, storage))
    made, was_done = export_bundle(
        folder,
        _place(to),
        spec,
        storage,
        pairs=source,
        provider=provider,
        is_replacing=replace,
        say=lambda line: click.echo(line, err=True),
    )
    code = Exit.NOTHING_TO_DO if was_done and not done_ok else Exit.DONE
    result = {"path": str(made.folder), "version": made.version, "was_done": was_done, "exit_code": int(code)}
    keys = ("name", "heads", "models", "parity", "made_by")
    head = f"{'Nothing to do: this bundle is in' if was_done else 'The bundle is in'} {made.folder}"
    return emit({**result, **{key: made.facts[key] for key in keys}}, f"{head}\n{_text(made)}", output, code)


HF_OPTIONS = frozenset({"student", "to", "form", "score", "licence", "replace", "done_ok", "output"})


def _export_hf(
    student: str, to: str, form: Any, score: Any, licence: str | None, *, is_replacing: bool, done_ok: bool, output: str
) -> int:
    """A folder for transformers and sentence-transformers.

    Raises:
        UsageError: an option was given that a bundle alone has.
    """
    given = [option.opts[0] for name, option in given_parameters().items() if name not in HF_OPTIONS]
    if given:
        raise UsageError(
            f"{given[0]} belongs to bundles; --format {form} takes --to, --licence, --replace and --done-ok."
        )
    from relabel.export.huggingface import export_to_hub_folder

    place = _place(to)
    library, left_out, was_done = export_to_hub_folder(
        Path(local_student(student, Storage())),
        place,
        form,
        score=score,
        licence=licence,
        is_replacing=is_replacing,
        say=lambda line: click.echo(line, err=True),
    )
    code = Exit.NOTHING_TO_DO if was_done and not done_ok else Exit.DONE
    head = "Nothing to do: this student is in" if was_done else "The student is in"
    rows = [("loads with", f"{library}; README.md says how")]
    rows += [("left out", f"heads {', '.join(left_out)}")] if left_out else []
    result = {"path": str(place), "library": library, "left_out": left_out, "was_done": was_done}
    return emit({**result, "exit_code": int(code)}, f"{head} {place}\n{grid(rows)}", output, code)


@click.command(
    "build-engine", epilog="Example: relabel build-engine models/ecom/current --to models/ecom-engine --precision fp16"
)
@click.argument("bundle", metavar="BUNDLE")
@click.option("--to", required=True, metavar="BUNDLE", help="Folder to make: the bundle with the engine in it.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    default="fp16",
    show_default=True,
    help="bf16 only if this TensorRT chooses types itself.",
)
@click.option(
    "--capability",
    metavar="M.N",
    help="Build for this compute capability instead of the GPU here (TensorRT-RTX alone).",
)
@output_option
@sigterm_ends()
def build_engine(bundle: str, to: str, precision: str, capability: str | None, output: str) -> int:
    """Build a TensorRT engine of a bundle's ONNX, for this machine's GPU and TensorRT, into a bundle of its own.

    Its shape profile is tuned for the lengths that the student was tested on. The bundle's load.py takes an engine only
    where GPU and TensorRT are those that it was built with, and ONNX elsewhere. Without TensorRT the command exits 4.
    """
    from relabel.export.bundle_facts import EngineFile, student_facts
    from relabel.export.tensorrt_engines import build_into
    from relabel.manifests.records import plain

    made = build_into(local_folder(bundle, "BUNDLE"), _place(to), precision=precision, capability=capability)
    engine = student_facts(made).models[-1]
    assert isinstance(engine, EngineFile)  # the one that was built now
    _, (pairs, tokens), _ = engine.profile
    rows = [
        ("version", made.version),
        (
            "engine",
            f"{engine.files[-1]}, {engine.flavour} {engine.tensorrt}, compute capability {engine.capability}",
        ),
        ("tuned for", f"{pairs} pairs of {tokens} tokens"),
        ("parity", "not compared: run it where it serves before you trust it"),
    ]
    return emit(
        {"path": str(made.folder), "version": made.version, "engine": plain(engine)},
        f"The bundle is in {made.folder}\n{grid(rows)}",
        output,
    )


def _place(to: str) -> Path:
    """The folder to make; where it is a link, its target.

    Raises:
        UsageError: it is a URL, or has no name.
    """
    folder = local_folder(to, "--to")
    if not folder.name:
        raise UsageError(f"--to {to!r}: name a folder of its own, such as out/bundle: it is made next to its place.")
    return folder.resolve() if folder.is_symlink() else folder


def _text(bundle: Bundle) -> str:
    from relabel.export.bundle_facts import parity_rows, read_parity, student_facts, undecided_lines
    from relabel.export.bundles import MANIFEST_NAME
    from relabel.jobs.delivery import files_text

    parity = read_parity(bundle.facts.get("parity"), f"{bundle.folder}/{MANIFEST_NAME}")
    first = parity.models[0]
    weak = f", fewer than {parity.spec.min_pairs:,}: a weak result" if first.is_weak else ""
    rows = [
        ("version", f"{bundle.version}, {files_text(bundle.all_files)}"),
        ("heads", ", ".join(f"{name} {grades}" for name, grades in student_facts(bundle).heads.items())),
        ("compared on", f"{first.rows:,} pairs of {first.queries:,} queries, {parity.provider}{weak}"),
    ]
    return "\n".join([grid(rows), grid(parity_rows(parity)), *undecided_lines(parity)])

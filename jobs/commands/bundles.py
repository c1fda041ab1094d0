"""The commands over bundles: export, build-engine, bench, conform, publish, channel, rollback, list, show, gc."""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from relabel.export.bench import (
    MAX_ROWS,
    BenchFacts,
    bench_bundle,
    check_place,
    latency_rows,
    machine_line,
    measurements_folder,
    warnings_of,
    write_results,
)
from relabel.export.bundle_facts import compared_on, parity_rows, read_parity, student_facts, undecided_lines
from relabel.export.bundles import MANIFEST_NAME, Bundle, open_bundle, put_back
from relabel.export.conform import Conformity, RerankServer
from relabel.export.conform import conform as compare
from relabel.export.loader import BundleError, Encoder, read_manifest
from relabel.export.parity import PairsFile, draw_pairs, file_pairs
from relabel.export.publishing import (
    SETTLE_S,
    Moved,
    SigningKey,
    baselines_within_chance,
    bundle_in,
    bundles_in,
    collect,
    names_in,
    parse_address,
    roll_back,
    set_channel,
    version_in,
)
from relabel.export.publishing import publish as publish_bundle
from relabel.export.puller import ALTHOUGH
from relabel.export.specs import BenchSpec, ExportSpec
from relabel.export.tensorrt_engines import build_into
from relabel.jobs import logs
from relabel.jobs.audit import failed_audits
from relabel.jobs.commands.options import (
    Number,
    columns_option,
    given_parameters,
    local_folder,
    names_column_options,
    output_option,
    report_refused,
    sign_key_option,
    sigterm_ends,
)
from relabel.jobs.commands.pull import is_destination, show_destination
from relabel.jobs.output import Exit, Summary, TextResult, emit, grid, note, value_text
from relabel.jobs.run.stop import span_s
from relabel.jobs.score import local_student
from relabel.jobs.settings import lay_over
from relabel.jobs.transfers import TransferDisplay
from relabel.manifests.errors import ConfigError, InputError, ManifestError, ServerGoneError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import parse_map
from relabel.manifests.metrics.evaluation import GateVerdict, parse_flag
from relabel.manifests.records import as_object, plain
from relabel.manifests.secrets import counted, keep_secret, redacted
from relabel.manifests.specs import validate_spec
from relabel.manifests.store import LocalStore, Store, open_bundle_store

# ------------------------------------------------------------------------------
# `publish`, `channel`, `rollback`, `list`, `show` and `gc`: bundles in a store. `pull` has a file of its own.


anyway_option = click.option(
    "--anyway", is_flag=True, help="Point the channel at a student that is no better than a baseline, too."
)


@click.command(epilog="Example: relabel publish out/bundle s3://bucket/models --channel candidate")
@click.argument("bundle", metavar="BUNDLE")
@click.argument("url", metavar="URL")
@click.option("--channel", metavar="NAME", help="Point this channel at the version afterwards.")
@click.option("--name", metavar="NAME", help="Publish under this name.  [default: the bundle's own]")
@click.option("--version", metavar="ID", help="Call the version this.  [default: 16 digits of its manifest's sha256]")
@click.option(
    "--reread", is_flag=True, help="Read every object back, known ones too, and repair what is damaged in the store."
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Point the channel at a student that is no better than a baseline or failed its audit, too.",
)
@sign_key_option
@output_option
def publish(
    bundle: str,
    url: str,
    channel: str | None,
    name: str | None,
    version: str | None,
    reread: bool,
    anyway: bool,
    sign_key: str | None,
    output: str,
) -> int:
    """Publish a bundle: its files, each once, then its version, then the channel's pointer.

    Every file's digest is checked before and after it is uploaded. The same bundle again uploads nothing and exits 10.
    If it is killed or cut off, the same command does what is left. If another process moved the channel meanwhile, it
    exits 20. A channel is not pointed at a student that is no better than a baseline on its test split (a constant
    grade, BM25), or that failed a gate of `relabel audit`, unless --anyway is given: exit 5. What refuses it is kept
    with the version, and `channel set`, `show` and `pull` say it.
    """
    bundle_store = open_bundle_store(url, Storage())
    key = None if sign_key is None else SigningKey(sign_key)
    with TransferDisplay() as display:
        display("checking the bundle", 0)
        opened = open_bundle(local_folder(bundle, "BUNDLE"))
        done = publish_bundle(
            opened,
            bundle_store,
            display,
            name=name,
            version=version,
            channel=channel,
            key=key,
            rereads=reread,
            is_anyway=anyway,
            failed_audits=failed_audits(opened),
        )
    unclear = baselines_within_chance(opened.facts)
    if channel is not None and unclear:
        logs.write(
            f"{bundle}: on its test split the student is not shown to be better than a baseline: {'; '.join(unclear)}. "
            "More test queries would show it.",
            level="warning",
            event="publish",
        )
    code = Exit.DONE if done.has_changed else Exit.NOTHING_TO_DO
    result = {
        "url": bundle_store.url,
        "name": done.version.name,
        "version": done.version.at,
        "sha256": done.version.sha256,
        "objects": len(done.version.distinct_files),
        "uploaded": len(done.uploaded),
        "uploaded_bytes": sum(file.size_bytes for file in done.uploaded),
        "channel": channel,
        "sequence": done.channel.head["sequence"] if done.channel else None,
        "exit_code": int(code),
    }
    state = "published" if done.has_changed else "nothing to do, all of it is there"
    return emit(Summary(f"{bundle_store.url}/{done.version.name}: {state}", result), output, code)


# ------------------------------------------------------------------------------
# `channel` and `rollback`: which version a channel points to.


@click.group(epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
def channel() -> None:
    """Move a channel by hand."""


@channel.command("set", epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@click.argument("version", metavar="VERSION")
@anyway_option
@sign_key_option
@output_option
def channel_set(bundle: str, name: str, version: str, anyway: bool, sign_key: str | None, output: str) -> int:
    """Point a channel at a version that is published and whole.

    Exits 10 if it points there already, 20 if another process moved it meanwhile, and 5, as `publish` does, at a
    student that is no better than a baseline, unless --anyway is given.
    """
    bundle_store, bundle_name = _bundle_at(bundle)
    known = names_in(bundle_store, bundle_name, "channels")
    moved = set_channel(
        bundle_store,
        bundle_name,
        name,
        version,
        None if sign_key is None else SigningKey(sign_key),
        is_anyway=anyway,
    )
    if known and name not in known:
        note(f"{name} is a new channel, next to {', '.join(known)}")
    return _emit_move(bundle_store, moved, output, Exit.DONE if moved.has_moved else Exit.NOTHING_TO_DO)


@click.command(epilog="Example: relabel rollback s3://bucket/models/ecom stable")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@sign_key_option
@output_option
def rollback(bundle: str, name: str, sign_key: str | None, output: str) -> int:
    """Point a channel at the version that it pointed to before; again: one further back.

    Its sequence still rises, so all who follow it change too. To go back on one machine alone: relabel pull
    --rollback DEST.
    """
    bundle_store, bundle_name = _bundle_at(bundle)
    moved = roll_back(bundle_store, bundle_name, name, None if sign_key is None else SigningKey(sign_key))
    return _emit_move(bundle_store, moved, output, Exit.DONE)


def _emit_move(bundle_store: Store, moved: Moved, output: str, code: Exit) -> int:
    channel = moved.channel
    known = {key: channel.head[key] for key in ("version", "sequence", "reason")}
    if moved.version.refused_by:
        note(_remark(moved.version.about()))
    return emit(
        Summary(
            f"{channel.name}@{channel.at}: points to {known['version']}",
            {"url": bundle_store.url, "name": channel.name, "channel": channel.at, **known, "exit_code": int(code)},
        ),
        output,
        code,
    )


def _bundle_at(text: str) -> tuple[Store, str]:
    address = parse_address(text)
    if address.at is not None:
        raise click.UsageError(f"{text}: give URL/NAME without @{address.at} here.")
    return open_bundle_store(address.url, Storage()), address.name


# ------------------------------------------------------------------------------
# `list` and `show`: what a bundle store holds, and the active version of a folder.


@click.command("list", epilog="Example: relabel list s3://bucket/models")
@click.argument("url", metavar="URL")
@output_option
def list_bundles(url: str, output: str) -> int:
    """List the bundles that are published at a place, and where their channels point."""
    bundle_store = _open_existing(url)
    bundles = bundles_in(bundle_store)
    rows = []
    for bundle in bundles:
        pointers = [f"{channel['channel']} → {channel['version']}" for channel in bundle["channels"]]
        rows.append({**bundle, "channels": pointers})
    text = f"{bundle_store.url}: {counted(len(bundles), 'bundle')}\n{_table(('name', 'versions', 'channels'), rows)}"
    return emit(TextResult(text, {"url": bundle_store.url, "bundles": bundles}), output)


def _open_existing(url: str) -> Store:
    """The store at a place.

    Raises:
        InputError: a local folder that is not there, or that of one bundle; either would look empty.
    """
    bundle_store = open_bundle_store(url, Storage())
    if isinstance(bundle_store, LocalStore):
        root = Path(bundle_store.root)
        if not root.is_dir():
            raise InputError(f"{url}: no such folder.")
        if any(root.glob("versions/*.json")):
            raise InputError(f"{url}: no store, but a bundle of one. Give the store: {root.parent}")
    return bundle_store


def _table(keys: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    rows = [[value_text(record[key]) for key in keys] for record in records]
    return grid([keys, *rows])


@click.command(epilog="Example: relabel show s3://bucket/models/ecom@stable")
@click.argument("bundle", metavar="URL/NAME[@CHANNEL|@VERSION]|DEST")
@output_option
def show(bundle: str, output: str) -> int:
    """Show a bundle's versions and the history of its channels; with @, one version's files and facts; of a folder that
    was pulled to, its active version.

    Of DEST, every byte is read; exits 3 and names a file that is not what was pulled. Writes nothing and needs no
    network. --output json has all there is.
    """
    if is_destination(bundle):
        return show_destination(Path(bundle), output)
    if (Path(bundle) / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{bundle}: an output, which is in no bundle store. See it: relabel report {shlex.quote(bundle)}"
        )
    address = parse_address(bundle)
    bundle_store = open_bundle_store(address.url, Storage())
    if address.at is None:
        return emit(_shown_bundle(bundle_store.url, bundle_in(bundle_store, address.name)), output)
    return emit(_shown_version(bundle_store.url, address.name, version_in(bundle_store, address)), output)


def _shown_bundle(url: str, bundle: dict[str, Any]) -> TextResult:
    versions = _table(("version", "files", "size_bytes", "channels", "signed_by"), bundle["versions"])
    channels = _table(
        ("channel", "version", "sequence", "reason", "moved", "signed_by"),
        sorted(bundle["channels"], key=lambda channel: channel["moved"], reverse=True),
    )
    text = f"{url}/{bundle['name']}, newest first. All moves: --output json\n{versions}\n{channels}"
    text += "".join(f"\n{_remark(version)}" for version in bundle["versions"] if version["refused_by"])
    return TextResult(text, {"url": url, **bundle})


def _remark(version: dict[str, Any]) -> str:
    """What spoke against a version when it was published, in a line."""
    return f"version {version['version']} {ALTHOUGH}{'; '.join(version['refused_by'])}"


def _shown_version(url: str, name: str, version: dict[str, Any]) -> TextResult:
    facts = []
    for key, value in {**version, **version["facts"]}.items():
        if key == "signed_by" or not isinstance(value, dict | list):
            facts.append((key, value_text(value)))
    files = _table(("path", "size_bytes", "sha256"), version["list"])
    text = f"{url}/{name}: version {version['version']}. All of it: --output json\n{grid(facts)}\n{files}"
    if version["refused_by"]:
        text += f"\n{_remark(version)}"
    return TextResult(text, {"url": url, "name": name, **version})


# ------------------------------------------------------------------------------
# `gc`: versions and files that nothing points to.


@click.command(epilog="Example: relabel gc s3://bucket/models --delete")
@click.argument("url", metavar="URL")
@click.option("--delete", "deletes", is_flag=True, help="Do it; without, only say what would be done.")
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Last moves of a channel whose versions stay.",
)
@click.option(
    "--grace",
    default="7d",
    show_default=True,
    metavar="TIME",
    help="What is younger stays, for instance 12h or 30d.",
)
@output_option
def gc(url: str, deletes: bool, keep: int, grace: str, output: str) -> int:
    """Remove versions that no channel points to any more, and objects that no version names.

    In two steps: what is found gets a gc mark, and a gc that runs a day later (after --grace, if that is shorter)
    deletes it, so that no publisher loses what it is about to rely on.
    Never touched: what a channel or its last moves point to, and what is younger than the grace time.
    """
    bundle_store = _open_existing(url)
    grace_s = span_s(grace, "--grace")
    counts = collect(bundle_store, keep=keep, grace_s=grace_s, deletes=deletes)
    has_work = counts["marked"] or counts["deleted"] or counts["swept"]
    code = Exit.DONE if has_work or not deletes else Exit.NOTHING_TO_DO
    did = "nothing was touched. To do it: --delete"
    if deletes and counts["marked"]:
        wait = grace if grace_s < SETTLE_S else "a day"
        did = f"done. What is marked is deleted by the same command, {wait} or more after it was marked"
    elif deletes:
        did = "done" if has_work else "nothing to do"
    return emit(
        Summary(
            f"{bundle_store.url}: {did}",
            {"url": bundle_store.url, "dry_run": not deletes, **counts, "exit_code": int(code)},
        ),
        output,
        code,
    )


# ------------------------------------------------------------------------------
# `export`: a student becomes a bundle.


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
@click.option(
    "--formats",
    default="onnx",
    show_default=True,
    metavar="LIST",
    help="onnx, and tensorrt where a GPU is.",
)
@click.option(
    "--precisions",
    default="fp32",
    show_default=True,
    metavar="LIST",
    help="Of fp32, fp16, bf16, int8, int8-static; with --format hf and rerank, of fp32, fp16, int8.",
)
@click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where parity is tried.",
)
@click.option("--pairs", metavar="PATH", help="Parquet with pairs to compare on, instead of the student's test split.")
@columns_option("Columns of --pairs other than those the student was trained on.")
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
    columns: dict[str, Any],
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
        return _export_hf(
            student,
            to,
            form,
            score,
            own["licence"],
            precisions=own["precisions"] if "precisions" in given_parameters() else None,
            pairs=None if pairs is None else PairsFile(pairs, columns=columns),
            is_replacing=replace,
            done_ok=done_ok,
            output=output,
        )
    from relabel.export.exporting import export_bundle

    if pairs is None and (gold or gold_map or columns):
        raise UsageError(
            "--columns, --gold and --gold-map belong to --pairs; the student's test split has columns and grades of "
            "its own."
        )
    spec = validate_spec(ExportSpec, lay_over(own, overrides), where="the options")
    source = None if pairs is None else PairsFile(pairs, gold, parse_map(gold_map, "--gold-map"), columns)
    storage = Storage()
    folder = Path(local_student(student, storage))
    with names_column_options(are_options=source is not None):
        made, was_done = export_bundle(
            folder,
            _place(to),
            spec,
            storage,
            pairs=source,
            provider=provider,
            is_replacing=replace,
            report=lambda line: click.echo(line, err=True),
        )
    code = Exit.NOTHING_TO_DO if was_done and not done_ok else Exit.DONE
    return emit(ExportResult(made, was_done, code), output, code)


@dataclass(frozen=True)
class ExportResult:
    """A bundle, made now or earlier."""

    bundle: Bundle
    was_done: bool
    code: Exit

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        facts = self.bundle.facts
        return {
            "path": str(self.bundle.folder),
            "version": self.bundle.version,
            "was_done": self.was_done,
            "exit_code": int(self.code),
            "name": facts["name"],
            "heads": facts["heads"],
            "models": facts["models"],
            "parity": facts["parity"],
            "made_by": facts["made_by"],
        }

    def lines(self) -> list[str]:
        """The result for people."""
        bundle = self.bundle
        parity = read_parity(bundle.facts.get("parity"), f"{bundle.folder}/{MANIFEST_NAME}")
        head = "Nothing to do: this bundle is in" if self.was_done else "The bundle is in"
        about = f"version {bundle.version}, heads {', '.join(bundle.facts['heads'])}. {compared_on(parity)}"
        if parity.models[0].is_weak:
            about += f" Fewer than {parity.spec['min_pairs']:,}: a weak result."
        return [f"{head} {bundle.folder}", about, grid(parity_rows(parity)), *undecided_lines(parity)]


def _export_hf(
    student: str,
    to: str,
    form: Any,
    score: Any,
    licence: str | None,
    *,
    precisions: str | None,
    pairs: PairsFile | None,
    is_replacing: bool,
    done_ok: bool,
    output: str,
) -> int:
    """A folder for transformers and sentence-transformers.

    Args:
        precisions: of its graphs, with commas; None where none were named.
    Raises:
        UsageError: an option was given that a bundle alone has.
    """
    fitting = {
        "student",
        "to",
        "form",
        "score",
        "precisions",
        "pairs",
        "columns",
        "licence",
        "replace",
        "done_ok",
        "output",
    }
    given = [option.opts[0] for name, option in given_parameters().items() if name not in fitting]
    if given:
        raise UsageError(
            f"{given[0]} belongs to bundles; --format {form} takes --to, --precisions, --pairs, --columns, --licence, "
            "--replace and --done-ok."
        )
    from relabel.export.huggingface import export_to_hub_folder

    wanted = None
    if precisions is not None:
        wanted = validate_spec(ExportSpec, {"precisions": precisions}, where="the options").precisions
    target = _place(to)
    storage = Storage()
    with names_column_options(are_options=pairs is not None):
        made = export_to_hub_folder(
            Path(local_student(student, storage)),
            target,
            form,
            score=score,
            storage=storage,
            pairs=pairs,
            precisions=wanted,
            licence=licence,
            is_replacing=is_replacing,
            report=lambda line: click.echo(line, err=True),
        )
    code = Exit.NOTHING_TO_DO if made.was_done and not done_ok else Exit.DONE
    result = {
        "path": str(target),
        "library": made.library,
        "checks": [str(check) for check in made.checks],
        "graphs": {graph.path: graph.sha256 for graph in made.graphs},
        "left_out": made.left_out,
        "was_done": made.was_done,
    }
    return emit(
        Summary(
            f"{'Nothing to do: this student is in' if made.was_done else 'The student is in'} {target}",
            {**result, "exit_code": int(code)},
        ),
        output,
        code,
    )


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
    made = build_into(local_folder(bundle, "BUNDLE"), _place(to), precision=precision, capability=capability)
    return emit(
        Summary(
            "The engine was not compared: run it where it serves before you trust it.",
            {"path": str(made.folder), "version": made.version, "engine": plain(student_facts(made).models[-1])},
        ),
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


# ------------------------------------------------------------------------------
# The command `bench`: how fast a bundle answers, and how many requests it can serve.


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
@columns_option("Columns of --pairs other than those the student was trained on.")
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
    "--request-pairs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Pairs of an open-loop request.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Pairs of a micro-batch.",
)
@click.option(
    "--max-wait-ms",
    type=Number(0),
    default=2.0,
    show_default=True,
    help="How long the oldest waits for its batch.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of the CPU; 0 is all that it may use.",
)
@click.option(
    "--seconds",
    type=Number(0, min_open=True),
    default=120.0,
    show_default=True,
    help="For all measuring together.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of arrivals and of what is replayed.",
)
@click.option(
    "--require",
    multiple=True,
    metavar="GATE",
    help="Exit 5 unless this holds: 'cpu.int8.1xreplay.p99_ms<=20'. Repeatable.",
)
@click.option("--to", metavar="DIR", help="Write the results there, with a table and a plot.")
@output_option
@sigterm_ends()
def bench(
    bundle: str,
    pairs: str | None,
    columns: dict[str, Any],
    require: tuple[str, ...],
    to: str | None,
    output: str,
    **options: Any,
) -> int:
    """Measure a bundle's latency and throughput on this machine, and record it next to the bundle, which stays as it
    is.

    Closed loop: batches by lengths. Open loop: requests by a Poisson process with
    micro-batching, latency from the scheduled arrival. docs/bench.md has the figures.
    """
    spec = validate_spec(BenchSpec, options, where="the options")
    gates = [parse_flag(text) for text in require]
    folder = local_folder(bundle, "BUNDLE").resolve()
    put_back(folder)
    opened = open_bundle(folder)
    target = measurements_folder(folder) if to is None else local_folder(to, "--to")
    check_place(target)
    texts: Sequence[tuple[str, str]] | None = None
    if pairs is None and columns:
        raise UsageError("--columns belongs to --pairs, which is not given.")
    if pairs is not None:
        student = student_facts(opened)
        source = PairsFile(pairs, columns=columns)
        with names_column_options():
            named = file_pairs(source, student.inputs.columns, Storage(), grades=student.grades)
        texts = draw_pairs(named, MAX_ROWS, seed=spec.seed)
    facts, verdicts = bench_bundle(
        opened,
        spec,
        pairs=texts,
        gates=gates,
        write=lambda line: click.echo(line, err=True),
    )
    written = write_results(target, facts)
    for warning in warnings_of(facts):
        logs.write(warning, level="warning", event="bench")
    report_refused(verdicts)
    code = Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE
    return emit(BenchResult(written, opened.version, facts, verdicts, code), output, code)


@dataclass(frozen=True)
class BenchResult:
    """What a bench measured; `path` is the file of figures."""

    path: Path
    version: str
    facts: BenchFacts
    gates: list[GateVerdict]
    code: Exit

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            "path": str(self.path),
            "version": self.version,
            "exit_code": int(self.code),
            "gates": plain(self.gates),
            **as_object(self.facts),
        }

    def lines(self) -> list[str]:
        """The result for people."""
        parts = [
            grid([("results", str(self.path)), ("version", self.version)]),
            machine_line(self.facts),
            grid(latency_rows(self.facts)),
            *map(str, self.gates),
        ]
        return ["\n\n".join(parts)]


# ------------------------------------------------------------------------------
# The command `conform`: whether a running server answers as a bundle does.


@click.command(epilog="Example: relabel conform http://localhost:8080 out/bundle")
@click.argument("url", metavar="URL")
@click.argument("bundle", metavar="BUNDLE")
@click.option(
    "--api",
    type=click.Choice(["auto", "cohere", "tei", "vllm-score", "openai-score", "kserve-v2"]),
    default="auto",
    show_default=True,
    help="How the server is asked; auto is the first that answers. kserve-v2: the server's URL with --model, or one "
    "that ends in /infer.",
)
@click.option("--model", default="", metavar="NAME", help="The model's name at the server, where it wants one.")
@click.option("--api-key-env", metavar="NAME", help="The variable that holds the server's key.")
@click.option(
    "--watch",
    type=Number(1),
    metavar="SECONDS",
    help="Ask again this often, with a line of JSON each time, until the server answers otherwise.",
)
@click.option(
    "--require",
    type=click.Choice(["equal"]),
    help="Exit 5 unless the scores are equal: for those who compare them with a threshold.",
)
@output_option
def conform(
    url: str,
    bundle: str,
    api: str,
    model: str,
    api_key_env: str | None,
    watch: float | None,
    require: str | None,
    output: str,
) -> int:
    """Ask a running rerank server a bundle's reference pairs and some traps, and say whether it answers as the bundle
    does: equal; monotone, the same order on another scale; or different, with the mistake and the worst pairs.

    Exit 5: it answers differently. Exit 20: it can't be reached.
    """
    folder = local_folder(bundle, "BUNDLE")
    shown = redacted(url)
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"URL {shown}: a server's address begins with http:// or https://, say http://127.0.0.1:8080.")
    open_bundle(folder)
    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: that variable is not set.")
    if key:
        keep_secret(key, f"the value of {api_key_env}")
    try:
        encoder = Encoder(folder, read_manifest(folder)["inputs"])
    except BundleError as exc:
        raise ManifestError(str(exc)) from exc
    while True:
        try:
            server = RerankServer(url, api, model, key, encoder)
            if watch is None:
                conformity = compare(folder, server, partial(logs.write, event="conform"))
            else:
                conformity = compare(folder, server)
        except ServerGoneError as exc:
            if watch is None:
                raise
            result: dict[str, Any] = {"url": shown, "error": str(exc)}
            code = Exit.DONE
        else:
            result = {"url": shown, **as_object(conformity)}
            code = _code_of(conformity, require)
            if watch is None:
                text = _conformity_text(shown, conformity)
                return emit(TextResult(text, {**result, "exit_code": int(code)}), output, code)
        click.echo(json.dumps({"time": time.time(), **result}))
        if code is Exit.GATE:
            return code
        time.sleep(watch)


def _code_of(conformity: Conformity, require: str | None) -> Exit:
    if conformity.verdict == "different" or (require == "equal" and conformity.verdict != "equal"):
        return Exit.GATE
    return Exit.DONE


def _conformity_text(url: str, conformity: Conformity) -> str:
    reason = conformity.reason or "–"
    if conformity.explained is not None:
        reason += f" (explains {conformity.explained:.1%} of the squared differences)"
    rows = [
        ("asked", f"{counted(conformity.pairs, 'pair')} by {conformity.api}"),
        ("reason", reason),
        ("scores", conformity.scale),
        ("furthest", f"{conformity.max_difference:.2g} of a scale from 0 to 1"),
        ("same order", f"{conformity.tau:.4f} (Kendall's tau)"),
    ]
    rows += [("note", remark) for remark in conformity.remarks]
    text = f"{url}: {conformity.verdict}\n{grid(rows)}"
    if conformity.worst:
        text += "\n" + _table(("expected", "served", "kind", "query", "document"), conformity.worst)
    return text

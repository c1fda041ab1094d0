"""The command `conform`: whether a running server answers as a bundle does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

from relabel.export.bundles import open_bundle
from relabel.export.conform import Conformity
from relabel.export.conform import conform as compare
from relabel.export.huggingface import RerankServer
from relabel.export.loader import BundleError, Encoder, read_manifest
from relabel.jobs.commands.options import Number, local_folder, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid
from relabel.jobs.run.progress import Metric, check_metrics_file, write_metrics
from relabel.manifests.errors import ConfigError, InputError, ManifestError, ServerGoneError
from relabel.manifests.records import plain
from relabel.manifests.secrets import keep_secret, one_line, redacted


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
    "--metrics",
    metavar="FILE",
    help="Keep a Prometheus text file with the last answer, for node_exporter's textfile collector.",
)
@output_option
def conform(
    url: str,
    bundle: str,
    api: str,
    model: str,
    api_key_env: str | None,
    watch: float | None,
    metrics: str | None,
    output: str,
) -> int:
    """Ask a running rerank server a bundle's reference pairs and some traps, and say whether it answers as the bundle
    does: equal; monotone, the same order on another scale; or different, with the reason.

    Exit 5: it answers differently. Exit 20: it can't be reached.
    """
    folder = local_folder(bundle, "BUNDLE")
    labels = {"url": redacted(url), "version": open_bundle(folder).version}
    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: that variable is not set.")
    if key:
        keep_secret(key, f"the value of {api_key_env}")

    try:
        encoder = Encoder(folder, read_manifest(folder)["inputs"])
    except BundleError as exc:
        raise ManifestError(str(exc)) from exc

    def keep(found: Conformity | None) -> None:
        if metrics is not None and (why := write_metrics(Path(metrics), _metrics(found), labels)):
            click.echo(f"warning: {why}", err=True)

    if metrics is not None:
        check_metrics_file(Path(metrics))
    while True:
        try:
            found = compare(folder, RerankServer(url, api, model, key, encoder))
        except (InputError, ServerGoneError) as exc:
            keep(None)
            if watch is None or isinstance(exc, InputError):
                raise
            click.echo(json.dumps({"time": time.time(), "url": redacted(url), "error": str(exc)}))
        else:
            keep(found)
            code = Exit.GATE if found.verdict == "different" else Exit.DONE
            result = {"url": redacted(url), **plain(found)}
            if watch is None:
                return emit({**result, "exit_code": int(code)}, _text(redacted(url), found), output, code)
            click.echo(json.dumps({"time": time.time(), **result}))
            if code is Exit.GATE:
                return code
        time.sleep(watch)


def _metrics(found: Conformity | None) -> list[Metric]:
    """Args: found: None where the server did not answer."""
    up = ("relabel_conform_up", "1 where the server answered, and not by an error.", float(found is not None))
    if found is None:
        return [up]
    verdicts = {name: float(name == found.verdict) for name in ("equal", "monotone", "different")}
    return [
        up,
        ("relabel_conform_verdict", "1 for what the server's answers are to the bundle's.", ("verdict", verdicts)),
        ("relabel_conform_max_difference", "Largest difference of scores from 0 to 1.", found.max_difference),
        ("relabel_conform_tau", "Kendall's tau of server and bundle.", found.tau),
        ("relabel_conform_timestamp_seconds", "When the server answered.", time.time()),
    ]


def _text(url: str, found: Conformity) -> str:
    rows = [("asked", f"{found.pairs} pairs by {found.api}")]
    if found.reason:
        rows.append(("reason", found.reason))
    rows.append(("scores", found.scale))
    rows.append(("furthest", f"{found.max_difference:.2g} of a scale from 0 to 1"))
    rows.append(("same order", f"{found.tau:.4f} (Kendall's tau)"))
    rows += [("note", remark) for remark in found.remarks]
    text = f"{url}: {found.verdict}\n" + grid(rows)
    if found.scale_points:
        text += "\n" + grid([("expected", "served"), *((f"{a:.4f}", f"{b:.4f}") for a, b in found.scale_points)])
    if found.worst:
        shown = [(f"{one.expected:.4f}", f"{one.served:.4f}", one.kind, one_line(one.document)) for one in found.worst]
        text += "\n" + grid([("expected", "served", "", "document"), *shown])
    return text

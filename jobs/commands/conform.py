"""The command `conform`: whether a running server answers as a bundle does."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import click

from relabel.jobs.commands.options import Number, local_folder, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid, table
from relabel.manifests.errors import ConfigError, ManifestError, ServerGoneError
from relabel.manifests.secrets import keep_secret, one_line, redacted

if TYPE_CHECKING:
    from relabel.export.conform import Conformity


@click.command(epilog="Example: relabel conform http://localhost:8080 out/bundle")
@click.argument("url", metavar="URL")
@click.argument("bundle", metavar="BUNDLE")
@click.option(
    "--api",
    type=click.Choice(["auto", "cohere", "tei", "vllm-score", "openai-score", "kserve-v2"]),
    default="auto",
    show_default=True,
    help="How the server is asked; auto is the first that answers. kserve-v2: a URL that ends in /infer.",
)
@click.option("--model", default="", metavar="NAME", help="The model's name at the server, where it wants one.")
@click.option("--api-key-env", metavar="NAME", help="The variable that holds the server's key.")
@click.option(
    "--watch",
    type=Number(1),
    metavar="SECONDS",
    help="Ask again this often, with a line of JSON each time, until the server answers otherwise.",
)
@output_option
def conform(
    url: str, bundle: str, api: str, model: str, api_key_env: str | None, watch: float | None, output: str
) -> int:
    """Ask a running rerank server a bundle's reference pairs and some traps, and say whether it answers as the bundle
    does: equal; monotone, the same order on another scale; or different, with the reason.

    Exit 5: it answers differently. Exit 20: it can't be reached.
    """
    from relabel.export.bundles import open_bundle
    from relabel.export.conform import conform as compare
    from relabel.export.loader import BundleError, Encoder, read_manifest
    from relabel.export.rerank_servers import RerankServer
    from relabel.manifests.records import plain

    folder = local_folder(bundle, "BUNDLE")
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

    def ask() -> Conformity:
        return compare(folder, RerankServer(url, api, model, key, encoder))

    while watch is not None:
        try:
            found = ask()
            click.echo(json.dumps({"time": time.time(), "url": redacted(url), **plain(found)}))
            if found.verdict == "different":
                return Exit.GATE
        except ServerGoneError as exc:
            click.echo(json.dumps({"time": time.time(), "url": redacted(url), "error": str(exc)}))
        time.sleep(watch)
    found = ask()
    code = Exit.GATE if found.verdict == "different" else Exit.DONE
    return emit(
        {"url": redacted(url), **plain(found), "exit_code": int(code)}, _text(redacted(url), found), output, code
    )


def _text(url: str, found: Conformity) -> str:
    rows = [("asked", f"{found.pairs} pairs by {found.api}")]
    if found.reason:
        rows.append(("reason", found.reason))
    rows.append(("scores", found.scale))
    rows.append(("furthest", f"{found.max_difference:.2g} of a scale from 0 to 1"))
    rows.append(("same order", f"{found.tau:.4f} (Kendall's tau)"))
    rows += [("note", remark) for remark in found.remarks]
    text = f"{url}: {found.verdict}\n" + table(rows)
    if found.scale_points:
        text += "\n" + grid([("expected", "served"), *((f"{a:.4f}", f"{b:.4f}") for a, b in found.scale_points)])
    if found.worst:
        shown = [(f"{one.expected:.4f}", f"{one.served:.4f}", one.kind, one_line(one.document)) for one in found.worst]
        text += "\n" + grid([("expected", "served", "", "document"), *shown])
    return text

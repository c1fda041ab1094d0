"""Runs whose every text is made here, committed chunk by chunk as a worker does it, and a Chromium that says all that a
page did.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.labelers.graph_grpo import GraphGrpo
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import LabelRow, QuarantineRow
from relabel.manifests.plan import (
    ChunkId,
    FinishedRows,
    WorkFacts,
    commit_chunk,
    fingerprint_parts,
    shard_row_ids,
    write_plan,
)
from relabel.manifests.rows import make_plan, read_chunks
from relabel.manifests.run_folder import RunFolder, build_manifest
from relabel.manifests.run_labels import file_schema
from relabel.manifests.run_manifest import write_manifest
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import open_run_store
from tests.jobs.conftest import folder, no_scheduler, relabel, write_job  # noqa: F401

NODES = {column.name: column.kind for column in GraphGrpo.columns}

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FOREIGN_IMAGE = "img:not([src^='data:image/svg+xml;base64,'])"
START = datetime.fromisoformat("2026-11-20T01:00:00+00:00")
BAITS = (
    "</script><script>window.pwned=1;alert(1)</script>",
    '<img src=x onerror="window.pwned=1;alert(2)">',
    "'\"><svg onload=window.pwned=1><iframe src=javascript:parent.pwned=1>",
    "<!--<script>window.pwned=1//-->",
    "]]>{{7*7}}{% raw %}${window.pwned=1}",
    (
        "\u2028window.pwned=1\u2029\u202e<style>@import 'http://127.0.0.1:9/x'</style><link rel=stylesheet "
        "href=http://127.0.0.1:9/y>"
    ),
    '<a href="javascript:window.pwned=1">&lt;b&gt; &amp;amp; \x01\x1b[31m',
)


OWN = {**NODES, "tone": "string", "words": "list<string>"}
"""Columns of a forged run's labeler: those that the page draws as a graph, and others."""


@dataclass
class Judgment:
    """What a forged run says about one row: a label, or with `status` none."""

    grade: int = 0
    probs: Sequence[float] | None = (0.6, 0.3, 0.1)
    outside: float | None = 0.02
    evidence: Sequence[tuple[int, int, str]] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    intent: str | None = None
    reasoning: str | None = None
    flags: Sequence[str] = ()
    status: str = "ok"
    reason: str = ""
    tries: Sequence[str] = ()


@dataclass
class Seen:
    """All that a page did also showing itself."""

    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[str]:
        return [*self.console, *self.errors, *self.dialogs, *self.requests]


def forge_run(
    root: Path,
    pairs: Path,
    judge: Callable[[Any], Judgment],
    *,
    name: str = "forged",
    labeler: str = "r3a",
    chunk_rows: int = 64,
    seconds: float = 10.0,
    workers: Sequence[str] = ("node-1",),
    gold: str | None = None,
    spec: dict[str, Any] | None = None,
    is_finished: bool = True,
    family: str = "transformers",
    model: str = "made up",
    model_digest: str = "0" * 64,
) -> Path:
    """An output whose labels are what `judge` says of each pair, with receipts, and a manifest unless it is to be
    unfinished.

    Args:
        seconds: from one commit to the next, by the receipts' times; chunks go to `workers` in blocks.
    """
    columns = Columns(gold=gold)
    dataset = open_dataset(InputSpec(path=(str(pairs),), columns=columns), Storage())
    parts = fingerprint_parts(
        dataset,
        limit=None,
        overlong="truncate",
        labeler={"name": labeler, "grades": 3},
        label_columns=OWN,
        templates={},
        stages={"verdict": name},
        engine={"name": "fake"},
        model_digest="0" * 64,
        cut={"shards": 1, "chunk_rows": chunk_rows},
    )
    store = open_run_store(root, Storage())
    plan, plan_files = make_plan(dataset, parts, name=name, shards=1, chunk_rows=chunk_rows)
    write_plan(store, plan, plan_files)
    run = RunFolder(store, plan)
    count = len(plan.shards[0].chunks)
    row_ids = None if plan.shards[0].row_ids is None else shard_row_ids(store, plan.shards[0])
    for chunk, found in read_chunks(dataset, plan.shards[0], row_ids, range(count)):
        if not is_finished and chunk == count - 1:
            continue
        labels: list[LabelRow] = []
        quarantine: list[QuarantineRow] = []
        for pair in found:
            _add(judge(pair), pair, labels, quarantine)
        begun = START + timedelta(seconds=chunk * seconds)
        tokens = {
            "asks": len(found),
            "prompt_tokens": 100 * len(found),
            "cached_tokens": 60 * len(found),
            "output_tokens": 9 * len(found),
        }
        commit_chunk(
            store,
            ChunkId(0, chunk),
            FinishedRows(labels, quarantine, schema=file_schema(plan.parts)),
            WorkFacts(
                fingerprint=plan.fingerprint,
                stages={"verdict": tokens},
                seconds=seconds,
                engine={
                    "family": family,
                    "version": "1",
                    "model": model,
                    "model_digest": model_digest,
                    "device": "cpu",
                    "dtype": "float32",
                },
                worker=workers[chunk * len(workers) // count],
                epoch=0,
                started=begun.isoformat(),
                committed=(begun + timedelta(seconds=seconds)).isoformat(),
            ),
        )
    if is_finished:
        held = {
            "name": name,
            "input": {"path": [str(pairs)], "columns": columns.model_dump(mode="json")},
            "labeler": {"name": labeler},
            **(spec or {}),
        }
        manifest = build_manifest(run, run.snapshot(), spec=held, max_failed_fraction=0.5, relabel_version="0.1.0")
        write_manifest(store, manifest)
    return root


def _add(said: Judgment, pair: Any, labels: list[LabelRow], quarantine: list[QuarantineRow]) -> None:
    ids = (pair.row_id, pair.query_id, pair.doc_id)
    if said.status != "ok":
        tries = [
            {"stage": "verdict", "attempt": number, "finish": "stop", "text": text, "reason": said.reason}
            for number, text in enumerate(said.tries, start=1)
        ]
        quarantine.append(QuarantineRow(*ids, said.status, said.reason, tries, 100, 9))
        return
    expected = None if said.probs is None else sum(grade * p for grade, p in enumerate(said.probs))
    spans = [{"start": start, "end": end, "text": text} for start, end, text in said.evidence]
    labels.append(
        LabelRow(
            *ids,
            "ok",
            said.grade,
            said.probs,
            said.outside,
            expected,
            spans,
            said.intent,
            said.reasoning,
            list(said.flags),
            None,
            100,
            9,
            False,
            columns=said.columns,
        )
    )


class _Tables(HTMLParser):
    """Tables of a page by caption, and the texts for images, as they are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.plots: dict[str, str] = {}
        self._rows: list[list[str]] | None = None
        self._title = ""
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        if tag == "table":
            self._rows = self.tables.setdefault(str(held["aria-label"]), [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("th", "td") and self._rows is not None:
            self._rows[-1].append("")
        elif tag == "figcaption":
            self._title, self._is_title = "", True
        elif tag == "img":
            self.plots[self._title] = str(held["alt"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._rows = None
        elif tag == "figcaption":
            self._is_title = False

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self._title += data
        elif self._rows and self._rows[-1]:
            self._rows[-1][-1] += data.strip()


def tables_of(html: str) -> dict[str, list[list[str]]]:
    """The tables of a page by caption, their heads first."""
    page = _Tables()
    page.feed(html)
    return page.tables


def table_of(html: str, caption: str) -> list[list[str]]:
    """The rows of a table on a page, its head left out."""
    tables = tables_of(html)
    assert caption in tables, f"no {caption} in {list(tables)}"
    return tables[caption][1:]


def plots_of(html: str) -> dict[str, str]:
    """What each plot of a page shows, in words, by its title."""
    page = _Tables()
    page.feed(html)
    return page.plots


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def plain_pairs(queries: int, docs: int) -> list[dict[str, Any]]:
    """Pairs with a gold grade; `docs` documents a query."""
    return [
        {
            "query_id": f"q{query}",
            "query": f"red shoe {query}",
            "doc_id": f"d{query}-{doc}",
            "title": f"shoe {doc}",
            "body": f"a shoe of kind {query * docs + doc}, red and light",
            "grade": (query + doc) % 3,
        }
        for query in range(queries)
        for doc in range(docs)
    ]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium for the tests of a module; no longer, since its driver keeps an event loop in this thread,
    which others want.
    """
    path = os.environ.get("RELABEL_CHROMIUM") or next(
        (found for name in CHROMIUMS if (found := shutil.which(name))), None
    )
    if path is None:
        pytest.skip(
            "no Chromium here: `make browser` installs it where apt and root are, RELABEL_CHROMIUM names one elsewhere"
        )
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page is driven by playwright: pip install -e '.[dev]'"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., tuple[Any, Seen]]]:
    """`open_page(path, width=1400, scheme="light")`: the page, and what it did."""
    contexts = []

    def call(path: Path, *, width: int = 1400, scheme: str = "light") -> tuple[Any, Seen]:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page, seen = context.new_page(), Seen()
        page.on("console", lambda message: seen.console.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.errors.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (seen.dialogs.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        own = path.absolute().as_uri()
        page.on(
            "request",
            lambda request: seen.requests.append(request.url) if request.url.partition("#")[0] != own else None,
        )
        page.goto(own)
        return page, seen

    yield call
    for context in contexts:
        context.close()

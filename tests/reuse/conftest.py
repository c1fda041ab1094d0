"""Days of one job: an input that changes from day to day, an output for each day, the CLI in this process."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from relabel.jobs.cli import relabel
from relabel.jobs.output import exit_for
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Answer, Request
from relabel.manifests.errors import RelabelError
from relabel.manifests.labels import LABELS

Row = dict[str, Any]


def rows_of(queries: int, documents: int) -> list[Row]:
    """Queries of a few documents each, with context; texts differ from row to row."""
    return [
        {
            "query_id": f"q{query}",
            "query": f"blue wool socks {query}",
            "doc_id": f"d{query}-{document}",
            "document": f"Socks of wool in blue, pair {query} of kind {document}, warm and soft.",
            "context": [f"people who asked for {query} bought socks", "and shoes"],
        }
        for query in range(queries)
        for document in range(documents)
    ]


class Days:
    """Runs a job day by day in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def out(self, day: str) -> Path:
        return self.folder / day

    def job(self, day: str, rows: Sequence[Row], **changes: Any) -> Path:
        """Write a day's input and job file."""
        data = self.folder / f"{day}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), data)
        spec: dict[str, Any] = {
            "name": "socks",
            "input": {"path": str(data)},
            "labeler": {"name": "r3a"},
            "engine": {"name": "fake", "seed": 7},
            "output": str(self.out(day)),
            "shards": 2,
            "run": {"chunk_rows": 10},
        }
        for key, value in changes.items():
            spec[key] = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
        if "reuse" in spec:
            spec["reuse"] = [str(self.out(earlier)) for earlier in spec["reuse"]]
        path = self.folder / f"{day}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def call(self, *arguments: str | Path) -> tuple[int, Any]:
        """A command; its exit code, and its JSON result or its error's message."""
        try:
            found = CliRunner().invoke(
                relabel, [*map(str, arguments), "--output", "json"], standalone_mode=False, catch_exceptions=False
            )
        except RelabelError as exc:
            return int(exit_for(exc)), str(exc)
        return int(found.return_value or 0), json.loads(found.stdout)

    def run(self, day: str, rows: Sequence[Row], **changes: Any) -> dict[str, Any]:
        """A day's run, to its end, and `verify` after it."""
        job = self.job(day, rows, **changes)
        code, result = self.call("run", job)
        assert code == 0, result
        code, verified = self.call("verify", job)
        assert code == 0, verified
        return result

    def manifest(self, day: str) -> dict[str, Any]:
        return json.loads((self.out(day) / "manifest.json").read_bytes())

    def labels(self, day: str) -> list[Row]:
        """A finished day's labels in row order."""
        files = self.manifest(day)["labels"]
        rows = [row for file in files for row in pq.read_table(self.out(day) / file["path"]).to_pylist()]
        return sorted(rows, key=lambda row: row["row_id"])

    def asks(self, day: str) -> dict[str, int]:
        return {stage: counts["asks"] for stage, counts in self.manifest(day)["stages"].items()}

    def templates(self, name: str, **edits: tuple[str, str]) -> str:
        """A folder with r3a's templates of which some are edited: `verdict=("old words", "new words")`."""
        from relabel.labelers.prompts import BUILT_IN

        folder = self.folder / name
        folder.mkdir()
        for stem, (pattern, new) in edits.items():
            text = (BUILT_IN / "r3a" / f"{stem}.j2").read_text()
            changed = re.sub(pattern, new, text, count=1)
            assert changed != text
            (folder / f"{stem}.j2").write_text(changed)
        return str(folder)


@pytest.fixture
def days(tmp_path: Path) -> Days:
    return Days(tmp_path)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`spoil("kind 1", "kind 2")`: from here on the fake engine says nothing readable about documents with these words,
    and `spoil()` that it is well again.
    """
    spoilt: tuple[str, ...] = ()
    answer = Fake._answer

    def answered(self: Fake, request: Request, draw: int) -> Answer:
        found = answer(self, request, draw)
        if any(words in str(request.ask) for words in spoilt):
            found.text = "?"
        return found

    def choose(*words: str) -> None:
        nonlocal spoilt
        spoilt = words

    monkeypatch.setattr(Fake, "_answer", answered)
    return choose


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on a start of an engine fails the test."""

    def forbid() -> None:
        def start(*_: Any) -> Any:
            raise AssertionError("an engine was started")

        monkeypatch.setattr("relabel.jobs.run.label.start_runner", start)

    return forbid


LABEL = (
    "status",
    "grade",
    "probs",
    "outside_mass",
    "expected_grade",
    "evidence",
    "intent",
    "reasoning",
    "flags",
    "key",
)


def said(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What labels say, without whose rows they are and where they came from."""
    return [{name: row[name] for name in row if name in LABEL or name not in LABELS.names} for row in rows]

"""The README's picture is one of today's report."""

import re
from pathlib import Path
from typing import Any

from relabel.jobs.report.build import build_report
from relabel.manifests.files import Storage
from tests.report.conftest import Judgment, forge_run, plain_pairs, write_table

PICTURED = Path(__file__).parents[2] / "docs/images/report.txt"


def judged(pair: Any) -> Judgment:
    return Judgment(pair.row_id % 3, [(0.7, 0.2, 0.1), (0.2, 0.6, 0.2), (0.1, 0.1, 0.8)][pair.row_id % 3])


def test_a_run_with_gold_has_the_sections_that_are_pictured_in_their_order(tmp_path: Path) -> None:
    """Where it does not: `make picture` draws the page again."""
    pairs = write_table(tmp_path / "pairs.parquet", plain_pairs(24, 8))
    run = forge_run(
        tmp_path / "out",
        pairs,
        judged,
        gold="grade",
        spec={"input": {"path": [str(pairs)], "columns": {"gold": "grade"}}},
    )
    html = build_report([str(run)], Storage()).html
    sections = re.findall(r'<li><a href="#[a-z-]+">(.*?)</a></li>', html)
    pictured = PICTURED.read_text(encoding="utf-8").splitlines()
    assert [name for name in pictured if name in sections] == sections

"""The section of `relabel report` on audits: the verdict first, nothing of another judge's audit, and no text where
none is wanted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import table_of, tables_of

Relabel = Callable[..., Any]
JudgedBy = Callable[..., str]

FURTHEST = "the furthest"


@pytest.fixture
def page(relabel: Relabel) -> Callable[..., str]:
    """`page("--max-rows", "0")`: the report of out/ecom as HTML."""

    def write(*options: str) -> str:
        assert relabel("report", "out/ecom", "--to", "page.html", "--force", *options).code == 0
        return Path("page.html").read_text(encoding="utf-8")

    return write


def test_a_judge_that_is_fooled_is_named_first_with_its_probes(
    relabel: Relabel, judged_by: JudgedBy, page: Callable[..., str]
) -> None:
    job = judged_by("CountsWords")
    assert relabel("run", job).code == 0
    assert 'id="audit"' not in page()
    assert relabel("audit", job, "--require", "stuffing<=0.05").code == 5
    outcome = relabel("report", "out/ecom", "--to", "page.html", "--force")
    assert "ecom can be fooled. Pairs that a probe moves the wrong way: stuffing 83%" in outcome.out
    html = page()
    verdict = html.index("ecom can be fooled")
    assert html.index('<section id="verdict"') < verdict < html.index('<section id="ran"')
    assert "A gate refuses it: stuffing&lt;=0.05: refused" in html
    stuffing = next(row for row in table_of(html, "How the grades of ecom move") if row[0] == "stuffing")
    assert stuffing[4] == "0.8333"
    assert table_of(html, FURTHEST)[0][0] == "stuffing"
    assert FURTHEST not in tables_of(page("--max-rows", "0"))


def test_a_judge_that_is_not_fooled_is_said_to_be_so(
    relabel: Relabel, judged_by: JudgedBy, page: Callable[..., str]
) -> None:
    job = judged_by("ReadsGold")
    assert relabel("run", job).code == 0
    assert relabel("audit", job).code == 0
    assert "No probe is shown to move more than one pair in twenty of ecom the wrong way" in page()


def test_a_few_queries_give_no_verdict(relabel: Relabel, judged_by: JudgedBy, page: Callable[..., str]) -> None:
    job = judged_by("CountsWords")
    assert relabel("run", job).code == 0
    assert relabel("audit", job, "--rows", "2").code == 0
    assert "Whether ecom can be fooled is not known: 2 pairs of 2 queries are too few." in page()


def test_the_audit_of_another_prompt_is_not_shown_for_this_run(
    relabel: Relabel, judged_by: JudgedBy, page: Callable[..., str]
) -> None:
    job = judged_by("CountsWords")
    assert relabel("run", job).code == 0
    assert relabel("audit", job, "--set", "labeler.name=umbrela").code == 0
    html = page()
    assert "is not of this label run: labeler" in html
    assert "can be fooled" not in html


@pytest.mark.parametrize("damage", ["{}", "[", '{"judge": "an earlier relabel"}'])
def test_an_audit_that_can_not_be_read_does_not_cost_the_page(
    relabel: Relabel, judged_by: JudgedBy, page: Callable[..., str], folder: Path, damage: str
) -> None:
    job = judged_by("CountsWords")
    assert relabel("run", job).code == 0
    assert relabel("audit", job, "--probe", "padded").code == 0
    (folder / "out/measurements/ecom/audit/audit.json").write_text(damage, encoding="utf-8")
    html = page()
    assert "The audit of ecom is not shown" in html
    assert 'id="conservation"' in html

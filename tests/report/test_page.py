"""What holds of the page in a browser: hostile text stays text, nothing is asked of a network, it can be read and used
by everybody.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.evaluate.sides import JudgingOptions
from relabel.jobs.report.build import build_report
from relabel.jobs.report.page import render_page
from relabel.jobs.sections import Cell, Section, Table
from relabel.manifests.files import Storage
from tests.report.conftest import BAITS, FOREIGN_IMAGE, Judgment, forge_run, plain_pairs, write_table

EMOJI = "👟🔥 a réd shoe 𝒳 — light"
NODES = {
    "preliminary": 1,
    "preliminary_probs": [0.2, 0.5, 0.3],
    "preliminary_outside_mass": 0.1,
    "subject": 4,
    "subject_probs": [0.0, 0.0, 0.1, 0.1, 0.8],
    "subject_outside_mass": 0.0,
    "attribute": 1,
    "attribute_probs": [0.0, 0.7, 0.1, 0.1, 0.1],
    "attribute_outside_mass": 0.0,
    "query_subject": "shoe",
    "query_attribute": "red",
    "product_subject": "shoe",
    "product_attribute": None,
    "phi_grade": 0,
    "phi_agrees": False,
    "tone": "dry <b>",
    "words": ["red", "<i>shoe</i>"],
}


def bait(number: int) -> str:
    return BAITS[number % len(BAITS)]


def hostile_pairs() -> list[dict[str, Any]]:
    return [
        {
            "query_id": f"q{number // 4} {bait(number // 4)}",
            "query": f"query {number // 4} {bait(number // 4)}",
            "doc_id": f"d{number} {bait(number + 1)}",
            "title": f"{EMOJI} {bait(number + 2)}",
            "body": f"body {number} {bait(number + 3)}",
            "grade": number % 3,
        }
        for number in range(48)
    ]


def hostile_judgment(pair: Any) -> Judgment:
    number = pair.row_id
    if number % 8 == 7:
        status = ("format", "refused", "engine")[number // 8 % 3]
        return Judgment(status=status, reason=f"reason {bait(number)}", tries=[f"try {bait(number)}", ""])
    start = pair.document.index("shoe")
    evidence = [(start, start + 4, "shoe"), (0, 2, pair.document[:2])]
    probs = [(0.6, 0.3, 0.1), (0.1, 0.8, 0.1), (0.2, 0.2, 0.6)][number % 3]
    return Judgment(
        number % 3, probs, 0.2, evidence, NODES, bait(number), f"reasoning {bait(number)}", ["evidence_unneeded"]
    )


@pytest.fixture
def report(relabel: Callable[..., Any], folder: Path) -> Callable[..., Path]:
    """`report(*paths, flags)`: the page that the command wrote."""

    def call(*arguments: str) -> Path:
        done = relabel("report", *arguments, "--to", "report.html", "--output", "json")
        assert done.code == 0, done
        return folder / "report.html"

    return call


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose every text tries to run: names, paths, ids, texts, answers, reasons, the spec."""
    folder = tmp_path_factory.mktemp("hostile")
    pairs = write_table(folder / "</script><script>window.pwned=1<" / "pairs'\"<b>.parquet", hostile_pairs())
    name = f"run {BAITS[0]} $x$ \\frac"
    one = forge_run(
        folder / "out <img src=x onerror=pwned=1>",
        pairs,
        hostile_judgment,
        name=name,
        chunk_rows=8,
        gold="grade",
        spec={"note": BAITS[1]},
    )
    other = forge_run(
        folder / "other", pairs, lambda pair: Judgment((pair.row_id + 1) % 3), name=f"other {BAITS[1]}", chunk_rows=8
    )
    page = folder / "report.html"
    page.write_text(
        build_report([str(one), str(other)], Storage(), gold=JudgingOptions(str(pairs))).html,
        encoding="utf-8",
        errors="replace",
    )
    return page


def test_hostile_texts_run_nowhere_and_ask_nobody(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, seen = open_page(hostile)
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    for number in range(page.locator(".rows .head").count()):
        page.locator(".rows .head").nth(number).click()
    for word in ("window.pwned", "</script>", "<img", "\u2028"):
        page.locator("#find").fill(word)
        page.wait_for_timeout(100)
    page.locator("#find").fill("")
    page.locator("#theme").click()
    page.wait_for_timeout(300)
    assert page.evaluate("'pwned' in window") is False
    assert seen.all == []
    # our style, the rows, our script
    assert page.locator(f"script, iframe, {FOREIGN_IMAGE}, link, object, embed, style").count() == 3
    assert page.locator("[onerror], [onload], [style], a[href^='javascript:']").count() == 0
    shown = page.locator("main").inner_text()
    assert BAITS[1] in shown
    assert "reason " + BAITS[0] in shown


def test_policy_refuses_a_script_that_got_in_all_the_same(
    hostile: Path, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    """The second wall: markup put into the finished file, as if something had not been escaped."""
    broken = tmp_path / "broken.html"
    holes = (
        "<script>window.pwned=1</script><img src=http://127.0.0.1:9/x onerror='window.pwned=1'><p style='color:red'>"
    )
    broken.write_text(hostile.read_text(encoding="utf-8").replace("</main>", f"{holes}</main>"), encoding="utf-8")
    page, seen = open_page(broken)
    page.wait_for_timeout(300)
    assert page.evaluate("'pwned' in window") is False
    assert len(seen.console) >= 3
    assert all("Content Security Policy" in line for line in seen.console)
    assert (
        page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return 'set' } catch (error) { return error.name } }"
        )
        == "TypeError"
    )


def test_evidence_after_emoji_is_marked_where_it_is(hostile: Path, open_page: Callable[..., Any]) -> None:
    """Spans count code points; an emoji is two of JavaScript's units."""
    page, _ = open_page(hostile)
    page.locator(".rows .head").first.click()
    assert page.locator(".rows mark").all_inner_texts() == ["👟🔥", "shoe"]
    text = page.locator(".rows [aria-label=document]").first.evaluate("one => one.textContent")
    assert text.startswith(EMOJI)


def test_opened_row_shows_reasoning_nodes_and_distributions(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile)
    head = page.locator(".rows .head").nth(1)
    head.click()
    row = page.locator(".rows > li").nth(1)
    assert head.get_attribute("aria-expanded") == "true"
    assert "reasoning " + BAITS[1] in row.inner_text()
    others = row.locator("[aria-label='columns of its labeler']").evaluate("one => one.textContent")
    assert "tone: dry <b>\nwords: red,<i>shoe</i>" in others
    assert "phi_grade: 0" in others
    assert row.locator("svg[aria-label^='0: 0.000, 1: 0.000, 2: 0.100, 3: 0.100, 4: 0.800']").count() == 1
    assert row.locator("svg[aria-label^='0: 0.100, 1: 0.800, 2: 0.100, outside: 0.200']").count() == 1
    head.click()
    assert row.locator(".open").count() == 0


def test_filters_keep_what_they_say(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile)
    rows = json.loads(page.locator("#rows").inner_text())["rows"]

    def found(**settings: str) -> int:
        page.locator("#filters [type=reset]").click()
        for name, value in settings.items():
            field = page.locator(f"#{name.replace('_', '-')}")
            if field.evaluate("one => one.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        page.wait_for_timeout(150)
        return int(page.locator("#found").inner_text().split()[0])

    assert found() == len(rows) == 96
    assert found(by_status="refused") == sum(row["status"] == "refused" for row in rows) == 2
    assert found(by_grade="2") == sum(row.get("grade") == 2 for row in rows)
    assert found(by_run="1") == 48
    assert found(by_gold="differs") == sum("grade" in row and row["grade"] != row["gold"] for row in rows) > 0
    assert found(by_gold="agrees") == sum("grade" in row and row["grade"] == row["gold"] for row in rows) > 0
    assert found(low="0.9") == sum(row.get("entropy", -1) >= 0.9 for row in rows)
    assert found(high="0.7") == sum(row.get("entropy", 9) <= 0.7 for row in rows)
    assert found(find="BODY 17 ") == 2
    assert found(find="no such words") == 0


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_shows_itself_on_a_phone_and_a_desk_in_dark_and_light(
    hostile: Path, open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    import numpy as np

    page, _ = open_page(hostile, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out to the side
    assert page.evaluate(
        "[...document.querySelectorAll('figure img')].every(one => one.complete && one.naturalWidth > 0)"
    )
    page.locator("figure img").first.scroll_into_view_if_needed()
    shot = np.asarray(image.open(io.BytesIO(page.screenshot())).convert("RGB")).reshape(-1, 3)
    ground = (248, 247, 244) if scheme == "light" else (20, 22, 26)
    card = (255, 255, 255) if scheme == "light" else (28, 31, 37)
    for colour, least in ((ground, 0.02), (card, 0.05), ((15, 111, 128), 0.001)):
        assert (shot == colour).all(axis=1).mean() > least, colour
    assert shot.std() > 10


TALL = """() => [...document.querySelectorAll('.scroll')].flatMap(box => [...box.querySelectorAll('tr')].filter(row => {
    const height = cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getBoundingClientRect().height;
    };
    const seen = [...row.cells].filter(cell => cell.getBoundingClientRect().left < box.getBoundingClientRect().right);
    return row.offsetHeight > Math.max(...seen.map(height)) + 30;
}).map(row => row.innerText)).filter(text => text)"""
"""Rows that are taller than what is in sight of them without scrolling."""


def test_no_row_of_a_table_is_tall_and_empty_on_a_phone(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    head = ("run", "labels", "judged", "without a gold grade", "with a null one", "queries", "joined by")
    rows: list[list[Cell]] = [[name, 96, 96, 0, 0, 12, "query_id and doc_id, row_id"] for name in ("one", "two")]
    page = tmp_path / "page.html"
    page.write_text(render_page("a", "b", [Section("gold", "Gold", [Table("What was judged", head, rows)])]))
    opened, _ = open_page(page, width=400)
    assert opened.evaluate("document.querySelectorAll('.scroll tr').length") == 3
    assert opened.evaluate(TALL) == []


def test_button_turns_dark_into_light(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(20, 22, 26)"
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(248, 247, 244)"
    assert page.locator("#theme").inner_text() == "Dark"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_axe_finds_no_violation(hostile: Path, open_page: Callable[..., Any], scheme: str, width: int) -> None:
    page, _ = open_page(hostile, scheme=scheme, width=width)
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    for number in range(3):
        page.locator(".rows .head").nth(number).click()
    script = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))  # by the debugger, which the page's policy does not bind
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_keyboard_alone_reaches_and_opens_everything(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(400):
        page.keyboard.press("Tab")
        where = page.evaluate(
            "() => { const one = document.activeElement, link = (one.getAttribute('href') || '').slice(0, 9);"
            "return one.id || one.className || one.tagName.toLowerCase() + link }"
        )
        reached.add(where)
        if where == "head":
            break
    assert {
        "theme",
        "a#ran",
        "summary",
        "scroll",
        "find",
        "by-status",
        "by-grade",
        "by-gold",
        "low",
        "high",
        "order",
        "head",
    } <= reached
    page.keyboard.press("Enter")
    assert page.locator(".rows .open").count() == 1
    page.locator("#by-status").focus()
    page.keyboard.type("format")
    page.wait_for_timeout(100)
    assert page.locator("#found").inner_text().startswith("2 of")


def test_paper_gets_everything_open_and_no_controls(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile, scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("details:not([open])").count() == 0
    for hidden in (".toc", "#filters", "#theme"):
        assert not page.locator(hidden).is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"


def test_five_thousand_rows_are_filtered_at_once(
    report: Callable[..., Path], folder: Path, open_page: Callable[..., Any]
) -> None:
    words = [
        "light",
        "red",
        "shoe",
        "runner",
        "who",
        "wants",
        "to",
        "go",
        "far",
        "home",
        "again",
        "any",
        "weather",
        "there",
        "is",
    ]
    rows = [
        {**row, "body": " ".join(words[(number + at) % len(words)] for at in range(120))}
        for number, row in enumerate(plain_pairs(500, 10))
    ]
    pairs = write_table(folder / "pairs.parquet", rows)
    out = forge_run(
        folder / "out", pairs, lambda pair: Judgment(pair.row_id % 3, reasoning=" ".join(words * 2)), chunk_rows=250
    )
    page, seen = open_page(report(str(out)))
    assert page.locator("#found").inner_text().startswith("5,000 of 5,000")
    page.evaluate("performance.clearMeasures()")
    for word in ("runner", "runner weather", "d42-", "nothing has this", ""):
        page.locator("#find").fill(word)
        page.wait_for_timeout(150)
    page.locator("#order").select_option("entropy")
    page.locator("#by-grade").select_option("1")
    times = page.evaluate("performance.getEntriesByName('filter').map(one => one.duration)")
    print(f"filter over 5,000 rows: {', '.join(f'{ms:.1f}' for ms in times)} ms")
    assert len(times) == 7
    assert sorted(times)[len(times) // 2] < 100  # 3 ms where the core is free: benchmarks/report_cpu_2026-11-20.md
    assert max(times) < 1000  # on a busy machine one of them may find the core taken
    assert seen.all == []

"""What holds of the page in a browser: hostile text stays text, nothing is asked of a network, it can be read and used
by everybody.
"""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.evaluate import JudgingOptions
from relabel.jobs.report.build import build_report
from relabel.manifests.files import Storage
from tests.report.conftest import BAITS, FOREIGN_IMAGE, Judgment, forge_run, write_table

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
    page.locator("#find").fill("</script>")
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


OUTSIDE = """() => {
  const box = document.documentElement.getBoundingClientRect();
  const isIn = (one) =>
    one.left >= box.left && one.top >= box.top && one.right <= box.right && one.bottom <= box.bottom;
  const texts = [...document.querySelectorAll("text")].filter((text) => !isIn(text.getBoundingClientRect()));
  return texts.map((text) => text.textContent);
}"""


def test_all_text_of_a_plot_is_inside_it(hostile: Path, open_page: Callable[..., Any], tmp_path: Path) -> None:
    plots = re.findall("data:image/svg[+]xml;base64,([^\"']+)", hostile.read_text(encoding="utf-8"))
    assert len(plots) >= 4
    for number, plot in enumerate(plots):
        file = tmp_path / f"plot-{number}.svg"
        file.write_bytes(base64.b64decode(plot))
        page, _ = open_page(file)
        assert page.locator("text").count() > 8
        assert page.evaluate(OUTSIDE) == []


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
    assert found(by_run="1") == 48
    assert found(by_gold="differs") == sum("grade" in row and row["grade"] != row["gold"] for row in rows) > 0
    assert found(low="0.9") == sum(row.get("entropy", -1) >= 0.9 for row in rows)
    assert found(find="BODY 17 ") == 2


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1400, "light")])
def test_page_shows_itself_on_a_phone_and_a_desk_in_dark_and_light(
    hostile: Path, open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    page, _ = open_page(hostile, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out to the side
    wider = "element => element.scrollWidth > element.clientWidth + 1"
    if width == 400:
        assert not any(table.evaluate(wider) for table in page.locator(".scroll:has(.many)").all())
    assert page.evaluate(
        "[...document.querySelectorAll('figure img')].every(one => one.complete && one.naturalWidth > 0)"
    )
    ground = "rgb(248, 247, 244)" if scheme == "light" else "rgb(20, 22, 26)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_axe_finds_no_violation(hostile: Path, open_page: Callable[..., Any]) -> None:
    page, _ = open_page(hostile, scheme="dark", width=400)
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    for number in range(3):
        page.locator(".rows .head").nth(number).click()
    script = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))  # by the debugger, which the page's policy does not bind
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20

"""What the page says: every number is one of the run's own, what is missing is reported, and nothing of it depends on
chance.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.evaluate import JudgingOptions
from relabel.jobs.report.artifacts import open_artifact
from relabel.jobs.report.build import WORST, browser_json, build_report
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from tests.report.conftest import Judgment, forge_run, plain_pairs, plots_of, table_of, tables_of, write_table


def rows_of(html: str) -> list[dict[str, Any]]:
    """The browser's rows as the page's script reads them."""
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    rows = json.loads(found[1])["rows"]
    assert isinstance(rows, list)
    return rows


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """24 queries of 8 documents."""
    return write_table(tmp_path / "pairs.parquet", plain_pairs(24, 8))


def mixed(pair: Any) -> Judgment:
    """Three of four rows are labelled; the others have three reasons not to be, one of them rare."""
    row = pair.row_id
    if row == 100:
        return Judgment(status="engine", reason="the engine went down twice at this row")
    if row % 4 == 3:
        return Judgment(
            status="format" if row % 8 == 3 else "truncated", reason="no readable grade", tries=["<score>7"]
        )
    return Judgment(row % 3, [(0.7, 0.2, 0.1), (0.2, 0.6, 0.2), (0.0, 0.0, 1.0)][row % 3])


def test_counts_on_the_page_are_those_of_the_run(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed)
    html = build_report([str(run)], Storage()).html
    assert table_of(html, "Rows in and out") == [["forged", "192", "143", "0", "49", "proven by row ids"]]
    (quarantine,) = (caption for caption in tables_of(html) if caption.startswith("Quarantine of forged"))
    assert table_of(html, quarantine) == [["format", "24"], ["truncated", "24"], ["engine", "1"]]
    labelled = [row for row in rows_of(html) if row["status"] == "ok"]
    counts = [sum(row["grade"] == grade for row in labelled) for grade in range(3)]
    assert plots_of(html)["Grades"] == "forged: " + ", ".join(f"{grade} {count}" for grade, count in enumerate(counts))
    assert "Entropy of the distributions" in plots_of(html)
    assert re.search(r"forged: mean 0\.\d+ over 143 rows", html)
    assert "no readable grade" in html
    assert {one["text"] for row in rows_of(html) for one in row.get("tries", ())} == {"<score>7"}


@pytest.mark.parametrize("most", [1, 40])
def test_sample_keeps_every_status_and_says_so(tmp_path: Path, pairs: Path, most: int) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed)
    html = build_report([str(run)], Storage(), max_rows=most).html
    rows = rows_of(html)
    assert {row["status"] for row in rows} == {"ok", "format", "truncated", "engine"}
    assert len(rows) <= max(most, 4)
    assert "a seeded sample that keeps every status" in html
    assert rows == rows_of(build_report([str(run)], Storage(), max_rows=most).html)
    assert table_of(html, "Rows in and out")[0][1] == "192"


def test_unfinished_run_is_shown_as_such(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed, is_finished=False)
    html = build_report([str(run)], Storage()).html
    assert "not finished" in html
    assert "64 rows open" in html
    assert "proven by row ids" not in html


def test_texts_that_are_gone_are_missed_aloud_and_not_made_up(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed, gold="grade")
    write_table(pairs, plain_pairs(24, 7))
    built = build_report([str(run)], Storage())
    assert all("document" not in row and "gold" not in row for row in rows_of(built.html))
    assert "can&#39;t be read again" in built.html
    assert not any("gold" in title for title in plots_of(built.html))
    pairs.unlink()
    assert len(rows_of(build_report([str(run)], Storage()).html)) == 192


def test_no_rows_means_no_text_of_any_document(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed)
    built = build_report([str(run)], Storage(), max_rows=0)
    assert "labels" not in built.sections
    assert "a shoe of kind" not in built.html
    assert 'id="rows"' not in built.html


def test_gold_column_of_the_job_is_used_without_a_flag(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(
        tmp_path / "out", pairs, lambda pair: Judgment((pair.row_id // 8 + pair.row_id % 8) % 3), gold="grade"
    )
    built = build_report([str(run)], Storage())
    figures = {row[0]: row[1] for row in table_of(built.html, "figures of forged")}
    assert figures["accuracy"] == "1.0000"
    assert all(row["gold"] == row["grade"] for row in rows_of(built.html))
    worst = table_of(built.html, f"The {WORST} queries that forged ranks worst")
    assert len({row[0] for row in worst} & {f"q{number}" for number in range(24)}) == WORST


def test_worst_queries_are_those_whose_ndcg_is_defined(tmp_path: Path) -> None:
    """Every third query has no relevant document."""
    rows = plain_pairs(24, 8)
    for number, row in enumerate(rows):
        row["grade"] = 2 if number % 8 == 0 and number // 8 % 3 else 0
    num_before = [number * 5 % 8 for number in range(24)]

    def judge(pair: Any) -> Judgment:
        query, doc = divmod(pair.row_id, 8)
        if doc == 0:
            return Judgment(1, probs=None)
        return Judgment(2 if doc <= num_before[query] else 0, probs=None)

    pairs = write_table(tmp_path / "pairs.parquet", rows)
    html = build_report([str(forge_run(tmp_path / "out", pairs, judge, gold="grade"))], Storage()).html
    worst = table_of(html, f"The {WORST} queries that forged ranks worst")
    ndcg = {f"q{number}": 1 / math.log2(num_before[number] + 2) for number in range(24) if number % 3}
    ranked = sorted((figure, query) for query, figure in ndcg.items())
    assert worst == [[query, f"{figure:.4f}", "8"] for figure, query in ranked[:WORST]]


def test_query_of_one_judged_document_is_none_of_the_worst(tmp_path: Path) -> None:
    pairs = write_table(tmp_path / "pairs.parquet", [{**row, "grade": 1} for row in plain_pairs(3, 1)])
    html = build_report([str(forge_run(tmp_path / "out", pairs, lambda _: Judgment(), gold="grade"))], Storage()).html
    assert not any("ranks worst" in caption for caption in tables_of(html))


def test_gold_that_was_named_and_does_not_fit_is_an_error(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed)
    other = write_table(tmp_path / "other.parquet", [{"query_id": "none", "doc_id": "none", "grade": 1}])
    with pytest.raises(InputError, match="no label found a gold grade"):
        build_report([str(run)], Storage(), gold=JudgingOptions(str(other)))


def test_without_rows_no_reason_is_shown_since_it_may_quote_an_answer(tmp_path: Path, pairs: Path) -> None:
    reasons = ("score is 'SECRET 7', expected one of 0, 1, 2", "the server said HTTP 400: SECRET is in the prompt")

    def judge(pair: Any) -> Judgment:
        return Judgment(status="engine", reason=reasons[pair.row_id % 2], tries=["SECRET"])

    run = forge_run(tmp_path / "out", pairs, judge)
    assert "SECRET" in build_report([str(run)], Storage()).html
    html = build_report([str(run)], Storage(), max_rows=0).html
    assert "SECRET" not in html
    (quarantine,) = (caption for caption in tables_of(html) if caption.startswith("Quarantine of forged"))
    assert table_of(html, quarantine) == [["engine", "192"]]


def test_every_text_of_a_row_is_cut_and_the_cut_reported(tmp_path: Path) -> None:
    rows = plain_pairs(2, 2)
    for row in rows:
        row["query"] += "q" * 500_000
        row["body"] += " shoe" * 2_000
    pairs = write_table(tmp_path / "pairs.parquet", rows)
    long = "l" * 20_000
    spans = [(number, number + 4, long) for number in range(3_000)]

    def judge(pair: Any) -> Judgment:
        if pair.row_id == 3:
            return Judgment(status="format", reason=long, tries=[long])
        return Judgment(1, evidence=spans, intent=long, reasoning=long)

    html = build_report([str(forge_run(tmp_path / "out", pairs, judge))], Storage()).html
    assert len(html) < 600_000
    shown = {row["row"]: row for row in rows_of(html)}
    assert all("characters more)" in row["query"] for row in shown.values())
    for name in ("intent", "reasoning"):
        assert shown[0][name].endswith("characters more)")
    assert shown[0]["evidence"][0][2].endswith("characters more)")
    assert shown[0]["evidence_more"] == 3_000 - len(shown[0]["evidence"]) > 0
    assert shown[3]["reason"].endswith("characters more)")


def test_two_runs_are_compared(tmp_path: Path, pairs: Path) -> None:
    one = forge_run(tmp_path / "a", pairs, lambda pair: Judgment(pair.row_id % 3), name="a")
    other = forge_run(tmp_path / "b", pairs, lambda pair: Judgment(pair.row_id % 2), name="b")
    built = build_report([str(one), str(other)], Storage())
    assert "between" in built.sections
    cells = [[sum(r % 3 == x and r % 2 == y for r in range(192)) for y in range(3)] for x in range(3)]
    assert [[int(cell) for cell in row[1:4]] for row in table_of(built.html, "a \\ b")[:3]] == cells


def test_cost_needs_a_price(tmp_path: Path, pairs: Path) -> None:
    free = forge_run(tmp_path / "free", pairs, mixed)
    priced = forge_run(
        tmp_path / "priced",
        pairs,
        mixed,
        spec={"cost_per_gpu_hour": 7.2, "engine": {"args": {"tensor_parallel_size": 2}}},
    )
    assert "<dt>cost</dt>" not in build_report([str(free)], Storage()).html
    seconds = open_artifact(str(priced), Storage()).snapshot.tally.worker_seconds
    assert f"<dt>cost</dt><dd>{seconds / 3600 * 7.2 * 2:.4f}</dd>" in build_report([str(priced)], Storage()).html


def test_same_run_gives_the_same_bytes(tmp_path: Path, pairs: Path) -> None:
    run = forge_run(tmp_path / "out", pairs, mixed, gold="grade")
    assert build_report([str(run)], Storage()).html == build_report([str(run)], Storage()).html


def test_embedded_rows_can_not_leave_their_element() -> None:
    hostile = "</script><!-- \u2028 \u2029 & <script>"
    text = browser_json(["x"], [{"run": 0, "document": hostile}])
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text)["rows"][0]["document"] == hostile


def test_path_that_holds_nothing_known_is_reported(tmp_path: Path, pairs: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no plan\.json"):
        build_report([str(tmp_path / "empty")], Storage())
    run = forge_run(tmp_path / "out", pairs, mixed)
    with pytest.raises(UsageError, match="given twice"):
        build_report([str(run), f"{run}/../out"], Storage())
    with pytest.raises(InputError, match=r"pairs\.parquet: is a file\. A report takes folders"):
        build_report([str(pairs)], Storage())


def test_command_writes_the_page_and_says_what_is_in_it(relabel: Callable[..., Any], folder: Path) -> None:
    pairs = write_table(folder / "pairs.parquet", plain_pairs(6, 4))
    forge_run(folder / "out", pairs, mixed)
    done = relabel(
        "report", "out", "--gold", "pairs.parquet", "--to", "pages/ecom.html", "--max-rows", "12", "--output", "json"
    )
    page = (folder / "pages/ecom.html").read_bytes()
    assert done.code == 0
    assert done.json["bytes"] == len(page)
    assert done.json["rows"] == 24
    assert done.json["rows_shown"] == len(rows_of(page.decode())) <= 12
    assert {"ran", "conservation", "gold", "labels"} <= set(done.json["sections"])
    relabel("report", "absent").refused(3, "absent: holds no plan.json")

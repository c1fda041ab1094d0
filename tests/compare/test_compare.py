"""`relabel compare` from end to end: which rows are the same, what is counted, what is shown, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon
from sklearn import metrics

from relabel.manifests.metrics.comparison import PairedRows, PairedStatistics
from tests.report.conftest import BAITS, Judgment, forge_run, plain_pairs, write_table

TwoRuns = Callable[..., tuple[list[dict[str, Any]], list[Judgment], list[Judgment]]]


@pytest.fixture
def compare(relabel: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """`compare("a", "b")`: the comparison's JSON; it must end well."""

    def call(*arguments: str) -> dict[str, Any]:
        done = relabel("compare", *arguments, "--output", "json")
        assert done.code == 0, done
        return dict(done.json)

    return call


def test_every_row_is_counted_once_and_figures_are_those_of_the_rows_that_both_labelled(
    two_runs: TwoRuns, compare: Callable[..., Any]
) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b", "--examples", "5")
    assert found["matched_by"] == "row_id: both were made from the same input"
    states = [(one.status == "ok", other.status == "ok") for one, other in zip(first, second, strict=True)]
    ends = {
        "both": (True, True),
        "quarantined_b_only": (True, False),
        "quarantined_a_only": (False, True),
        "quarantined_both": (False, False),
    }
    counts = {name: states.count(state) for name, state in ends.items()}
    assert found["counts"] | counts | {"only_a": 0, "only_b": 0} == found["counts"]
    rows = [row for row in range(len(pairs)) if first[row].status == second[row].status == "ok"]
    ours, theirs = [first[row].grade for row in rows], [second[row].grade for row in rows]
    assert found["confusion"] == metrics.confusion_matrix(ours, theirs, labels=[0, 1, 2]).tolist()
    assert found["figures"]["agreement"]["value"] == pytest.approx(metrics.accuracy_score(ours, theirs))

    def score(said: Judgment) -> float:
        return said.grade if said.probs is None else round(sum(grade * p for grade, p in enumerate(said.probs)), 6)

    flips = found["flips"]
    changed = [row for row in rows if first[row].grade != second[row].grade]
    assert flips["rows"] == len(changed) == flips["up"] + flips["down"]
    shown = flips["examples"]
    furthest = sorted(changed, key=lambda row: (-abs(score(second[row]) - score(first[row])), row))
    assert [one["row_a"] for one in shown] == furthest[:5]
    for one in shown:
        pair = pairs[one["row_a"]]
        assert (one["query"], one["document"]) == (pair["query"], f"{pair['title']}\n\n{pair['body']}")
        assert one["a"]["grade"] == first[one["row_a"]].grade
        assert one["b"]["reasoning"] == f"because {one['row_a']}"


def test_texts_that_are_gone_are_left_out_and_the_rest_is_shown(
    two_runs: TwoRuns, compare: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    (folder / "pairs.parquet").unlink()
    found = compare("a", "b")
    assert found["flips"]["examples"][0]["document"] is None
    assert found["flips"]["examples"][0]["a"]["reasoning"].startswith("because")
    assert any("texts of the examples are left out" in note and "no such file" in note for note in found["notes"])


def test_human_grades_say_who_is_right(two_runs: TwoRuns, compare: Callable[..., Any]) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b", "--qrels", "pairs.parquet")["gold"]
    rows = [row for row in range(len(pairs)) if first[row].status == second[row].status == "ok"]
    right = [(first[row].grade == pairs[row]["grade"], second[row].grade == pairs[row]["grade"]) for row in rows]
    only_a, only_b = right.count((True, False)), right.count((False, True))
    assert (found["only_a_right"], found["only_b_right"], found["judged"]) == (only_a, only_b, len(rows))
    difference = found["b"]["figures"]["accuracy"]["value"] - found["a"]["figures"]["accuracy"]["value"]
    assert found["difference"]["accuracy"]["value"] == pytest.approx(difference)
    assert difference == pytest.approx((only_b - only_a) / len(rows))


def test_other_inputs_are_matched_by_ids_and_pairs_that_come_twice_in_order(
    compare: Callable[..., Any], folder: Path
) -> None:
    pairs = plain_pairs(4, 3)
    twice = [*pairs, pairs[5] | {"body": "again"}]
    one = write_table(folder / "one.parquet", twice)
    other = write_table(folder / "other.parquet", [twice[row] for row in (12, 5, 4, 3, 0, 1)] + plain_pairs(6, 3)[15:])
    forge_run(folder / "a", one, lambda pair: Judgment(pair.row_id % 3, (0.2, 0.3, 0.5)), name="a")
    forge_run(folder / "b", other, lambda pair: Judgment(1, (0.1, 0.8, 0.1)), name="b")
    found = compare("a", "b")
    assert found["matched_by"] == "query_id and doc_id"
    counts = found["counts"]
    assert (counts["both"], counts["only_a"], counts["only_b"], counts["repeated"]) == (6, 7, 3, 1)
    assert any("rows are matched by query_id and doc_id, since their inputs differ" in note for note in found["notes"])
    assert any("matched in order; rows beyond the first: 1" in note for note in found["notes"])
    rows = {one["row_a"]: one["row_b"] for one in found["flips"]["examples"]}
    assert rows.items() <= {0: 4, 3: 3, 4: 2, 5: 0, 12: 1, 1: 5}.items()
    assert found["flips"]["rows"] == len([row for row in (0, 3, 4, 5, 12, 1) if row % 3 != 1])
    assert found["confusion"] == [[0, 3, 0], [0, 2, 0], [0, 1, 0]]


def test_runs_that_can_not_be_compared_are_refused(
    two_runs: TwoRuns, relabel: Callable[..., Any], write_job: Callable[..., str], folder: Path
) -> None:
    two_runs()
    relabel("compare", "a", "./a/").refused(2, "a and ./a/ are one run")
    relabel("compare", "a", "typo").refused(3, "typo: no such folder.")
    relabel("compare", "a", "pairs.parquet").refused(3, "pairs.parquet: no run's output folder", "relabel evaluate")
    forge_run(folder / "half", folder / "pairs.parquet", lambda pair: Judgment(1), name="half", is_finished=False)
    relabel("compare", "a", "half").refused(3, "half: not finished", "--allow-partial")
    done = relabel("compare", "a", "half", "--allow-partial", "--output", "json")
    assert done.json["counts"]["only_a"] > 0
    assert any("half is not finished" in note for note in done.json["notes"])
    four = write_job({"input": {"path": "pairs.parquet"}, "labeler": {"name": "umbrela"}, "output": "four"})
    assert relabel("run", four).code == 0
    relabel("compare", "a", "four").refused(3, "a has 3 grades, four 4", "--map-labels")
    others = write_table(
        folder / "others.parquet", [pair | {"query_id": "x" + pair["query_id"]} for pair in plain_pairs(3, 3)]
    )
    forge_run(folder / "elsewhere", others, lambda pair: Judgment(1), name="elsewhere")
    relabel("compare", "a", "elsewhere").refused(3, "have no labelled row in common", "Did both label the same pairs?")


def test_the_page_holds_what_the_text_says_and_is_left_alone_unless_forced(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    done = relabel("compare", "a", "b", "--qrels", "pairs.parquet", "--html", "page.html", "--output", "json")
    assert done.json["html"] == "page.html", done
    assert "wrote page.html" in done.err
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "run-a and run-b" in page
    assert f"{done.json['figures']['agreement']['value']:.4f}" in page
    relabel("compare", "a", "b", "--html", "page.html").refused(2, "page.html: is there already", "--force")
    assert relabel("compare", "a", "b", "--html", "page.html", "--force").code == 0
    relabel("compare", "a", "b", "--html", "a/page.html").refused(2, "is in the input a")


def test_hostile_texts_run_nowhere_on_the_page_which_everybody_can_read_on_a_phone_too(
    relabel: Callable[..., Any], folder: Path, open_page: Callable[..., Any]
) -> None:
    pairs = [
        {
            key: f"{value} {BAITS[(row + place) % len(BAITS)]}" if key != "grade" else value
            for place, (key, value) in enumerate(pair.items())
        }
        for row, pair in enumerate(plain_pairs(4, 7))
    ]
    path = write_table(folder / "pairs.parquet", pairs)
    for number, name in enumerate("ab"):
        forge_run(
            folder / name,
            path,
            lambda pair, number=number: Judgment(
                (pair.row_id + number) % 3, (0.2, 0.3, 0.5), reasoning=BAITS[pair.row_id % len(BAITS)]
            ),
            name=f"{name} {BAITS[number]}",
        )
    done = relabel("compare", "a", "b", "--qrels", "pairs.parquet", "--html", "page.html")
    assert done.code == 0, done
    assert "\x1b" not in done.out
    page, seen = open_page(folder / "page.html", width=400, scheme="dark")
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    page.wait_for_timeout(200)
    assert page.evaluate("'pwned' in window") is False
    assert BAITS[1] in page.locator("main").inner_text()
    # the policy admits no script from elsewhere, so the checker comes in through the driver
    script = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))
    broken = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in broken] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert seen.all == []


def test_grades_are_never_written_over_and_what_speaks_of_them_needs_them(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    before = (folder / "pairs.parquet").read_bytes()
    written = ("--html", "pairs.parquet", "--force")
    relabel("compare", "a", "b", "--qrels", "pair*.parquet", *written).refused(2, "is in the input")
    assert (folder / "pairs.parquet").read_bytes() == before
    relabel("compare", "a", "b", "--grade", "g").refused(2, "belong to --qrels, which is not given")


def test_what_is_printed_is_golden_down_to_the_order_of_keys(
    two_runs: TwoRuns, relabel: Callable[..., Any], golden: Callable[[str, str], None]
) -> None:
    """Floats to 9 digits: the last ones are the processor's. Fingerprints hold the version of pyarrow that wrote the
    input.
    """
    two_runs(8, 5)
    options = ("a", "b", "--qrels", "pairs.parquet", "--examples", "3", "--queries", "3", "--resamples", "50")
    golden("compare/judged.txt", relabel("compare", *options).out)
    found = relabel("compare", *options, "--output", "json").out
    found = re.sub(r'"fingerprint": "[0-9a-f]{64}"', '"fingerprint": "…"', found)
    golden(
        "compare/judged.json",
        json.dumps(
            json.loads(found, parse_float=lambda text: float(f"{float(text):.9g}")), ensure_ascii=False, indent=1
        )
        + "\n",
    )


# The figures of two label sets against scikit-learn, scipy and plain loops.


GRADES = 3


def world(seed: int, *, queries: int = 8, most: int = 9, lacking: float = 0.2) -> PairedRows:
    """Two sets over a few queries; some rows lack a distribution in one of them."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, most + 1, queries)
    query = np.repeat(np.arange(queries), sizes)
    count = len(query)
    probs = [random.dirichlet(np.ones(GRADES), count) for _ in range(2)]
    for side in probs:
        side[random.random(count) < lacking] = np.nan
    grades = [random.integers(0, GRADES, count) for _ in range(2)]
    return PairedRows(query, random.permutation(count), (grades[0], grades[1]), (probs[0], probs[1]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_figures_are_those_of_the_libraries(seed: int) -> None:
    rows = world(seed)
    statistics = PairedStatistics(rows, int(rows.query[-1]) + 1, GRADES, depth=3)
    found = {name: figure.value for name, figure in statistics.figures(resamples=0, seed=1).items()}
    first, second = rows.grades
    every = list(range(GRADES))
    assert found["agreement"] == pytest.approx(metrics.accuracy_score(first, second))
    kappa = metrics.cohen_kappa_score(first, second, labels=every)
    quadratic = metrics.cohen_kappa_score(first, second, labels=every, weights="quadratic")
    assert found["kappa"] == pytest.approx(kappa, abs=1e-9)
    assert found["kappa_quadratic"] == pytest.approx(quadratic, abs=1e-9)
    assert statistics.counts.by_group.sum(0).tolist() == metrics.confusion_matrix(first, second, labels=every).tolist()
    assert found["mean_grade_a"] == pytest.approx(first.mean())
    assert found["mean_grade_difference"] == pytest.approx(second.mean() - first.mean(), abs=1e-9)
    expected = [side @ np.arange(GRADES) for side in rows.probs]
    both = ~np.isnan(expected[0]) & ~np.isnan(expected[1])
    if both.any():
        assert found["mean_expected_difference"] == pytest.approx((expected[1] - expected[0])[both].mean(), abs=1e-9)
        ours, theirs = rows.probs[0][both], rows.probs[1][both]
        assert found["js"] == pytest.approx(
            np.mean([jensenshannon(p, q) ** 2 for p, q in zip(ours, theirs, strict=True)]), abs=1e-9
        )
        assert found["kl_a_b"] == pytest.approx(
            np.mean([stats.entropy(p, q) for p, q in zip(ours, theirs, strict=True)]), abs=1e-7
        )
        assert found["kl_b_a"] == pytest.approx(
            np.mean([stats.entropy(q, p) for p, q in zip(ours, theirs, strict=True)]), abs=1e-7
        )
    taus, stayed, changed = [], [], []
    for query in range(int(rows.query[-1]) + 1):
        here = np.flatnonzero(rows.query == query)
        scores = [side[here] for side in rows.scores]
        if np.ptp(scores[0]) > 0 and np.ptp(scores[1]) > 0:
            taus.append(stats.kendalltau(*scores).statistic)
        tops = [
            sorted(range(len(here)), key=lambda row: (score[row], rows.docs[here[row]]), reverse=True)[:3]
            for score in scores
        ]
        stayed.append(len(set(tops[0]) & set(tops[1])) / min(3, len(here)))
        changed.append(tops[0][0] != tops[1][0])
    assert found["kendall_tau"] == pytest.approx(np.mean(taus)) if taus else found["kendall_tau"] is None
    assert found["overlap@3"] == pytest.approx(np.mean(stayed))
    assert found["first_changed"] == pytest.approx(np.mean(changed))

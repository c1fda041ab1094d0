"""`relabel compare` from end to end: which rows are the same, what is counted, what is shown, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from relabel.jobs.tables import query_buckets
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


def test_every_row_is_counted_once_by_what_each_run_has_of_it(two_runs: TwoRuns, compare: Callable[..., Any]) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b")
    assert found["matched_by"] == "row_id: both were made from the same input"
    states = [(one.status == "ok", other.status == "ok") for one, other in zip(first, second, strict=True)]
    counts = found["counts"]
    assert counts["both"] == states.count((True, True))
    assert counts["quarantined_b_only"] == states.count((True, False)) > 0
    assert counts["quarantined_a_only"] == states.count((False, True)) > 0
    assert counts["quarantined_both"] == states.count((False, False))
    assert counts["both"] + counts["quarantined_a_only"] + counts["quarantined_b_only"] + counts[
        "quarantined_both"
    ] == len(pairs)
    assert (counts["only_a"], counts["only_b"]) == (0, 0)


def test_figures_are_those_of_the_rows_that_both_labelled(two_runs: TwoRuns, compare: Callable[..., Any]) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b")
    rows = [row for row in range(len(pairs)) if first[row].status == second[row].status == "ok"]
    ours, theirs = [first[row].grade for row in rows], [second[row].grade for row in rows]
    assert found["confusion"] == metrics.confusion_matrix(ours, theirs, labels=[0, 1, 2]).tolist()
    value = {name: figure["value"] for name, figure in found["figures"].items()}
    assert value["agreement"] == pytest.approx(metrics.accuracy_score(ours, theirs))
    assert value["kappa"] == pytest.approx(metrics.cohen_kappa_score(ours, theirs))
    assert value["kappa_quadratic"] == pytest.approx(metrics.cohen_kappa_score(ours, theirs, weights="quadratic"))

    def score(said: Judgment) -> float:
        return said.grade if said.probs is None else round(sum(grade * p for grade, p in enumerate(said.probs)), 6)

    taus, moved = [], 0
    for query in dict.fromkeys(pair["query_id"] for pair in pairs):
        here = [row for row in rows if pairs[row]["query_id"] == query]
        sides = [[score(said[row]) for row in here] for said in (first, second)]
        moved += abs(np.mean(sides[1]) - np.mean(sides[0])) > 1e-6
        if np.ptp(sides[0]) > 0 and np.ptp(sides[1]) > 0:
            taus.append(stats.kendalltau(*sides).statistic)
    assert value["kendall_tau"] == pytest.approx(np.mean(taus), abs=1e-9)
    assert found["figures"]["kendall_tau"]["over"] == len(taus)
    assert found["queries"]["moved"] == moved
    for figure in found["figures"].values():
        assert figure["low"] <= figure["value"] <= figure["high"]


def test_flips_are_the_rows_that_changed_and_the_largest_come_first_with_their_texts(
    two_runs: TwoRuns, compare: Callable[..., Any]
) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b", "--examples", "5")["flips"]
    rows = [row for row in range(len(pairs)) if first[row].status == second[row].status == "ok"]
    changed = [row for row in rows if first[row].grade != second[row].grade]
    assert found["rows"] == len(changed) == found["up"] + found["down"]
    assert found["up"] == sum(second[row].grade > first[row].grade for row in rows)

    def change(row: int) -> float:
        sides = [
            np.float32(said.grade if said.probs is None else sum(g * p for g, p in enumerate(said.probs)))
            for said in (first[row], second[row])
        ]
        return abs(float(sides[1]) - float(sides[0]))

    shown = found["examples"]
    assert [one["row_a"] for one in shown] == sorted(changed, key=lambda row: (-change(row), row))[:5]
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


def test_human_grades_say_who_is_right(
    two_runs: TwoRuns, compare: Callable[..., Any], relabel: Callable[..., Any]
) -> None:
    pairs, first, second = two_runs()
    found = compare("a", "b", "--qrels", "pairs.parquet")["gold"]
    rows = [row for row in range(len(pairs)) if first[row].status == second[row].status == "ok"]
    right = [(first[row].grade == pairs[row]["grade"], second[row].grade == pairs[row]["grade"]) for row in rows]
    only_a, only_b = right.count((True, False)), right.count((False, True))
    assert (found["only_a_right"], found["only_b_right"], found["judged"]) == (only_a, only_b, len(rows))
    difference = found["b"]["figures"]["accuracy"]["value"] - found["a"]["figures"]["accuracy"]["value"]
    assert found["difference"]["accuracy"]["value"] == pytest.approx(difference)
    assert difference == pytest.approx((only_b - only_a) / len(rows))
    # `evaluate` over the same two sets, the first of which it takes for the teacher: the same rows, the same figures
    evaluated = relabel("evaluate", "a", "b", "--qrels", "pairs.parquet", "--output", "json").json["comparisons"][0][
        "against_gold"
    ]
    assert {name: one["value"] for name, one in found["a"]["figures"].items()} == pytest.approx(
        {name: one["value"] for name, one in evaluated["teacher"]["figures"].items()}
    )
    assert found["difference"]["f1_macro"] == pytest.approx(evaluated["difference"]["f1_macro"])


def test_qrels_elsewhere_judge_by_pair_and_null_grades_judge_nothing(
    two_runs: TwoRuns, compare: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    pairs, _, _ = two_runs()
    kept = [pair | {"grade": None if row % 5 == 0 else pair["grade"]} for row, pair in enumerate(pairs) if row % 3]
    (folder / "gold.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in kept))
    found = compare("a", "b", "--gold", "gold.jsonl")
    gold = found["gold"]
    assert gold["joined_by"] == "query_id and doc_id"
    assert gold["judged"] + gold["unjudged"] + gold["gold_null"] == found["counts"]["both"]
    assert gold["gold_null"] > 0
    (folder / "off.jsonl").write_text(json.dumps(pairs[1] | {"grade": 3}) + "\n")
    relabel("compare", "a", "b", "--qrels", "off.jsonl").refused(
        3, "off.jsonl: grade 3 is off the scale 0 to 2", "--map"
    )
    (folder / "strange.qrels").write_text("x 0 y 1\n")
    relabel("compare", "a", "b", "--qrels", "strange.qrels").refused(3, "none of the", "has a grade in strange.qrels")


def test_a_run_next_to_its_twin_agrees_in_everything(
    two_runs: TwoRuns, compare: Callable[..., Any], folder: Path
) -> None:
    _, first, _ = two_runs()
    forge_run(folder / "twin", folder / "pairs.parquet", lambda pair: first[pair.row_id], name="run-a", chunk_rows=5)
    found = compare("a", "twin", "--qrels", "pairs.parquet")
    value = {name: figure["value"] for name, figure in found["figures"].items()}
    assert (value["agreement"], value["kappa"], value["js"], value["mean_grade_difference"]) == (1.0, 1.0, 0.0, 0.0)
    assert value["kendall_tau"] == pytest.approx(1.0)
    assert found["differences"] == {}
    assert found["flips"] == {"rows": 0, "up": 0, "down": 0, "examples": []}
    assert found["queries"]["moved_most"] == []
    assert (found["gold"]["only_a_right"], found["gold"]["only_b_right"]) == (0, 0)


def test_what_differs_in_the_making_is_named(
    two_runs: TwoRuns, compare: Callable[..., Any], relabel: Callable[..., Any]
) -> None:
    two_runs()
    assert compare("a", "b")["differences"] == {"stages": ["verdict"]}
    assert "differently in stages (verdict)" in relabel("compare", "a", "b").out


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
    relabel("compare", "a", "pairs.parquet").refused(3, "pairs.parquet: no run's output folder", "relabel evaluate")
    relabel("compare", "a", "absent").refused(3, "absent: no run's output folder")
    (folder / "bare").mkdir()
    relabel("compare", "a", "bare").refused(3, "bare: a folder without plan.json")
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


def test_a_changed_label_file_ends_the_comparison(two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path) -> None:
    two_runs()
    file = next((folder / "b/labels").rglob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    relabel("compare", "a", "b").refused(3, file.name, "sha256")


def test_buckets_of_few_rows_give_the_same_comparison(
    two_runs: TwoRuns, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_runs()
    whole = compare("a", "b", "--qrels", "pairs.parquet")
    monkeypatch.setattr("relabel.jobs.tables.query_buckets.__kwdefaults__", {"bucket_rows": 20})
    cut = compare("a", "b", "--qrels", "pairs.parquet")
    assert json.dumps(cut["flips"]) == json.dumps(whole["flips"])
    for name in ("counts", "confusion", "queries", "gold", "notes"):
        assert cut[name] == whole[name], name
    for name, figure in whole["figures"].items():
        assert cut["figures"][name] == pytest.approx(figure, abs=1e-9)


def test_a_bucket_holds_whole_queries_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    import polars

    random = np.random.default_rng(3)
    names = [f"q{number}" for number in random.integers(0, 40, 500)]
    file = tmp_path / "rows.parquet"
    polars.DataFrame({"row": range(500), "query_id": names}).write_parquet(file)
    seen = list(query_buckets(polars, (file,), lambda frame, _: frame, tmp_path / "buckets", bucket_rows=50))
    assert 5 < len(seen) <= 10
    assert [name for bucket in seen for name in bucket["query_id"].unique(maintain_order=True)] == list(
        dict.fromkeys(names)
    )
    assert sorted(row for bucket in seen for row in bucket["row"]) == list(range(500))
    assert all(bucket["row"].to_list() == bucket.sort("query", "row")["row"].to_list() for bucket in seen)
    assert (
        list(query_buckets(polars, (file,), lambda frame, _: frame.filter(polars.col("row") < 0), tmp_path / "none"))
        == []
    )


def test_the_page_holds_what_the_text_says_and_is_left_alone_unless_forced(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    done = relabel("compare", "a", "b", "--qrels", "pairs.parquet", "--html", "page.html", "--output", "json")
    assert done.json["html"] == "page.html"
    assert "wrote page.html" in done.err
    page = (folder / "page.html").read_text(encoding="utf-8")
    for word in (
        "run-a and run-b",
        "Cohen kappa",
        "B alone",
        "the largest flips",
        "queries that moved furthest",
    ):
        assert word in page
    assert f"{done.json['figures']['agreement']['value']:.4f}" in page
    relabel("compare", "a", "b", "--html", "page.html").refused(2, "page.html: is there already", "--force")
    assert relabel("compare", "a", "b", "--html", "page.html", "--force").code == 0
    relabel("compare", "a", "b", "--html", "a/page.html").refused(2, "is in the input a")


def test_hostile_texts_run_nowhere_on_the_page(
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
    page, seen = open_page(folder / "page.html")
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    page.wait_for_timeout(200)
    assert page.evaluate("'pwned' in window") is False
    assert seen.all == []
    assert BAITS[1] in page.locator("main").inner_text()


def test_real_runs_with_two_seeds_compare(
    relabel: Callable[..., Any], compare: Callable[..., Any], folder: Path, write_job: Callable[..., str]
) -> None:
    write_table(folder / "pairs.parquet", plain_pairs(6, 4))
    for seed in (1, 2):
        job = write_job({"engine": {"seed": seed}, "output": f"out/{seed}"})
        assert relabel("run", job).code == 0
    found = compare("out/1", "out/2")
    assert found["differences"] == {"engine": ["seed"]}
    assert found["counts"]["both"] == 24
    assert sum(map(sum, found["confusion"])) == 24


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_the_page_can_be_read_by_everybody_on_a_phone_too(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path, open_page: Callable[..., Any], scheme: str, width: int
) -> None:
    two_runs()
    assert relabel("compare", "a", "b", "--qrels", "pairs.parquet", "--html", "page.html").code == 0
    page, seen = open_page(folder / "page.html", width=width, scheme=scheme)
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    # the policy admits no script from elsewhere, so the checker comes in through the driver
    script = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.all == []


def test_rows_refused_in_one_run_and_absent_from_the_other_are_reported(
    compare: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    pairs = plain_pairs(6, 3)
    one = write_table(folder / "one.parquet", pairs)
    other = write_table(folder / "other.parquet", pairs[:15])
    forge_run(folder / "a", one, lambda pair: Judgment(1, status="refused" if pair.row_id >= 14 else "ok"), name="a")
    forge_run(folder / "b", other, lambda pair: Judgment(1), name="b")
    found = compare("a", "b", "--html", "page.html")
    assert found["counts"]["quarantined_elsewhere_absent"] == 3
    assert any("in quarantine in one run and absent from the other: 3" in note for note in found["notes"])
    assert "3 in one and absent from the other" in relabel("compare", "a", "b").out
    assert "3 in one and absent from the other" in (folder / "page.html").read_text(encoding="utf-8")


def test_the_page_counts_null_grades(compare: Callable[..., Any], folder: Path, two_runs: TwoRuns) -> None:
    pairs, _, _ = two_runs()
    kept = [pair | {"grade": None if row % 5 == 0 else pair["grade"]} for row, pair in enumerate(pairs)]
    write_table(folder / "gold.parquet", kept)
    found = compare("a", "b", "--qrels", "gold.parquet", "--html", "page.html")["gold"]["gold_null"]
    page = re.sub(r"<[^>]+>|\s+", " ", (folder / "page.html").read_text(encoding="utf-8"))
    assert f"{found} with a null one" in page


def test_grades_are_never_written_over_and_what_speaks_of_them_needs_them(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    before = (folder / "pairs.parquet").read_bytes()
    for gold in ("pairs.parquet", "pair*.parquet"):
        relabel("compare", "a", "b", "--qrels", gold, "--html", "pairs.parquet", "--force").refused(
            2, "is in the input"
        )
    assert (folder / "pairs.parquet").read_bytes() == before
    for flags in (("--grade", "g"), ("--by", "q"), ("--doc", "d"), ("--map", "0=0,1=1"), ("--duplicates", "first")):
        relabel("report", "a", *flags).refused(2, "belong to --gold, which is not given")
        relabel("compare", "a", "b", *flags).refused(2, "belong to --qrels, which is not given")


def test_a_path_beyond_utf8_gives_a_page_all_the_same(
    two_runs: TwoRuns, relabel: Callable[..., Any], folder: Path
) -> None:
    two_runs()
    (folder / "a").rename(folder / "a\udcff")
    done = relabel("compare", "a\udcff", "b", "--html", "page.html")
    assert done.code == 0, done
    assert "run-a and run-b" in (folder / "page.html").read_text(encoding="utf-8")


def test_a_long_query_of_a_flip_is_cut(compare: Callable[..., Any], folder: Path) -> None:
    path = write_table(folder / "pairs.parquet", [pair | {"query": "q" * 50_000} for pair in plain_pairs(1, 3)])
    for number, name in enumerate("ab"):
        forge_run(folder / name, path, lambda pair, number=number: Judgment((pair.row_id + number) % 3), name=name)
    assert all(len(one["query"]) < 1_100 for one in compare("a", "b")["flips"]["examples"])


@pytest.mark.parametrize("qrels", [(), ("--qrels", "pairs.parquet")], ids=["alone", "judged"])
def test_what_is_printed_is_golden_down_to_the_order_of_keys(
    two_runs: TwoRuns, relabel: Callable[..., Any], golden: Callable[[str, str], None], qrels: tuple[str, ...]
) -> None:
    """Floats to 9 digits: the last ones are the processor's. Fingerprints hold the version of pyarrow that wrote the
    input.
    """
    two_runs(8, 5)
    options = ("a", "b", *qrels, "--examples", "3", "--queries", "3", "--resamples", "50")
    name = "judged" if qrels else "alone"
    golden(f"compare/{name}.txt", relabel("compare", *options).out)
    found = relabel("compare", *options, "--output", "json").out
    found = re.sub(r'"fingerprint": "[0-9a-f]{64}"', '"fingerprint": "…"', found)
    golden(
        f"compare/{name}.json",
        json.dumps(
            json.loads(found, parse_float=lambda text: float(f"{float(text):.9g}")), ensure_ascii=False, indent=1
        )
        + "\n",
    )

"""`relabel systems` end to end: every figure of its JSON recomputed from the files by ir_measures, SciPy and a formula
written by hand; what it says first; what it refuses, and how.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from tests.jobs.conftest import Outcome
from tests.systems.conftest import Collection, Grades, make_collection, write
from tests.systems.test_estimate import by_hand
from tests.systems.test_figures import by_reference

Compare = Callable[..., dict[str, Any]]
Relabel = Callable[..., Outcome]


def condensed(scores: dict[str, dict[str, float]], grades: Grades) -> dict[str, dict[str, float]]:
    """The rankings without documents that have no grade."""
    return {
        query: {doc: score for doc, score in held.items() if doc in grades.get(query, {})}
        for query, held in scores.items()
    }


def bad_cases(grades: Grades, scores: dict[str, dict[str, float]], k: int) -> dict[str, float]:
    found = {}
    for query in grades:
        ranked = sorted(scores.get(query, {}), key=lambda doc: (scores[query][doc], doc), reverse=True)
        found[query] = sum(grades[query][doc] == 0 for doc in ranked[:k]) / k
    return found


def reference(collection: Collection, grades: Grades, name: str, *, k: int = 10) -> dict[str, dict[str, float]]:
    """Figures of a system by name and query."""
    scores = condensed(collection.systems[name], grades)
    found = by_reference(grades, scores, k=k, relevant=2)
    return {f"{figure}@{k}": values for figure, values in found.items()} | {f"bad@{k}": bad_cases(grades, scores, k)}


def of_queries(values: dict[str, float], queries: list[str]) -> np.ndarray:
    return np.array([values[query] for query in queries])


@pytest.mark.parametrize("gold", [5, 12, 25])
def test_every_figure_is_recomputed_from_the_files(collection: Collection, compare: Compare, gold: int) -> None:
    found = compare(*collection.write_all(gold=gold))
    assert (found["queries"], found["gold_queries"], found["is_opinion"]) == (40, gold, False)
    with_gold, others = collection.queries[:gold], collection.queries[gold:]
    humans = {query: collection.humans[query] for query in with_gold}
    by_human = {name: reference(collection, humans, name) for name in ("good", "bad")}
    by_judge = {name: reference(collection, collection.judge, name) for name in ("good", "bad")}
    (pair,) = found["pairs"]
    for figure, shown in pair["figures"].items():
        human, judge_gold, judge_other = (
            of_queries(figures["bad"][figure], queries) - of_queries(figures["good"][figure], queries)
            for figures, queries in ((by_human, with_gold), (by_judge, with_gold), (by_judge, others))
        )
        is_fitted = gold >= 20 or figure == "bad@10"
        wanted = by_hand(human, judge_gold, judge_other, is_fitted=is_fitted)
        assert list(shown["difference"].values()) == pytest.approx(wanted, abs=1e-6), figure
        alone = stats.ttest_1samp(human, 0).confidence_interval(0.95)
        assert [shown["humans"]["low"], shown["humans"]["high"]] == pytest.approx(alone, abs=1e-6)
        opinion = stats.ttest_1samp([*judge_gold, *judge_other], 0).confidence_interval(0.95)
        assert [shown["judge"]["low"], shown["judge"]["high"]] == pytest.approx(opinion, abs=1e-6)
        assert shown["lowest"] == shown["difference"]["value"] == shown["highest"], "all is judged"
    for system in found["systems"]:
        assert ("levels" in system) == (gold >= 10)
        for figure, shown in system.get("levels", {}).items():
            human = of_queries(by_human[system["name"]][figure], with_gold)
            judge_gold, judge_other = (
                of_queries(by_judge[system["name"]][figure], queries) for queries in (with_gold, others)
            )
            *wanted, weight = by_hand(human, judge_gold, judge_other, is_fitted=gold >= 20 or figure == "bad@10")
            expected = [*np.clip(wanted, 0.0, 1.0), weight]
            assert list(shown.values()) == pytest.approx(expected, abs=1e-6), figure


def test_the_first_line_says_which_is_better(collection: Collection, compare: Compare, relabel: Relabel) -> None:
    arguments = collection.write_all(gold=12)
    shown = compare(*arguments)["pairs"][0]["figures"]["ndcg@10"]
    assert shown["better"] == "good"
    value, low, high = (abs(shown["difference"][name]) for name in ("value", "high", "low"))
    first = relabel("systems", *arguments).out.splitlines()[0]
    assert first == f"good is better than bad by {value:.3f} ({low:.3f} to {high:.3f}) in nDCG@10."


def test_what_is_not_decided_names_how_many_queries_would(relabel: Relabel, folder: object) -> None:
    alike = make_collection(gap=0.02)
    first = relabel("systems", *alike.write_all(gold=12), "--width", "0.05").out.splitlines()[0]
    assert first.startswith("bad against good: not decided (")
    assert "more judged queries would show a difference of 0.05." in first
    whole = relabel("systems", *alike.write_all(gold=40)).out.splitlines()[0]
    assert "new queries (all of these are judged) would show a difference of 0.02." in whole
    few = relabel("systems", *alike.write_all(gold=12)).out.splitlines()[0]
    counts = re.search(
        r"about (\d+) more judged queries would show a difference of 0\.02, and 28 are not judged yet: "
        r"about (\d+) new queries have to be added\.$",
        few,
    )
    assert counts, few
    assert int(counts[1]) == 28 + int(counts[2])
    wider = relabel("systems", *alike.write_all(gold=12), "--width", "0.2").out.splitlines()[0]
    assert wider.endswith("a difference of 0.2 would have been shown.")


def test_figures_that_are_equal_in_every_query_say_why(collection: Collection, compare: Compare) -> None:
    """Ten places hold all of eight documents; where every document is relevant, no order is better."""
    few = make_collection(documents=8)
    for gold in (0, 12):
        (note,) = (note for note in compare(*few.write_all(gold=gold))["notes"] if "is 0 in every query" in note)
        assert note.startswith("bad - good: the difference in P@10 and bad documents@10 is 0 in every query, since")
        assert "the same documents in the top 10" in note
    assert not [note for note in compare(*few.write_all(gold=12), "--k", "3")["notes"] if "in every query" in note]
    for grades in (*collection.humans.values(), *collection.judge.values()):
        grades.update({doc: max(grade, 1) for doc, grade in grades.items()})
    notes = compare(*collection.write_all(gold=12), "--relevant", "1")["notes"]
    assert [note for note in notes if "is 0 in every query" in note] == [
        "bad - good: the difference in P@10 and RR@10 is 0 in every query, since both have 1.0000 in each",
        "bad - good: the difference in bad documents@10 is 0 in every query, since both have 0.0000 in each",
    ]


def test_without_gold_it_is_the_judges_opinion_without_levels(
    collection: Collection, compare: Compare, relabel: Relabel
) -> None:
    arguments = collection.write_all(gold=0)
    found = compare(*arguments)
    assert found["is_opinion"]
    assert all("levels" not in system for system in found["systems"])
    assert found["pairs"][0]["figures"]["ndcg@10"]["humans"] is None
    lines = relabel("systems", *arguments).out.splitlines()
    assert lines[0].startswith("The judge finds good better than bad by ")
    assert lines[1].startswith("No human judged anything here")


@pytest.mark.parametrize(("gold", "more"), [(1, 4), (4, 1)])
def test_fewer_than_five_gold_queries_are_refused_with_the_number_that_do(
    collection: Collection, relabel: Relabel, gold: int, more: int
) -> None:
    done = relabel("systems", *collection.write_all(gold=gold))
    done.refused(3, "--gold humans.qrels", f"{gold} of the compared queries", f"Judge {more} more")
    planned = relabel("systems", *collection.write_all(gold=gold), "--plan")
    assert f"Humans judged {gold} of the compared queries, and figures want 5: these are the judge's" in planned.out


def without_best(grades: Grades, scores: dict[str, dict[str, float]]) -> Grades:
    """Grades of all documents but the first that a system returns."""
    best = {query: max(held, key=lambda doc: held[doc]) for query, held in scores.items()}
    return {query: {doc: grade for doc, grade in held.items() if doc != best[query]} for query, held in grades.items()}


@pytest.mark.parametrize("gold", [0, 12])
def test_unjudged_documents_are_counted_and_bound_the_difference(
    collection: Collection, compare: Compare, gold: int
) -> None:
    """The good system's first documents lack a label, or of gold queries a human's grade: worst and best enclose what
    these give.
    """
    arguments = collection.write_all(gold=gold)
    whole = compare(*arguments)["pairs"][0]["figures"]["ndcg@10"]
    scores = collection.systems["good"]
    if gold:
        collection.write_qrels(without_best(collection.humans, scores), "humans.qrels", queries=gold)
    else:
        collection.write_qrels(without_best(collection.judge, scores), "judge.qrels")
    found = compare(*arguments)
    good = found["systems"][0]
    counts = [good[name] for name in ("documents", "unlabelled", "gold_documents", "ungraded")]
    assert counts == ([400, 0, 120, 12] if gold else [400, 40, 0, 0])
    shown = found["pairs"][0]["figures"]["ndcg@10"]
    assert shown["lowest"] < shown["difference"]["value"] < shown["highest"]
    assert shown["lowest"] <= whole["difference"]["value"] <= shown["highest"]
    warning = "12 of 120 documents of the gold queries" if gold else "40 of 400 documents have no label"
    assert any(text.startswith("good, top 10: ") and warning in text for text in found["warnings"])


def test_what_the_judge_leaves_out_does_not_move_a_difference_with_gold(
    collection: Collection, compare: Compare
) -> None:
    arguments = collection.write_all(gold=12)
    collection.write_qrels(without_best(collection.judge, collection.systems["good"]), "judge.qrels")
    found = compare(*arguments)
    shown = found["pairs"][0]["figures"]["ndcg@10"]
    assert shown["lowest"] == shown["difference"]["value"] == shown["highest"]
    assert any("40 of 400 documents have no label" in text and "do not move it" in text for text in found["warnings"])


def test_a_query_without_documents_counts_as_0_and_is_named(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    del collection.systems["bad"]["q003"]
    collection.write_run("bad")
    found = compare(*arguments)
    bad = found["systems"][1]
    assert (bad["queries"], bad["without_documents"]) == (39, ["q003"])
    assert found["warnings"] == ["bad returns nothing for 1 of 40 queries, which count as 0: q003"]
    humans = {query: collection.humans[query] for query in collection.queries[:12]}
    assert not found["pairs"][0]["sentence"].startswith("bad returns nothing")
    wanted = reference(collection, humans, "bad")["ndcg@10"]
    assert wanted["q003"] == 0
    human = of_queries(wanted, collection.queries[:12])
    assert found["pairs"][0]["figures"]["ndcg@10"]["humans"]["value"] == pytest.approx(
        (human - of_queries(reference(collection, humans, "good")["ndcg@10"], collection.queries[:12])).mean(), abs=1e-6
    )


def test_three_systems_are_compared_in_pairs(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    collection.systems["third"] = collection.systems["good"]
    found = compare(collection.write_run("third"), *arguments)
    names = [(pair["a"], pair["b"]) for pair in found["pairs"]]
    assert names == list(itertools.combinations(["third", "good", "bad"], 2))
    same = found["pairs"][0]["figures"]["ndcg@10"]["difference"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)


def test_the_plan_names_random_queries_that_nobody_judged(collection: Collection, compare: Compare) -> None:
    few = compare(*collection.write_all(gold=4), "--plan")
    assert few["is_opinion"]
    plan = few["plan"]
    assert len(plan["queries"]) == 6
    assert not set(plan["queries"]) & set(collection.queries[:4])
    again = compare(*collection.write_all(gold=4), "--plan")["plan"]
    assert again == plan
    other = compare(*collection.write_all(gold=4), "--plan", "--seed", "8")["plan"]
    assert other["queries"] != plan["queries"]
    tops = set()
    for name, query in itertools.product(collection.systems, plan["queries"]):
        scores = collection.systems[name][query]
        tops |= {(query, doc) for doc in sorted(scores, key=scores.get)[-10:]}
    assert plan["pairs"] == len(tops)


def test_the_plan_asks_for_the_wanted_width(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    wide = compare(*arguments, "--plan", "--width", "0.08")
    assert len(wide["plan"]["queries"]) == min(wide["pairs"][0]["more_queries"], 28)
    narrow = compare(*arguments, "--plan", "--width", "0.06")
    assert len(narrow["plan"]["queries"]) > len(wide["plan"]["queries"])
    assert narrow["plan"]["queries"][: len(wide["plan"]["queries"])] == wide["plan"]["queries"]
    nothing = compare(*arguments, "--plan", "--width", "0.9")["plan"]
    assert (nothing["queries"], "is shown already for each pair" in nothing["reason"]) == ([], True)


def test_a_plan_where_all_is_judged_says_that_queries_have_to_be_added(
    collection: Collection, relabel: Relabel
) -> None:
    arguments = (*collection.write_all(gold=40), "--plan", "--width", "0.02")
    done = relabel("systems", *arguments)
    assert "The plan names no query: " in done.out
    assert "nobody judged 0 of those that there are, so queries have to be added" in done.out
    assert "shown already" not in done.out


@pytest.mark.parametrize("gold", [6, 12, 36])
def test_the_plan_and_the_sentence_name_the_same_number(collection: Collection, compare: Compare, gold: int) -> None:
    found = compare(*collection.write_all(gold=gold), "--plan", "--width", "0.02")
    more = found["pairs"][0]["more_queries"]
    assert more > 10
    assert f"{more:,} more would show a difference of 0.02" in found["plan"]["reason"]
    assert len(found["plan"]["queries"]) == min(more, 40 - gold)


def test_the_plan_becomes_a_file_for_people_whose_grades_are_gold(
    relabel: Relabel, write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    made = make_collection(12, 15)
    systems = [made.write_run(name) for name in made.systems]
    pairs = [
        {"query_id": query, "query": f"words of {query}", "doc_id": doc, "document": f"text of {doc}"}
        for query, held in made.humans.items()
        for doc in held
    ]
    plan = relabel("systems", *systems, "--labels", labelled_by_fake(write_pairs, write_job, relabel, pairs), "--plan")
    assert "relabel review RUN --queries plan.json --to FILE" in plan.out
    planned = relabel("systems", *systems, "--labels", "out/ecom", "--plan", "--output", "json")
    Path("plan.json").write_text(planned.out, encoding="utf-8")
    asked = planned.json["plan"]
    assert list(asked["documents"]) == asked["queries"]
    assert sum(map(len, asked["documents"].values())) == asked["pairs"]
    look = relabel("review", "out/ecom", "--queries", "plan.json", "--to", "look.parquet", "--output", "json").json
    assert (look["order"], look["queries"], look["pairs"], look["without_label"]) == ("random", 10, asked["pairs"], 0)
    rows = pq.read_table("look.parquet").to_pylist()
    assert {(row["query_id"], row["doc_id"]) for row in rows} == {
        (query, doc) for query, docs in asked["documents"].items() for doc in docs
    }
    assert [query for query, _ in itertools.groupby(row["query_id"] for row in rows)] == asked["queries"]
    first = [row["doc_id"] for row in rows if row["query_id"] == asked["queries"][0]]
    assert first != sorted(first)
    filled = [row | {"grade": min(made.humans[row["query_id"]][row["doc_id"]], 2), "who": "anna"} for row in rows]
    pq.write_table(pa.Table.from_pylist(filled), "anna.parquet")
    assert relabel("review", "out/ecom", "--from", "anna.parquet", "--to", "people.parquet").code == 0
    found = relabel("systems", *systems, "--labels", "out/ecom", "--gold", "people.parquet", "--output", "json").json
    assert (found["gold_queries"], found["is_opinion"]) == (10, False)
    assert not [note for note in found["notes"] if "random" in note]


def test_what_the_plan_asks_and_the_run_lacks_is_counted_and_another_file_is_refused(
    relabel: Relabel, write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    pairs = [{"query_id": "q1", "query": "shoe", "doc_id": f"d{number}", "document": "a shoe"} for number in range(3)]
    labelled_by_fake(write_pairs, write_job, relabel, pairs)

    def review(plan: Any, *more: str) -> Any:
        Path("plan.json").write_text(json.dumps(plan), encoding="utf-8")
        return relabel("review", "out/ecom", "--queries", "plan.json", "--to", "look.csv", "--force", *more)

    shown = review({"plan": {"documents": {"q1": ["d0", "d2", "d9"], "q2": ["d0"]}}})
    assert shown.code == 0
    assert "2 documents of the plan have no label in out/ecom" in shown.out
    assert "order      that of the plan's queries\n" in shown.out
    assert "random" not in shown.out
    assert "relabel pairs unjudged" in shown.out
    review({"plan": {"documents": {}}}).refused(3, "plan.json: the plan names no query")
    review({"plan": {"documents": {"q7": ["d0"]}}}).refused(3, "plan.json: out/ecom has a label of none")
    for other in ({"plan": None}, {"plan": {"queries": ["q1"]}}, ["q1"], {"plan": {"documents": {"q1": "d0"}}}):
        review(other).refused(3, "plan.json: is not what `relabel systems … --plan --output json` prints")
    missing = relabel("review", "out/ecom", "--queries", "plan.jsn", "--to", "look.csv", "--force")
    missing.refused(3, "plan.jsn: no such file")
    for option in (["--pairs", "3"], ["--order", "random"], ["--second", "out/ecom"]):
        review({}, *option).refused(2, option[0], "--queries")


def labelled_by_fake(
    write_pairs: Callable[..., Path], write_job: Callable[..., str], relabel: Relabel, pairs: list[dict[str, str]]
) -> str:
    """The output of a run over these pairs."""
    write_pairs(pairs)
    job = {"input": {"columns": {"document": "document", "gold": None}}}
    assert relabel("run", write_job(job)).code == 0
    return "out/ecom"


def test_scores_of_the_judge_are_warned_of(collection: Collection, compare: Compare, relabel: Relabel) -> None:
    arguments = collection.write_all(gold=12)
    found = compare(*arguments, "--made-by", "good=student", "--made-by", "bad=other")
    assert [system["made_by"] for system in found["systems"]] == ["student", "other"]
    assert found["warnings"][0].startswith("good: its scores are those of a student of the judge")
    relabel("systems", *arguments, "--made-by", "worse=judge").refused(2, "--made-by worse", "there are good, bad")
    relabel("systems", *arguments, "--made-by", "good=gpt").refused(2, "--made-by good=gpt", "judge, student, other")


def test_labels_and_gold_come_as_tables_too(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    wanted = compare(*arguments)
    for grades, path, queries in ((collection.judge, "judge.parquet", 40), (collection.humans, "humans.parquet", 12)):
        rows = [
            {"query_id": query, "doc_id": doc, "grade": grade}
            for query in collection.queries[:queries]
            for doc, grade in grades[query].items()
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = compare(*arguments[:2], "--labels", "judge.parquet", "--gold", "humans.parquet")
    assert found["pairs"] == wanted["pairs"]


def test_files_in_each_others_place_are_refused(collection: Collection, relabel: Relabel) -> None:
    good, bad, *_ = collection.write_all(gold=12)
    relabel("systems", good, "humans.qrels", "--labels", "judge.qrels").refused(
        3, "humans.qrels: its lines have four fields", "judgments, not a system's ranking", "--labels or --gold"
    )
    relabel("systems", good, bad, "--labels", bad).refused(
        3, "--labels bad.run: its lines have six fields", "scores are no grades", "Name it as a system"
    )
    relabel("systems", good, bad, "--labels", "judge.qrels", "--gold", good).refused(3, "--gold good.run: its lines")


def test_ids_that_do_not_go_together_are_refused(collection: Collection, relabel: Relabel) -> None:
    good, bad, *_ = collection.write_all(gold=12)
    write("other.qrels", ["x1 0 d0-0 1", "x2 0 d0-1 2"])
    relabel("systems", good, bad, "--labels", "other.qrels").refused(
        3, "good.run: none of its 40 queries has a label in other.qrels", "q000", "labels are of x1, x2"
    )
    write("docs.qrels", ["q000 0 x 1", "q001 0 y 2"])
    relabel("systems", good, bad, "--labels", "docs.qrels").refused(
        3, "none of the 20 documents in its top 10", "--doc"
    )
    relabel("systems", good, bad, "--labels", "judge.qrels", "--gold", "other.qrels").refused(
        3, "--gold other.qrels: none of its queries is compared: it grades x1, x2; labels and systems have q000"
    )


def test_one_system_or_two_of_one_name_are_refused(collection: Collection, relabel: Relabel) -> None:
    good, _, *rest = collection.write_all(gold=12)
    relabel("systems", good, *rest).refused(2, "two or more are compared")
    relabel("systems", good, good, *rest).refused(2, "two systems are called good", "NAME=PATH")


def test_one_file_under_two_names_is_refused(collection: Collection, relabel: Relabel) -> None:
    path = collection.write_run("good")
    collection.write_qrels(collection.judge, "judge.qrels")
    done = relabel("systems", f"old={path}", f"new=./{path}", "--labels", "judge.qrels")
    done.refused(2, "old and new are the same ranking")


def test_a_systems_own_figure_lies_within_0_and_1(folder: object, compare: Compare) -> None:
    kind = {f"q{query}": {"d1": 3, "d2": 0} for query in range(40)}
    best = {query: {"d1": 2.0, "d2": 1.0} for query in kind}
    worst = {query: {"d1": 1.0, "d2": 2.0} for query in kind}
    mixed = {query: {"d1": 3 * (number % 3 > 0), "d2": 3} for number, query in enumerate(kind)}
    collection = Collection(kind, mixed, {"best": best, "worst": worst})
    found = compare(*collection.write_all(gold=12))
    for system in found["systems"]:
        for name, level in system["levels"].items():
            assert 0.0 <= level["low"] <= level["value"] <= level["high"] <= 1.0, (system["name"], name)


def test_labels_that_hold_the_gold_itself_are_refused(collection: Collection, relabel: Relabel) -> None:
    good, bad, *rest = collection.write_all(gold=12)
    rows = [
        {"query_id": query, "doc_id": doc, "grade": grade, "from_gold": query == "q000"}
        for query, held in collection.judge.items()
        for doc, grade in held.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), "combined.parquet")
    relabel("systems", good, bad, "--labels", "combined.parquet", *rest[2:]).refused(
        3, "combined.parquet: 30 of its labels are grades of humans", "Give the labels of before"
    )


def test_gold_that_is_the_judges_own_is_warned_of(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    assert compare(*arguments)["warnings"] == []
    collection.write_qrels(collection.judge, "humans.qrels", queries=12)
    (warning,) = compare(*arguments)["warnings"]
    assert warning.startswith("humans.qrels: its grades are the labels', for all 360 documents")


@pytest.mark.parametrize(("option", "path"), [("--map", "humans.qrels"), ("--map-labels", "judge.qrels")])
def test_grades_of_which_none_is_relevant_are_warned_of(
    collection: Collection, compare: Compare, option: str, path: str
) -> None:
    """Two scales, say 0 to 1 and 0 to 3: P and RR of one of them are 0 for every query."""
    arguments = (*collection.write_all(gold=12), "--grades", "4")
    (warning,) = compare(*arguments, option, "0=0,1=0,2=1,3=1")["warnings"]
    assert warning.startswith(f"{path}: its grades go up to 1, and documents are relevant from 2 on")
    assert compare(*arguments, option, "0=0,1=0,2=1,3=1", "--relevant", "1")["warnings"] == []


def test_scores_that_do_not_rank_are_warned_of(collection: Collection, compare: Compare) -> None:
    """A run file with ranks and a 0 for every score."""
    arguments = collection.write_all(gold=12)
    collection.systems["bad"] = {query: dict.fromkeys(held, 0.0) for query, held in collection.systems["bad"].items()}
    collection.write_run("bad")
    (warning,) = compare(*arguments)["warnings"]
    assert warning.startswith("bad: in 40 of 40 queries all documents have one score")


def test_a_verdict_that_unjudged_documents_could_turn_says_so(
    collection: Collection, compare: Compare, relabel: Relabel
) -> None:
    """Half of the documents have no label."""
    arguments = collection.write_all(gold=0)
    half = {query: dict([*held.items()][::2]) for query, held in collection.judge.items()}
    collection.write_qrels(half, "judge.qrels")
    shown = compare(*arguments)["pairs"][0]["figures"]["ndcg@10"]
    assert shown["is_decided"]
    assert shown["lowest"] < 0 < shown["highest"]
    first = relabel("systems", *arguments).out.splitlines()[0]
    assert "in nDCG@10, unless unjudged documents turn it." in first


def test_that_many_queries_have_no_documents_leads_the_sentence(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    for query in collection.queries[:18]:
        del collection.systems["bad"][query]
    collection.write_run("bad")
    sentence = compare(*arguments)["pairs"][0]["sentence"]
    assert sentence.startswith("bad returns nothing for 18 of 40 queries, which count as 0. good is better than bad by")


def test_columns_of_one_table_are_not_asked_of_files_that_have_the_usual_ones(
    relabel: Relabel,
    folder: object,
) -> None:
    collection = make_collection(12)
    rows = ["qid,docid,score"]
    for query, scores in collection.systems["bad"].items():
        rows += [f"{query},{doc},{score}" for doc, score in scores.items()]
    write("bad.csv", rows)
    collection.write_run("good")
    collection.write_qrels(collection.humans, "humans.qrels", queries=8)
    labels = ["query_id,doc_id,grade"]
    for query, grades in collection.judge.items():
        labels += [f"{query},{doc},{grade}" for doc, grade in grades.items()]
    write("judge.csv", labels)
    columns = ("--by", "qid", "--doc", "docid")
    found = relabel("systems", "good.run", "bad.csv", "--labels", "judge.csv", "--gold", "humans.qrels", *columns)
    assert found.code == 0, found
    wrong = ("--by", "topic", "--doc", "docid")
    relabel("systems", "good.run", "bad.csv", "--labels", "judge.csv", *wrong).refused(3, "bad.csv: no column `topic`")


def some_pairs(grades: Grades, scores: dict[str, dict[str, float]], *, kept: int, queries: int) -> Grades:
    """Grades of so many of a system's first ten documents, of so many queries; those of the others whole."""
    found = dict(grades)
    for query in list(grades)[:queries]:
        top = sorted(scores[query], key=lambda doc: (scores[query][doc], doc), reverse=True)[:10]
        found[query] = {doc: grade for doc, grade in grades[query].items() if doc not in top[kept:]}
    return found


def test_random_pairs_make_no_gold_query(collection: Collection, relabel: Relabel) -> None:
    """Two or three of a query's documents leave two systems alike, whichever is better."""
    arguments = collection.write_all(gold=0)
    random = np.random.default_rng(5)
    pairs = [(query, doc) for query, held in collection.humans.items() for doc in held]
    chosen = sorted(random.choice(len(pairs), 100, replace=False))
    lines = [f"{query} 0 {doc} {collection.humans[query][doc]}" for query, doc in (pairs[place] for place in chosen)]
    write("humans.qrels", lines)
    num_queries = len({line.split()[0] for line in lines})
    done = relabel("systems", *arguments, "--gold", "humans.qrels")
    done.refused(
        3,
        "--gold humans.qrels: 0 of the compared queries have grades of humans for 80 % or more of each system's top 10",
        f"{num_queries} queries are graded in part and do not count: q000 (",
        "Grade all documents of a query's top 10",
        "--plan",
    )
    planned = relabel("systems", *arguments, "--gold", "humans.qrels", "--plan", "--output", "json")
    assert (planned.json["is_opinion"], len(planned.json["plan"]["queries"])) == (True, 10)
    assert any("graded in part" in text for text in planned.json["warnings"])
    assert planned.json["warnings"][0].startswith("Humans judged 0 of the compared queries, and figures want 5")


@pytest.mark.parametrize(("kept", "counted"), [(8, 12), (7, 9)])
def test_a_gold_query_has_four_fifths_of_each_systems_top_graded(
    collection: Collection, compare: Compare, kept: int, counted: int
) -> None:
    arguments = collection.write_all(gold=12)
    partial = some_pairs(collection.humans, collection.systems["bad"], kept=kept, queries=3)
    collection.write_qrels(partial, "humans.qrels", queries=12)
    found = compare(*arguments)
    assert found["gold_queries"] == counted
    assert all(("levels" in system) == (counted >= 10) for system in found["systems"])
    in_part = [text for text in found["warnings"] if "graded in part" in text]
    assert bool(in_part) == (counted < 12)
    if in_part:
        assert "humans.qrels: 3 queries are graded in part and do not count: q000 (" in in_part[0]
        assert found["systems"][0]["gold_documents"] == 90


def discounted(grades: Iterable[float]) -> float:
    """DCG of ten documents in this order."""
    return sum(grade / math.log2(place + 2) for place, grade in enumerate(list(grades)[:10]))


def test_ndcg_by_humans_who_graded_the_top_alone_is_measured_by_all_labelled_documents(
    collection: Collection, compare: Compare
) -> None:
    """The best ranking has, for documents without a human's grade, the mean of what humans gave to their label."""
    arguments = collection.write_all(gold=12)
    queries = collection.queries[:12]
    humans: Grades = {}
    for query in queries:
        tops = [sorted(held[query], key=held[query].__getitem__)[-10:] for held in collection.systems.values()]
        humans[query] = {doc: collection.humans[query][doc] for top in tops for doc in top}
    collection.write_qrels(humans, "humans.qrels", queries=12)
    given: dict[int, list[int]] = {}
    for query in queries:
        for doc, grade in humans[query].items():
            given.setdefault(collection.judge[query][doc], []).append(grade)
    assert set(given) == set(range(4)), "humans graded documents of every label"
    expected = dict[str, dict[str, float]]()
    for name, held in collection.systems.items():
        for query in queries:
            ranked = sorted(held[query], key=held[query].__getitem__, reverse=True)
            best = sorted(
                (
                    humans[query].get(doc, float(np.mean(given[label])))
                    for doc, label in collection.judge[query].items()
                ),
                reverse=True,
            )
            value = discounted(humans[query][doc] for doc in ranked[:10]) / discounted(best)
            expected.setdefault(name, {})[query] = min(value, 1.0)
    found = compare(*arguments)
    difference = np.mean([expected["bad"][query] - expected["good"][query] for query in queries])
    (pair,) = found["pairs"]
    assert pair["figures"]["ndcg@10"]["humans"]["value"] == pytest.approx(difference, abs=1e-9)
    assert any("humans graded fewer documents than the judge labelled in 12 of 12" in note for note in found["notes"])


def test_queries_graded_in_part_change_no_figure(collection: Collection, compare: Compare) -> None:
    """Those that are graded whole give what they give alone."""
    arguments = collection.write_all(gold=12)
    wanted = compare(*arguments)
    partial = {query: dict(list(held.items())[:3]) for query, held in collection.humans.items()}
    partial |= {query: collection.humans[query] for query in collection.queries[:12]}
    collection.write_qrels(partial, "humans.qrels", queries=20)
    found = compare(*arguments)
    assert found["pairs"] == wanted["pairs"]
    assert found["systems"] == wanted["systems"]


def test_tables_with_other_columns_go_with_tables_with_the_usual_ones(collection: Collection, compare: Compare) -> None:
    arguments = collection.write_all(gold=12)
    wanted = compare(*arguments)
    for name, head in (("good", "qid,docid,bm25"), ("bad", "query_id,doc_id,score")):
        held = collection.systems[name].items()
        write(f"{name}.csv", [head, *(f"{query},{doc},{one}" for query, docs in held for doc, one in docs.items())])
    columns = ("--by", "qid", "--doc", "docid", "--score", "bm25")
    found = compare("good.csv", "bad.csv", *arguments[2:], *columns)
    assert found["pairs"] == wanted["pairs"]


def test_a_score_column_that_no_table_has_is_refused(collection: Collection, relabel: Relabel) -> None:
    good, _, *rest = collection.write_all(gold=12)
    rows = ["query_id,doc_id,score"]
    for query, scores in collection.systems["bad"].items():
        rows += [f"{query},{doc},{score}" for doc, score in scores.items()]
    write("bad.csv", rows)
    relabel("systems", good, "bad.csv", *rest, "--score", "bm52").refused(3, "--score bm52", "bad.csv")

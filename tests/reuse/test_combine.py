"""Several judges' labels as one set: the mean, Dawid-Skene, gold that anchors, and who takes the file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.examples import load_examples
from relabel.distill.students.spec import DistillSpec
from relabel.jobs.combine import SMOOTHING, Votes, combine_votes, dawid_skene
from relabel.manifests.files import Storage
from tests.reuse.conftest import Days, Row, rows_of

QUERIES, DOCS, GRADES = 24, 10, 3


def judge(days: Days, name: str, grades: dict[tuple[str, str], int], probs: list[float] | None = None) -> Path:
    """A label file."""
    rows = [{"query_id": query, "doc_id": doc, "grade": grade, **({"probs": probs} if probs else {})}
            for (query, doc), grade in grades.items()]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), days.folder / f"{name}.parquet")
    return days.folder / f"{name}.parquet"


def crowd(days: Days, *shares: float) -> tuple[list[Path], dict[tuple[str, str], int]]:
    """Judges that give the true grade with these shares, else the highest; and the truth, of which half is 0."""
    rng = np.random.default_rng(3)
    pairs = [(f"q{query}", f"d{doc}") for query in range(QUERIES) for doc in range(DOCS)]
    truth = dict(zip(pairs, rng.choice(GRADES, len(pairs), p=[0.5, 0.3, 0.2]).tolist(), strict=True))
    files = []
    for number, share in enumerate(shares):
        given = {pair: grade if rng.random() < share else GRADES - 1 for pair, grade in truth.items()}
        files.append(judge(days, f"judge{number}", given))
    return files, truth


def written(days: Days, *arguments: Any) -> tuple[dict[str, Any], list[Row]]:
    """What `combine` says, and the rows that it writes."""
    code, said = days.call("combine", *arguments, "--to", days.out("combined.parquet"), "--force")
    assert code == 0, said
    return said, pq.read_table(days.out("combined.parquet")).to_pylist()


def scalar_dawid_skene(votes: list[list[int | None]], gold: list[int], grades: int) -> list[list[float]]:
    """EM of a list a pair, number by number; None is no vote, -1 no gold."""

    def known(pair: int, found: list[float]) -> list[float]:
        return found if gold[pair] < 0 else [float(grade == gold[pair]) for grade in range(grades)]

    probs = []
    for pair, row in enumerate(votes):
        cast = [vote for vote in row if vote is not None]
        probs.append(known(pair, [cast.count(grade) / len(cast) for grade in range(grades)]))
    for _ in range(2000):
        prior = [sum(row[true] for row in probs) + SMOOTHING for true in range(grades)]
        confusion = {}
        for one in range(len(votes[0])):
            for true in range(grades):
                counts = [SMOOTHING + sum(probs[pair][true] for pair, row in enumerate(votes) if row[one] == given)
                          for given in range(grades)]  # fmt: skip
                confusion[one, true] = [count / sum(counts) for count in counts]
        for pair, row in enumerate(votes):
            likely = [prior[true] * math.prod(confusion[one, true][vote] for one, vote in enumerate(row)
                                              if vote is not None) for true in range(grades)]  # fmt: skip
            probs[pair] = known(pair, [value / sum(likely) for value in likely])
    return probs


@pytest.mark.parametrize("gold", [[-1] * 8, [-1, 1, -1, -1, -1, 0, -1, -1]])
def test_dawid_skene_is_what_a_scalar_em_finds(gold: list[int]) -> None:
    votes = [[0, 0, 1], [1, 1, 1], [2, 2, None], [0, 1, 1], [2, 0, 2], [1, 1, 0], [None, 2, 2], [0, 0, 0]]
    grade_JPK = np.array([[np.eye(3)[row[one]] if row[one] is not None else np.zeros(3) for row in votes]
                          for one in range(3)])  # fmt: skip
    found = dawid_skene(grade_JPK, np.array(gold))
    assert found == pytest.approx(np.array(scalar_dawid_skene(votes, gold, 3)), abs=1e-4)


def test_the_mean_counts_a_grade_as_sure_and_a_pair_that_a_judge_lacks_by_the_others(days: Days) -> None:
    first = judge(days, "a", {("q", "x"): 0, ("q", "y"): 2}, [0.6, 0.4, 0.0])
    second = judge(days, "b", {("q", "z"): 1, ("q", "x"): 1})
    said, rows = written(days, first, second)
    assert {row["doc_id"]: (row["grade"], [round(one, 6) for one in row["probs"]]) for row in rows} == {
        "x": (1, [0.3, 0.7, 0.0]),
        "y": (0, [0.6, 0.4, 0.0]),
        "z": (1, [0.0, 1.0, 0.0]),
    }
    assert [(one["name"], one["pairs"], one["agreement"]) for one in said["labels"]] == [
        (str(first), 2, 0.0),
        (str(second), 2, 1.0),
    ]
    metadata = pq.read_schema(days.out("combined.parquet")).metadata
    assert json.loads(metadata[b"relabel.combine"])["judges"] == [str(first), str(second)]
    code, message = days.call("combine", first, "--to", days.out("alone.parquet"))
    assert (code, "one judge alone" in message) == (2, True)


def test_dawid_skene_trusts_the_judges_that_agree(days: Days) -> None:
    files, truth = crowd(days, 0.9, 0.85, 0.3, 0.3, 0.3)

    def right(by: str) -> float:
        rows = written(days, *files, "--by", by)[1]
        return float(np.mean([row["grade"] == truth[row["query_id"], row["doc_id"]] for row in rows]))

    assert right("dawid-skene") > right("mean") + 0.1


def test_gold_stays_as_it_is_and_gives_the_others_its_shares(days: Days) -> None:
    files, truth = crowd(days, 0.7, 0.6, 0.5)
    known = {pair: grade for pair, grade in truth.items() if int(pair[0][1:]) < 12}
    gold = judge(days, "gold", known)
    said, rows = written(days, *files, "--gold", gold, "--by", "dawid-skene")
    grades = {(row["query_id"], row["doc_id"]): row["grade"] for row in rows}
    assert {pair: grades[pair] for pair in known} == known
    share_K, other_K = (np.bincount(list(some.values()), minlength=GRADES) / len(some)
                        for some in (known, {pair: grades[pair] for pair in grades.keys() - known}))  # fmt: skip
    assert np.abs(share_K - other_K).max() < 0.15  # ties have one grade
    assert (said["gold_pairs"], said["gold_queries"]) == (120, 12)
    by_gold = {one["name"]: one["by_gold"] for one in said["labels"]}
    assert list(by_gold) == [*map(str, files), "mean", "dawid-skene"]
    assert all(one["auc"]["low"] < one["auc"]["value"] < one["auc"]["high"] for one in by_gold.values())
    assert by_gold["dawid-skene"]["kappa"]["value"] < 1.0  # what anchored is not what is measured


def test_equal_scores_get_one_grade_and_a_grade_that_gold_lacks_is_never_given() -> None:
    grade_JPK = np.eye(4)[np.array([[0, 0, 1, 1, 2, 2, 3, 3, 0, 2]])]
    nothing: Any = np.zeros(0)
    votes = Votes(["one"], nothing, nothing, nothing, grade_JPK, grade_JPK, np.zeros((1, 10), dtype=bool))
    grade_P, _ = combine_votes(votes, "mean", np.array([-1] * 8 + [0, 2]))
    assert grade_P.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 0, 2]


def test_the_instructions_of_an_ensemble_are_judges(days: Days) -> None:
    days.run("views", rows_of(6, 4), labeler={"name": "ensemble", "grades": 3})
    said, rows = written(days, days.out("views"))
    assert [one["name"].partition(": ")[2] for one in said["labels"]] == [f"instruction {one}" for one in (1, 2, 3)]
    for row, label in zip(sorted(rows, key=lambda row: row["row_id"]), days.labels("views"), strict=True):
        assert row["probs"] == pytest.approx(label["probs"], abs=1e-6)


def test_evaluate_a_cascade_and_distill_take_the_file(days: Days) -> None:
    rows = rows_of(40, 5)
    for name, seed in (("one", 7), ("two", 8)):
        days.run(name, rows, labeler={"name": "direct"}, engine={"seed": seed})
    written(days, days.out("one"), days.out("two"), "--by", "dawid-skene")
    combined = str(days.out("combined.parquet"))
    gold = judge(days, "gold", {(one["query_id"], one["doc_id"]): one["grade"] for one in days.labels("one")})
    assert days.call("evaluate", combined, "--qrels", gold, "--resamples", "10")[1]["counts"]["judged"] == 200
    cascade = {"cheap": combined, "calibration": str(days.out("one")), "alpha": 0.9}
    assert days.run("cascade", rows, labeler={"name": "direct"}, cascade=cascade)["cascade"]["calibration"] == 200
    source = {"path": combined, "pairs": {"path": str(days.folder / "one.parquet")}}
    student = {"kind": "encoder", "model": "none"}
    spec = DistillSpec.model_validate({"name": "s", "labels": [source], "student": student, "output": "o"})
    examples = load_examples(spec, Storage())
    assert len(examples.texts) == 200
    held = {row["row_id"]: row["probs"] for row in pq.read_table(combined).to_pylist()}
    assert examples.targets["relevance"][17] == pytest.approx(held[examples.names[17][1]], abs=1e-6)


def test_gold_with_ids_of_other_names_anchors_labels_by_a_named_column(days: Days) -> None:
    files, truth = crowd(days, 0.7, 0.6)
    known = {pair: grade for pair, grade in truth.items() if int(pair[0][1:]) < 12}
    gold = pq.read_table(judge(days, "gold", known)).rename_columns({"query_id": "qid", "doc_id": "sku"})
    pq.write_table(gold, days.folder / "own.parquet")
    call = ("combine", *files, "--to", days.out("anchored.parquet"), "--gold", days.folder / "own.parquet")
    code, message = days.call(*call)
    assert (code, "with --columns query_id=… and --columns doc_id=…" in message) == (3, True)
    assert days.call(*call, "--columns", "query_id=qid,doc_id=sku")[1]["gold_pairs"] == 120
    assert days.call(*call, "--columns", "query=text", "--force")[0] == 2


def test_judges_that_share_no_pair_are_not_combined_in_silence(days: Days) -> None:
    first = judge(days, "a", {("q", "x"): 0, ("q", "y"): 2})
    second = judge(days, "b", {("q-1", "x"): 0, ("q-1", "y"): 1})
    third = judge(days, "c", {("q", "x"): 1})
    notes = written(days, first, second)[0]["notes"]
    assert [note.partition(" shares")[0] for note in notes if "shares no pair" in note] == [str(first), str(second)]
    notes = written(days, first, second, third)[0]["notes"]
    assert [note.partition(" shares")[0] for note in notes if "shares no pair" in note] == [str(second)]


def test_labels_of_several_inputs_are_learned_by_their_ids(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows[:25], labeler={"name": "direct"})
    days.run("tuesday", rows[15:], labeler={"name": "direct"}, engine={"seed": 8})
    written(days, days.out("monday"), days.out("tuesday"))
    combined = str(days.out("combined.parquet"))
    assert "row_id" not in pq.read_schema(combined).names, "it would count in two inputs"
    pairs = [str(days.folder / "monday.parquet"), str(days.folder / "tuesday.parquet")]
    source = {"path": combined, "pairs": {"path": pairs}}
    student = {"kind": "encoder", "model": "none"}
    spec = DistillSpec.model_validate({"name": "s", "labels": [source], "student": student, "output": "o"})
    assert len(load_examples(spec, Storage()).texts) == 40


def judged_by(days: Days, gold: Path, *sets: Path | str) -> tuple[int, Any]:
    return days.call("evaluate", *(sets or (days.out("combined.parquet"),)), "--qrels", gold, "--resamples", "10")


@pytest.mark.parametrize("by", ["mean", "dawid-skene"])
def test_gold_that_anchored_a_file_does_not_judge_it(days: Days, by: str) -> None:
    files, truth = crowd(days, 0.7, 0.6, 0.5)
    known = {pair: grade for pair, grade in truth.items() if int(pair[0][1:]) < 12}
    some, every = judge(days, "some", known), judge(days, "every", truth)
    rows = written(days, *files, "--gold", some, "--by", by)[1]
    assert {(row["query_id"], row["doc_id"]) for row in rows if row["from_gold"]} == known.keys()

    code, said = judged_by(days, some)
    assert code == 3
    assert "all 120 labels that it has a grade for are of queries whose gold went in" in said
    counts = judged_by(days, every)[1]["counts"]
    assert (counts["judged"], counts["from_gold"], counts["gold_null"]) == (120, 120, 0)
    assert counts["qrels_without_label"] == 0, "what gold went into is labelled, too"
    right = [truth[row["query_id"], row["doc_id"]] == row["grade"] for row in rows if not row["from_gold"]]
    assert judged_by(days, every)[1]["figures"]["accuracy"]["value"] == pytest.approx(np.mean(right))

    both = judged_by(days, every, days.out("combined.parquet"), files[0])[1]["comparisons"][0]
    assert (both["counts"]["judged"], both["counts"]["from_gold"], both["counts"]["matched"]) == (120, 120, 240)
    code, said = judged_by(days, some, days.out("combined.parquet"), files[0])
    assert (code, "are of queries whose gold went in" in said) == (3, True)


def test_gold_within_a_judge_is_carried_on_and_does_not_rate_it(days: Days) -> None:
    files, truth = crowd(days, 0.7, 0.6, 0.5)
    gold = judge(days, "gold", {pair: grade for pair, grade in truth.items() if int(pair[0][1:]) < 12})
    written(days, *files, "--gold", gold)
    anchored = days.out("combined.parquet").rename(days.folder / "anchored.parquet")
    said, rows = written(days, anchored, files[0], "--gold", judge(days, "every", truth))
    assert said["labels"][0]["by_gold"]["kappa"]["value"] < 1.0
    assert said["labels"][0]["by_gold"]["kappa"]["over"] == 120
    said, rows = written(days, anchored, files[0])
    assert sum(row["from_gold"] for row in rows) == 120


def test_a_query_whose_gold_was_seen_in_part_is_not_judged_by_the_rest_of_it(days: Days) -> None:
    files, truth = crowd(days, 0.7, 0.6, 0.5)
    known = {pair: grade for pair, grade in truth.items() if int(pair[0][1:]) < 12 and pair[1] in ("d0", "d1")}
    rows = written(days, *files, "--gold", judge(days, "some", known))[1]
    assert sum(row["from_gold"] for row in rows) == len(known)
    every = judge(days, "every", truth)
    found = judged_by(days, every)[1]
    assert (found["counts"]["judged"], found["counts"]["from_gold"]) == (120, 120)
    right = [truth[row["query_id"], row["doc_id"]] == row["grade"] for row in rows if int(row["query_id"][1:]) >= 12]
    assert found["figures"]["accuracy"]["value"] == pytest.approx(np.mean(right))

    lines = [",".join(("query_id", "doc_id", "grade", "from_gold"))]
    lines += [f"{row['query_id']},{row['doc_id']},{row['grade']},{row['from_gold']}" for row in rows]
    as_text = days.folder / "combined.csv"
    as_text.write_text("\n".join(lines))
    assert judged_by(days, every, as_text)[1]["counts"] == found["counts"]

    said = days.call("convert", days.out("combined.parquet"), days.folder / "combined.qrels")[1]
    assert "do not judge it by that gold" in said["notes"][0]


def test_without_gold_no_column_says_so_and_an_older_anchored_file_is_not_judged(days: Days) -> None:
    files, truth = crowd(days, 0.7, 0.6)
    gold = judge(days, "gold", truth)
    assert "from_gold" not in written(days, *files)[1][0]
    written(days, *files, "--gold", gold)
    older = days.folder / "older.parquet"
    pq.write_table(pq.read_table(days.out("combined.parquet")).drop_columns(["from_gold"]), older)
    code, said = judged_by(days, gold, older)
    assert (code, "240 of its labels are the grades of" in said, "Combine it again" in said) == (3, True, True)


def test_a_grade_off_the_scale_names_the_option_that_maps_it(days: Days) -> None:
    judges = [judge(days, "sure", {("q1", "d1"): 1}, [0.2, 0.8]), judge(days, "wide", {("q1", "d1"): 3})]
    code, said = days.call("combine", *judges, "--to", days.out("combined.parquet"))
    assert (code, "grade 3 is off the scale 0 to 1" in str(said), "--map-labels" in str(said)) == (3, True, True)


def test_judges_of_three_and_of_four_grades_are_brought_to_one_scale(days: Days) -> None:
    three = judge(days, "three", {("q1", "d1"): 2, ("q1", "d2"): 0}, [0.1, 0.2, 0.7])
    four = judge(days, "four", {("q1", "d1"): 3, ("q1", "d2"): 1}, [0.0, 0.4, 0.2, 0.4])
    code, said = days.call("combine", three, four, "--to", days.out("combined.parquet"))
    assert (code, "different scales" in said, "--map-labels" in said) == (3, True, True)
    rows = written(days, three, four, "--map-labels", "0=0,1=1,2=2,3=2")[1]
    assert [row["grade"] for row in rows] == [2, 2]
    for row in rows:
        assert row["probs"] == pytest.approx([0.05, 0.3, 0.65])


def test_a_yes_no_judge_keeps_its_grades_where_the_other_is_mapped_to_two(days: Days) -> None:
    yes_no = judge(days, "yes_no", {("q1", "d1"): 1, ("q1", "d2"): 1}, [0.1, 0.9])
    four = judge(days, "four", {("q1", "d1"): 3, ("q1", "d2"): 2}, [0.0, 0.0, 0.6, 0.4])
    code, said = days.call("combine", yes_no, four, "--to", days.out("combined.parquet"))
    assert (code, "--map-labels OLD=NEW,…, for instance 0=0,1=0,2=1,3=1" in said) == (3, True)
    assert "--map-labels JUDGE=OLD=NEW,… maps one judge alone." in said
    result, rows = written(days, yes_no, four, "--map-labels", "0=0,1=0,2=1,3=1")
    assert result["by_grade"] == [0, 2]
    assert rows[0]["probs"] == pytest.approx([0.05, 0.95])
    assert [note for note in result["notes"] if "yes_no.parquet: has 2 grades already" in note]


def test_a_file_that_never_gives_the_highest_grade_is_asked_for_its_scale(days: Days) -> None:
    four = judge(days, "four", {("q1", "d1"): 3, ("q1", "d2"): 0})
    yes_no = judge(days, "yes_no", {("q1", "d1"): 1, ("q1", "d2"): 0})
    (doubt,) = [note for note in written(days, four, yes_no)[0]["notes"] if "its labels go up to 1" in note]
    assert f"--map-labels {yes_no}=0=0,1=3" in doubt
    result, rows = written(days, four, yes_no, "--map-labels", f"{yes_no}=0=0,1=3")
    assert not [note for note in result["notes"] if "its labels go up to" in note]
    assert [row["grade"] for row in rows] == [3, 0]


@pytest.mark.parametrize("probs", [None, [0.1, 0.9]])
def test_a_map_that_leaves_a_judge_one_grade_is_refused(days: Days, probs: list[float] | None) -> None:
    yes_no = judge(days, "yes_no", {("q1", "d1"): 1, ("q1", "d2"): 0}, probs)
    four = judge(days, "four", {("q1", "d1"): 3, ("q1", "d2"): 1}, [0.0, 0.4, 0.2, 0.4])
    code, said = days.call(
        "combine", yes_no, four, "--map-labels", "0=0,1=0,2=1,3=2", "--to", days.out("combined.parquet")
    )
    assert (code, "all grades of" in said, "yes_no.parquet (0, 1) would become 0" in said) == (3, True, True)


def test_each_judge_has_the_map_that_names_it_and_the_others_the_plain_one(days: Days) -> None:
    yes_no = judge(days, "yes_no", {("q1", "d1"): 1, ("q1", "d2"): 1}, [0.1, 0.9])
    three = judge(days, "three", {("q1", "d1"): 2, ("q1", "d2"): 2}, [0.0, 0.2, 0.8])
    four = judge(days, "four", {("q1", "d1"): 3, ("q1", "d2"): 2}, [0.0, 0.0, 0.6, 0.4])
    maps = ["--map-labels", f"{yes_no}=0=0,1=3", "--map-labels", f"{three}=0=0,1=1,2=3"]
    result, rows = written(days, yes_no, three, four, *maps)
    assert (result["grades"], result["by_grade"]) == (4, [0, 0, 0, 2])
    assert rows[0]["probs"] == pytest.approx([0.1 / 3, 0.2 / 3, 0.2, 2.1 / 3])
    maps = ["--map-labels", "0=0,1=0,2=1,3=1", "--map-labels", f"{three}=0=0,1=0,2=1"]
    assert written(days, yes_no, three, four, *maps)[0]["grades"] == 2


def test_a_run_is_mapped_by_the_folder_that_names_it_however_it_is_written(days: Days) -> None:
    days.run("three", rows_of(6, 4), labeler={"name": "r3a"})
    days.run("four", rows_of(6, 4), labeler={"name": "direct"})
    three, four = days.out("three"), days.out("four")
    mapped = written(days, three, four, "--map-labels", f"{three}/=0=0,1=2,2=3")[0]
    assert (mapped["grades"], [labels["name"] for labels in mapped["labels"]]) == (4, [str(three), str(four)])


def test_gold_that_is_a_runs_own_input_is_read_by_the_columns_of_its_job(days: Days) -> None:
    rows = [{**row, "stars": number % 3} for number, row in enumerate(rows_of(6, 4))]
    named = [{"qid" if key == "query_id" else key: value for key, value in row.items()} for row in rows]
    columns = {"query_id": "qid", "gold": "stars"}
    for day in ("one", "two"):
        path = str(days.folder / f"{day}-own.parquet")
        pq.write_table(pa.Table.from_pylist(named), path)
        days.run(day, named, input={"path": path, "columns": columns}, engine={"name": "fake", "seed": len(day)})
    found = written(days, days.out("one"), days.out("two"), "--gold", path)[1]
    assert [row["grade"] for row in found] == [row["stars"] for row in rows]


def test_maps_that_name_no_judge_or_one_twice_are_refused(days: Days) -> None:
    yes_no = judge(days, "yes_no", {("q1", "d1"): 1}, [0.1, 0.9])
    four = judge(days, "four", {("q1", "d1"): 3}, [0.0, 0.0, 0.6, 0.4])

    def refused(*maps: str) -> str:
        options = [word for one in maps for word in ("--map-labels", one)]
        code, said = days.call("combine", yes_no, four, *options, "--to", days.out("combined.parquet"))
        assert code == 2, said
        return str(said)

    assert f"put the judge in front as LABELS names it: --map-labels {yes_no}=0=0,1=1" in refused("yes_no=0=0,1=3")
    assert "want each grade once" in refused(f"{yes_no}=0=0,0=3")
    assert f"two maps for {yes_no}" in refused(f"{yes_no}=0=0,1=3", f"{yes_no}=0=0,1=2")
    assert "two maps for all judges" in refused("0=0,1=3", "0=0,1=2")


def test_the_instructions_of_an_ensemble_are_mapped(days: Days) -> None:
    days.run("views", rows_of(6, 4), labeler={"name": "ensemble", "grades": 4})
    plain = written(days, days.out("views"))[1]
    mapped = written(days, days.out("views"), "--map-labels", "0=0,1=0,2=1,3=1")[1]
    for row, was in zip(mapped, plain, strict=True):
        low, high = sum(was["probs"][:2]), sum(was["probs"][2:])
        assert row["probs"] == pytest.approx([low, high], abs=1e-6)

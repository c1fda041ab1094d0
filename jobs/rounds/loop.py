"""Runs the rounds of a search one after the other, each as a run of its own, and writes the trajectories when all
searches are finished."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relabel.jobs.exits import Exit
from relabel.jobs.job import Job
from relabel.jobs.pairs.chunks import counter_digest, token_counter
from relabel.jobs.rounds.searches import (
    CORPUS_KEY,
    Corpus,
    Search,
    digest_of_rows,
    folder_of,
    load_corpus,
    load_questions,
    read_reviews,
    read_round,
    trajectories,
    write_round,
)
from relabel.jobs.run.results import RunReport
from relabel.manifests import failpoints
from relabel.manifests.costs import BudgetState
from relabel.manifests.errors import ConfigError, ManifestError, StaleRunError
from relabel.manifests.manifest import MANIFEST_NAME
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME, differences, load_plan
from relabel.manifests.records import checked, readable_json
from relabel.manifests.run import open_run_labels
from relabel.manifests.schemas import table_bytes
from relabel.manifests.specs import InputSpec, RoundsSpec
from relabel.manifests.store import RunStore, open_run_store, read_if_there

LOOP_VERSION = 1


def parts_of_search(
    questions: list[tuple[str, str]], corpus: Corpus, limits: RoundsSpec, tokens_by: str
) -> dict[str, Any]:
    """What ties an output to one search, in addition to its rounds' plans; paths are no part of it."""
    return {
        "version": LOOP_VERSION,
        "questions": {"rows": len(questions), "sha256": digest_of_rows(questions)},
        "corpus": {"documents": corpus.num_documents, "sha256": corpus.digest},
        "rounds": limits.model_dump(mode="json", exclude={"corpus", "tokenizer"}) | {"tokenizer": tokens_by},
    }


def claim(store: RunStore, parts: dict[str, Any]) -> None:
    """Write down what an output is for, or see that it is for this.

    Raises:
        StaleRunError: it is for something else; names what differs.
    """
    held = read_if_there(store, ROUNDS_NAME)
    if held is None:
        for name in (PLAN_NAME, MANIFEST_NAME):
            if read_if_there(store, name) is not None:
                raise StaleRunError(
                    f"{store.root}: holds a {name}, so it belongs to something else, say to a run. Name another "
                    "`output`."
                )
        store.check_conditional_writes()
        store.sweep("")
        store.create(ROUNDS_NAME, readable_json(parts))
        held = store.read(ROUNDS_NAME)
    where = f"{store.root}/{ROUNDS_NAME}"
    try:
        was = checked(dict[str, Any], json.loads(held))
    except ValueError as exc:
        raise ManifestError(f"{where}: can't be read. Restore it from a copy, or name another `output`.") from exc
    if changed := list(differences(was, parts)):
        listed = "\n  ".join(changed)
        raise StaleRunError(
            f"{store.root}: belongs to another search. Different:\n  {listed}\n  Use another `output`, or restore what "
            "changed."
        )


# The rounds of a search, one after the other, each a run of its own; and the trajectories once all are over.
#
# A round's rows follow from the rounds before it, and are written only where there are none; so a kill anywhere costs
# what it costs a run, and the same command goes on.

TRAJECTORIES_NAME = "trajectories.parquet"
_SAID = {"is_sufficient", "sufficient_probs", "new_query", "useful", "summary"}
_NAMES_OF_QUESTIONS = {"query_id", "query"}


@dataclass(slots=True)
class RoundsReport:
    """What a command did and found.

    Args:
        runs: of each round that is there, the report of its run.
        searches: all of them, as they are now.
        was_written_now: the trajectories.
    """

    exit: Exit
    output: str
    searches: list[Search]
    num_documents: int
    runs: list[RunReport] = field(default_factory=list)
    was_written_now: bool = False

    @property
    def stopped(self) -> dict[str, int]:
        """Searches by why they are over, the most frequent first."""
        return dict(Counter(search.stopped for search in self.searches if search.stopped is not None).most_common())

    @property
    def num_open(self) -> int:
        return sum(search.stopped is None for search in self.searches)

    @property
    def budget(self) -> BudgetState | None:
        """Of all rounds, as the last one found it; None where the job has none."""
        return self.runs[-1].budget if self.runs else None

    @property
    def failed_fraction(self) -> float:
        return self.stopped.get("failed", 0) / len(self.searches)


def run_rounds(
    job: Job, label_round: Callable[[Job], RunReport], *, cache_dir: Path | None, say: Callable[[str], None]
) -> RoundsReport:
    """Go on with a search until it is over or a round can't be finished here.

    Args:
        label_round: does what is left of a round's run, and concludes it.
        cache_dir: where fetched models are kept, for the tokenizer.
    Raises:
        ConfigError, InputError: the job is no search in rounds, or its questions or its corpus are off.
        StaleRunError: the output belongs to something else, or a round was changed after a later one was begun.
    """
    limits, spec = _limits(job), job.spec
    count = token_counter(
        limits.tokenizer, job.storage, cache_dir=cache_dir, purpose="relabel rounds (rounds.tokenizer)"
    )
    questions = load_questions(spec.input, job.storage)
    corpus = load_corpus(limits.corpus, count, job.storage)
    if corpus.num_left_out:
        say(f"{corpus.num_left_out:,} documents of {limits.corpus} are blank or have the text of another, left out")
    store = open_run_store(spec.output, job.storage, single_writer=spec.run.single_writer)
    tokens_by = counter_digest(limits.tokenizer, job.storage, cache_dir=cache_dir)
    claim(store, parts_of_search(questions, corpus, limits, tokens_by))
    report = RoundsReport(Exit.PARTIAL, spec.output, [Search(*one) for one in questions], corpus.num_documents)
    while going := [search for search in report.searches if search.stopped is None]:
        number = len(report.runs) + 1
        round_job = job_of_round(job, number)
        if load_plan(open_run_store(round_job.spec.output, job.storage, single_writer=spec.run.single_writer)) is None:
            write_round(store, number, going, corpus, limits.k)
        offered = read_round(store, number, going)
        say(f"round {number}: {len(going):,} of {len(questions):,} questions")
        run = label_round(round_job)
        report.runs.append(run)
        if run.over_limit is None:  # not all of it is done
            report.exit = run.exit if run.exit in (Exit.LOCKED, Exit.GATE) else Exit.PARTIAL
            return report
        reviews = read_reviews(open_run_labels(run.output, job.storage, allow_partial=True))
        for search in going:
            search.take(reviews[search.query_id], offered[search.query_id], limits)
        if run.stopped is not None and report.num_open:
            return report
    report.was_written_now = _write(store, report.searches)
    is_over_limit = report.failed_fraction > spec.run.max_failed_fraction
    done = Exit.DONE if report.was_written_now else Exit.NOTHING_TO_DO
    report.exit = Exit.OVER_LIMIT if is_over_limit else done
    return report


def job_of_round(job: Job, number: int) -> Job:
    """The job of a round, an ordinary one: its rows lie in the output's `inputs`, its labels in `round-N`. What all
    rounds spend is counted in the output itself.
    """
    spec, root = job.spec, job.spec.output.rstrip("/")
    rows = InputSpec(path=(f"{root}/{folder_of(number)}",), overlong=spec.input.overlong)
    own = {"rounds": None, "input": rows, "output": f"{root}/round-{number}"}
    return replace(job, spec=spec.model_copy(update=own), ledger=root)


def _limits(job: Job) -> RoundsSpec:
    spec = job.spec
    if spec.rounds is None:
        raise ConfigError(
            f"{job.where}: `rounds` is missing; it needs at least `rounds: {{corpus: docs.parquet}}`. A job without it "
            "is for `relabel run`."
        )
    columns = {column.name for column in job.labeler.columns}
    if not columns >= _SAID:
        raise ConfigError(
            f"{job.where}: `labeler.name` = {spec.labeler.name}: what is found in a round is judged by `review`. Write "
            "`labeler: {name: review}`."
        )
    if strange := spec.input.columns.model_fields_set - _NAMES_OF_QUESTIONS:
        raise ConfigError(
            f"{job.where}: `input.columns.{min(strange)}`: of the input, the questions alone are read (query_id, "
            f"query); documents come from {CORPUS_KEY}. Remove the key."
        )
    if spec.input.table is not None:
        raise ConfigError(
            f"{job.where}: `input.table`: the questions of `rounds` are read from files, not from a table. Write its "
            "query_id and query to a Parquet file, and name that."
        )
    for path in spec.input.path:
        job.refuse_output_inside(path, "input.path")
    job.refuse_output_inside(spec.rounds.corpus, CORPUS_KEY)
    return spec.rounds


def _write(store: RunStore, searches: list[Search]) -> bool:
    """Make the trajectories durable; False if they are there already."""
    data = table_bytes(trajectories(searches))
    if read_if_there(store, TRAJECTORIES_NAME) == data:
        return False
    failpoints.hit("before_trajectories")
    store.put(TRAJECTORIES_NAME, data)
    failpoints.hit("after_trajectories")
    return True

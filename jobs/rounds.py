"""Runs the rounds of a search one after the other, each as a run of its own, and writes the trajectories when all
searches are finished."""

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from relabel.jobs.job import Job
from relabel.jobs.output import Exit, grid
from relabel.jobs.pairs.chunks import CountTokens, counter_digest, token_counter
from relabel.jobs.pairs.context import Bm25Index, queries_of
from relabel.jobs.run.report import ENDED_AT_BUDGET, RunReport
from relabel.jobs.tables import document_of, load_polars, refuse_null, refuse_two_texts, scan, translate_polars_errors
from relabel.labelers.searching import ASPECT, PREVIOUS_DOCS, PREVIOUS_QUERIES, PREVIOUS_SUMMARIES
from relabel.manifests import failpoints
from relabel.manifests.budgets import BudgetState
from relabel.manifests.errors import ConfigError, InputError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.labels import QUARANTINE, table_bytes, table_of
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME, load_plan
from relabel.manifests.records import differences, plain, read_record, readable_json
from relabel.manifests.run_labels import RunLabels, open_run_labels, read_labels
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.specs import InputSpec, RoundsSpec
from relabel.manifests.store import Store, open_run_store, read_if_there

StopReason = Literal["sufficient", "tokens", "rounds"]


def stop_reason(useful_tokens: int, *, is_sufficient: bool, num_rounds: int, limits: RoundsSpec) -> StopReason | None:
    """Why a search ends after a round; None if it goes on. Of several reasons the first of `StopReason`.

    Args:
        useful_tokens: of the documents that were found to matter, over all rounds.
        is_sufficient: what the last review says.
        num_rounds: done so far, the last one included.
    Source:
        R2RAG, section 3.3: sufficient, over 20,000 tokens, or the fifth round.
    """
    if is_sufficient:
        return "sufficient"
    if useful_tokens > limits.max_tokens:
        return "tokens"
    return "rounds" if num_rounds >= limits.max_rounds else None


OVER_TEXTS = {
    "sufficient": "with sufficient documents",
    "tokens": "with as many tokens as are allowed",
    "rounds": "after the last round",
    "failed": "failed",
}
"""Why searches are over, after their number."""
TEXTS = pa.list_(pa.string())
SAID = ["is_sufficient", "sufficient_probs", "new_query", "useful", "summary"]
"""The columns of a label of `review` that say something of its question."""
ROUND = pa.struct(
    [
        ("query", pa.string()),
        ("shown", TEXTS),
        ("is_sufficient", pa.bool_()),
        ("p_sufficient", pa.float32()),
        ("new_query", pa.string()),
        ("useful", TEXTS),
        ("summary", pa.string()),
    ]
)
"""What was searched in a round, ids of the documents that the review was shown, and what it says; nulls where it
failed. `p_sufficient` is P(yes), null where the engine gives no distribution.
"""
TRAJECTORIES = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("stopped", pa.string()),
        ("reason", pa.string()),
        ("num_rounds", pa.int32()),
        ("useful", TEXTS),
        ("useful_tokens", pa.int64()),
        ("rounds", pa.list_(ROUND)),
    ],
    metadata={"relabel.schema": "trajectories-1"},
)
"""A row a question. `stopped` is `sufficient`, `tokens`, `rounds` or `failed`, and `reason` says why a review failed;
`useful` are the documents of all rounds, in the order in which they were named.
"""


class RoundReview(NamedTuple):
    """What a round's review says of one question.

    Args:
        query: what was searched.
        shown: ids of the documents that it was shown.
        p_sufficient: P(yes).
        useful: of the documents that are new, those that matter, the most important first.
        failure: why there is no answer; then all before it is empty.
    """

    query: str = ""
    shown: tuple[str, ...] = ()
    is_sufficient: bool | None = None
    p_sufficient: float | None = None
    new_query: str | None = None
    useful: tuple[str, ...] = ()
    summary: str | None = None
    failure: str | None = None


@dataclass(slots=True)
class Search:
    """One question's search.

    Args:
        useful: documents that were found to matter, id → tokens, in the order in which they were named.
        stopped: why it is over; None while it goes on.
    """

    query_id: str
    query: str
    rounds: list[RoundReview] = field(default_factory=list)
    useful: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def next_query(self) -> str:
        """What the next round searches: the question itself, then what the last review asks for."""
        return (self.rounds[-1].new_query or "") if self.rounds else self.query

    @property
    def useful_tokens(self) -> int:
        return sum(self.useful.values())

    def take(self, review: RoundReview, offered: Mapping[str, int], limits: RoundsSpec) -> None:
        """Go on by a round.

        Args:
            offered: tokens of the documents that were found for it, by id. What the review says of other documents
                does not count: a round that found none was shown an empty one.
        """
        shown, useful = (tuple(doc for doc in docs if doc in offered) for docs in (review.shown, review.useful))
        summary = review.summary if useful else None
        self.rounds.append(review._replace(query=self.next_query, shown=shown, useful=useful, summary=summary))
        self.useful |= {doc: offered[doc] for doc in useful}
        num_rounds = len(self.rounds)
        is_sufficient = bool(review.is_sufficient)
        found = stop_reason(self.useful_tokens, is_sufficient=is_sufficient, num_rounds=num_rounds, limits=limits)
        self.stopped = found if review.failure is None else "failed"


def trajectories(searches: Iterable[Search]) -> pa.Table:
    """A row for each search, in their order, with the columns of `TRAJECTORIES`."""
    rows = [
        {
            "query_id": one.query_id,
            "query": one.query,
            "stopped": one.stopped,
            "reason": one.rounds[-1].failure,
            "num_rounds": len(one.rounds),
            "useful": list(one.useful),
            "useful_tokens": one.useful_tokens,
            "rounds": [review._asdict() for review in one.rounds],
        }
        for one in searches
    ]
    return pa.Table.from_pylist(rows, schema=TRAJECTORIES)


CORPUS_KEY = "rounds.corpus"


class Corpus:
    """Documents that can be searched, by BM25 as `relabel pairs context` has it.

    Args:
        documents: id and text of each; no two texts equal and none blank.
        count: tokens of a text.
        num_left_out: documents that are blank, or have the text of another with a smaller id.
    """

    def __init__(self, documents: list[tuple[str, str]], count: CountTokens, num_left_out: int = 0) -> None:
        self.num_documents = len(documents)
        self.num_left_out = num_left_out
        self.digest = digest_of_rows(documents)
        self._ids = {text: doc_id for doc_id, text in documents}
        self._count = functools.cache(count)

    @functools.cached_property
    def _index(self) -> Bm25Index:
        return Bm25Index(list(self._ids))

    def best(self, query: str, k: int, known: Collection[str]) -> list[tuple[str, str, int]]:
        """Id, text and tokens of the k best documents for a query whose ids are not among the known ones; fewer where
        fewer share a word with it.
        """
        found = ((self._ids[text], text) for text in self._index.best(query, k + len(known)))
        new = ((doc_id, text, self._count(text)) for doc_id, text in found if doc_id not in known)
        return list(itertools.islice(new, k))


def load_corpus(path: str, count: CountTokens, storage: Storage) -> Corpus:
    """Read the corpus; held in memory.

    Raises:
        InputError: a file or column is off, a document has no id or occurs with two texts, or none has any text.
    """
    polars = load_polars()
    docs, text_columns = scan(
        path,
        {"doc_id": "id"},
        storage,
        has_text=True,
        role=CORPUS_KEY,
    )
    refuse_null(docs, "doc_id", path=path)
    with translate_polars_errors(path):
        documents = (
            docs.select(doc_id=polars.col("doc_id").cast(polars.String), text=document_of(text_columns))
            .unique()
            .sort("doc_id", "text")
            .collect(engine="streaming")
        )
    refuse_two_texts(documents["doc_id"], path=path, what="document")
    with_text = documents.filter(polars.col("text").str.strip_chars() != "")
    distinct = with_text.unique("text", keep="first", maintain_order=True)
    if not distinct.height:
        raise InputError(f"{path} ({CORPUS_KEY}): no document there has any text. Name a corpus with documents.")
    return Corpus(list(distinct.iter_rows()), count, documents.height - distinct.height)


def load_questions(spec: InputSpec, storage: Storage) -> list[tuple[str, str]]:
    """Id and text of each question, by id: the different queries of the input, whatever else its rows hold.

    Raises:
        InputError: a file or column is off, a row has no id or text, one id has two texts, or there is no row.
    """
    polars = load_polars()
    names = spec.columns
    where = ", ".join(spec.path)
    frames = []
    for path in spec.path:
        frame, _ = scan(path, {names.query_id: "id", names.query: "string"}, storage, role="input.path")
        for name in (names.query_id, names.query):
            refuse_null(frame, name, path=path)
        query_id, query = (polars.col(name).cast(polars.String) for name in (names.query_id, names.query))
        frames.append(frame.select(query_id=query_id, query=query))
    rows = polars.concat(frames)
    if spec.limit is not None:
        rows = rows.head(spec.limit)
    questions: list[tuple[str, str]] = queries_of(rows, where).rows()
    if not questions:
        raise InputError(f"{where} (input.path): no rows, so no question. Give questions, a row each.")
    return questions


def digest_of_rows(rows: Iterable[tuple[str, ...]]) -> str:
    """sha256 of rows of texts, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        for text in row:
            data = text.encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)
    return digest.hexdigest()


SEARCHES_PER_FILE = 512
ROWS = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("doc_id", pa.string()),
        ("document", pa.string()),
        ("num_tokens", pa.int64()),
        (ASPECT.name, pa.string()),
        (PREVIOUS_QUERIES.name, TEXTS),
        (PREVIOUS_SUMMARIES.name, TEXTS),
        (PREVIOUS_DOCS.name, TEXTS),
    ]
)
"""The input of a round, as `review` reads it: for each search that goes on the documents that were found, best first,
or one row without a document where none was. `num_tokens` is the document's.
"""

Offered = dict[str, dict[str, int]]
"""By question: the tokens of each document that was found for it, by id."""


def folder_of(number: int) -> str:
    """Where the input of a round lies."""
    return f"inputs/round-{number}"


def write_round(store: Store, number: int, searches: Sequence[Search], corpus: Corpus, k: int) -> None:
    """Search what comes next, and make the rows durable, file by file; a file that is there already must hold them.

    Raises:
        StaleRunError: a file is there with other rows: an earlier round was changed since.
    """
    store.sweep(folder_of(number))
    for start in range(0, len(searches), SEARCHES_PER_FILE):
        some = searches[start : start + SEARCHES_PER_FILE]
        name = f"{folder_of(number)}/part-{start // SEARCHES_PER_FILE:05d}.parquet"
        rows = itertools.chain.from_iterable(_rows(search, corpus, k) for search in some)
        table = pa.Table.from_pylist(list(rows), schema=ROWS)
        failpoints.hit("before_round_file")
        if not store.create(name, table_bytes(table)) and not table_of(store.read(name)).equals(table):
            raise _changed(store, number, f"{name} holds other rows than they lead to")
        failpoints.hit("after_round_file")


def _rows(search: Search, corpus: Corpus, k: int) -> Iterator[dict[str, Any]]:
    asked = search.next_query
    row = {
        "query_id": search.query_id,
        "query": search.query,
        ASPECT.name: asked,
        PREVIOUS_QUERIES.name: [one.query for one in search.rounds],
        PREVIOUS_SUMMARIES.name: [one.summary for one in search.rounds if one.summary],
        PREVIOUS_DOCS.name: list(search.useful),
    }
    found: Sequence[tuple[str | None, str, int]] = corpus.best(asked, k, search.useful)
    for doc_id, text, num_tokens in found or [(None, "", 0)]:
        yield {**row, "doc_id": doc_id, "document": text, "num_tokens": num_tokens}


def read_round(store: Store, number: int, searches: Sequence[Search]) -> Offered:
    """What was found for each search.

    Raises:
        StaleRunError: the rows are those of other searches: an earlier round was changed since.
    """
    offered = Offered()
    asked = dict[str, str]()
    for name in store.names(folder_of(number)):
        table = table_of(store.read(name), ["query_id", "doc_id", "num_tokens", ASPECT.name])
        for query_id, doc_id, num_tokens, aspect in zip(*(column.to_pylist() for column in table.columns), strict=True):
            asked[query_id] = aspect
            documents = offered.setdefault(query_id, {})
            if doc_id is not None:
                documents[doc_id] = num_tokens
    if asked != {search.query_id: search.next_query for search in searches}:
        raise _changed(store, number, "its input is that of other searches")
    return offered


def _changed(store: Store, number: int, what: str) -> StaleRunError:
    return StaleRunError(
        f"{store.root}: a round before round {number} was changed since round {number} was begun: {what}. Restore it "
        f"from a copy, or remove {folder_of(number)}, round-{number} and all later ones to go on from there."
    )


def read_reviews(run: RunLabels) -> dict[str, RoundReview]:
    """What a finished round says of each question."""
    labels = dict[str, list[dict[str, Any]]]()
    reviews = dict[str, RoundReview]()
    for file in run.found.labels:
        for row in read_labels(run.folder, file, ["row_id", "query_id", "doc_id", *SAID]).to_pylist():
            labels.setdefault(row["query_id"], []).append(row)
    for file in run.found.quarantine:
        for lost in run.folder.table(file, QUARANTINE, ["query_id", "status", "reason"]).to_pylist():
            reviews.setdefault(lost["query_id"], RoundReview(failure=f"{lost['status']}: {lost['reason']}"))
    for query_id, rows in labels.items():  # where a row of a question has a label, those without one were not shown
        last = rows[-1]
        reviews[query_id] = RoundReview(
            shown=tuple(row["doc_id"] for row in sorted(rows, key=lambda row: row["row_id"])),
            is_sufficient=last["is_sufficient"],
            p_sufficient=None if last["sufficient_probs"] is None else last["sufficient_probs"][1],
            new_query=last["new_query"],
            useful=tuple(last["useful"] or ()),
            summary=last["summary"],
        )
    return reviews


def claim(store: Store, parts: dict[str, Any]) -> None:
    """Write down what an output is for, or see that it is for this.

    Raises:
        StaleRunError: it is for something else; names what differs.
    """
    record = read_if_there(store, ROUNDS_NAME)
    if record is None:
        if any(read_if_there(store, name) is not None for name in (PLAN_NAME, MANIFEST_NAME)):
            raise StaleRunError(f"{store.root}: belongs to something else, say to a run. Name another `output`.")
        store.check_conditional_writes()
        store.sweep("")
        store.create(ROUNDS_NAME, readable_json(parts))
        record = store.read(ROUNDS_NAME)
    was = read_record(
        dict[str, Any],
        record,
        where=f"{store.root}/{ROUNDS_NAME}",
        what="not the record of a search",
        advice="Restore it from a copy, or name another `output`.",
    )
    listed = "\n  ".join(differences(was, parts))
    if listed:
        raise StaleRunError(
            f"{store.root}: belongs to another search. Different:\n  {listed}\n  Use another `output`, or restore what "
            "changed."
        )


# The rounds of a search, one after the other, each a run of its own; and the trajectories once all are over.
#
# A round's rows follow from the rounds before it, and are written only where there are none; so a kill anywhere costs
# what it costs a run, and the same command goes on.

TRAJECTORIES_NAME = "trajectories.parquet"


@dataclass(slots=True)
class RoundsReport:
    """What a command did and found.

    Args:
        name: of the job.
        runs: of each round that is there, the report of its run.
        searches: all of them, as they are now.
        is_idle_fine: nothing to do exits with 0 (`--done-ok`).
    """

    exit: Exit
    name: str
    output: str
    searches: list[Search]
    num_documents: int
    runs: list[RunReport] = field(default_factory=list)
    is_idle_fine: bool = False
    seconds: float = 0.0

    @property
    def exit_code(self) -> Exit:
        """What the command exits with."""
        if self.is_idle_fine and self.exit is Exit.NOTHING_TO_DO:
            return Exit.DONE
        return self.exit

    @property
    def trajectories(self) -> str | None:
        """Where the trajectories are; None while a search goes on."""
        return None if self.num_open else f"{self.output}/{TRAJECTORIES_NAME}"

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

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        result = {
            "exit_code": int(self.exit_code),
            "output": self.output,
            "trajectories": self.trajectories,
            "questions": len(self.searches),
            "open": self.num_open,
            "stopped": self.stopped,
            "failed_fraction": round(self.failed_fraction, 6),
            "documents": self.num_documents,
            "rounds": [_round_json(run) for run in self.runs],
        }
        if self.budget is not None:
            result["budget"] = plain(self.budget)
        result["seconds"] = round(self.seconds, 3)
        return result

    def lines(self) -> list[str]:
        """How it ended, the questions by what became of them, and the rounds."""
        over = ", ".join(f"{count:,} {OVER_TEXTS[reason]}" for reason, count in self.stopped.items())
        rows = [
            ("questions", f"{len(self.searches):,}, {self.num_open:,} open"),
            ("over", over or "none"),
        ]
        for number, run in enumerate(self.runs, start=1):
            text = f"{run.rows:,} rows, {run.tally.num_quarantined:,} quarantined, {run.output}"
            rows.append((f"round {number}", text))
        rows += [("stopped", run.too_near) for run in self.runs if run.too_near is not None]
        if self.budget is not None and self.budget.text:
            rows.append(("budget", self.budget.text))
        if self.trajectories is not None:
            rows.append(("trajectories", self.trajectories))
        return [f"{self.name}: {self._verdict()}", *grid(rows).split("\n")]

    def _verdict(self) -> str:
        failed = f"{self.failed_fraction:.1%}"
        verdicts = {
            Exit.DONE: "done, every question has its trajectory",
            Exit.NOTHING_TO_DO: "nothing to do, every question has its trajectory",
            Exit.GATE: ENDED_AT_BUDGET,
            Exit.LOCKED: "another process works on this round",
            Exit.OVER_LIMIT: f"done, but {failed} of the questions failed, over the limit; everything is kept",
        }
        return verdicts.get(self.exit, "partial; run the same command again")


def _round_json(run: RunReport) -> dict[str, Any]:
    return {
        "output": run.output,
        "rows": run.rows,
        "labelled": run.tally.labelled,
        "reused": run.tally.reused,
        "quarantined": run.tally.num_quarantined,
        "rows_open": run.rows_open,
        "exit_code": int(run.exit),
    }


def run_rounds(
    job: Job, label_round: Callable[[Job], RunReport], *, cache_dir: Path | None, write: Callable[[str], None]
) -> RoundsReport:
    """Go on with a search until it is over or a round can't be finished here.

    Args:
        label_round: does what is left of a round's run, and concludes it.
        cache_dir: where fetched models are kept, for the tokenizer.
    Raises:
        ConfigError, InputError: the job is no search in rounds, or its questions or its corpus are off.
        StaleRunError: the output belongs to something else, or a round was changed after a later one was begun.
    """
    limits = _limits(job)
    spec = job.spec
    count = token_counter(
        limits.tokenizer, job.storage, cache_dir=cache_dir, purpose="relabel rounds (rounds.tokenizer)"
    )
    questions = load_questions(spec.input, job.storage)
    corpus = load_corpus(limits.corpus, count, job.storage)
    if corpus.num_left_out:
        write(f"{corpus.num_left_out:,} documents of {limits.corpus} are blank or have the text of another, left out")
    store = open_run_store(spec.output, job.storage, single_writer=spec.run.single_writer)
    tokens_by = counter_digest(limits.tokenizer, job.storage, cache_dir=cache_dir)
    # what ties an output to one search, in addition to its rounds' plans; paths are no part of it
    own_limits = limits.model_dump(mode="json", exclude={"corpus", "tokenizer"})
    claim(
        store,
        {
            "version": 1,
            "questions": {"rows": len(questions), "sha256": digest_of_rows(questions)},
            "corpus": {"documents": corpus.num_documents, "sha256": corpus.digest},
            "rounds": own_limits | {"tokenizer": tokens_by},
        },
    )
    report = RoundsReport(
        exit=Exit.PARTIAL,
        name=spec.name,
        output=spec.output,
        searches=[Search(query_id, query) for query_id, query in questions],
        num_documents=corpus.num_documents,
    )
    while going := [search for search in report.searches if search.stopped is None]:
        number = len(report.runs) + 1
        round_job = job_of_round(job, number)
        if load_plan(open_run_store(round_job.spec.output, job.storage, single_writer=spec.run.single_writer)) is None:
            write_round(store, number, going, corpus, k=limits.k)
        offered = read_round(store, number, going)
        write(f"round {number}: {len(going):,} of {len(questions):,} questions")
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
    data = table_bytes(trajectories(report.searches))
    report.exit = Exit.NOTHING_TO_DO
    if read_if_there(store, TRAJECTORIES_NAME) != data:
        failpoints.hit("before_trajectories")
        store.put(TRAJECTORIES_NAME, data)
        failpoints.hit("after_trajectories")
        report.exit = Exit.DONE
    if report.failed_fraction > spec.run.max_failed_fraction:
        report.exit = Exit.OVER_LIMIT
    return report


def job_of_round(job: Job, number: int) -> Job:
    """The job of a round, an ordinary one: its rows lie in the output's `inputs`, its labels in `round-N`. What all
    rounds spend is counted in the output itself.
    """
    spec = job.spec
    root = job.spec.output.rstrip("/")
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
    if not set(SAID) <= {column.name for column in job.labeler.columns}:
        raise ConfigError(
            f"{job.where}: `labeler.name` = {spec.labeler.name}: what is found in a round is judged by `review`. Write "
            "`labeler: {name: review}`."
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

"""Labels that a run takes over: of which earlier outputs, for which rows of a chunk, and the answers that go along."""

from collections.abc import Sequence

from relabel.jobs.job import Job, OpenRun
from relabel.jobs.run.chunks import ChunkWork, asked_again
from relabel.manifests.asks import Ask
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.files import place_of
from relabel.manifests.label_keys import AnswerKeys
from relabel.manifests.labels import AnswerRow, Pair
from relabel.manifests.plan import Plan, ReusedRows, recipe_digest, stages_changed
from relabel.manifests.reuse import (
    EarlierOutput,
    KnownLabels,
    RowPlace,
    open_earlier,
    shared_answers,
    why_nothing,
)
from relabel.manifests.run_labels import labeler_columns


def earlier_outputs(job: Job) -> list[EarlierOutput]:
    """The outputs that a job reuses, opened, in order of precedence.

    Raises:
        ConfigError: the job reuses its own output, or one twice.
        ManifestError: a path holds no run.
    """
    paths = list(job.spec.reuse)
    seen = {place_of(job.spec.output)}
    for path in paths:
        if place_of(path) in seen:
            raise ConfigError(
                f"{job.where}: `reuse`: {path} is the job's own output, or is given twice. Name outputs of earlier "
                "runs, each once."
            )
        seen.add(place_of(path))
    if job.spec.cascade is not None:
        from relabel.manifests.label_sets import is_run  # with the metrics, which other jobs do without

        calibration = job.spec.cascade.calibration
        if place_of(calibration) not in seen and is_run(calibration, job.storage):
            paths.append(calibration)
    return [open_earlier(path, job.storage) for path in paths]


def reuse_remark(opened: OpenRun, earlier: EarlierOutput) -> str:
    """What a reused output can give, in a sentence."""
    differences = why_nothing(earlier, opened.plan.parts)
    if not differences:
        tally = earlier.found.tally
        return f"{earlier.path}: {tally.labelled + tally.reused:,} labels made in the same way"
    shown = [
        f"{part} ({', '.join(names)})"
        for part, names in differences.items()
        if part != "stages" or len(differences) == 1
    ]
    text = f"{earlier.path}: 0 rows reused, another {'; '.join(shown)}"
    if "schema" in differences:
        return text
    changed = stages_changed(earlier.plan.parts, opened.plan.parts)
    shared = {ask.stage for ask in opened.job.labeler.probe() if ask.shared_by is not None}
    answered = sorted(shared - set(changed)) if earlier.found.answers else []
    asked = [stage for stage in opened.plan.parts["stages"] if stage not in answered]
    text += f"; asked again: {', '.join(asked)}"
    if answered:
        text += f"; kept: {', '.join(answered)}"
    return text


class AnswerCache(AnswerKeys):
    """Answers that rows share: found in earlier outputs, kept for later ones."""

    def __init__(self, plan: Plan, outputs: list[EarlierOutput]) -> None:
        super().__init__(plan.parts)
        self.known = shared_answers(outputs)


class Reuse:
    """What a run reuses of earlier outputs.

    Args:
        outputs: as `earlier_outputs` opened them.
    """

    def __init__(self, job: Job, plan: Plan, outputs: list[EarlierOutput]) -> None:
        self.job = job
        self.outputs = outputs
        self.labels = KnownLabels(outputs, recipe_digest(plan.parts), labeler_columns(plan.parts))
        self.answer_cache = AnswerCache(plan, outputs)
        self._first_is_shared = any(ask.shared_by is not None for ask in job.labeler.probe()[:1])

    def fill(self, work: ChunkWork) -> int:
        """Settle the rows of a chunk whose labels are known. Returns how many.

        Raises:
            ManifestError: a file of an earlier output is missing or is not the one committed.
        """
        if not self.outputs:
            return 0
        keys = [key for key in work.keys if key is not None]
        known = dict[int, RowPlace]()
        for index, place in enumerate(self.find(work.pairs, keys)):
            if place is not None and not work.pairs[index].broken_text:
                known[index] = place
        rows = self.labels.take(list(known.values()))
        for (index, place), row in zip(known.items(), rows, strict=True):
            pair = work.pairs[index]
            label = row._replace(
                row_id=pair.row_id,
                query_id=pair.query_id,
                doc_id=pair.doc_id,
                reused=True,
            )
            work.take_over(index, label, place.output)
        if self._first_is_shared:
            self._carry(work, list(known))
        return len(known)

    def find(self, pairs: Sequence[Pair], keys: Sequence[bytes]) -> list[RowPlace | None]:
        """Where the label of each row lies; None for one that is to be asked.

        Rows of a query that take their labels from one answer are reused all together, from the one file that an
        attempt left, or not at all: else labels of two different answers would lie side by side.
        """
        places = self.labels.find(keys)
        if not self.job.reads.siblings:
            return places
        files: dict[str, set[int]] = {}
        for pair, place in zip(pairs, places, strict=True):
            files.setdefault(pair.query_id, set()).add(-1 if place is None else place.file)
        return [place if len(files[pair.query_id]) == 1 else None for pair, place in zip(pairs, places, strict=True)]

    def sources(self, work: ChunkWork) -> list[ReusedRows]:
        """What a chunk's receipt says of its rows that were reused."""
        counts = sorted(work.sources.items())
        return [self.outputs[number].taken(rows) for number, rows in counts if number >= 0]

    def _carry(self, work: ChunkWork, indexes: list[int]) -> None:
        """Keep the shared answers that reused rows were labelled by, so that a run that reuses this
        output has them too.
        """
        groups = dict[tuple[object, ...], Pair]()
        for index in reversed(indexes):  # the first row of each group is what stays
            pair = work.pairs[index]
            groups[pair.query_id, pair.query, pair.context, repr(pair.columns)] = pair
        for pair in groups.values():
            try:
                ask = next(self.job.labeler.label(pair))
            except (StopIteration, VerdictError):
                continue
            for sample in range(self.job.spec.labeler.samples):
                work.answers += self._answers_known(ask, work.round, sample)

    def _answers_known(self, first: Ask, round_number: int, sample: int) -> list[AnswerRow]:
        """The answers to a shared ask and to its further attempts, up to the first that is not known."""
        options = self.job.spec.labeler
        cache = self.answer_cache
        again = asked_again(first, options)
        answers = list[AnswerRow]()
        for attempt in range(options.attempts):
            ask = again if attempt else first
            answer = cache.known.get(cache.key(ask, round_number, sample, attempt))
            if answer is None:
                break
            answers.append(answer)
        return answers

"""Walks a pair through a labeler with the fake engine, as the run loop does but one at a time."""

from collections.abc import Sequence
from typing import Any

from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.registry import Labeler, labeler_class
from relabel.manifests.asks import Answer, Ask, Engine, Request
from relabel.manifests.labels import Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import ChunkId
from relabel.manifests.specs import EngineSpec, LabelerOptions, validate_spec
from relabel.manifests.trees import COLUMN, CONTENT, NO_PARENT, ROOT, STRUCTURE, Node


def chunked(pair: Pair, token_len: int | None = None) -> Pair:
    """The pair with its document as one chunk, and as one node below a title, for the labelers that read those."""
    whole = pair.document
    size = len(whole) // 4 if token_len is None else token_len
    chunk = {"n": 1, "heading_path": [], "text": whole, "token_len": size, "start": 0, "end": len(whole)}
    nodes = (Node(0, STRUCTURE, 0, "Title", 0, 0, NO_PARENT), Node(1, CONTENT, 1, whole, 0, len(whole), ROOT))
    tree = tuple(node._asdict() for node in nodes[: 2 if whole else 1])
    columns = {"chunks": (chunk,) if whole else (), COLUMN: tree, "passages": (whole,) if whole else ()}
    return pair._replace(columns={**pair.columns, **columns})


ROSES = Pair(
    7,
    "q1",
    "pruning climbing roses",
    "d1",
    "Climbing roses want pruning late.\n\nCut   to an outward bud.",
    ("Roses in winter", "Tools"),
)
ROSES = chunked(ROSES)


def options_of(name: str, **options: Any) -> LabelerOptions:
    return validate_spec(labeler_class(name).Options, {"name": name, **options}, where="test")


def labeler(name: str, **options: Any) -> Labeler:
    return labeler_class(name)(options_of(name, **options))


def caps(name: str, *, think: int = 512, text: int = 160) -> dict[str, int]:
    """Those caps on an answer's length, in tokens, that the labeler has as options."""
    fields = labeler_class(name).Options.model_fields
    return {key: cap for key, cap in (("max_think_tokens", think), ("max_text_tokens", text)) if key in fields}


def fake(**args: Any) -> Fake:
    overlong = args.pop("overlong", "truncate")
    max_prompt_tokens = args.pop("max_prompt_tokens", 8192)
    return Fake(EngineSpec(name="fake", max_prompt_tokens=max_prompt_tokens, args=FakeArgs(**args)), overlong=overlong)


def answer_of(engine: Engine, ask: Ask, seed: int = 0) -> Answer:
    engine.submit(Request(0, ask, seed))
    (answer,) = engine.poll()
    return answer


def walk(subject: Labeler, pair: Pair, engine: Engine, seed: int = 0) -> tuple[Label, list[Ask], list[Answer]]:
    """The label with all asks and answers on the way; VerdictError as the labeler raises it."""
    generator = subject.label(pair if pair.siblings else chunked(pair))
    asks = [next(generator)]
    answers: list[Answer] = []
    while True:
        answers.append(answer_of(engine, asks[-1], seed))
        try:
            asks.append(generator.send(answers[-1]))
        except StopIteration as end:
            return end.value, asks, answers


def replay(subject: Labeler, pair: Pair, answers: Sequence[Answer]) -> tuple[Label | None, list[Ask]]:
    """The label (None if the answers end before it) and the asks that these answers lead to."""
    generator = subject.label(pair if pair.siblings else chunked(pair))
    asks = [next(generator)]
    for answer in answers:
        try:
            asks.append(generator.send(answer))
        except StopIteration as end:
            return end.value, asks
    return None, asks


def reply(text: str, **fields: Any) -> Answer:
    """An answer with this text."""
    return Answer(0, text, fields.pop("finish", "stop"), **fields)


def run_loop(
    name: str, pairs: list[Pair], options: dict[str, Any] | None = None, **engine: Any
) -> tuple[list[LabelRow | QuarantineRow], int]:
    """The rows of one chunk, labelled by the run loop with the fake engine, and how many of its answers were no refusal
    for length.
    """
    done: list[ChunkWork] = []
    checked, progress = options_of(name, **(options or {})), Progress()
    loop = RunLoop(
        labeler_class(name)(checked),
        checked,
        fake(**engine),
        seed=3,
    )
    chunks = iter([ChunkWork(ChunkId(0, 0, 1), pairs)])
    assert loop.label_chunks(chunks, lambda work: done.append(work) is None, progress=progress, stop=Stop())
    return [row for row in done[0].rows if row is not None], progress.requests

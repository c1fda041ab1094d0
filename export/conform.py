"""Whether a running server answers as the bundle does, and if not, why.

The server is asked the bundle's reference pairs, each alone, and traps: long, empty and odd texts, the same pair twice,
a batch of 64 and the same batch reversed. What it should answer is computed from the bundle; where it answers
otherwise, `mistakes.py` finds the mistake that gives its scores.
"""

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.loader import BF16_TOLERANCE, REFERENCE, Encoder, Student, load_tokenizer
from relabel.export.mistakes import (
    EXPECTED,
    SAME,
    Comparison,
    Pair,
    Scale,
    Subject,
    expected_share,
    explain,
    scales_of,
)
from relabel.export.parity import FAMILY, kept_orders, tau_of
from relabel.manifests.errors import InputError, ServerGoneError
from relabel.manifests.secrets import one_line, redacted, shortened

# N pairs, T tokens, D hidden, K grades

TOLERANCE = BF16_TOLERANCE
"""The largest difference of scores from 0 to 1 that an ordinary change of runtime or precision makes."""
MUCH_NEARER = 2.0
"""By so much a server's mean difference from another precision than the default is smaller, where that is served."""
BATCH = 64
OVER = 2.0
"""The text over the limit has so many words for each token that the student reads."""
TEXTS = ("", "Füße 鞋 👟\u200d🔥", "שלום привет こんにちは", "kite\n\n\ttent  ")
"""Empty, emoji, other scripts, blanks."""
OVER_LIMIT = "a text over the limit"
LONG_QUERIES = 3
"""Queries that are asked with texts over the limit."""
WORST = 5
UNEXPLAINED = "no mistake that was tried explains it: other weights, another head or another pooling"
NEAR = 0.05
"""Scores that differ by less on average are on a known scale; so those beyond the tolerance are wrong, in any order."""


# ------------------------------------------------------------------------------
# The server, by the APIs that such servers have.


def _text_pair(query: str, documents: Sequence[str], model: str) -> dict[str, Any]:
    # vLLM refuses what is too long unless it is asked to cut
    return {"model": model, "text_1": query, "text_2": list(documents), "truncate_prompt_tokens": -1}


APIS: Mapping[str, tuple[str, Callable[[str, Sequence[str], str], dict[str, Any]], str | None, str]] = {
    "cohere": (
        "/rerank",
        lambda query, documents, model: {"model": model, "query": query, "documents": list(documents)},
        "results",
        "relevance_score",
    ),
    "tei": ("/rerank", lambda query, documents, _: {"query": query, "texts": list(documents)}, None, "score"),
    "vllm-score": ("/score", _text_pair, "data", "score"),
    "openai-score": ("/v1/score", _text_pair, "data", "score"),
}
"""The endpoint's path, its body for a query, documents and the model's name, the key of the list in its reply (None:
the reply is the list), and the key of a score in each item. Cohere's and Jina's `/rerank` (vLLM and llama.cpp have it
too), text-embeddings-inference, and vLLM's score task.
"""
KSERVE = "kserve-v2"
"""Triton and OpenVINO Model Server: token ids in, the graph's heads out; `auto` asks it where the URL ends in `/infer`.
"""


class RerankServer:
    """A server that answers `scores`.

    Args:
        url: its address, with or without the endpoint's path; of `kserve-v2` without it, `model` is needed.
        api: a name of `APIS`, `kserve-v2`, or `auto`: the first that answers a made-up pair.
        model: its name there.
        key: sent as a bearer token, and never shown.
        encoder: of the bundle, for `kserve-v2`; None where that is not asked.
    Raises:
        InputError: no API answers there.
        ServerGoneError: nothing listens there.
    """

    def __init__(self, url: str, api: str, model: str, key: str | None, encoder: Encoder | None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._key = key
        self._encoder = encoder
        self.api = api
        if api != "auto":
            return
        faults = []
        tried = (KSERVE,) if self._url.endswith("/infer") else APIS
        for self.api in tried:
            try:
                self.scores("wool", ["wool socks"])
                return
            except InputError as exc:
                faults.append(f"{self.api}: {exc}")
        raise InputError(f"{redacted(url)}: no rerank API answers there. {' '.join(faults)}")

    def scores(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """A score a document, float64 [N], in their order.

        Raises:
            InputError: the reply is an error, or is not one score a document; names what came.
        """
        if self.api == KSERVE:
            return self._expected_grades([(query, document) for document in documents])
        path, body, results, score = APIS[self.api]
        reply = self._post(path, body(query, documents, self._model))
        try:
            entries = reply[results] if results else reply
            ranked = sorted((int(entry["index"]), float(entry[score])) for entry in entries)
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"its reply is not one of {self.api}: {shortened(json.dumps(reply), 200)}") from exc
        if [index for index, _ in ranked] != list(range(len(documents))):
            raise InputError(f"{len(documents)} documents were sent, and its reply scores {len(ranked)}")
        scores_N = np.array([score for _, score in ranked])
        if not np.isfinite(scores_N).all():
            raise InputError("its reply holds scores that are not finite")
        return scores_N

    def _expected_grades(self, pairs: Sequence[Pair]) -> np.ndarray:
        assert self._encoder is not None
        inputs = [
            {"name": name, "shape": list(ids.shape), "datatype": "INT64", "data": ids.ravel().tolist()}
            for name, ids in self._encoder.collate(self._encoder.encode(pairs)).items()
        ]
        reply = self._post(
            "" if self._url.endswith("/infer") else f"/v2/models/{self._model}/infer", {"inputs": inputs}
        )
        found = {one["name"]: one for one in reply.get("outputs", ())} if isinstance(reply, dict) else {}
        if "relevance" not in found:
            raise InputError(f"its reply has no output `relevance`: {shortened(json.dumps(reply), 200)}")
        return expected_share(np.array(found["relevance"]["data"], float).reshape(found["relevance"]["shape"]))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        url = self._url if not path or self._url.endswith(path) else self._url + path
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60.0
            ) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as exc:
            raise (ServerGoneError if exc.code in (429, 502, 503, 504) else InputError)(
                f"{redacted(url)} answers {exc.code} {shortened(exc.read(2000).decode(errors='replace'), 200)}"
            ) from exc
        except ValueError as exc:
            raise InputError(f"{redacted(url)}: not a URL of http, or its reply is not JSON ({exc})") from exc
        except OSError as exc:
            raise ServerGoneError(f"{redacted(url)}: no answer ({getattr(exc, 'reason', exc)}).") from exc


# ------------------------------------------------------------------------------
# What it is asked.


@dataclass(frozen=True)
class Question:
    """Documents of one query that go to the server together; `kind` names what they try."""

    kind: str
    query: str
    documents: list[str]

    @property
    def pairs(self) -> list[Pair]:
        """Each document with the query."""
        return [(self.query, document) for document in self.documents]


@dataclass(frozen=True)
class Conformity:
    """How a server answers.

    Args:
        verdict: `equal`; `monotone`, the same order on another scale; or `different`.
        reason: of a difference: a mistake of `mistakes.py`, or what is known of it; empty where there is none.
        explained: the share of the squared differences that the mistake explains; None without one.
        scale: what its scores are.
        precision: of the bundle, that its answers are nearest to.
        api: by which it was asked.
        pairs: how many were asked; `max_difference` is over these.
        tau: Kendall's, over pairs whose expected scores differ by more than the tolerance.
        remarks: what it refused, and what is worth a look.
        worst: pairs with the largest differences, each once: `kind`, `query`, `document`, `expected` and `served`, from
            0 to 1. No character in them commands a terminal.
    """

    verdict: str
    reason: str
    explained: float | None
    scale: str
    precision: str
    api: str
    pairs: int
    max_difference: float
    tau: float
    remarks: list[str]
    worst: list[dict[str, Any]]


def conform(bundle: Path, server: RerankServer, report: Callable[[str], None] = lambda _: None) -> Conformity:
    """Compare a server's scores with the bundle's.

    Args:
        report: called with what begins, a line each; the last takes minutes where a server's weights are other ones.
    Raises:
        InputError: the bundle has no reference pairs; the server answers none of them.
        BundleError: the bundle is damaged.
    """
    student = Student(bundle, provider="cpu")
    path = bundle / REFERENCE
    if not path.exists():
        raise InputError(f"{bundle}: holds no reference pairs. Export it with `--set reference_pairs=32`.")
    reference = json.loads(path.read_bytes())
    sealed = [(query, document) for query, document in reference["pairs"]]
    report("the server is asked")
    refused: dict[str, InputError] = {}
    asked: list[Question] = []
    served: list[np.ndarray] = []
    for question in _questions(sealed, student, refused):
        try:
            served.append(server.scores(question.query, question.documents))
        except InputError as exc:
            if question.kind == "pair":
                raise InputError(f"it does not answer a reference pair ({exc})") from exc
            refused[question.kind] = exc
        else:
            asked.append(question)
    remarks = [one_line(f"refuses {kind}: {why}") for kind, why in refused.items()]
    tolerances = {name: float(model["tolerance"]) for name, model in reference["models"].items()}
    return _judged(
        student,
        tolerances,
        asked,
        np.concatenate(served),
        server.api,
        remarks,
        report,
    )


def _questions(sealed: list[Pair], student: Student, refused: Collection[str]) -> Iterator[Question]:
    """The reference pairs, each alone, then the traps; the batches hold a long text if it was not refused alone.

    Args:
        refused: kinds of questions that the server refused so far.
    """
    for query, document in sealed:
        yield Question("pair", query, [document])
    long = _long_pairs(sealed, student)
    for query, document in long:
        yield Question(OVER_LIMIT, query, [document])
    query, document = max(sealed, key=lambda pair: len(pair[1]))
    for text in TEXTS:
        yield Question(f"the text {text!r}", query, [text])
    tokens = load_tokenizer(student.folder / student.encoder.inputs.tokenizer).get_added_tokens_decoder().values()
    for token in [token for token in tokens if token.special][:4]:
        spelled = f"{document} {token.content} {sealed[0][1]}"
        yield Question("a text that spells a control token", query, [spelled])
    yield Question("the same pair twice", query, [document, document])
    last = document if OVER_LIMIT in refused else long[0][1]
    batch = [document for _, document in itertools.islice(itertools.cycle(sealed), BATCH - 1)] + [last]
    yield Question(f"a batch of {BATCH}", query, batch)
    yield Question("the batch reversed", query, batch[::-1])


def _long_pairs(sealed: list[Pair], student: Student) -> list[Pair]:
    """Pairs beyond the student's limit, in which it shows at what length and on which side a server cuts.

    A long document has one text at its beginning, another in its middle and a third at its end, so that what is read of
    it is another text, whichever part is kept: the ones that the student scores highest and lowest for the query. A
    query is long in the last of them.
    """
    most = student.encoder.max_tokens
    queries = list(dict.fromkeys(query for query, _ in sealed))
    documents = list(dict.fromkeys(document for _, document in sealed))
    filler = " ".join(documents).split() or ["word"]

    def words(number: int) -> str:
        return " ".join(itertools.islice(itertools.cycle(filler), number))

    pairs = []
    for number in range(min(LONG_QUERIES, len(queries))):
        query = queries[number * len(queries) // LONG_QUERIES]
        ranked = np.argsort(student.expected_grades([(query, document) for document in documents]), kind="stable")
        worst = documents[ranked[0]]
        best = documents[ranked[-1]]
        pairs.append((query, f"{best} {words(int(OVER * most))} {worst}"))
        pairs.append((query, f"{worst} {words(int(OVER * most))} {best}"))
        pairs.append((query, f"{words(most // 4)} {best} {words(int(OVER * most))}"))
    pairs.append((f"{queries[0]} {words(most)}", f"{documents[-1]} {words(most)}"))
    return list(dict.fromkeys(pairs))


# ------------------------------------------------------------------------------
# The verdict.


@dataclass(frozen=True)
class Match:
    """What a server's scores are nearest to.

    Args:
        precision: of the bundle.
        scale: of the server.
        expected: the scores [N] that the bundle gives, from 0 to 1.
        apart: [N], their distance from the server's on that scale.
    """

    precision: str
    scale: Scale
    expected: np.ndarray
    apart: np.ndarray


def _judged(
    student: Student,
    tolerances: Mapping[str, float],
    asked: Sequence[Question],
    served_N: np.ndarray,
    api: str,
    remarks: list[str],
    report: Callable[[str], None],
) -> Conformity:
    """
    Args:
        student: the bundle in its default precision.
        tolerances: of each precision, as sealed.
    """
    pairs: list[Pair] = []
    kinds: list[str] = []
    for question in asked:
        pairs += question.pairs
        kinds += [question.kind] * len(question.documents)
    report("the bundle answers the same pairs")
    answers = _answers_by_precision(student, pairs)
    match = _nearest_match(answers, student.heads["relevance"], served_N, tolerances)
    apart_N = match.apart
    most = max(TOLERANCE, tolerances[match.precision])
    counts_N = np.ones(len(pairs), dtype=bool)
    empty_N = np.array([not document.strip() for _, document in pairs])
    odd = float(apart_N[empty_N].max(initial=0.0))
    if odd > most:
        remarks.append(f"answers an empty document otherwise than the bundle, by {odd:.2g}; nothing hangs on it")
        counts_N = ~empty_N
        apart_N[empty_N] = 0.0
    furthest = float(apart_N.max())
    tau = tau_of(kept_orders(np.zeros(len(pairs), int), match.expected, served_N, TOLERANCE)[1]) or 0.0
    mistake = None
    if furthest > SAME:
        report(f"scores differ by up to {furthest:.2g}: known mistakes are tried, one by one and two together")
        noise = [_rms(scores_N - answers[student.precision]) for scores_N in answers.values()]
        compared = Comparison(
            [question.pairs for question in asked],
            served_N,
            apart_N,
            counts_N,
            max(TOLERANCE, *noise),
        )
        mistake = explain(Subject(student), compared, combines=furthest > most)
    disorder = furthest > most and _furthest_again(pairs, served_N) > TOLERANCE
    reason = ""
    scale = match.scale.name
    verdict = "equal"
    if mistake is not None:
        reason = mistake.name
    elif disorder:
        reason = "a pair's score is not the same each time: it depends on its batch"
    elif furthest > most and (tau < 0.999 or apart_N[counts_N].mean() < NEAR):
        reason = UNEXPLAINED
    if reason:
        verdict = "different"
        scale = "not known" if mistake is None else f"{mistake.scale}, but for that"
    elif furthest > most:
        verdict = "monotone"
        scale = "a scale of its own"
    elif match.scale.name != EXPECTED.name:
        verdict = "monotone"
    if verdict != "different" and match.precision != student.precision:
        remarks.append(f"answers as the bundle in {match.precision}; labels are in its default, {student.precision}")
    return Conformity(
        verdict=verdict,
        reason=reason,
        explained=None if mistake is None else mistake.explained,
        scale=scale,
        precision=match.precision,
        api=api,
        pairs=len(pairs),
        max_difference=furthest,
        tau=tau,
        remarks=remarks,
        worst=_worst(pairs, kinds, match, served_N) if verdict == "different" else [],
    )


def _answers_by_precision(student: Student, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    """The scores [N] that the bundle gives in its default precision and in those of int8, which may serve as well."""
    students = [student]
    for model in student.manifest["models"]:
        precision = model["precision"]
        if FAMILY.get(precision) == "int8" and precision != student.precision:
            students.append(Student(student.folder, provider="cpu", precision=precision, check_digests=False))
    answers = {}
    for loaded in students:
        probs_NK = loaded.probabilities(pairs, batch_tokens=1)["relevance"]
        answers[loaded.precision] = expected_share(probs_NK.astype(float))
    return answers


def _nearest_match(
    answers: Mapping[str, np.ndarray], num_grades: int, served_N: np.ndarray, tolerances: Mapping[str, float]
) -> Match:
    """The scale and precision by which a server is nearest to the bundle.

    Args:
        answers: of the default precision first. Another one has to fit, or to be much nearer: of a server that is
            wrong, chance would choose.
        tolerances: of each precision.
    """
    nearest = []
    for precision, expected_N in answers.items():
        matches = [
            Match(precision, scale, expected_N, np.abs(expected_N - scale.share(served_N)))
            for scale in scales_of(num_grades)
        ]
        nearest.append(min(matches, key=lambda match: float(match.apart.mean())))
    default = nearest[0]
    found = min(nearest, key=lambda match: float(match.apart.mean()))
    fits = found.apart.max() <= max(TOLERANCE, tolerances[found.precision])
    return found if fits or found.apart.mean() < default.apart.mean() / MUCH_NEARER else default


def _rms(values_N: np.ndarray) -> float:
    return float(np.sqrt((values_N**2).mean()))


def _furthest_again(pairs: Sequence[Pair], served_N: np.ndarray) -> float:
    """How far the scores of one pair that was asked several times are from each other."""
    first: dict[Pair, float] = {}
    apart = [abs(first.setdefault(pair, score) - score) for pair, score in zip(pairs, served_N.tolist(), strict=True)]
    return float(max(apart))


def _worst(pairs: Sequence[Pair], kinds: Sequence[str], match: Match, served_N: np.ndarray) -> list[dict[str, Any]]:
    """The different pairs that are furthest off."""
    places: dict[Pair, int] = {}
    for place in np.argsort(-match.apart, kind="stable").tolist():
        places.setdefault(pairs[place], place)
    return [
        {
            "kind": kinds[place],
            "query": one_line(shortened(query, 60)),
            "document": one_line(shortened(document, 60)),
            "expected": float(match.expected[place]),
            "served": float(served_N[place]),
        }
        for (query, document), place in itertools.islice(places.items(), WORST)
    ]

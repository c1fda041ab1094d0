"""Whether a running server answers as the bundle does, and if not, why.

The server is asked the bundle's reference pairs, each alone, and traps: long, empty and odd texts, the same pair twice,
a batch of 64 and the same batch reversed. What it should answer is computed from the bundle. Where it answers
otherwise, the bundle is asked the same pairs with one mistake after another that serving stacks make (`_readings`,
`_scales`): the mistake whose scores are the server's is the reason.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from relabel.distill.students.model import softmax
from relabel.export.loader import BF16_TOLERANCE, REFERENCE, Encoder, Student, load_tokenizer
from relabel.export.parity import FAMILY, expected_grade, kept_orders, tau_of
from relabel.manifests.errors import InputError, ServerGoneError
from relabel.manifests.secrets import redacted, shortened

# N pairs, T tokens, D hidden, K grades

Verdict = Literal["equal", "monotone", "different"]
Pair = tuple[str, str]
TOLERANCE = BF16_TOLERANCE
"""The largest difference of scores from 0 to 1 that an ordinary change of runtime or precision makes."""
SAME = 1e-4
"""Scores that differ by no more are the same, and no mistake is looked for."""
CLEARLY_BETTER = 3.0
"""A mistake is the reason where its scores are the server's but for a change of precision, and lie this many times
nearer to them than the right ones do: both, since other weights may lie nearer to a mistake by chance."""
BATCH = 64
OVER = 2.0
"""The text over the limit has so many words for each token that the student reads."""
CUTS = (64, 128, 256, 512)
"""Lengths in tokens at which servers cut by default."""
TEXTS = ("", "Füße 鞋 👟\u200d🔥", "שלום привет こんにちは", "kite\n\n\ttent  ")
"""Empty, emoji, other scripts, blanks."""
OVER_LIMIT, REVERSED = "a text over the limit", "the batch reversed"
WORST = 5
MONOTONE_TAU = 0.999


# ------------------------------------------------------------------------------
# The server, by the APIs that such servers have.


TIMEOUT_S = 60.0


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
        encoder: of the bundle, for `kserve-v2`.
    Raises:
        InputError: no API answers there.
        ServerGoneError: nothing listens there.
    """

    def __init__(self, url: str, api: str, model: str, key: str | None, encoder: Encoder) -> None:
        self._url, self._model, self._key, self._encoder = url.rstrip("/"), model, key, encoder
        self.api, faults = api, []
        tried = (KSERVE,) if self._url.endswith("/infer") else APIS
        for self.api in tried if api == "auto" else ():
            try:
                self.scores("wool", ["wool socks"])
                return
            except InputError as exc:
                faults.append(f"{self.api}: {exc}")
        if faults:
            raise InputError(f"{redacted(url)}: no rerank API answers there. " + " ".join(faults))

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
            found = sorted((int(one["index"]), float(one[score])) for one in (reply[results] if results else reply))
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"its reply is not one of {self.api}: {shortened(json.dumps(reply), 200)}") from exc
        if [place for place, _ in found] != list(range(len(documents))):
            raise InputError(f"{len(documents)} documents were sent, and its reply scores {len(found)}")
        scores_N = np.array([score for _, score in found])
        if not np.isfinite(scores_N).all():
            raise InputError("its reply holds scores that are not finite")
        return scores_N

    def _expected_grades(self, pairs: Sequence[Pair]) -> np.ndarray:
        batch = self._encoder.collate(self._encoder.encode(pairs))
        inputs = [
            {"name": name, "shape": list(ids.shape), "datatype": "INT64", "data": ids.ravel().tolist()}
            for name, ids in batch.items()
        ]
        path = "" if self._url.endswith("/infer") else f"/v2/models/{self._model}/infer"
        reply = self._post(path, {"inputs": inputs})
        found = {one["name"]: one for one in reply.get("outputs", ())} if isinstance(reply, dict) else {}
        if "relevance" not in found:
            raise InputError(f"its reply has no output `relevance`: {shortened(json.dumps(reply), 200)}")
        return _expected(np.array(found["relevance"]["data"], float).reshape(found["relevance"]["shape"]))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        url = self._url if not path or self._url.endswith(path) else self._url + path
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as exc:
            said = f"{redacted(url)} answers {exc.code} {shortened(exc.read(2000).decode(errors='replace'), 200)}"
            raise (ServerGoneError if exc.code in (429, 502, 503, 504) else InputError)(said) from exc
        except ValueError as exc:
            raise InputError(f"{redacted(url)}: not a URL of http, or its reply is not JSON ({exc})") from exc
        except OSError as exc:
            raise ServerGoneError(f"{redacted(url)}: no answer ({getattr(exc, 'reason', exc)}).") from exc


# ------------------------------------------------------------------------------
# What it is asked.


class Asked(NamedTuple):
    """Pairs of one query that go to the server together; `kind` says what they try."""

    kind: str
    query: str
    documents: list[str]


@dataclass(frozen=True)
class Conformity:
    """How a server answers.

    Args:
        verdict: `equal`; `monotone`: the same order on another scale; `different`.
        api: by which it was asked.
        scale: what its scores are.
        reason: of a difference; empty where there is none.
        pairs: how many were asked; `max_difference` is over these.
        remarks: what it refused.
        worst: pairs with the largest differences: `kind`, `query`, `document`, `expected` and `served`, from 0 to 1.
        tau: Kendall's, over pairs whose expected scores differ by more than the tolerance.
    """

    verdict: Verdict
    api: str
    scale: str
    reason: str
    pairs: int
    max_difference: float
    tau: float
    remarks: list[str]
    worst: list[dict[str, Any]]


def conform(bundle: Path, server: RerankServer) -> Conformity:
    """Compare a server's scores with the bundle's.

    Raises:
        InputError: the bundle has no reference pairs; the server answers none of them.
        BundleError: the bundle is damaged.
    """
    student = Student(bundle, provider="cpu", precision="fp32")
    held = [one["precision"] for one in student.manifest["models"]]
    students = [student, *(Student(bundle, provider="cpu", precision=one) for one in held if FAMILY.get(one) == "int8")]
    path = bundle / REFERENCE
    if not path.exists():
        raise InputError(f"{bundle}: holds no reference pairs. Export it with `--set reference_pairs=32`.")
    reference = json.loads(path.read_bytes())
    refused: list[tuple[str, InputError]] = []
    asked, served = [], []
    for one in _questions([(query, document) for query, document in reference["pairs"]], student, refused):
        try:
            served.append(server.scores(one.query, one.documents))
            asked.append(one)
        except InputError as exc:
            if one.kind == "pair":
                raise InputError(f"it does not answer a reference pair ({exc})") from exc
            refused.append((one.kind, exc))
    remarks = [f"refuses {kind}: {why}" for kind, why in refused]
    return _judged(students, reference, asked, np.concatenate(served), server.api, remarks)


def _questions(sealed: list[Pair], student: Student, refused: Sequence[tuple[str, InputError]]) -> Iterator[Asked]:
    """The reference pairs, each alone, then the traps; the batches hold the long text if it was not refused alone.

    Args:
        refused: kinds of questions that the server refused so far, and how.
    """
    for query, document in sealed:
        yield Asked("pair", query, [document])
    query, document = max(sealed, key=lambda pair: len(pair[1]))
    words = " ".join(document for _, document in sealed).split() or ["word"]
    long = " ".join(itertools.islice(itertools.cycle(words), int(OVER * student.encoder.max_tokens)))
    tokens = _tokenizer(student).get_added_tokens_decoder().values()
    control = [f"{document} {token.content} {sealed[0][1]}" for token in tokens if token.special][:4]
    for kind, documents in (
        (OVER_LIMIT, [long]),
        *((f"the text {text!r}", [text]) for text in TEXTS),
        *(("a text that spells a control token", [text]) for text in control),
        ("the same pair twice", [document, document]),
    ):
        yield Asked(kind, query, documents)
    last = document if OVER_LIMIT in dict(refused) else long
    batch = [document for _, document in itertools.islice(itertools.cycle(sealed), BATCH - 1)] + [last]
    yield Asked(f"a batch of {BATCH}", query, batch)
    yield Asked(REVERSED, query, batch[::-1])


# ------------------------------------------------------------------------------
# What it should answer, and what mistakes would make of that.


def _expected(probs_NK: np.ndarray) -> np.ndarray:
    return np.asarray(expected_grade(probs_NK) / (probs_NK.shape[1] - 1))


def _logit(share_N: np.ndarray) -> np.ndarray:
    share_N = np.clip(share_N, 1e-7, 1 - 1e-7)
    return np.asarray(np.log(share_N) - np.log1p(-share_N))


def _sigmoid(value_N: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-value_N)))


class Scale(NamedTuple):
    """A way to make one number of a distribution.

    Args:
        scores: of probabilities [N, K].
        share: of scores, a number from 0 to 1 in the same order, so that differences on all scales compare.
        is_monotone: it orders as the expected grade does: another scale, and no mistake.
    """

    name: str
    scores: Callable[[np.ndarray], np.ndarray]
    share: Callable[[np.ndarray], np.ndarray] = np.asarray
    is_monotone: bool = False


def _scales(num_grades: int, temperature: float) -> list[Scale]:
    """Those that serving stacks give, the expected grade from 0 to 1 first."""
    top = num_grades - 1
    scales = [
        Scale("the expected grade from 0 to 1", _expected, is_monotone=True),
        Scale("the log-odds of the expected grade", lambda p: _logit(_expected(p)), _sigmoid, is_monotone=True),
        Scale("sigmoid applied twice", lambda p: _sigmoid(_expected(p)), is_monotone=True),
        Scale("labels in reverse order", lambda p: 1 - _expected(p)),
        Scale("the most probable grade, not the distribution", lambda p: p.argmax(1) / top),
        Scale("the highest probability, whatever its grade", lambda p: p.max(1)),
        Scale("softmax over one logit: 1 for every pair", lambda p: np.ones(len(p))),
        Scale("0.5 for every pair: a head of zeros", lambda p: np.full(len(p), 0.5)),
        Scale("softmax applied twice", lambda p: _expected(softmax(p))),
    ]
    if top > 1:
        scales += [
            Scale(f"the expected grade from 0 to {top}", lambda p: _expected(p) * top, lambda s: s / top, True),
            *(
                Scale(f"the probability of grade {one} alone", partial(np.take, indices=one, axis=1))
                for one in (0, 1, top)
            ),
        ]
    if abs(temperature - 1) > 1e-3:
        scales.append(
            Scale(
                "the calibrating temperature is left out",
                lambda p: _expected(softmax(np.log(np.maximum(p, 1e-30)) * temperature)),
            )
        )
    return scales


def _tokenizer(student: Student) -> Any:
    return load_tokenizer(student.folder / student.encoder.inputs.tokenizer)


Rows = list[tuple[list[int], list[int]]]


def _readings(student: Student, pairs: Sequence[Pair]) -> Iterator[tuple[str, np.ndarray]]:
    """What the bundle answers [N, K] where pairs become tokens by a mistake."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    encoder = student.encoder
    right = encoder.encode(pairs)
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what a graph can't run is passed over

    def answers(rows: Rows) -> np.ndarray:
        return np.concatenate([student.session.run(["relevance"], encoder.collate([row]), options)[0] for row in rows])

    yield "query and document are swapped", answers(encoder.encode([(document, query) for query, document in pairs]))
    yield "the query is missing", answers(encoder.encode([("", document) for _, document in pairs]))
    if encoder.inputs.kind == "decoder":
        before, _, after = encoder.inputs.prompt_ids
        yield "the instruction before the pair is missing", answers([(ids[len(before) :], []) for ids, _ in right])
        yield "the template's end is missing", answers([(ids[: len(ids) - len(after)], []) for ids, _ in right])
        yield "the first token comes twice", answers([(ids[:1] + ids, []) for ids, _ in right])
        tokenizer = _tokenizer(student)
        tokenizer.encode_special_tokens = False
        parts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoder.inputs.prompt_ids]
        texts = ["".join((parts[0], query, parts[1], document, parts[2])) for query, document in pairs]
        whole: Rows = [(one.ids, []) for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
        yield "prompt and texts become tokens in one piece, and are not cut", answers(whole)
        return
    if encoder.inputs.kind != "encoder":
        return
    if "token_type_ids" in encoder.inputs.names and any(any(types) for _, types in right):
        yield "token types are left out", answers([(ids, [0] * len(ids)) for ids, _ in right])
    tokenizer = _tokenizer(student)

    def encoded(
        most: int = encoder.max_tokens, side: str = encoder.inputs.truncation_side, *, escapes: bool = True, **how: Any
    ) -> np.ndarray:
        tokenizer.encode_special_tokens = escapes
        tokenizer.enable_truncation(most, strategy="longest_first", direction=side)
        return answers([(one.ids, one.type_ids) for one in tokenizer.encode_batch(list(pairs), **how)])

    other = "left" if encoder.inputs.truncation_side == "right" else "right"
    yield f"long texts are cut on the {other}", encoded(side=other)
    tokenizer.no_truncation()
    longest = max(len(one.ids) for one in tokenizer.encode_batch(list(pairs)))
    for most in sorted({*CUTS, encoder.max_tokens // 2, longest} - {encoder.max_tokens}):
        if most > longest:
            break
        cut = f"cut at {most} tokens, not at {encoder.max_tokens}"
        try:
            yield f"texts are {cut if most < longest else f'not cut at {encoder.max_tokens} tokens'}", encoded(most)
        except (Fail, InvalidArgument, RuntimeException):  # the graph has fewer positions
            break
    yield "special tokens are left out", encoded(add_special_tokens=False)
    yield "control tokens in texts are read as control tokens", encoded(escapes=False)


# ------------------------------------------------------------------------------
# The verdict.


def _judged(
    students: Sequence[Student],
    reference: Mapping[str, Any],
    asked: Sequence[Asked],
    served_N: np.ndarray,
    api: str,
    remarks: list[str],
) -> Conformity:
    """
    Args:
        students: the bundle in each precision that may serve, fp32 first.
        reference: the sealed pairs and the tolerance of each precision.
    """
    pairs = [(one.query, document) for one in asked for document in one.documents]
    kinds = [one.kind for one in asked for _ in one.documents]
    right = {one.precision: one.probabilities(pairs, batch_tokens=1) for one in students}
    temperature = float(students[0].manifest["temperature"].get("relevance", 1.0))
    scales = _scales(students[0].heads["relevance"], temperature)
    good = [scale for scale in scales if scale.is_monotone]

    def apart(probs_NK: np.ndarray, scale: Scale) -> np.ndarray:
        return np.asarray(np.abs(scale.share(scale.scores(probs_NK)) - scale.share(served_N)))

    _, precision, scale = min(
        (float(apart(found["relevance"], scale).mean()), precision, scale)
        for precision, found in right.items()
        for scale in good
    )
    expected_N = _expected(right[precision]["relevance"])
    apart_N = apart(right[precision]["relevance"], scale)
    tau = tau_of(kept_orders(np.zeros(len(pairs), int), expected_N, served_N, TOLERANCE)[1]) or 0.0
    most = max(TOLERANCE, float(reference["models"][precision]["tolerance"]))
    empty_N = np.array([not document.strip() for _, document in pairs])
    if (odd := float(apart_N[empty_N].max(initial=0.0))) > most:
        remarks.append(f"answers an empty document otherwise than the bundle, by {odd:.2g}; nothing hangs on it")
        apart_N[empty_N] = 0.0
    reason = ""
    if apart_N.max() > SAME:
        mistakes = [(float(apart(right["fp32"]["relevance"], one).mean()), one.name) for one in scales]
        mistakes += [
            (float(apart(probs_NK, scales[0]).mean()), f"another head: {head}")
            for head, probs_NK in right["fp32"].items()
            if head != "relevance"
        ]
        place_of = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}  # a batch repeats most pairs
        place_N = [place_of[pair] for pair in pairs]
        for name, probs_PK in _readings(students[0], list(place_of)):
            mistakes += [(float(apart(probs_PK[place_N], one).mean()), name) for one in good]
        nearest, name = min(mistakes)
        reason = name if nearest <= TOLERANCE and nearest * CLEARLY_BETTER < apart_N.mean() else ""
    if apart_N.max() > most:
        reason = _disorder(pairs, kinds, served_N) or reason
    verdict: Verdict = "equal" if scale is scales[0] else "monotone"
    named = scale.name
    if reason or (apart_N.max() > most and tau < MONOTONE_TAU):
        verdict, named = "different", "not known"
        reason = reason or "no mistake that was tried explains it: other weights, another head or another pooling"
    elif apart_N.max() > most:
        verdict, named = "monotone", "a scale of its own"
    worst = [
        {
            "kind": kinds[place],
            "query": shortened(pairs[place][0], 60),
            "document": shortened(pairs[place][1], 60),
            "expected": float(expected_N[place]),
            "served": float(served_N[place]),
        }
        for place in np.argsort(-apart_N)[:WORST].tolist()
    ]
    return Conformity(
        verdict=verdict,
        api=api,
        scale=named,
        reason=reason,
        pairs=len(pairs),
        max_difference=float(apart_N.max()),
        tau=tau,
        remarks=remarks,
        worst=worst if verdict == "different" else [],
    )


def _disorder(pairs: list[Pair], kinds: list[str], served_N: np.ndarray) -> str:
    """What is wrong where one pair has several scores; empty where none has."""
    first: dict[Pair, float] = {}
    apart = max(
        abs(first.setdefault(pair, score) - score) for pair, score in zip(pairs, served_N.tolist(), strict=True)
    )
    if apart <= TOLERANCE:
        return ""
    forward_N, reversed_N = (served_N[[kind == name for kind in kinds]] for name in (f"a batch of {BATCH}", REVERSED))
    if not len(forward_N) or not len(reversed_N):  # refused
        return "a pair's score is not the same each time"
    if np.allclose(forward_N, reversed_N, atol=TOLERANCE) and np.all(np.diff(forward_N) <= TOLERANCE):
        return "scores come back sorted, and not in the order of the documents"
    return "a pair's score depends on its batch: padding is not masked"

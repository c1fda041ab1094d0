"""Whether a running server answers as the bundle does.

The server is asked the bundle's reference pairs, each alone, and traps: long, empty and odd texts, the same pair twice,
a batch of 64 and the same batch reversed. What it should answer is computed from the bundle.
"""

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.loader import BF16_TOLERANCE, REFERENCE, Encoder, Student, load_tokenizer
from relabel.export.parity import FAMILY, expected_grade, kept_orders, tau_of
from relabel.manifests.errors import InputError, ServerGoneError
from relabel.manifests.secrets import redacted, shortened

# N pairs, T tokens, D hidden, K grades

Pair = tuple[str, str]
TOLERANCE = BF16_TOLERANCE
"""The largest difference of scores from 0 to 1 that an ordinary change of runtime or precision makes."""
BATCH = 64
OVER = 2.0
"""The text over the limit has so many words for each token that the student reads."""
TEXTS = ("", "Füße 鞋 👟\u200d🔥", "שלום привет こんにちは", "kite\n\n\ttent  ")
"""Empty, emoji, other scripts, blanks."""
OVER_LIMIT, EXPECTED = "a text over the limit", "the expected grade from 0 to 1"
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
        return _expected(np.array(found["relevance"]["data"], float).reshape(found["relevance"]["shape"]))

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


def conform(bundle: Path, server: RerankServer) -> dict[str, Any]:
    """Compare a server's scores with the bundle's.

    Returns:
        `verdict`: `equal`; `monotone`, the same order on another scale; or `different`, with the `reason`; `scale`,
        what its scores are; `api`, by which it was asked; `pairs`, how many were asked; `max_difference` over these;
        `tau`, Kendall's, over pairs whose expected scores differ by more than the tolerance; `remarks`, what it
        refused; `worst`, pairs with the largest differences: `kind`, `query`, `document`, `expected` and `served`,
        from 0 to 1.

    Raises:
        InputError: the bundle has no reference pairs; the server answers none of them.
        BundleError: the bundle is damaged.
    """
    student = Student(bundle, provider="cpu", precision="fp32")
    others = [one["precision"] for one in student.manifest["models"] if FAMILY.get(one["precision"]) == "int8"]
    students = [student, *(Student(bundle, provider="cpu", precision=precision) for precision in others)]
    path = bundle / REFERENCE
    if not path.exists():
        raise InputError(f"{bundle}: holds no reference pairs. Export it with `--set reference_pairs=32`.")
    reference = json.loads(path.read_bytes())
    refused: dict[str, InputError] = {}
    asked: list[tuple[str, Pair]] = []
    served: list[np.ndarray] = []
    for kind, query, documents in _questions(
        [(query, document) for query, document in reference["pairs"]], student, refused
    ):
        try:
            served.append(server.scores(query, documents))
        except InputError as exc:
            if kind == "pair":
                raise InputError(f"it does not answer a reference pair ({exc})") from exc
            refused[kind] = exc
        else:
            asked += [(kind, (query, document)) for document in documents]
    return _judged(
        students,
        reference,
        asked,
        np.concatenate(served),
        server.api,
        [f"refuses {kind}: {why}" for kind, why in refused.items()],
    )


def _questions(sealed: list[Pair], student: Student, refused: Collection[str]) -> Iterator[tuple[str, str, list[str]]]:
    """What each question tries, its query and its documents: the reference pairs, each alone, then the traps; the
    batches hold the long text if it was not refused alone.

    Args:
        refused: what the server refused so far.
    """
    for query, document in sealed:
        yield "pair", query, [document]
    query, document = max(sealed, key=lambda pair: len(pair[1]))
    words = " ".join(document for _, document in sealed).split() or ["word"]
    long = " ".join(itertools.islice(itertools.cycle(words), int(OVER * student.encoder.max_tokens)))
    yield OVER_LIMIT, query, [long]
    for text in TEXTS:
        yield f"the text {text!r}", query, [text]
    tokens = load_tokenizer(student.folder / student.encoder.inputs.tokenizer).get_added_tokens_decoder().values()
    for token in [token for token in tokens if token.special][:4]:
        yield "a text that spells a control token", query, [f"{document} {token.content} {sealed[0][1]}"]
    yield "the same pair twice", query, [document, document]
    last = document if OVER_LIMIT in refused else long
    batch = [document for _, document in itertools.islice(itertools.cycle(sealed), BATCH - 1)] + [last]
    yield f"a batch of {BATCH}", query, batch
    yield "the batch reversed", query, batch[::-1]


# ------------------------------------------------------------------------------
# The verdict.


def _expected(probs_NK: np.ndarray) -> np.ndarray:
    return np.asarray(expected_grade(probs_NK) / (probs_NK.shape[1] - 1))


def _sigmoid(value_N: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-value_N)))


def _apart(expected_N: np.ndarray, served_N: np.ndarray, top: int) -> dict[str, np.ndarray]:
    """How far a server's scores are from the expected ones, from 0 to 1, by the scale that they may be on. All order as
    the expected grade does.
    """
    return {
        EXPECTED: np.abs(expected_N - served_N),
        "the log-odds of the expected grade": np.abs(expected_N - _sigmoid(served_N)),
        "sigmoid applied twice": np.abs(_sigmoid(expected_N) - served_N),
        f"the expected grade from 0 to {top}": np.abs(expected_N - served_N / top),
    }


def _judged(
    students: Sequence[Student],
    reference: Mapping[str, Any],
    asked: Sequence[tuple[str, Pair]],
    served_N: np.ndarray,
    api: str,
    remarks: list[str],
) -> dict[str, Any]:
    """
    Args:
        students: the bundle in each precision that may serve, fp32 first.
        reference: the sealed pairs and the tolerance of each precision.
        asked: what each pair tried, and the pair.
    """
    pairs = [pair for _, pair in asked]
    found: list[tuple[np.ndarray, np.ndarray, str, str]] = []
    for one in students:
        expected_N = _expected(one.probabilities(pairs, batch_tokens=1)["relevance"])
        found += [
            (apart_N, expected_N, one.precision, scale)
            for scale, apart_N in _apart(expected_N, served_N, one.heads["relevance"] - 1).items()
        ]
    apart_N, expected_N, precision, scale = min(found, key=lambda one: one[0].mean())
    tau = tau_of(kept_orders(np.zeros(len(pairs), int), expected_N, served_N, TOLERANCE)[1]) or 0.0
    most = max(TOLERANCE, float(reference["models"][precision]["tolerance"]))
    empty_N = np.array([not document.strip() for _, document in pairs])
    if (odd := float(apart_N[empty_N].max(initial=0.0))) > most:
        remarks.append(f"answers an empty document otherwise than the bundle, by {odd:.2g}; nothing hangs on it")
        apart_N[empty_N] = 0.0
    verdict = "equal" if scale == EXPECTED else "monotone"
    reason, first = "", dict[Pair, float]()
    if apart_N.max() > most:
        again = [
            abs(first.setdefault(pair, score) - score) for pair, score in zip(pairs, served_N.tolist(), strict=True)
        ]
        if max(again) > TOLERANCE:
            reason = "a pair's score is not the same each time: it depends on its batch, or scores come back sorted"
        elif tau < 0.999 or apart_N.mean() < NEAR:
            reason = "another model, or one that is asked otherwise than it was trained"
        verdict, scale = ("different", "not known") if reason else ("monotone", "a scale of its own")
    worst = [
        {
            "kind": asked[place][0],
            "query": shortened(pairs[place][0], 60),
            "document": shortened(pairs[place][1], 60),
            "expected": float(expected_N[place]),
            "served": float(served_N[place]),
        }
        for place in np.argsort(-apart_N)[:5].tolist()
    ]
    return {
        "verdict": verdict,
        "api": api,
        "scale": scale,
        "reason": reason,
        "pairs": len(pairs),
        "max_difference": float(apart_N.max()),
        "tau": tau,
        "remarks": remarks,
        "worst": worst if verdict == "different" else [],
    }

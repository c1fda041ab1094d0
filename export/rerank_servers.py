"""Asking a running rerank server for the scores of a query's documents, by the APIs that such servers have."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from relabel.export.loader import Encoder
from relabel.export.parity import expected_grade
from relabel.manifests.errors import InputError, ServerGoneError
from relabel.manifests.secrets import redacted, shortened

TIMEOUT_S = 60.0


class Api(NamedTuple):
    """How a server is asked and answers.

    Args:
        path: of the endpoint, below the server's address.
        body: of a query, its documents and the model's name.
        scores: of a reply: (place of the document, score), in any order.
    """

    path: str
    body: Callable[[str, Sequence[str], str], dict[str, Any]]
    scores: Callable[[Any], list[tuple[int, float]]]


def _text_pair(query: str, documents: Sequence[str], model: str) -> dict[str, Any]:
    # vLLM refuses what is too long unless it is asked to cut
    return {"model": model, "text_1": query, "text_2": list(documents), "truncate_prompt_tokens": -1}


def _indexed(key: str | None, score: str) -> Callable[[Any], list[tuple[int, float]]]:
    def read(reply: Any) -> list[tuple[int, float]]:
        return [(int(one["index"]), float(one[score])) for one in (reply if key is None else reply[key])]

    return read


APIS: Mapping[str, Api] = {
    "cohere": Api(
        "/rerank",
        lambda query, documents, model: {"model": model, "query": query, "documents": list(documents)},
        _indexed("results", "relevance_score"),
    ),
    "tei": Api(
        "/rerank", lambda query, documents, _: {"query": query, "texts": list(documents)}, _indexed(None, "score")
    ),
    "vllm-score": Api("/score", _text_pair, _indexed("data", "score")),
    "openai-score": Api("/v1/score", _text_pair, _indexed("data", "score")),
}
"""Cohere's and Jina's `/rerank` (vLLM and llama.cpp have it too), text-embeddings-inference, and vLLM's score task."""
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
        self.api = api
        if api != "auto":
            return
        faults = []
        for name in (KSERVE,) if self._url.endswith("/infer") else APIS:
            self.api = name
            try:
                self.scores("wool", ["wool socks"])
                return
            except InputError as exc:
                faults.append(f"{name}: {exc}")
        raise InputError(f"{redacted(url)}: no rerank API answers there. " + " ".join(faults))

    def scores(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """A score a document, float64 [N], in their order.

        Raises:
            InputError: the reply is an error, or is not one score a document; names what came.
        """
        if self.api == KSERVE:
            return self._expected_grades([(query, document) for document in documents])
        api = APIS[self.api]
        reply = self._post(api.path, api.body(query, documents, self._model))
        try:
            found = api.scores(reply)
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"its reply is not one of {self.api}: {shortened(json.dumps(reply), 200)}") from exc
        if sorted(place for place, _ in found) != list(range(len(documents))):
            raise InputError(f"{len(documents)} documents were sent, and its reply scores {len(found)}")
        scores_N = np.array([score for _, score in sorted(found)])
        if not np.isfinite(scores_N).all():
            raise InputError("its reply holds scores that are not finite")
        return scores_N

    def _expected_grades(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
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
        probs_NK = np.array(found["relevance"]["data"], float).reshape(found["relevance"]["shape"])
        return np.asarray(expected_grade(probs_NK) / (probs_NK.shape[1] - 1))

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

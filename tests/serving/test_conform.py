"""`relabel conform` names what a server does wrong: faults are planted in the reference server, without the table of
mistakes, and each is named; a server without a fault is never called different.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from relabel.distill.students.model import load_student
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.conform import Conformity, RerankServer, conform
from relabel.export.loader import Encoder, Student, load_tokenizer, read_manifest

Pairs = Sequence[tuple[str, str]]
Serve = Callable[[Any], str]
TOP = 2


class Faulty:
    """A student whose `score` is wrong in one way.

    Args:
        read: from pairs to token rows; as trained by default.
        scale: from probabilities [N, K] to scores.
        together: rows of a batch are padded together, and padding is not masked.
    """

    version = "faulty"

    def __init__(
        self,
        right: Student,
        read: Callable[[Student, Pairs], list[tuple[list[int], list[int]]]] = lambda one, pairs: one.encoder.encode(
            pairs
        ),
        scale: Callable[[np.ndarray], np.ndarray] = lambda p: p @ np.linspace(0, 1, p.shape[1]),
        head: str = "relevance",
        *,
        is_unmasked: bool = False,
        is_sorted: bool = False,
    ) -> None:
        self._right, self._read, self._scale, self._head = right, read, scale, head
        self._is_unmasked, self._is_sorted = is_unmasked, is_sorted

    def score(self, pairs: Pairs) -> list[float]:
        rows = self._read(self._right, pairs)
        width = max(len(ids) for ids, _ in rows) if self._is_unmasked else None
        found = []
        for row in rows:
            batch = self._right.encoder.collate([row], width=width)
            if self._is_unmasked:
                batch["attention_mask"][:] = 1
            found.append(self._right.session.run([self._head], batch)[0][0])
        scores: list[float] = self._scale(np.stack(found).astype(float)).tolist()
        return sorted(scores, reverse=True) if self._is_sorted else scores


def tokens(side: str = "right", most: int = 0, *, escapes: bool = True, special: bool = True) -> Any:
    def read(one: Student, pairs: Pairs) -> list[tuple[list[int], list[int]]]:
        tokenizer = load_tokenizer(one.folder / one.encoder.inputs.tokenizer)
        tokenizer.encode_special_tokens = escapes
        tokenizer.enable_truncation(most or one.encoder.max_tokens, strategy="longest_first", direction=side)
        encoded = tokenizer.encode_batch(list(pairs), add_special_tokens=special)
        return [(found.ids, found.type_ids) for found in encoded]

    return read


def no_types(one: Student, pairs: Pairs) -> list[tuple[list[int], list[int]]]:
    return [(ids, [0] * len(ids)) for ids, _ in one.encoder.encode(pairs)]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(x) / np.exp(x).sum(1, keepdims=True))


def grade(p: np.ndarray) -> np.ndarray:
    return np.asarray(p @ np.arange(TOP + 1) / TOP)


class Torch:
    """The student itself as a server's model."""

    version = "torch"

    def __init__(self, model: Any) -> None:
        self._model = model

    def score(self, pairs: Pairs) -> list[float]:
        probs_NK = self._model.probabilities(pairs)["relevance"]
        scores: list[float] = grade(probs_NK.astype(float)).tolist()
        return scores


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "swapped": (
        {"read": lambda one, pairs: one.encoder.encode([(document, query) for query, document in pairs])},
        "query and document are swapped",
    ),
    "no query": (
        {"read": lambda one, pairs: one.encoder.encode([("", text) for _, text in pairs])},
        "the query is missing",
    ),
    "cut on the left": ({"read": tokens("left")}, "long texts are cut on the left"),
    "cut at 16": ({"read": tokens(most=16)}, "texts are cut at 16 tokens, not at 32"),
    "cut at 64": ({"read": tokens(most=64)}, "texts are cut at 64 tokens, not at 32"),
    "token types": ({"read": no_types}, "token types are left out"),
    "no special tokens": ({"read": tokens(special=False)}, "special tokens are left out"),
    "control tokens": ({"read": tokens(escapes=False)}, "control tokens in texts are read as control tokens"),
    "softmax of one": ({"scale": lambda p: np.ones(len(p))}, "softmax over one logit"),
    "softmax twice": ({"scale": lambda p: grade(softmax(p))}, "softmax applied twice"),
    "reversed labels": ({"scale": lambda p: grade(p[:, ::-1])}, "labels in reverse order"),
    "one label": ({"scale": lambda p: p[:, TOP]}, f"the probability of grade {TOP} alone"),
    "padding": ({"is_unmasked": True}, "padding is not masked"),
    "sorted": ({"is_sorted": True}, "scores come back sorted"),
    "other head": ({"head": "other"}, "another head"),
}
SAME_ORDER: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "0 to the top grade": (lambda p: grade(p) * TOP, f"the expected grade from 0 to {TOP}"),
    "a logit": (lambda p: np.log(grade(p)) - np.log1p(-grade(p)), "the log-odds of the expected grade"),
    "sigmoid twice": (lambda p: sigmoid(grade(p)), "sigmoid applied twice"),
    "its own": (lambda p: grade(p) ** 3 * 7 - 2, "a scale of its own"),
}


def checked(bundle: Path, url: str, api: str = "auto", batch: int = 16) -> Conformity:
    """A command asks for 64 together; most faults show in 16."""
    with mock.patch("relabel.export.conform.BATCH", batch):
        return conform(bundle, RerankServer(url, api, "", None, Encoder(bundle, read_manifest(bundle)["inputs"])))


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_planted_fault_is_named(name: str, bundle: Path, serve: Serve) -> None:
    how, reason = DIFFERENT[name]
    right = Student(bundle, provider="cpu", precision="fp32")
    if how.get("head") == "other":
        how = {"head": next(head for head in right.heads if head != "relevance")}
    found = checked(bundle, serve(Faulty(right, **how)))
    assert found.verdict == "different"
    assert reason in found.reason
    assert found.worst
    assert found.precision == "fp32", "int8 may be nearer by chance"


def with_random_head(student: Any, seed: int) -> None:
    torch.manual_seed(seed)
    student.module.heads["relevance"].reset_parameters()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no temperature": (lambda one: one.record.temperature.clear(), "the calibrating temperature is left out"),
    "the first token": (lambda one: setattr(one.module, "pooling", "cls"), "another pooling: by the first token"),
    "a random head": (partial(with_random_head, seed=0), "other weights, another head or another pooling"),
    "another random head": (partial(with_random_head, seed=1), "other weights, another head or another pooling"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_of_the_served_model_is_named(name: str, student: Path, bundle: Path, serve: Serve) -> None:
    model = load_student(student, batch_tokens=1)
    change, reason = CHANGES[name]
    change(model)
    found = checked(bundle, serve(Torch(model)))
    assert found.verdict == "different"
    assert reason in found.reason


@pytest.mark.parametrize("name", SAME_ORDER)
def test_another_scale_is_monotone_and_named(name: str, bundle: Path, serve: Serve) -> None:
    scale, said = SAME_ORDER[name]
    found = checked(bundle, serve(Faulty(Student(bundle, provider="cpu", precision="fp32"), scale=scale)))
    assert (found.verdict, found.scale) == ("monotone", said)


@pytest.mark.parametrize(
    ("precision", "threads", "api"), [("fp32", 1, "auto"), ("fp16", 2, "cohere"), ("int8", 2, "auto")]
)
def test_a_server_without_a_fault_is_never_different(
    precision: str, threads: int, api: str, bundle: Path, serve: Serve
) -> None:
    found = checked(bundle, serve(Student(bundle, provider="cpu", precision=precision, threads=threads)), api)
    assert (found.verdict, found.reason) == ("equal", ""), found


def test_a_decoder_is_checked_too(decoder_bundle: Path, serve: Serve) -> None:
    right = Student(decoder_bundle, provider="cpu", precision="fp32")
    assert checked(decoder_bundle, serve(right)).verdict == "equal"
    before = len(right.encoder.inputs.prompt_ids[0])
    bare = Faulty(right, read=lambda one, pairs: [(ids[before:], []) for ids, _ in one.encoder.encode(pairs)])
    found = checked(decoder_bundle, serve(bare))
    assert (found.verdict, found.reason) == ("different", "the instruction before the pair is missing")

    def in_one_piece(one: Student, pairs: Pairs) -> list[tuple[list[int], list[int]]]:
        tokenizer = load_tokenizer(one.folder / one.encoder.inputs.tokenizer)
        tokenizer.encode_special_tokens = False
        before, between, after = (tokenizer.decode(ids, False) for ids in one.encoder.inputs.prompt_ids)
        texts = [f"{before}{query}{between}{document}{after}" for query, document in pairs]
        return [(found.ids, []) for found in tokenizer.encode_batch(texts, add_special_tokens=False)]

    found = checked(decoder_bundle, serve(Faulty(right, read=in_one_piece)))
    assert found.verdict == "different"
    assert found.reason == "prompt and texts become tokens in one piece, and are not cut"


@pytest.mark.parametrize("most", [1, 16])
def test_a_server_that_refuses_long_texts_or_batches_is_asked_what_it_takes(
    most: int, bundle: Path, serve: Serve
) -> None:
    """llama.cpp refuses what is longer than its batch, text-embeddings-inference more than 32 texts at once."""
    right = Student(bundle, provider="cpu", precision="fp32")
    served = SimpleNamespace(version="strict")
    room, scores = 32, right.score
    turns = iter(range(10**6))

    def strict(pairs: Pairs, *, is_odd: bool = False) -> list[float]:
        if len(pairs) > most or any(len(document.split()) > room for _, document in pairs):
            raise ValueError("too long")
        return [score + is_odd * 0.1 * (next(turns) % 2) for score in scores(pairs)]

    served.score = strict
    found = checked(bundle, serve(served))
    assert (found.verdict, found.tau) == ("equal", 1.0)
    refused = [remark.partition(":")[0] for remark in found.remarks]
    batches = ["refuses the same pair twice", "refuses a batch of 16", "refuses the batch reversed"]
    assert refused == ["refuses a text over the limit", *(batches if most == 1 else [])]
    served.score = partial(strict, is_odd=True)
    assert checked(bundle, serve(served)).verdict == "different"


def test_the_command_says_the_verdict_by_its_exit_code(bundle: Path, serve: Serve, relabel: Any) -> None:
    right = Student(bundle, provider="cpu", precision="fp32")
    done = relabel("conform", serve(Faulty(right, read=no_types)), str(bundle))
    assert (done.code, "token types are left out" in done.out) == (5, True), done.err
    assert "known mistakes are tried" in done.err
    assert relabel("conform", "http://127.0.0.1:9", str(bundle)).code == 20


@pytest.mark.parametrize(
    ("scale", "verdict", "code"), [(grade, "equal", 0), (lambda p: TOP * grade(p), "monotone", 5)], ids=["1", "2"]
)
def test_who_compares_with_a_threshold_can_require_equal_scores(
    scale: Any, verdict: str, code: int, bundle: Path, serve: Serve, relabel: Any
) -> None:
    url = serve(Faulty(Student(bundle, provider="cpu", precision="fp32"), scale=scale))
    loose = relabel("conform", url, str(bundle))
    strict = relabel("conform", url, str(bundle), "--require", "equal")
    assert (loose.code, strict.code) == (0, code), strict.err
    assert f": {verdict}" in strict.out


def test_the_worst_pairs_are_shown_once_with_their_query_and_command_no_terminal(
    bundle: Path, tmp_path: Path, serve: Serve, relabel: Any
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    reference = json.loads((copy / "reference.json").read_bytes())
    odd = "\x1b]0;owned\x07\x9b2J\u202e\r\n\u2028"
    reference["pairs"] = [[f"{query} {odd}", f"{odd} {text}"] for query, text in reference["pairs"]]
    (copy / "reference.json").write_text(json.dumps(reference))
    seal_bundle(copy, open_bundle(bundle).own_facts)
    turned = Faulty(Student(copy, provider="cpu", precision="fp32"), scale=lambda p: grade(p[:, ::-1]))
    url = serve(turned)
    done = relabel("conform", url, str(copy))
    as_json = relabel("conform", url, str(copy), "--output", "json")
    assert (done.code, as_json.code) == (5, 5)
    for text in (done.out, as_json.out):
        assert not set(text) & set("\x1b\x07\x9b\u202e\r\u2028")
    worst = as_json.json["worst"]
    assert len({(one["query"], one["document"], one["kind"]) for one in worst}) == len(worst) == 5
    assert "query" in done.out.splitlines()[-6].split()
    assert "\\x1b]0;owned" in done.out


def recorded(api: str, student: Student, asked: Any) -> Any:
    """What a server of an API answers, in the form of its documentation: the best first where it sorts.

    `kserve-v2` as Triton's "HTTP/REST and GRPC protocol" has it: tensors as flat lists with name, shape and datatype.
    """
    if api == "kserve-v2":
        feed = {}
        for tensor in asked["inputs"]:
            assert tensor.keys() == {"name", "shape", "datatype", "data"}
            assert (tensor["datatype"], np.prod(tensor["shape"])) == ("INT64", len(tensor["data"]))
            feed[tensor["name"]] = np.array(tensor["data"]).reshape(tensor["shape"])
        probs = student.session.run(["relevance"], feed)[0]
        tensor = {"name": "relevance", "datatype": "FP32", "shape": list(probs.shape), "data": probs.ravel().tolist()}
        return {"model_name": "ecom", "model_version": "1", "outputs": [tensor]}
    query, documents = (asked["query"], asked["texts"]) if api == "tei" else (asked["text_1"], asked["text_2"])
    scores = student.score([(query, document) for document in documents])
    found = [{"index": place, "score": score} for place, score in enumerate(scores)]
    if api == "tei":
        return sorted(found, key=lambda one: -one["score"])
    return {"id": "score-1", "object": "list", "data": [{"object": "score", **one} for one in found]}


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("tei", "/rerank"),
        ("vllm-score", "/score"),
        ("openai-score", "/v1/score"),
        ("kserve-v2", "/v2/models/ecom/infer"),
    ],
)
def test_servers_of_other_apis_are_asked_in_the_form_that_they_document(
    api: str, path: str, bundle: Path, serve: Serve, rerank: Any, relabel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = Student(bundle, provider="cpu", precision="fp32")

    def answer(handler: Any) -> None:
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        is_known = handler.path == path
        handler._reply(200, recorded(api, student, asked)) if is_known else handler._reply(400, {"error": "no model"})

    monkeypatch.setattr(rerank.Rerank, "do_POST", answer)
    url = serve(student)
    done = relabel("conform", url, str(bundle), "--api", api, "--model", "ecom", "--output", "json")
    assert (done.code, done.json["verdict"], done.json["api"]) == (0, "equal", api)
    assert relabel("conform", url + "/wrong", str(bundle), "--api", api, "--model", "ecom").code == 3
    if api == "kserve-v2":
        assert checked(bundle, url + path).api == api


RECORDED: dict[str, tuple[str, Any, list[float]]] = {
    "llama.cpp, xllamacpp 2026.10.11549": (
        "cohere",
        {"model": "ecom.gguf", "object": "list", "usage": {"prompt_tokens": 23, "total_tokens": 23}, "results": [
            {"index": 0, "relevance_score": 0.0062364861369132996},
            {"index": 1, "relevance_score": -11.277735710144043},
        ]},
        [0.00623649, -11.2777357],
    ),
    "the same, asked as text-embeddings-inference": (
        "tei",
        [{"index": 1, "score": 0.0062364861369132996}, {"index": 0, "score": -11.277735710144043}],
        [-11.2777357, 0.00623649],
    ),
    "infinity-emb 0.0.78": (
        "cohere",
        {"object": "rerank", "results": [
            {"relevance_score": 0.501854419708252, "index": 0, "document": None},
            {"relevance_score": 0.000013467334611050319, "index": 1, "document": None},
        ], "model": "ecom", "usage": {"prompt_tokens": 54, "total_tokens": 54}, "id": "infinity-0be41743"},
        [0.50185442, 0.00001346733],
    ),
    "Triton 2.51": (
        "kserve-v2",
        {"model_name": "ecom", "model_version": "1", "outputs": [
            {"name": "relevance", "datatype": "FP32", "shape": [1, 3],
             "data": [0.026951154693961145, 0.967588484287262, 0.0054603926837444309]},
        ]},
        [0.48925463],
    ),
}  # fmt: skip


@pytest.mark.parametrize("server", RECORDED)
def test_replies_of_real_servers_are_read(
    server: str, bundle: Path, serve: Serve, rerank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded on 2026-11-27."""
    api, reply, scores = RECORDED[server]
    monkeypatch.setattr(rerank.Rerank, "do_POST", lambda handler: handler._reply(200, reply))
    encoder = Encoder(bundle, read_manifest(bundle)["inputs"])
    asked = RerankServer(serve(SimpleNamespace(version="recorded")), api, "ecom", None, encoder)
    assert np.allclose(asked.scores("red shoe", ["red fits shoe", "lamp misses"][: len(scores)]), scores, atol=1e-7)


def test_a_canary_goes_on_until_the_server_answers_otherwise(
    bundle: Path, serve: Serve, rerank: Any, relabel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Student(bundle, provider="cpu", precision="fp32")
    served = SimpleNamespace(version="canary", score=right.score)
    url, post, seen = serve(served), rerank.Rerank.do_POST, list[float]()

    def later(seconds: float) -> None:
        seen.append(seconds)
        is_first = len(seen) == 1
        gone = lambda handler: handler._reply(503, {"error": "it restarts"})  # noqa: E731
        monkeypatch.setattr(rerank.Rerank, "do_POST", gone if is_first else post)
        served.score = Faulty(right, read=no_types).score

    monkeypatch.setattr("time.sleep", later)
    done = relabel("conform", url, str(bundle), "--watch", "300")
    assert done.code == 5
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line.get("verdict", "gone") for line in lines] == ["equal", "gone", "different"]
    assert "it restarts" in lines[1]["error"]
    assert seen == [300, 300]


def test_a_key_is_sent_and_never_shown(
    bundle: Path, serve: Serve, relabel: Any, monkeypatch: pytest.MonkeyPatch, rerank: Any
) -> None:
    sent: list[str] = []
    post = rerank.Rerank.do_POST

    def spy(handler: Any) -> None:
        sent.append(handler.headers["Authorization"])
        handler._reply(401, {"error": f"no {sent[-1]}"}) if len(sent) > 3 else post(handler)

    monkeypatch.setattr(rerank.Rerank, "do_POST", spy)
    monkeypatch.setenv("RERANK_KEY", "open-sesame-4711")
    url = serve(Student(bundle, provider="cpu", precision="fp32"))
    done = relabel("conform", url, str(bundle), "--api-key-env", "RERANK_KEY")
    assert sent[0] == "Bearer open-sesame-4711"
    assert done.code == 3
    assert "401" in done.err
    assert "open-sesame" not in done.out + done.err

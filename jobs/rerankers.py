"""A score run of somebody else's reranker: the folder of a cross-encoder, or a server that reranks.

Its scores rank and grade nothing, on a scale of their own: a label has no grade, and the column `score` instead.
`relabel evaluate` judges their order.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import numpy as np

from relabel.distill.students.spec import STUDENT_NAME
from relabel.export.bundles import HUB_RECORD_NAME
from relabel.export.conform import APIS, RerankServer
from relabel.export.loader import LOADER
from relabel.jobs.job import Job
from relabel.jobs.run.chunks import ChunkWork, quarantined_text
from relabel.jobs.run.progress import StageSeen
from relabel.jobs.score import STAGE, ScoreOptions, ScoringRunner
from relabel.jobs.settings import Places, resolved
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import DOCUMENT_FIELD, Ask, EngineFacts, Message
from relabel.manifests.errors import (
    ConfigError,
    InputError,
    ManifestError,
    MissingExtraError,
    ServerGoneError,
    UsageError,
)
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Label, LabelColumn, LabelRow, Pair, QuarantineRow
from relabel.manifests.metrics.judged import SCORE
from relabel.manifests.process import require
from relabel.manifests.records import digest_of, sha256_file
from relabel.manifests.secrets import keep_secret
from relabel.manifests.specs import EngineArgs, EngineSpec, JobSpec, LabelerOptions, validate_spec

# N pairs

RERANKER = "reranker"
"""Of such a run: its engine, its labeler and the kind of its plan."""
BATCH_PAIRS = 32
"""That a cross-encoder scores, or a server is asked, at once."""
ENDPOINTS = ("/rerank", "/score")
"""What the address of a server ends in, where no API is named."""
WAITS_S = (1.0, 4.0, 16.0)
"""Before a server that gives no answer is asked again; then the run ends, and can be continued."""

Pairs = Sequence[tuple[str, str]]


def is_server(reference: str) -> bool:
    """Whether a reference is the address of a server."""
    return reference.startswith(("http://", "https://"))


def is_cross_encoder(path: str) -> bool:
    """Whether a folder holds a Hugging Face model, or modules of sentence-transformers, and is neither a student nor a
    bundle.
    """
    folder = Path(path)
    is_ours = (folder / STUDENT_NAME).exists() or (folder / LOADER).exists()
    return not is_ours and any((folder / name).is_file() for name in ("config.json", "modules.json"))


# ------------------------------------------------------------------------------
# The two kinds, loaded.


class RerankerArgs(EngineArgs):
    """Options of scoring with a reranker."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"device", "api_key_env"})

    device: str = "auto"
    """Of a folder: what torch calls it; `auto` is a GPU where one is."""
    api: str = "auto"
    """Of a server: by which API it is asked; `auto` tries them."""
    served_model: str = ""
    """Of a server: the model's name there."""
    api_key_env: str | None = None
    """Of a server: the variable that holds its key."""


def check_outputs(path: str) -> None:
    """Refuse what is no reranker before a run is planned, as far as the files next to the weights say so.

    Raises:
        ManifestError: it is a bi-encoder, a language model, or a classifier of several classes; a file can't be read.
    """
    modules = Path(path) / "modules.json"
    if modules.exists() and str(_read_json(modules)[-1].get("type")).endswith(("Pooling", "Normalize")):
        raise ManifestError(f"{path}: no cross-encoder: its modules end with a vector of the text. {BI_ENCODER}")
    file = Path(path) / "config.json"
    if not file.exists():  # of modules; `CrossEncoderFolder` counts what they give
        return
    config = _read_json(file)
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForCausalLM") and not modules.exists():
        raise ManifestError(
            f"{path}: {architecture} without modules.json: a language model, which would be asked without a prompt. As "
            "a teacher it is the engine.model of a job (`relabel init`); a reranker that is a language model brings "
            "modules.json, which says how its scores are read."
        )
    if architecture.endswith("Model") and not modules.exists():
        raise ManifestError(f"{path}: no cross-encoder: {architecture} has no head that scores a pair. {BI_ENCODER}")
    num_outputs = len(config.get("id2label") or (0, 1))  # two where nothing is saved
    if architecture.endswith("ForSequenceClassification") and num_outputs != 1:
        raise ManifestError(_several_numbers(path, num_outputs))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ManifestError(f"{file}: can't be read as JSON: {exc}.") from exc


BI_ENCODER = (
    "If it is a bi-encoder: `relabel pairs similar PAIRS --to FILE --model FOLDER` writes its cosines, which `relabel "
    "evaluate --baseline` reads."
)


def _several_numbers(path: str, count: int) -> str:
    return f"{path}: the model gives {count} numbers a pair, and a reranker gives one. Is it a classifier?"


def check_head(model: Any, path: str) -> None:
    """Refuse a model with tensors that its files lack, as those of a bi-encoder lack a head: the library makes them up.

    Args:
        model: a cross-encoder that was loaded.
        path: its folder.
    Raises:
        ManifestError: names the first of them.
    """
    library = require("transformers", extra="hf", purpose="relabel score of a cross-encoder")
    (inner,) = [one for one in model.modules() if isinstance(one, library.PreTrainedModel)][:1]
    if getattr(inner, "_hf_peft_config_loaded", False):  # an adapter's files bring the head
        return
    _, loading = type(inner).from_pretrained(
        _weights_folder(path),
        config=inner.config,
        device_map="meta",  # shapes alone
        output_loading_info=True,
        local_files_only=True,
    )
    # modules that pool by themselves read the last layer, not the pooler that transformers adds
    missing = [name for name in loading["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        below = f"{inner.base_model_prefix}."
        first = min(missing, key=lambda name: (name.startswith(below), "bias" in name, name))
        raise ManifestError(
            f"{path}: no cross-encoder: its weights have no {first}, which would be random. {BI_ENCODER}"
        )


def _weights_folder(path: str) -> Path:
    """Where the model itself is: of modules, the folder of the first."""
    modules = Path(path) / "modules.json"
    if not modules.is_file():
        return Path(path)
    first = json.loads(modules.read_bytes())[0]
    return Path(path, str(first.get("path", "")))


class CrossEncoderFolder:
    """A cross-encoder of a folder, asked through sentence-transformers as its own page says.

    Raises:
        MissingExtraError: sentence-transformers, torch or the device is absent.
        ManifestError: the folder can't be loaded, has no head, or gives several numbers a pair.
    """

    def __init__(self, path: str, device: str) -> None:
        library = require("sentence_transformers", extra="hf", purpose="relabel score of a cross-encoder")
        torch = require("torch", extra="hf", purpose="relabel score of a cross-encoder")
        self.device = device
        if device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._model = library.CrossEncoder(path, device=self.device, local_files_only=True)
        except (RuntimeError, AssertionError) as exc:  # torch's words for a device that it does not know, or has not
            raise MissingExtraError(f"--device {self.device}: torch can't use it ({exc}).") from exc
        except (OSError, ValueError, KeyError) as exc:
            raise ManifestError(f"{path}: sentence-transformers can't load it as a cross-encoder: {exc}") from exc
        check_head(self._model, path)
        probe = np.asarray(self._model.predict([("wool", "wool socks")], show_progress_bar=False))
        if probe.size != 1:
            raise ManifestError(_several_numbers(path, probe.size))

    def encode(self, pairs: Pairs) -> list[tuple[str, str]]:
        """The pairs themselves: the library reads them."""
        return list(pairs)

    def score(self, pairs: Pairs, on_batch: Callable[[int], bool] = lambda _: True) -> np.ndarray | None:
        """A score a pair, float32 [N], in their order; None if `on_batch` gave up. Batches follow from the pairs."""
        scores_N = np.empty(len(pairs), dtype=np.float32)
        longest_first = sorted(range(len(pairs)), key=lambda place: -sum(map(len, pairs[place])))
        for begin in range(0, len(pairs), BATCH_PAIRS):
            places = longest_first[begin : begin + BATCH_PAIRS]
            batch = [pairs[place] for place in places]
            scores_N[places] = self._model.predict(batch, batch_size=BATCH_PAIRS, show_progress_bar=False)
            if not on_batch(len(places)):
                return None
        return scores_N


class RerankEndpoint:
    """A server that reranks; documents of a query go to it together.

    Raises:
        InputError: no API answers there.
        ServerGoneError: nothing listens there.
    """

    def __init__(self, url: str, api: str, model: str, key: str | None) -> None:
        self.server = RerankServer(url, api, model, key, None)

    def encode(self, pairs: Pairs) -> list[tuple[str, str]]:
        """The pairs themselves: the server reads them."""
        return list(pairs)

    def score(self, pairs: Pairs, on_batch: Callable[[int], bool] = lambda _: True) -> np.ndarray | None:
        """A score a pair, float32 [N], in their order, NaN for one that the server refuses; None if `on_batch` gave up.

        Raises:
            ServerGoneError: it gives no answer, several times.
        """
        scores_N = np.empty(len(pairs), dtype=np.float32)
        by_query: dict[str, list[int]] = {}
        for place, (query, _) in enumerate(pairs):
            by_query.setdefault(query, []).append(place)
        for query, places in by_query.items():
            for begin in range(0, len(places), BATCH_PAIRS):
                batch = places[begin : begin + BATCH_PAIRS]
                scores_N[batch] = self._scores(query, [pairs[place][1] for place in batch])
                if not on_batch(len(batch)):
                    return None
        return scores_N

    def _scores(self, query: str, documents: list[str]) -> np.ndarray:
        try:
            return self._patiently(query, documents)
        except InputError:
            if len(documents) == 1:
                return np.array([np.nan])
        return np.concatenate([self._scores(query, [document]) for document in documents])

    def _patiently(self, query: str, documents: list[str]) -> np.ndarray:
        for wait_s in WAITS_S:
            try:
                return self.server.scores(query, documents)
            except ServerGoneError:
                time.sleep(wait_s)
        return self.server.scores(query, documents)


# ------------------------------------------------------------------------------
# The job.


class RerankerOptions(LabelerOptions):
    """Options of a reranker as a labeler."""

    grades: Literal[0] = 0
    """None: the label is a score."""


class RerankerLabeler(Labeler):
    """A reranker as a labeler: a score a pair. The engine reads pairs by the chunk, and is asked nothing else."""

    Options: ClassVar[type[LabelerOptions]] = RerankerOptions
    columns = (LabelColumn(SCORE, "float32", "The reranker's score: the higher, the more relevant. It is no grade."),)

    def label(self, pair: Pair) -> Any:
        """One ask, whose answer is no text."""
        yield self._ask(pair)
        return Label(None, None)

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter."))]

    def _ask(self, pair: Pair) -> Ask:
        message = Message("user", ("", pair.query, "", pair.document, ""), ("query", DOCUMENT_FIELD))
        return Ask(STAGE, (message,), None, 0, ())


class RerankerJob(Job):
    """A job whose engine is a reranker. Its plan says so, so that readers of its labels know."""

    __slots__ = ()

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of: the input, the model, and how it is asked."""
        found = super().parts(dataset)
        args = {key: value for key, value in found["engine"]["args"].items() if value is not None}
        return {
            **found,
            "labeler": {"name": RERANKER, "grades": 0},
            "engine": {"name": RERANKER, "args": args},
            "kind": RERANKER,
        }


def reranker_job(model: str, options: ScoreOptions, storage: Storage) -> RerankerJob:
    """The job of `relabel score` of a reranker.

    Args:
        model: a folder, or the address of a server.
    Raises:
        ConfigError: a value is off, or the key's variable is not set.
        ManifestError: see `check_outputs`.
        UsageError: the address names no endpoint, and nobody an API.
    """
    if is_server(model):
        _check_address(model, options.api)
        _key(options.api_key_env)
        name = urlsplit(model).hostname or RERANKER
    else:
        check_outputs(model)
        name = Path(model).resolve().name
    args = RerankerArgs(
        device=options.device,
        api=options.api,
        served_model=options.served_model,
        api_key_env=options.api_key_env,
    )
    labeler = RerankerOptions(name=RERANKER)
    values = {
        "name": options.name or name,
        "input": {"path": options.input, "columns": dict(options.columns), "limit": options.limit},
        "labeler": labeler,
        "engine": EngineSpec(name=RERANKER, model=model, args=args),
        "output": options.to,
        "shards": options.shards,
        "run": {"chunk_rows": options.chunk_rows},
    }
    here = str(Path.cwd())
    spec = resolved(validate_spec(JobSpec, values, where="relabel score"), Places("relabel score", here, here))
    return RerankerJob(spec, RerankerLabeler(labeler), RerankerRunner, f"relabel score {model}", storage)


def _check_address(url: str, api: str) -> None:
    if api == "auto" and not urlsplit(url).path.rstrip("/").endswith(ENDPOINTS):
        raise UsageError(
            f"{url}: is this a server that reranks? Give the address of its endpoint, which ends in "
            f"{' or '.join(ENDPOINTS)}, or name its API with --api {'|'.join(APIS)}."
        )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: that variable is not set.")
    keep_secret(key, f"the value of {variable}")
    return key


def files_of(path: str) -> dict[str, str]:
    """The sha256 of each file of a model's folder, hidden ones left out."""
    folder = Path(path)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = {file: file.relative_to(folder) for file in files}
    return {
        str(name): sha256_file(file) for file, name in names.items() if not any(p.startswith(".") for p in name.parts)
    }


class RerankerRunner(ScoringRunner):
    """What runs a reranker in place of an engine: it is given whole chunks.

    Raises:
        ManifestError, MissingExtraError, InputError, ServerGoneError: as the two kinds.
    """

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> None:
        args = RerankerArgs.of(spec)
        self.model: CrossEncoderFolder | RerankEndpoint
        reference = str(spec.model)
        if is_server(reference):
            endpoint = RerankEndpoint(reference, args.api, args.served_model, _key(args.api_key_env))
            self.model = endpoint
            self._facts = EngineFacts(
                RERANKER,
                endpoint.server.api,
                args.served_model or reference,
                self.model_digest(spec),
                device="server",
                dtype="unknown",
                details={"api": endpoint.server.api},
            )
            return
        folder = CrossEncoderFolder(reference, args.device)
        self.model = folder
        record = Path(reference) / HUB_RECORD_NAME
        details = {"manifest_sha256": sha256_file(record)} if record.is_file() else {}
        self._facts = EngineFacts(
            RERANKER,
            version("sentence-transformers"),
            Path(reference).resolve().name,
            self.model_digest(spec),
            device=folder.device,
            dtype="float32",
            details=details,
        )

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """The digest of the folder's files, or of the server's address and model."""
        reference = str(spec.model)
        if is_server(reference):
            return digest_of({"url": reference, "model": RerankerArgs.of(spec).served_model})
        return digest_of(files_of(reference))

    def settle(self, work: ChunkWork, _encoded: Any, scores: Any) -> None:
        """Fill in the scores; a row without a finite one is quarantined."""
        rows = zip(work.pairs, work.keys, scores.tolist(), strict=True)
        work.rows = [quarantined_text(pair) or _row(pair, key, score) for pair, key, score in rows]
        work.left = 0
        work.stages[STAGE] = StageSeen(len(work.rows))


def _row(pair: Pair, key: bytes | None, score: float) -> LabelRow | QuarantineRow:
    if not np.isfinite(score):
        return QuarantineRow(
            pair.row_id,
            pair.query_id,
            pair.doc_id,
            "engine",
            "the reranker gives no finite score, or refuses the pair",
            tries=[],
            prompt_tokens=0,
            output_tokens=0,
        )
    return LabelRow(
        row_id=pair.row_id,
        query_id=pair.query_id,
        doc_id=pair.doc_id,
        status="ok",
        grade=None,
        probs=None,
        outside_mass=None,
        expected_grade=None,
        evidence=[],
        intent=None,
        reasoning=None,
        flags=[],
        samples=None,
        prompt_tokens=0,
        output_tokens=0,
        reused=False,
        key=key,
        columns={SCORE: score},
    )

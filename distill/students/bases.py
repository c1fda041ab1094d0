"""Pretrained models that students start from: checks before the data is read, building the module, sentence embeddings,
and the interface of a student's trainer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from relabel.distill.students.examples import Examples
from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.distill.students.manifest import STUDENT_VERSION, StudentRecord
from relabel.distill.students.model import (
    PROBES,
    PairTexts,
    TokenRow,
    check_batches,
    make_texts,
    module_class,
    refuse_leaks,
)
from relabel.distill.students.spec import KINDS, BaseKind, DistillSpec
from relabel.distill.training.curves import Outcome
from relabel.distill.training.spec import check_targets, open_base
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.labels import PhiTable
from relabel.manifests.models import ResolvedModel, config_file, read_tokenizer
from relabel.manifests.process import require
from relabel.manifests.specs import Columns

# ------------------------------------------------------------------------------
# The model that a student starts from: its kind and limits checked, its module built, its texts encoded.
#
# `check_base` reads the config, the tokenizer and the headers of the weights' files, so that a wrong model is refused
# before weights are loaded or texts encoded.


@dataclass
class Base:
    """A model that was checked.

    Args:
        limit: longest row that it can read, in tokens; None where it knows none.
    """

    resolved: ResolvedModel
    config: Any
    tokenizer: Any
    limit: int | None


def check_base(spec: DistillSpec, resolved: ResolvedModel) -> Base:
    """Check config, tokenizer, and the headers of its weights' files.

    Raises:
        ModelError: it is of the other kind, has no tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `student.lora.targets` names layers that it does not have, or
            it is a student of the other kind.
    """
    from relabel.distill.students.networks import load_backbone, load_lm

    path, reference = resolved.path, resolved.reference
    transformers, config = open_base(
        Path(config_file(path)), f"model {reference!r}", extra="cpu", purpose="relabel distill"
    )
    tokenizer = read_tokenizer(transformers, path, reference)
    if not (path / "tokenizer.json").is_file() and not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"model {reference!r}: no fast tokenizer in {path}; a tokenizer.json is wanted.")
    kind = kind_of(config)
    if kind != KINDS[spec.student.kind].base:
        is_what = {"encoder": "an encoder", "decoder": "a decoder"}.get(kind or "", "neither an encoder nor a decoder")
        raise ModelError(
            f"model {reference!r} (a {config.model_type}) is {is_what}, and student.kind is {spec.student.kind}. "
            "Set student.kind to what it is, or name another model."
        )
    if kind == "encoder" and tokenizer.pad_token_id is None:
        raise ModelError(
            f"model {reference!r}: its tokenizer has no padding token, which batches of an encoder need. Name one as "
            "`pad_token` in its tokenizer_config.json."
        )
    load_inner = load_backbone if kind == "encoder" else load_lm
    # shapes alone: what is missing would start from noise
    inner = load_inner(path, f"model {reference!r}", device="meta")
    if not _reads_types(inner):
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    if spec.student.lora is not None:
        check_targets(inner, spec.student.lora, key="student.lora")
    limits = [limit for limit in (_positions(inner), tokenizer.model_max_length) if limit and 0 < limit < 10**9]
    limit = min(limits, default=None)
    if limit is not None and spec.train.max_tokens > limit:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {reference!r} reads at most {limit} tokens. Lower it."
        )
    return Base(resolved, config, tokenizer, limit)


def _positions(model: Any) -> int | None:
    """How many tokens its positions are enough for. Those of RoBERTa and its like begin after the padding token's."""
    count = getattr(model.config, "max_position_embeddings", None)
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padding = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    return count - max(padding, default=-1) - 1 if count else None


def _reads_types(backbone: Any) -> bool:
    """Whether a model knows more than one token type. A tokenizer may give two to a model that knows one or none."""
    takes = "token_type_ids" in inspect.signature(backbone.forward).parameters
    return takes and getattr(backbone.config, "type_vocab_size", 2) > 1


def kind_of(config: Any) -> BaseKind | None:
    """`encoder` or `decoder`; None for what is neither."""
    from transformers.models.auto import modeling_auto as auto

    if getattr(config, "is_encoder_decoder", False):
        return None
    if config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        # BERT has a causal head too: what it was trained for decides
        return "encoder"
    return "decoder" if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def make_record(spec: DistillSpec, base: Base, heads: dict[str, int], phi: PhiTable, columns: Columns) -> StudentRecord:
    """What the student will be.

    Raises:
        ModelError: the tokenizer has no token for a grade.
        ConfigError: the prompt is off.
    """
    own = module_class(spec.student.kind).own_parts(spec, base.resolved.path, base.tokenizer, heads["relevance"])
    return StudentRecord(
        version=STUDENT_VERSION,
        kind=spec.student.kind,
        name=spec.name,
        heads=heads,
        max_tokens=spec.train.max_tokens,
        columns=columns.model_dump(mode="json", exclude={"gold", "context"}),
        temperature=dict.fromkeys(heads, 1.0),
        phi=phi,
        packs=spec.student.batching == "packed",
        **{"pooling": spec.student.pooling, **own},
    )


def build_module(spec: DistillSpec, base: Base, record: StudentRecord) -> Any:
    """The module to train, its weights loaded; heads of an earlier student are kept where they have the same name
    and size.

    Raises:
        ModelError: weights can't be loaded, a decoder scales its logits, or rows of a batch are not answered apart.
    """
    module: Any = module_class(record.kind).start(spec, base.resolved.path, base.tokenizer, record)
    check_batches(module.eval(), make_texts(record, base.tokenizer), record, f"model {base.resolved.reference!r}")
    return module


# ------------------------------------------------------------------------------
# What trains a student, whatever its kind: what it is given, and what it gives back.


@dataclass
class TrainingInputs:
    """All that a training starts from.

    Args:
        tokens: of all rows of the examples.
        checkpoints: folder that a training which is resumed keeps them in.
        say: where progress goes.
        notes: remarks for the manifest.
    """

    spec: DistillSpec
    base: Base
    record: StudentRecord
    examples: Examples
    tokens: list[TokenRow]
    texts: PairTexts
    checkpoints: Path
    say: Callable[[str], None]
    notes: list[str]


DevFigures: TypeAlias = Callable[[Any], dict[str, float]]
"""Figures of a module on dev, by name."""
Trainer: TypeAlias = Callable[[TrainingInputs, DevFigures], tuple[Any, Outcome]]
"""Trains a student of its kind: the trained module on the CPU, and how training ended."""


# ------------------------------------------------------------------------------
# Texts as vectors, by an encoder: what sentence-transformers computes of a model that is a transformer, a mean or CLS
# pooling and a normalisation.
#
# Documents are hostile: text that spells a control token is encoded as the characters it consists of.


# N texts, T tokens, D hidden

Role = Literal["query", "document"]
Pooling = Literal["mean", "cls"]
_POOLINGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """What the files of sentence-transformers in a model's directory say; a bare encoder has mean pooling.

    Args:
        max_tokens: of a text, special tokens included; None where no file says.
        prompts: text put before every query, and before every document.
        is_lower: texts are lower-cased first.
        is_stated: whether the model says how it pools.
    """

    pooling: Pooling
    max_tokens: int | None
    prompts: dict[Role, str]
    is_lower: bool
    is_stated: bool


def read_settings(folder: Path) -> EmbeddingSettings:
    """How a model makes a vector of a text.

    Raises:
        ModelError: it does so in a way that is not supported here (a dense layer, another pooling).
    """
    paths = {"Transformer": folder, "Pooling": folder / "1_Pooling"}
    for module in _read_json(folder / "modules.json") or ():
        name = str(module.get("type")).rpartition(".")[2]
        if name not in _MODULES:
            raise ModelError(f"{folder}: makes vectors with a module {name!r}; only {', '.join(_MODULES)} can be run.")
        paths[name] = folder / str(module.get("path", ""))
    pooled = _read_json(paths["Pooling"] / "config.json")
    config = _read_json(paths["Transformer"] / "sentence_bert_config.json") or {}
    prompts = (_read_json(folder / "config_sentence_transformers.json") or {}).get("prompts") or {}
    by_role = {
        role: next((prompts[one] for one in names if one in prompts), "") for role, names in _PROMPT_NAMES.items()
    }
    if pooled is not None and not pooled.get("include_prompt", True) and any(by_role.values()):
        raise ModelError(f"{folder}: pools without its prompt's tokens, which can't be run here.")
    return EmbeddingSettings(
        _pooling_of(folder, pooled),
        config.get("max_seq_length"),
        by_role,
        bool(config.get("do_lower_case")),
        pooled is not None,
    )


def _pooling_of(folder: Path, pooled: dict[str, Any] | None) -> Pooling:
    if pooled is None:
        return "mean"
    if (mode := pooled.get("pooling_mode")) is not None:  # as newer versions write it
        modes = [mode] if isinstance(mode, str) else list(mode)
    else:
        modes = [_POOLINGS.get(name, name) for name, on in pooled.items() if name.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in _POOLINGS.values():
        raise ModelError(f"{folder}: pools by {', '.join(modes) or 'nothing'}; mean and cls can be run.")
    return cast("Pooling", modes[0])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: can't be read ({exc}). Fetch the model again.") from exc


class Embedder:
    """An encoder with its tokenizer.

    Args:
        folder: a model directory with safetensors, as `resolve_model` finds it.
        max_tokens: a text is cut to so many tokens; None for what the model takes.
        batch_tokens: of a batch, padding included; None for what suits the device. Changes the last bits of a vector at
            most.
        device: what torch calls it; `auto` is a GPU where one is.
    Raises:
        ModelError: no encoder, one whose vectors can't be made here, or one that answers a text by its batch.
        MissingExtraError: torch or transformers is not installed.
    """

    def __init__(self, folder: Path, *, max_tokens: int | None, batch_tokens: int | None, device: str = "auto") -> None:
        purpose = "relabel pairs similar"
        torch = require("torch", extra="cpu", purpose=purpose)
        transformers = require("transformers", extra="cpu", purpose=purpose)
        from relabel.distill.students.networks import load_backbone

        transformers.logging.set_verbosity_error()  # it reports a pooling layer that is not used
        transformers.logging.disable_progress_bar()
        self.settings = read_settings(folder)
        self._tokenizer = read_tokenizer(transformers, folder, str(folder))
        try:
            self._module = load_backbone(folder).eval()
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"{folder}: no encoder that transformers can load: {exc}") from exc
        self.device = "cpu"
        limits = (
            max_tokens,
            self.settings.max_tokens,
            self._tokenizer.model_max_length,
            _positions(self._module),
        )
        self.max_tokens = min(limit for limit in limits if limit is not None)
        refuse_leaks(
            self._vectors, self._token_rows([f"{query} {document}" for query, document in PROBES]), str(folder)
        )
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._module.to(self.device)
        self._batch_tokens = batch_tokens or batch_tokens_on(self.device)

    def embed(self, texts: Sequence[str], role: Role) -> np.ndarray:
        """Vectors of length 1, float32 [N, D], in the order of the texts; of a text without tokens that count, the
        vector of the special tokens alone.
        """
        prompt = self.settings.prompts[role]
        rows = self._token_rows([prompt + text for text in texts])
        found = np.empty((len(rows), self._module.config.hidden_size), np.float32)
        for places in length_batches([len(row) for row in rows], self._batch_tokens):
            found[places] = self._vectors([rows[place] for place in places])
        return found

    def _token_rows(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.settings.is_lower:
            texts = [text.lower() for text in texts]
        rows: list[list[int]] = self._tokenizer(
            texts, truncation=True, max_length=self.max_tokens, split_special_tokens=True, return_attention_mask=False
        ).input_ids
        return rows

    def _vectors(self, rows: list[list[int]]) -> np.ndarray:
        import torch

        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        width = max(map(len, rows))
        pad = self._tokenizer.pad_token_id or 0
        ids_NT = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.device)
        mask_NT = (torch.arange(width, device=self.device)[None] < lengths[:, None]).long()
        with torch.inference_mode():
            vectors_ND = sentence_vectors(self._module, ids_NT, mask_NT, self.settings.pooling)
            vectors: np.ndarray = vectors_ND.float().cpu().numpy()
        return vectors


def sentence_vectors(backbone: Any, input_ids_NT: Any, mask_NT: Any, pooling: Pooling) -> Any:
    """Vectors of length 1 by an encoder, a tensor [N, D]."""
    from torch.nn.functional import normalize

    from relabel.distill.students.networks import pool

    hidden_NTD = backbone(input_ids=input_ids_NT, attention_mask=mask_NT).last_hidden_state
    return normalize(pool(hidden_NTD, mask_NT, pooling), dim=-1)

"""The PyTorch modules of students: an encoder with one linear head per node, a decoder that reads the logits of the
grade tokens, and a linear layer over a frozen embedding of the query; and the models that they start from."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relabel.distill.students.examples import Examples
from relabel.distill.students.model import (
    HEADS_NAME,
    PROBES,
    EncoderTexts,
    PairTexts,
    TokenRow,
    answers_of,
    drop_unknown_types,
    grade_token_ids,
    make_texts,
    module_class,
    refuse_leaks,
    render_prompt,
)
from relabel.distill.students.portable import COUNT_NAMES
from relabel.distill.students.spec import (
    KINDS,
    STUDENT_NAME,
    STUDENT_VERSION,
    BaseKind,
    DistillSpec,
    StudentRecord,
    read_student,
)
from relabel.distill.training.spec import LoraSpec, adapted, check_targets, open_base
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.models import BACKBONE_NAME, ResolvedModel, config_file
from relabel.manifests.phi import PhiTable
from relabel.manifests.process import require
from relabel.manifests.records import sha256_bytes
from relabel.manifests.specs import Columns
from relabel.manifests.weights import read_tokenizer, read_weights

# B rows, T tokens, D hidden, K grades of a head

HEAD = "relevance"
"""The head that every student has."""
Pooling = Literal["mean", "cls"]

# ------------------------------------------------------------------------------
# Encoder students: one shared representation of a pair, and a linear head for each node.


HEAD_STD = 0.02
"""Spread of a fresh head's weights, BERT's own."""


class StudentNetwork(nn.Module):  # type: ignore[misc]
    """A student as a module: called with what its texts collate, it gives logits [B, K] by head.

    A subclass has `own_parts`, `start`, `load`, `save`, `inner` and `output_rows` as `EncoderStudent`.
    """

    inner: Any

    @property
    def layers(self) -> Any:
        """The longest list of equal layers, which compile and shard one by one; empty where there is none."""
        lists = [module for module in self.inner.modules() if isinstance(module, nn.ModuleList)]
        alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
        return max(alike, key=len, default=nn.ModuleList())


class EncoderStudent(StudentNetwork):
    """A backbone with heads.

    Args:
        backbone: an AutoModel of transformers whose output has `last_hidden_state`.
        heads: number of grades by head name.
        pooling: `mean` over the tokens that are no padding, or the first token.
        dropout: on the pooled representation, in training.
        seed: each fresh head is drawn from this seed and its own name, so that a head starts the same whichever others
            there are.
    """

    extra_width: ClassVar[int] = 0
    """Columns that the heads read after the pooled vector."""

    def __init__(
        self, backbone: Any, heads: Mapping[str, int], *, pooling: Pooling = "mean", dropout: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.heads = nn.ModuleDict(
            {
                name: fresh_head(name, backbone.config.hidden_size + self.extra_width, grades, seed)
                for name, grades in heads.items()
            }
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Logits of every head.

        Args:
            input_ids, attention_mask, token_type_ids: int64 [B, T]; padding has mask 0 and may be anywhere.
        Returns:
            By head, float [B, K].
        """
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden_BTD = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **extra).last_hidden_state
        pooled_BD = self.dropout(pool(hidden_BTD, attention_mask, self.pooling))
        return {name: head(pooled_BD) for name, head in self.heads.items()}

    @staticmethod
    def own_parts(spec: DistillSpec, _path: Path, _tokenizer: Any, _grades: int) -> dict[str, Any]:
        """What its record has that others' do not."""
        return {"pooling": spec.student.pooling}

    @classmethod
    def start(cls, spec: DistillSpec, path: Path, _tokenizer: Any, record: StudentRecord) -> Self:
        """To be trained: with fresh heads, but for those of an earlier student that have the same name and size."""
        dropout = spec.student.dropout
        seed = spec.train.seed
        module = cls(
            load_backbone(path),
            record.heads,
            pooling=record.pooling,
            dropout=dropout,
            seed=seed,
        )
        if (path / STUDENT_NAME).is_file():
            module.load_heads(path, dict(record.heads.items() & read_student(path).heads.items()))
        return module

    @classmethod
    def load(cls, record: StudentRecord, folder: Path) -> Self:
        """A trained one, from its folder."""
        module = cls(load_backbone(folder), record.heads, pooling=record.pooling)
        module.load_heads(folder, record.heads)
        return module

    def load_heads(self, folder: Path, names: Collection[str]) -> None:
        """Take over these heads of a student's folder.

        Raises:
            ModelError: a head is missing there.
        """
        held = load_file(folder / HEADS_NAME)
        for name in names:
            if f"{name}.weight" not in held:
                raise ModelError(f"{folder / HEADS_NAME} holds no head {name}")
            self.heads[name].load_state_dict({part: held[f"{name}.{part}"] for part in ("weight", "bias")})

    def save(self, folder: Path) -> None:
        """Write the backbone as transformers does but for its config's name, and the heads in a file of their own."""
        self.backbone.save_pretrained(folder)
        (folder / "config.json").replace(folder / BACKBONE_NAME)
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in self.heads.state_dict().items()}, folder / HEADS_NAME
        )

    @property
    def inner(self) -> Any:
        """The model of transformers in it."""
        return self.backbone

    def output_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Weight [K, D] and bias [K] of the last layer, by head."""
        return {name: (head.weight, head.bias) for name, head in self.heads.items()}


def pool(hidden_BTD: Tensor, mask_BT: Tensor, pooling: Pooling) -> Tensor:
    """One vector a row [B, D]: the mean over tokens with mask 1, or the first token."""
    if pooling == "cls":
        return hidden_BTD[:, 0]
    weight_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
    return (hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp(min=1.0)


def fresh_head(name: str, width: int, grades: int, seed: int) -> nn.Linear:
    """A linear layer D → K with weights drawn from seed and name, and no bias yet (zeros)."""
    head = nn.Linear(width, grades)
    generator = torch.Generator().manual_seed(int(sha256_bytes(f"{seed}/{name}".encode())[:15], 16))
    with torch.no_grad():
        head.weight.normal_(0.0, HEAD_STD, generator=generator)
        head.bias.zero_()
    return head


def load_backbone(path: Path, where: str | None = None, *, device: str | None = None) -> Any:
    """The encoder of a model directory in float32, without a pooling layer that nothing trains, see `read_weights`."""
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = AutoConfig.from_pretrained(config_file(path))
    kind = MODEL_MAPPING[type(config)]
    extra = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    return read_weights(
        AutoModel,
        path,
        where or str(path),
        device=device,
        config=config,
        dtype=torch.float32,
        **extra,
    )


class LogisticStudent(EncoderStudent):
    """A linear head over the vectors of a backbone that is not trained, and the logarithms of nineteen counts of the
    query's text. The document is not read: what is predicted is a property of the query, such as how complex it is.

    Source:
        R2RAG, section 3.1 (logistic regression over a 128-dimensional embedding and 19 linguistic features, which the
        paper does not list; these are ours).
    """

    extra_width: ClassVar[int] = len(COUNT_NAMES)

    def forward(  # type: ignore[override]  # torch calls a module by the names of its own batch
        self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """Logits of every head, by head float [B, K].

        Args:
            input_ids, attention_mask: of the query, int64 [B, T].
            counts: int64 [B, 19].
        """
        columns_BC = self.columns(input_ids, attention_mask, counts)
        return {name: head(columns_BC) for name, head in self.heads.items()}

    def columns(self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor) -> Tensor:
        """What the head reads, [B, D + 19]: a vector of length 1, then log(1 + count)."""
        vectors_BD = sentence_vectors(self.backbone, input_ids, attention_mask, self.pooling)
        return torch.cat([vectors_BD, torch.log1p(counts.float()).to(vectors_BD.dtype)], dim=-1)

    @staticmethod
    def own_parts(_spec: DistillSpec, path: Path, tokenizer: Any, _grades: int) -> dict[str, Any]:
        """Pooling and the text before a query, as the model's own files have them."""
        if (path / STUDENT_NAME).is_file():
            earlier = read_student(path)
            return {"pooling": earlier.pooling, "prompt": earlier.prompt}
        settings = read_settings(path)
        if settings.is_lower and tokenizer("ABC").input_ids != tokenizer("abc").input_ids:
            raise ModelError(f"{path}: wants lower-cased texts, and its tokenizer does not make them. Take another.")
        return {"pooling": settings.pooling, "prompt": (settings.prompts["query"], "", "")}

    @classmethod
    def start(cls, _spec: DistillSpec, path: Path, _tokenizer: Any, record: StudentRecord) -> Self:
        """With a head that is to be fitted: an earlier student's is not used."""
        return cls(load_backbone(path), record.heads, pooling=record.pooling)


# ------------------------------------------------------------------------------
# A decoder student: the language model's own head at the prompt's last position, for the grade tokens alone.
#
# p_S(k) = softmax over the logits of the K grade tokens. Only those K rows of the output matrix are multiplied: for a
# vocabulary of 150,000 and a hidden size of 1,536 the whole product costs 230 million multiplications a row, the K rows
# a few thousand.
#
# Source: R3A, equation 3 (the student sees query and document and generates nothing).


PROBE_TOLERANCE = 1e-3
"""Largest difference between gathered logits and the model's own, relative to their size, in float32."""


class DecoderStudent(StudentNetwork):
    """A causal language model read at the last token of each row.

    Args:
        lm: a causal language model of transformers.
        grade_ids: the tokens of grades 0..K-1.
    """

    def __init__(self, lm: Any, grade_ids: Sequence[int]) -> None:
        super().__init__()
        self.lm = lm
        self.register_buffer("grade_ids", torch.tensor(list(grade_ids)), persistent=False)
        # peft's wrapper, in a list so that its parameters are not registered a second time
        self._adapted: list[Any] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        last: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Logits of the grade tokens.

        Args:
            input_ids, attention_mask, position_ids: int64 [B, T], padded on the left; or [1, T] with rows
                concatenated, positions that restart at each, and no mask.
            last: for packed rows, the place of each row's last token, int64 [B].
        Returns:
            `{"relevance": float [B, K]}`.
        """
        output = self.lm.base_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        hidden_BTD = output.last_hidden_state
        last_BD = hidden_BTD[:, -1] if last is None else hidden_BTD[0, last]
        return {HEAD: nn.functional.linear(last_BD, *self._grade_rows())}

    def _grade_rows(self) -> tuple[Tensor, Tensor | None]:
        output = self.lm.get_output_embeddings()
        bias = getattr(output, "bias", None)
        return output.weight[self.grade_ids], None if bias is None else bias[self.grade_ids]

    def adapt(self, lora: LoraSpec, *, seed: int) -> None:
        """Add low-rank adapters to the linear layers and freeze all else.

        Raises:
            MissingExtraError: peft is absent.
            ModelError: it finds no such layers.
        """
        self._adapted = [
            adapted(
                self.lm,
                lora,
                seed=seed,
                key="student.lora",
                extra="cpu",
            )
        ]

    def merge(self) -> None:
        """Merge the adapters, if any, into the weights."""
        if self._adapted:
            self.lm = self._adapted.pop().merge_and_unload()

    @staticmethod
    def own_parts(spec: DistillSpec, _path: Path, tokenizer: Any, grades: int) -> dict[str, Any]:
        """The prompt's three pieces and the grades' tokens."""
        wish = spec.student.prompt
        style: str = wish.style
        if style == "auto":
            style = "chat" if tokenizer.chat_template else "plain"
        pieces = {name: getattr(wish, name).replace("{top}", str(grades - 1)) for name in ("system", "user", "ending")}
        prompt = render_prompt(tokenizer, style=style, **pieces)
        return {"prompt": prompt, "grade_ids": grade_token_ids(tokenizer, grades, after=prompt[2])}

    @classmethod
    def start(cls, spec: DistillSpec, path: Path, tokenizer: Any, record: StudentRecord) -> Self:
        """With its output matrix checked, and with adapters if they are asked for.

        Raises:
            ModelError: the model's own logits are others than the output matrix gives.
        """
        module = cls(load_lm(path), record.grade_ids)
        # compared with the model's own forward pass, which may scale or cap its logits
        input_ids = torch.tensor([make_texts(record, tokenizer).encode(PROBES[1:2])[0].ids])
        with torch.no_grad():
            ours_K = module.eval()(input_ids)[HEAD][0]
            theirs_1TV = module.lm(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
        theirs_K = theirs_1TV[0, -1, module.grade_ids]
        difference = float((ours_K - theirs_K).abs().max())
        if difference > PROBE_TOLERANCE * max(1.0, float(theirs_K.abs().max())):
            raise ModelError(
                f"a {module.lm.config.model_type} scales or caps its logits after the output matrix, which this "
                "student's head does not do. Take another model."
            )
        if spec.student.lora is not None:
            module.adapt(spec.student.lora, seed=spec.train.seed)
        return module

    @classmethod
    def load(cls, record: StudentRecord, folder: Path) -> Self:
        """A trained one, from its folder."""
        return cls(load_lm(folder), record.grade_ids)

    def save(self, folder: Path) -> None:
        """Write the language model as transformers does."""
        self.lm.save_pretrained(folder)

    @property
    def inner(self) -> Any:
        """The language model."""
        return self.lm

    def output_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The output matrix's rows of the grade tokens; zeros where it has no bias."""
        rows_KD, bias_K = self._grade_rows()
        if bias_K is None:
            bias_K = rows_KD.new_zeros(len(rows_KD))
        return {HEAD: (rows_KD, bias_K)}


def load_lm(path: Path, where: str | None = None, *, device: str | None = None) -> Any:
    """The causal language model of a directory in float32, see `read_weights`."""
    from transformers import AutoModelForCausalLM

    return read_weights(
        AutoModelForCausalLM,
        path,
        where or str(path),
        device=device,
        dtype=torch.float32,
    )


# ------------------------------------------------------------------------------
# The model that a student starts from: its kind and limits checked, its module built, its texts encoded.
#
# `check_base` reads the config, the tokenizer and the headers of the weights' files, so that a wrong model is refused
# before weights are loaded or texts encoded.


@dataclass
class Base:
    """A model that was checked."""

    resolved: ResolvedModel
    config: Any
    tokenizer: Any


def check_base(spec: DistillSpec, resolved: ResolvedModel) -> Base:
    """Check config, tokenizer, and the headers of its weights' files.

    Raises:
        ModelError: it is of the other kind, has no tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `student.lora.targets` names layers that it does not have, or
            it is a student of the other kind.
    """
    path = resolved.path
    where = f"model {resolved.reference!r}"
    transformers, config = open_base(Path(config_file(path)), where, extra="cpu", purpose="relabel distill")
    tokenizer = read_tokenizer(transformers, path, resolved.reference)
    if not (path / "tokenizer.json").is_file() and not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{where}: no fast tokenizer in {path}; a tokenizer.json is wanted.")
    kind = kind_of(config)
    if kind != KINDS[spec.student.kind].base:
        is_what = {"encoder": "an encoder", "decoder": "a decoder"}.get(kind or "", "neither an encoder nor a decoder")
        raise ModelError(
            f"{where} (a {config.model_type}) is {is_what}, and student.kind is {spec.student.kind}. Set student.kind "
            "to what it is, or name another model."
        )
    if kind == "encoder" and tokenizer.pad_token_id is None:
        raise ModelError(
            f"{where}: its tokenizer has no padding token, which batches of an encoder need. Name one as `pad_token` "
            "in its tokenizer_config.json."
        )
    # shapes alone: what is missing would start from noise
    load = load_backbone if kind == "encoder" else load_lm
    inner = load(path, where, device="meta")
    drop_unknown_types(tokenizer, inner)
    if spec.student.lora is not None:
        check_targets(inner, spec.student.lora, key="student.lora")
    limit = min(_positions(inner) or spec.train.max_tokens, tokenizer.model_max_length)
    if spec.train.max_tokens > limit:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; {where} reads at most {limit} tokens. Lower it."
        )
    return Base(resolved, config, tokenizer)


def _positions(model: Any) -> int | None:
    """How many tokens its positions are enough for. Those of RoBERTa and its like begin after the padding token's."""
    count = getattr(model.config, "max_position_embeddings", None)
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padding = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    return count - max(padding, default=-1) - 1 if count else None


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
        **module_class(spec.student.kind).own_parts(spec, base.resolved.path, base.tokenizer, heads[HEAD]),
    )


def build_module(spec: DistillSpec, base: Base, record: StudentRecord) -> Any:
    """The module to train, its weights loaded; heads of an earlier student are kept where they have the same name
    and size.

    Raises:
        ModelError: weights can't be loaded, a decoder scales its logits, or rows of a batch are not answered apart.
    """
    module = module_class(record.kind).start(spec, base.resolved.path, base.tokenizer, record).eval()
    texts = make_texts(record, base.tokenizer)
    refuse_leaks(
        module,
        texts,
        record.heads,
        texts.encode(PROBES),
        f"model {base.resolved.reference!r}",
    )
    return module


@dataclass
class TrainingInputs:
    """All that a training starts from.

    Args:
        tokens: of all rows of the examples.
        checkpoints: folder that a training which is resumed keeps them in.
        report: where progress goes.
        identity: of the training, the same in all processes; see `train_to_end`.
    """

    spec: DistillSpec
    base: Base
    record: StudentRecord
    examples: Examples
    tokens: list[TokenRow]
    texts: PairTexts
    checkpoints: Path
    report: Callable[[str], None]
    identity: str


# ------------------------------------------------------------------------------
# Texts as vectors, by an encoder: what sentence-transformers computes of a model that is a transformer, a mean or CLS
# pooling and a normalisation.
#
# Documents are hostile: text that spells a control token is encoded as the characters it consists of.


Role = Literal["query", "document"]
_POOLINGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The settings of sentence-transformers in a model's directory; a bare encoder has mean pooling.

    Args:
        max_tokens: of a text, special tokens included; None where no file has it.
        prompts: text put before every query, and before every document.
        is_lower: texts are lower-cased first.
        is_stated: whether the model's files state how it pools.
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
    by_role: dict[Role, str] = {}
    for role, names in _PROMPT_NAMES.items():
        by_role[role] = next((prompts[name] for name in names if name in prompts), "")
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
    mode = pooled.get("pooling_mode")
    if mode is not None:  # as newer versions write it
        modes = [mode] if isinstance(mode, str) else list(mode)
    else:
        modes = [_POOLINGS.get(name, name) for name, on in pooled.items() if name.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in _POOLINGS.values():
        raise ModelError(f"{folder}: pools by {', '.join(modes) or 'nothing'}; mean and cls can be run.")
    return cast("Pooling", modes[0])


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


VECTOR = "vector"
"""The name of what an embedder computes."""


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
        transformers = require("transformers", extra="cpu", purpose="relabel pairs similar")
        transformers.logging.set_verbosity_error()  # it reports a pooling layer that is not used
        transformers.logging.disable_progress_bar()
        self.settings = read_settings(folder)
        tokenizer = read_tokenizer(transformers, folder, str(folder))
        try:
            backbone = load_backbone(folder).eval()
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"{folder}: no encoder that transformers can load: {exc}") from exc
        limits = (max_tokens, self.settings.max_tokens, tokenizer.model_max_length, _positions(backbone))
        self.max_tokens = min(limit for limit in limits if limit is not None)
        self.texts = EncoderTexts(tokenizer, self.max_tokens, has_types=False)
        self._backbone = backbone
        self._batch_tokens = batch_tokens
        self._widths = {VECTOR: backbone.config.hidden_size}
        refuse_leaks(
            self._vectors,
            self.texts,
            self._widths,
            self.texts.token_rows([f"{query} {document}" for query, document in PROBES]),
            str(folder),
        )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        self._backbone.to(self.device)

    def _vectors(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """[N, D]."""
        return {VECTOR: sentence_vectors(self._backbone, input_ids, attention_mask, self.settings.pooling)}

    def embed(self, texts: Sequence[str], role: Role) -> np.ndarray:
        """Vectors of length 1, float32 [N, D], in the order of the texts; of a text without tokens that count, the
        vector of the special tokens alone.
        """
        whole = [self.settings.prompts[role] + text for text in texts]
        if self.settings.is_lower:
            whole = [text.lower() for text in whole]
        return answers_of(
            self._vectors,
            self.texts,
            self.texts.token_rows(whole),
            self._widths,
            self.device,
            batch_tokens=self._batch_tokens,
        )[VECTOR]


def sentence_vectors(backbone: Any, input_ids_NT: Any, mask_NT: Any, pooling: Pooling) -> Any:
    """Vectors of length 1 by an encoder, a tensor [N, D]."""
    hidden_NTD = backbone(input_ids=input_ids_NT, attention_mask=mask_NT).last_hidden_state
    return nn.functional.normalize(pool(hidden_NTD, mask_NT, pooling), dim=-1)

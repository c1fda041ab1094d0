"""The PyTorch modules of transformer students: an encoder with one linear head per node, and a decoder that reads the
logits of the grade tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relabel.distill.students.manifest import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.model import (
    HEADS_NAME,
    DecoderTexts,
    EncoderTexts,
    PairTexts,
    grade_token_ids,
    render_prompt,
)
from relabel.distill.students.spec import DistillSpec
from relabel.distill.training.spec import LoraSpec, adapted
from relabel.manifests.errors import ModelError
from relabel.manifests.models import BACKBONE_NAME, config_file, read_weights
from relabel.manifests.records import sha256_bytes

# ------------------------------------------------------------------------------
# An encoder student: one shared representation of a pair, and a linear head for each node.


# B rows, T tokens, D hidden, K grades of a head

Pooling = Literal["mean", "cls"]
HEAD_STD = 0.02
"""Spread of a fresh head's weights, BERT's own."""


class EncoderStudent(nn.Module):  # type: ignore[misc]
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
        width = backbone.config.hidden_size + self.extra_width
        self.heads = nn.ModuleDict({name: fresh_head(name, width, grades, seed) for name, grades in heads.items()})

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
    def own_parts(_spec: DistillSpec, _path: Path, _tokenizer: Any, _grades: int) -> dict[str, Any]:
        """None: how it pools is in every record."""
        return {}

    @staticmethod
    def texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
        """Both texts, with the tokenizer's marks between them."""
        return EncoderTexts(tokenizer, record.max_tokens)

    @classmethod
    def start(cls, spec: DistillSpec, path: Path, _tokenizer: Any, record: StudentRecord) -> Self:
        """With fresh heads, but for those of an earlier student that have the same name and size."""
        dropout, seed = spec.student.dropout, spec.train.seed
        module = cls(load_backbone(path), record.heads, pooling=record.pooling, dropout=dropout, seed=seed)
        if (path / STUDENT_NAME).is_file():
            held = read_student(path).heads
            same = [name for name, head in module.heads.items() if held.get(name) == head.out_features]
            load_heads(module, path, same)
        return module

    @classmethod
    def load(cls, record: StudentRecord, folder: Path) -> Self:
        """A trained one, from its folder."""
        module = cls(load_backbone(folder), record.heads, pooling=record.pooling)
        load_heads(module, folder)
        return module

    def save(self, folder: Path) -> None:
        """Write the backbone as transformers does but for its config's name, and the heads in a file of their own."""
        self.backbone.save_pretrained(folder)
        (folder / "config.json").replace(folder / BACKBONE_NAME)
        heads = self.heads.state_dict().items()
        save_file({name: tensor.contiguous().cpu() for name, tensor in heads}, folder / HEADS_NAME)

    @property
    def inner(self) -> Any:
        """The backbone."""
        return self.backbone

    @property
    def layers(self) -> Any:
        """The backbone's transformer layers, for compiling them one by one; empty where they are not found."""
        return find_layers(self.backbone)

    def output_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Weight and bias by head."""
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


def load_heads(module: Any, folder: Path, names: Sequence[str] | None = None) -> None:
    """Put the heads of a student's folder into an encoder student.

    Args:
        names: of the heads to take; None for all that the module has.
    Raises:
        ModelError: a head is missing there or has another shape.
    """
    held = load_file(folder / HEADS_NAME)
    whole = module.heads.state_dict()
    state = {name: tensor for name, tensor in whole.items() if names is None or name.partition(".")[0] in names}
    for name, tensor in state.items():
        if name not in held or held[name].shape != tensor.shape:
            raise ModelError(f"{folder / HEADS_NAME} holds no {name} of shape {list(tensor.shape)}")
    module.heads.load_state_dict({**whole, **{name: held[name] for name in state}})


def load_backbone(path: Path, where: str | None = None, *, device: str | None = None) -> Any:
    """The encoder of a model directory in float32, without a pooling layer that nothing trains, see `read_weights`."""
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = AutoConfig.from_pretrained(config_file(path))
    kind = MODEL_MAPPING[type(config)]
    takes_flag = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    extra = {"add_pooling_layer": False} if takes_flag else {}
    return read_weights(AutoModel, path, where or str(path), device=device, config=config, dtype=torch.float32, **extra)


def find_layers(model: Any) -> Any:
    """The longest list of equal layers in a transformer."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    ]
    return max(lists, key=len, default=nn.ModuleList())


# ------------------------------------------------------------------------------
# A decoder student: the language model's own head at the prompt's last position, for the grade tokens alone.
#
# p_S(k) = softmax over the logits of the K grade tokens. Only those K rows of the output matrix are multiplied: for a
# vocabulary of 150,000 and a hidden size of 1,536 the whole product costs 230 million multiplications a row, the K rows
# a few thousand.
#
# Source: R3A, equation 3 (the student sees query and document and generates nothing).


# B rows, T tokens, D hidden, K grades

HEAD = "relevance"
PROBE_TOLERANCE = 1e-3
"""Largest difference between gathered logits and the model's own, relative to their size, in float32."""


class DecoderStudent(nn.Module):  # type: ignore[misc]
    """A causal language model read at the last token of each row.

    Args:
        lm: a causal language model of transformers.
        grade_ids: the tokens of grades 0..K-1.
    """

    def __init__(self, lm: Any, grade_ids: Sequence[int]) -> None:
        super().__init__()
        self.lm = lm
        self.register_buffer("grade_ids", torch.tensor(list(grade_ids)), persistent=False)
        self._adapted: list[
            Any
        ] = []  # peft's wrapper, in a list so that its parameters are not registered a second time

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
        found = self.lm.base_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        hidden_BTD = found.last_hidden_state
        hidden_BD = hidden_BTD[:, -1] if last is None else hidden_BTD[0, last]
        return {HEAD: nn.functional.linear(hidden_BD, *self._grade_rows())}

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
        self._adapted = [adapted(self.lm, lora, seed=seed, key="student.lora", extra="gpu")]

    def merge(self) -> None:
        """Merge the adapters, if any, into the weights."""
        if self._adapted:
            self.lm = self._adapted.pop().merge_and_unload()

    @staticmethod
    def own_parts(spec: DistillSpec, _path: Path, tokenizer: Any, grades: int) -> dict[str, Any]:
        """The prompt's three pieces and the grades' tokens."""
        wish = spec.student.prompt
        style = wish.style if wish.style != "auto" else "chat" if tokenizer.chat_template else "plain"
        pieces = {name: getattr(wish, name).replace("{top}", str(grades - 1)) for name in ("system", "user", "ending")}
        prompt = render_prompt(tokenizer, style=style, **pieces)
        return {"prompt": prompt, "grade_ids": grade_token_ids(tokenizer, grades, after=prompt[2])}

    @staticmethod
    def texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
        """The prompt around both texts."""
        return DecoderTexts(tokenizer, record.max_tokens, record.prompt, packs=record.packs)

    @classmethod
    def start(cls, spec: DistillSpec, path: Path, tokenizer: Any, record: StudentRecord) -> Self:
        """With its output matrix checked, and with adapters if they are asked for."""
        module = cls(load_lm(path), record.grade_ids)
        probe = cls.texts(record, tokenizer).encode([("running shoes", "Trail shoe for runners.")])[0]
        check_grade_logits(module, torch.tensor([probe.ids]))
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

    @property
    def layers(self) -> Any:
        """The model's transformer layers, for compiling them one by one."""
        return find_layers(self.lm)

    def output_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The output matrix's rows of the grade tokens; zeros where it has no bias."""
        rows_KD, bias_K = self._grade_rows()
        return {HEAD: (rows_KD, rows_KD.new_zeros(len(rows_KD)) if bias_K is None else bias_K)}


def load_lm(path: Path, where: str | None = None, *, device: str | None = None) -> Any:
    """The causal language model of a directory in float32, see `read_weights`."""
    from transformers import AutoModelForCausalLM

    return read_weights(AutoModelForCausalLM, path, where or str(path), device=device, dtype=torch.float32)


def check_grade_logits(student: DecoderStudent, input_ids: Tensor) -> None:
    """Compare gathered logits with those of the model's own forward pass, which may scale or cap them.

    Args:
        input_ids: one prompt, int64 [1, T].
    Raises:
        ModelError: they differ.
    """
    was_training = student.training
    student.eval()
    with torch.no_grad():
        ours_K = student(input_ids)[HEAD][0].float()
        whole_V = student.lm(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    student.train(was_training)
    theirs_K = whole_V[student.grade_ids]
    size = max(1.0, float(theirs_K.abs().max()))
    tolerance = PROBE_TOLERANCE if student.lm.dtype == torch.float32 else 0.05
    if float((ours_K - theirs_K).abs().max()) > tolerance * size:
        raise ModelError(
            f"a {student.lm.config.model_type} scales or caps its logits after the output matrix, which this "
            "student's head does not do. Take another model."
        )

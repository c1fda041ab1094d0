"""An encoder student: one shared representation of a pair, and a linear head for each node."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_record import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.students import HEADS_NAME
from relabel.distill.students.texts import EncoderTexts
from relabel.distill.students.token_rows import PairTexts
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.models.model_dirs import BACKBONE_NAME, config_file
from relabel.manifests.models.weights import read_weights

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
            are beside it.
    """

    extra_width: ClassVar[int] = 0
    """Columns that the heads read behind the pooled vector."""

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
        """Write the backbone as transformers does but for its config's name, and the heads beside it."""
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
        ValueError: a head is missing there or has another shape.
    """
    held = load_file(folder / HEADS_NAME)
    whole = module.heads.state_dict()
    state = {name: tensor for name, tensor in whole.items() if names is None or name.partition(".")[0] in names}
    for name, tensor in state.items():
        if name not in held or held[name].shape != tensor.shape:
            raise ValueError(f"{folder / HEADS_NAME} holds no {name} of shape {list(tensor.shape)}")
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

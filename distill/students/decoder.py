"""A decoder student: the language model's own head at the prompt's last position, for the grade tokens alone.

p_S(k) = softmax over the logits of the K grade tokens. Only those K rows of the output matrix are multiplied: for a
vocabulary of 150,000 and a hidden size of 1,536 the whole product costs 230 million multiplications a row, the K rows a
few thousand.

Source: R3A, equation 3 (the student sees query and document and generates nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from relabel.distill.students.encoder import find_layers
from relabel.distill.students.grade_prompts import grade_token_ids, render_prompt
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_record import StudentRecord
from relabel.distill.students.texts import DecoderTexts
from relabel.distill.students.token_rows import PairTexts
from relabel.distill.training.adapters import adapted
from relabel.distill.training.sections import LoraSpec
from relabel.manifests.errors import ModelError
from relabel.manifests.models.weights import read_weights

# B rows, T tokens, D hidden, K grades

HEAD = "relevance"
PROBE_TOLERANCE = 1e-3
"""How far gathered logits may lie from the model's own, relative to their size, in float32."""


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
            input_ids, attention_mask, position_ids: int64 [B, T], padded on the left; or [1, T] with rows packed behind
                each other, positions that begin anew at each, and no mask.
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
        """Put low-rank adapters beside the linear layers and freeze all else.

        Raises:
            MissingExtraError: peft is absent.
            ModelError: it finds no such layers.
        """
        self._adapted = [adapted(self.lm, lora, seed=seed, key="student.lora", extra="gpu")]

    def merge(self) -> None:
        """Add the adapters, if any, to the weights that they are beside."""
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

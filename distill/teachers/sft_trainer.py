"""The loop of supervised fine-tuning: transformers' Trainer, fed answers with some of their reasoning masked.

Not TRL's SFTTrainer: what it adds (chat templates, packing, its own preparation of a data set) is what has to come from
the labeler and the engine here, and its import takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relabel.distill.teachers.sft_examples import Example
from relabel.distill.training.planned import PlannedTrainer

# B rows, T tokens, C tokens of the longest answer, V vocabulary

IGNORED = -100
"""Label of a token that is not learned, as torch has it."""


class MaskedCollator:
    """Example numbers become a batch of tensors, padded on the left, so that all answers end at the last place.

    Args:
        mask: ρ, chance of a token of the reasoning not to be learned.
        seed: what is masked follows from it, the epoch, the example's number and the token's place alone.
        pad_id: any id; padding is masked.
    """

    def __init__(self, examples: Sequence[Example], *, mask: float, seed: int, pad_id: int | None) -> None:
        self._examples = examples
        self._mask = mask
        self._seed = seed
        self._pad_id = pad_id or 0
        self.epoch = 0

    def learned(self, number: int) -> np.ndarray:
        """Which tokens of an example's answer are learned in this epoch, bool [C]."""
        reasoning = np.frombuffer(self._examples[number].is_reasoning, dtype=bool)
        chance = np.random.default_rng([self._seed, self.epoch, number]).random(len(reasoning))
        return ~reasoning | (chance >= self._mask)

    def __call__(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The batch of these examples: `input_ids`, `attention_mask`, `position_ids` [B, T], `labels` [B, C] of the
        last C places, and `rows` [B].
        """
        chosen = [self._examples[number] for number in numbers]
        width = max(len(example.ids) for example in chosen)
        longest = max(example.num_answer for example in chosen)
        ids_BT = torch.full((len(chosen), width), self._pad_id)
        mask_BT = torch.zeros((len(chosen), width), dtype=torch.int64)
        labels_BC = torch.full((len(chosen), longest), IGNORED)
        for place, (number, example) in enumerate(zip(numbers, chosen, strict=True)):
            ids = torch.from_numpy(np.array(example.ids, dtype=np.int64))
            ids_BT[place, width - len(ids) :] = ids
            mask_BT[place, width - len(ids) :] = 1
            answer = ids[len(ids) - example.num_answer :]
            learned = torch.from_numpy(self.learned(number))
            labels_BC[place, longest - len(answer) :] = torch.where(learned, answer, IGNORED)
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "position_ids": positions_BT,
            "labels": labels_BC,
            "rows": torch.tensor(list(numbers)),
        }


def answer_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Sum of the cross-entropies of a batch's learned tokens, float32 [].

    The logits are the model's own, at the places before the answers' tokens alone.
    """
    labels_BC = batch["labels"]
    tokens = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    kept = labels_BC.shape[1] + 1
    logits_BCV = model(**tokens, use_cache=False, logits_to_keep=kept).logits[:, -kept:-1]
    return nn.functional.cross_entropy(
        logits_BCV.float().flatten(0, 1), labels_BC.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class MaskedTrainer(PlannedTrainer):
    """A Trainer whose loss is the mean over the learned tokens of an optimizer step."""

    data_collator: MaskedCollator

    def set_epoch(self, epoch: int) -> None:
        """The epoch decides what is masked, too."""
        super().set_epoch(epoch)
        self.data_collator.epoch = epoch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | None:
        """Learned tokens of all batches of the optimizer step, over all processes."""
        if not batch_samples:
            return None
        self.begin_step(sum(len(batch["rows"]) for batch in batch_samples))
        learned = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batch_samples]).sum().to(device)
        return self.accelerator.reduce(learned, reduction="sum") if self.args.world_size > 1 else learned

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This batch's share of the optimizer step's loss.

        Raises:
            TrainingError: it is not finite; the message names the batch's rows.
        """
        assert num_items_in_batch is not None
        assert not return_outputs
        share = answer_loss(model, inputs) / num_items_in_batch
        shown = share.detach()
        if self.args.world_size > 1:
            shown = self.accelerator.reduce(shown, reduction="sum")  # each process holds its share of the step's loss
        self.note({"loss": shown.item()}, inputs["rows"].tolist())
        return share * self.args.world_size  # devices average their gradients

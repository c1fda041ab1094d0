"""`method: sft`: supervised fine-tuning on answers, with parts of the reasoning masked at random."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from relabel.distill.teachers.answers import (
    AnsweredRow,
    AnsweredRows,
    AnsweredTurn,
    UnlearnableError,
    check_learnable,
    choices,
    load_answered_rows,
    load_sets,
    turns_of,
)
from relabel.distill.teachers.manifest import TeacherData
from relabel.distill.teachers.rollouts import token_parts
from relabel.distill.teachers.spec import SftSpec, TeacherSpec
from relabel.distill.teachers.teaching import (
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    check_teacher_base,
    load_model,
    train_learner,
)
from relabel.distill.training.loop import SupervisedLearner
from relabel.distill.training.output import TrainingPlace, writing
from relabel.distill.training.runtime import BatchPlan
from relabel.labelers.engines.decisions import DecisionPlaces
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import Overlong
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model

# ------------------------------------------------------------------------------
# Turns as token ids: the prompt as an engine encodes it, then the answer, and which of its tokens are reasoning.


REASONING = 0


class Example(NamedTuple):
    """One prompt with its answer, packed: five bytes a token, where a list would take eight and more.

    Args:
        ids: of both.
        is_reasoning: of each token of the answer, the last ones of `ids`: 1 or 0.
        row: number of the row that it is of.
    """

    ids: array[int]
    is_reasoning: bytes
    row: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.is_reasoning)


@dataclass
class AnswerExamples:
    """All examples.

    Args:
        dropped: rows that gave none, by reason.
        rows: how many rows gave some.
    """

    examples: list[Example]
    dropped: Counter[str]
    rows: int

    @property
    def digest(self) -> str:
        """Of all token ids and of what is masked."""
        total = hashlib.sha256()
        for example in self.examples:
            total.update(f"{len(example.ids)} {example.num_answer}\n".encode())
            total.update(np.array(example.ids, dtype="<i4").tobytes())
            total.update(example.is_reasoning)
        return total.hexdigest()


def make_examples(
    answered: AnsweredRows, base: TeacherBase, *, max_tokens: int, is_preliminary: bool = False
) -> AnswerExamples:
    """Examples of all rows; what rows of a query share is one example.

    Args:
        max_tokens: of prompt and answer.
        is_preliminary: the first grade is the whole answer.
    Raises:
        ModelError: the grades are not one token each.
    """
    dropped: Counter[str] = Counter()
    learned = _learned(answered, base, dropped, max_tokens=max_tokens, is_preliminary=is_preliminary)
    examples = [example for _, example in learned]
    return AnswerExamples(examples, dropped, len(answered.rows) - dropped.total())


def _learned(
    answered: AnsweredRows, base: TeacherBase, dropped: Counter[str], *, max_tokens: int, is_preliminary: bool
) -> Iterator[tuple[AnsweredTurn, Example]]:
    """Turns with their examples, in the order of the rows; why rows have none is counted in `dropped`."""
    encoder = AnswerEncoder(base)
    seen: set[tuple[str, bytes]] = set()
    for number, row in enumerate(answered.rows):
        try:
            if row.sets is not None:
                made = [encoder.longest_of(choices(answered, row), row, number, max_tokens=max_tokens)]
            else:
                turns = turns_of(answered, row, is_preliminary=is_preliminary)
                made = [(turn, encoder.encode(turn, row, number, max_tokens=max_tokens)) for turn in turns]
        except UnlearnableError as exc:
            dropped[exc.args[0]] += 1
            continue
        for turn, example in made:
            if turn.ask.shared_by is not None:
                key = turn.ask.stage, hashlib.sha256(example.ids.tobytes()).digest()
                if key in seen:
                    continue
                seen.add(key)
            yield turn, example


def conversations(spec: SftSpec, base: TeacherBase, storage: Storage) -> Iterator[dict[str, Any]]:
    """The prompts and answers that a spec's teacher learns, as chats.

    Raises:
        ConfigError, InputError, ManifestError: as `SftTrainer`.
    """
    answered, is_preliminary = _answered(spec, storage)
    settings = {"chat_template_kwargs": spec.chat_template_kwargs} if spec.chat_template_kwargs else {}
    learned = _learned(answered, base, Counter(), max_tokens=spec.train.max_tokens, is_preliminary=is_preliminary)
    for turn, example in learned:
        pair = answered.rows[example.row].pair
        yield {
            "prompt": [{"role": message.role, "content": message.text} for message in turn.ask.messages],
            "completion": [{"role": "assistant", "content": turn.ask.prefill + "".join(turn.parts)}],
            **settings,
            "query_id": pair.query_id,
            "doc_id": pair.doc_id,
            "stage": turn.ask.stage,
        }


CONVERSATIONS_NAME = "conversations.jsonl"


def export_conversations(spec: TeacherSpec, storage: Storage, folder: Path, *, cache_dir: Path | None = None) -> int:
    """Write the conversations that a spec's teacher would learn as chat JSONL, in TRL's form of prompt and completion;
    nothing is trained.

    Returns:
        How many there are.
    Raises:
        ConfigError: the method samples its answers itself, or the file is there already.
        RelabelError: as `train_teacher`, before it trains.
    """
    if not isinstance(spec, SftSpec):
        raise ConfigError(f"--export: `method: {spec.method}` samples its answers itself; only sft learns given ones.")
    file = folder / CONVERSATIONS_NAME
    if file.exists():
        raise ConfigError(f"{file}: is there already. Name another folder, or remove it.")
    base = check_teacher_base(spec, resolve_model(spec.init, cache_dir=cache_dir))
    scratch = folder / f".{CONVERSATIONS_NAME}"
    lines = conversations(spec, base, storage)
    count = 0
    with writing(folder, None):
        folder.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8") as target:
            for line in lines:
                target.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        scratch.replace(file)
    return count


class AnswerEncoder:
    """Makes turns into token ids, for one model."""

    def __init__(self, base: TeacherBase) -> None:
        self._base = base
        self._encoder = base.encoder
        self._places = DecisionPlaces(base.encoder, tokenizer_name=base.resolved.reference)

    def encode(self, turn: AnsweredTurn, row: AnsweredRow, number: int, *, max_tokens: int) -> Example:
        """One example.

        Raises:
            UnlearnableError: there is no room for it, or the evidence is in what was cut off the document.
        """
        if turn.label is not None:
            (place,) = self._places.of(turn.ask)
            answer, is_reasoning = [place.label_ids[turn.label]], [False]
        else:
            opened = self._encoder.opened_for(turn.ask).strip()  # in the prompt already
            answer = self._encoder.encode_answer((turn.parts[0].removeprefix(opened), *turn.parts[1:]))
            is_reasoning = [part == REASONING for part in self._parts(answer, turn, opened)]
            answer, is_reasoning = [*answer, self._base.end_id], [*is_reasoning, False]
        prompt = self._encoder.encode(turn.ask, max_prompt_tokens=max_tokens - len(answer))
        if isinstance(prompt, Overlong):
            raise UnlearnableError(f"too long for {max_tokens} tokens")
        evidence = row.label.evidence if row.label is not None else []
        seen = prompt.cut_document
        if seen is not None and any(str(span["text"]) not in seen for span in evidence):
            raise UnlearnableError("whose evidence is where the document was cut off")
        return Example(array("i", prompt.ids + answer), bytes(is_reasoning), number)

    def longest_of(
        self, turns: Iterable[AnsweredTurn], row: AnsweredRow, number: int, *, max_tokens: int
    ) -> tuple[AnsweredTurn, Example]:
        """The first turn that there is room for, of ever shorter ones.

        Raises:
            UnlearnableError: there is room for none.
        """
        for turn in turns:
            with contextlib.suppress(UnlearnableError):
                return turn, self.encode(turn, row, number, max_tokens=max_tokens)
        raise UnlearnableError(f"too long for {max_tokens} tokens, or without a chunk")

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        """Knows each token's bytes; takes a second to make, and grades alone do without."""
        vocabulary = int(self._base.config.get_text_config().vocab_size)
        return GrammarCompiler(self._base.tokenizer, vocab_size=vocabulary, eos_ids=[self._base.end_id])

    def _parts(self, answer: list[int], turn: AnsweredTurn, opened: str) -> list[int]:
        pieces = [opened.encode(), *map(self._compiler.token_bytes, answer)]
        return token_parts(pieces, {REASONING: turn.reasoning})[1:]


# ------------------------------------------------------------------------------
# Supervised fine-tuning: batches of answers with some of their reasoning masked, and their loss.
#
# Not TRL's SFTTrainer: what it adds (chat templates, packing, its own preparation of a data set) is what has to come
# from the labeler and the engine here, and its import takes ten times as long.


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

    def learned(self, number: int, epoch: int = 0) -> np.ndarray:
        """Which tokens of an example's answer are learned in an epoch, bool [C]."""
        reasoning = np.frombuffer(self._examples[number].is_reasoning, dtype=bool)
        chance = np.random.default_rng([self._seed, epoch, number]).random(len(reasoning))
        return ~reasoning | (chance >= self._mask)

    def __call__(self, numbers: Sequence[int], epoch: int = 0) -> dict[str, Any]:
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
            learned = torch.from_numpy(self.learned(number, epoch))
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


class AnswerLoss:
    """The mean of `answer_loss` over the learned tokens of an optimizer step."""

    def amounts(self, batch: dict[str, Any]) -> Tensor:
        """Learned tokens [1]."""
        return (batch["labels"] != IGNORED).sum()[None]

    def shares(self, model: Any, batch: dict[str, Any], totals_P: Tensor) -> dict[str, Tensor]:
        """A batch's share of the step's loss."""
        return {"loss": answer_loss(model, batch) / totals_P[0]}


# ------------------------------------------------------------------------------
# `method: sft`: a teacher learns to write answers, given the labeler's own prompts.
#
# The loss is a token's cross-entropy, over the answers' tokens that no mask leaves out, divided by their number in the
# optimizer step: −[log p(preliminary) + Σ_t m_t log p(c_t) + log p(final)] with m_t ~ Bernoulli(1 − ρ).
#
# Source: Graph-GRPO, equation 1 (random masking of the chain of thought).


class SftTrainer(TeacherTrainer):
    """Supervised fine-tuning on answers.

    Raises:
        ConfigError: the labeler's answers can't be rebuilt.
        InputError: a source is off, or no row gives an example.
        ManifestError: a run does not prove itself.
    """

    def __init__(self, spec: SftSpec, base: TeacherBase, storage: Storage) -> None:
        self._spec, self._base = spec, base
        answered, is_preliminary = _answered(spec, storage)
        found = make_examples(answered, base, max_tokens=spec.train.max_tokens, is_preliminary=is_preliminary)
        dropped = dict(sorted((answered.dropped + found.dropped).items()))
        if not found.examples:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            raise InputError(f"no row gives an example to learn from: {listed}.")
        self._examples = found
        self.digest = found.digest
        self._names = [answered.names[example.row] for example in found.examples]
        self.labeler = answered.options.model_dump(mode="json")
        self.templates = answered.labeler.template_digests
        self.notes = list(answered.notes)
        if found.dropped:
            self.notes.append(
                "rows left out: " + ", ".join(f"{count:,} {reason}" for reason, count in found.dropped.items())
            )
        self.data = TeacherData(
            runs=answered.runs,
            gold=answered.gold,
            rows=found.rows,
            dropped=dropped,
            examples=len(found.examples),
            tokens=sum(len(example.ids) for example in found.examples),
            answer_tokens=sum(example.num_answer for example in found.examples),
        )

    def estimate(self) -> TrainingEstimate:
        """What training would do."""
        train, data = self._spec.train, self.data
        per_step = train.batch_size * train.accumulation
        per_pass = math.ceil(data.examples / per_step)
        steps = train.max_steps or max(1, math.ceil(train.epochs * per_pass))
        whole, rest = divmod(steps, per_pass)  # the last step of a pass may have fewer
        passes = whole + min(1.0, rest * per_step / data.examples)
        return TrainingEstimate(
            rows=data.rows,
            examples=data.examples,
            steps=steps,
            tokens=round(passes * data.tokens),
            answer_tokens=round(passes * data.answer_tokens),
        )

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, resuming from the last whole checkpoint; with half the batch if memory runs out."""
        build = functools.partial(self._learner, checkpoints, say)
        return train_learner(self._spec, checkpoints, say, build)

    def _learner(
        self, folder: Path, say: Callable[[str], None], accelerator: Accelerator, halvings: int
    ) -> SupervisedLearner:
        settings, examples = self._spec.train, self._examples.examples
        plan = BatchPlan(
            [len(example.ids) for example in examples],
            np.arange(len(examples)),
            seed=settings.seed,
            batch_size=max(1, settings.batch_size >> halvings),
            groups=settings.group_by_length,
            accumulation=settings.accumulation << halvings,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        pad_id = self._base.tokenizer.pad_token_id
        return SupervisedLearner(
            accelerator,
            load_model(self._spec, self._base),
            TrainingPlace(folder, settings.keep_checkpoints, say, self._names, settings.report_to, self._spec.name),
            settings,
            plan=plan,
            collate=MaskedCollator(examples, mask=settings.mask, seed=settings.seed, pad_id=pad_id),
            step_loss=AnswerLoss(),
        )


def _answered(spec: SftSpec, storage: Storage) -> tuple[AnsweredRows, bool]:
    """What is learned from, and whether it is the first grades alone."""
    gold, is_preliminary = spec.data.gold, spec.data.answer == "preliminary"
    if gold is not None and gold.sets is not None:
        assert spec.labeler is not None
        return load_sets(spec.labeler, gold, storage), is_preliminary
    answered = load_answered_rows(spec, spec.data, storage)
    if not all(row.sets is not None for row in answered.rows):
        check_learnable(
            answered.options, answered.labeler, has_answers=bool(spec.data.runs), is_preliminary=is_preliminary
        )
    return answered, is_preliminary

"""`method: res-rag`: a teacher learns to choose evidence by what a frozen generator answers from its choice.

The loss is GRPO's, over answers that a grammar holds; see `res_rag_trainer.py`. The reward is in
`evidence_scores.py`, the generator in `generators.py`.

Source: RES-RAG (papers, sections 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relabel.distill.teachers.bases import TeacherBase
from relabel.distill.teachers.evidence_queries import EvidenceRow, load_evidence_rows
from relabel.distill.teachers.evidence_scores import EVIDENCE_COLUMNS, EvidenceJudge
from relabel.distill.teachers.generators import Generator, identity_of, own_keys
from relabel.distill.teachers.gold_rows import GoldRows
from relabel.distill.teachers.grpo import GrpoTeacher, answer_end_ids
from relabel.distill.teachers.res_rag_spec import ResRagSpec
from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.trainers import Trained
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.registry import engine_class
from relabel.labelers.registry import Labeler
from relabel.labelers.short_answers import ShortAnswers
from relabel.manifests.metrics.evidence_sets import RewardWeights
from relabel.manifests.storage.context import Storage

ANSWERS = "generator"
"""Folder of the generator's kept answers, beside the checkpoints."""


class ResRagTeacher(GrpoTeacher):
    """A `TeacherTrainer`: GRPO with RES-RAG's joint reward.

    Raises:
        ModelError, MissingExtraError: the generator can't be started here.
        InputError: no question can be learned from, or fewer than a step takes.
    """

    _spec: ResRagSpec

    def __init__(self, spec: ResRagSpec, base: TeacherBase, storage: Storage) -> None:
        with own_keys():
            engine_class(spec.generator.name).check(spec.generator)
            self._generator_identity = identity_of(spec.generator, ShortAnswers())
        self._generator: Generator | None = None
        self._secrets: Mapping[str, Any] = {}
        super().__init__(spec, base, storage)

    def take_secrets(self, secrets: Mapping[str, Any]) -> None:
        """What the generator's options name, by option."""
        self._secrets = secrets

    def _digest_parts(self) -> list[Any]:
        rows = [row for row in self._gold.rows if isinstance(row, EvidenceRow)]
        return [self._gold.prompts, [[row.sets, row.answers] for row in rows], self._generator_identity]

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """As GRPO; the generator is started before the trainer, and closed behind it."""
        kept = self._spec.generator.cache
        folder = Path(kept) if kept is not None else checkpoints / ANSWERS
        self._generator = Generator(self._spec.generator, folder, secrets=self._secrets)
        say("starting the generator")
        try:
            for remark in self._generator.start():
                say(remark)
            return super().train(checkpoints, say)
        finally:
            self._generator.close()

    def _longest_answer(self) -> int:
        return self._spec.rollouts.max_answer_tokens

    def _read_gold(self, labeler: Labeler, storage: Storage) -> GoldRows:
        return load_evidence_rows(self._spec.data.gold, labeler, self._dialogues, storage)

    def _remarks(self) -> list[str]:
        return []

    def _log(self, checkpoints: Path) -> RolloutLog:
        return RolloutLog(checkpoints, columns=EVIDENCE_COLUMNS)

    def _trainer_class(self) -> Any:
        from relabel.distill.teachers.res_rag_trainer import HeldTrainer

        return HeldTrainer

    def _method_options(self) -> dict[str, Any]:
        from relabel.distill.teachers.grammar_masks import GrammarMasks

        assert self._generator is not None
        reward = self._spec.reward
        weights = RewardWeights(
            cost=reward.eta,
            answer=reward.alpha_ans,
            retrieval=reward.alpha_ret,
            empty_answer=reward.gamma,
            lowest=reward.r_min,
            highest=reward.r_max,
        )
        tokenizer = self._base.tokenizer
        width = max(len(tokenizer), int(self._base.config.get_text_config().vocab_size))
        compiler = GrammarCompiler(tokenizer, vocab_size=width, eos_ids=answer_end_ids(self._base))
        masks = GrammarMasks(compiler)
        return {"masks": masks, "judge": EvidenceJudge(self._generator, weights)}

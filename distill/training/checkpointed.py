"""A trainer with checkpoints of our own: whole or not there, without pickle, and gone on with bit for bit.

Overridden hooks of transformers' Trainer, and why: `_save_checkpoint` and the `_load_*` methods (Trainer's own write
pickle, and a half-written one would be taken for whole), `create_accelerator_and_postprocess` (no DDP around shards).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerState

from relabel.distill.training import checkpoints, sharding
from relabel.distill.training.checkpoint_folders import WEIGHTS, checkpoint_name, damaged
from relabel.distill.training.measured import MeasuredTrainer
from relabel.distill.training.outcomes import Outcome
from relabel.distill.training.step_state import StepState, write_checkpoint
from relabel.manifests.interruptions import draining

STATE_OF_TRAINER = "trainer_state.json"


class CheckpointedTrainer(MeasuredTrainer):
    """A Trainer that writes, finds and names things as this project does. Arguments are MeasuredTrainer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_sharded = sharding.is_sharded(kwargs.get("model"))
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Shards reduce their own gradients: accelerate must put autocast around the module and no DDP, as it does for
        evaluation.
        """
        super().create_accelerator_and_postprocess()
        if self._is_sharded:
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = lambda module, **_: prepare(
                module, device_placement=False, evaluation_mode=True
            )

    @property
    def checkpoints_folder(self) -> Path:
        return self._place.folder

    def own_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint beside model, optimizer and generators: plain values and tensors."""
        return {}

    def load_own_state(self, held: dict[str, Any]) -> None:
        """Take back what `own_state` gave."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        best, is_writer = self.state.best_global_step, self.args.should_save
        if best:
            self.state.best_model_checkpoint = str(self._place.folder / checkpoint_name(best))
        if not is_writer and not self._is_sharded:
            return
        scaler = getattr(self.accelerator, "scaler", None)
        state = StepState(
            optimizer=sharding.whole_moments(self.optimizer.state_dict(), keep=is_writer),
            scheduler=self.lr_scheduler.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            curve=self.curve.points,
            own=self.own_state(),
        )
        write_checkpoint(
            self._place,
            self.state.global_step,
            self.accelerator.unwrap_model(self.model),
            state,
            is_writer=is_writer,
            best=best,
            write_more=lambda folder: self.state.save_to_json(str(folder / STATE_OF_TRAINER)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_weights(
            self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint) / WEIGHTS
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        held = StepState.load(checkpoint)
        self.optimizer.load_state_dict(sharding.cut_moments(held.optimizer, self.optimizer))
        self.lr_scheduler.load_state_dict(held.scheduler)
        self._take(held)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            state = StepState.load(checkpoint).scaler
            if state is not None:
                scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            StepState.load(checkpoint).restore_random(checkpoint)

    def _take(self, held: StepState) -> None:
        held.restore_curve(self.curve)
        self.load_own_state(held.own)

    def stopped_by(self) -> str | None:
        """What ended training before its last step, as the state of the last checkpoint says."""
        return None

    def adopt_if_finished(self, checkpoint: Path) -> bool:
        """Take over a checkpoint after which there is nothing left to train; False if there is. Trainer itself would do
        one step more.

        Raises:
            ManifestError: it is damaged.
        """
        try:
            self.state = TrainerState.load_from_json(str(checkpoint / STATE_OF_TRAINER))
        except (OSError, ValueError, TypeError) as exc:
            raise damaged(checkpoint, f"{STATE_OF_TRAINER} is missing, or can't be read") from exc
        self._take(StepState.load(checkpoint))
        if self.state.global_step < self.state.max_steps and self.stopped_by() is None:
            return False
        self._load_from_checkpoint(str(checkpoint))
        return True


def run_to_end(trainer: CheckpointedTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end and keep the best step's weights where early stopping chose one.

    Raises:
        KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        ManifestError: the best step's checkpoint is missing or damaged.
    """
    try:
        if resume_from is None or not trainer.adopt_if_finished(resume_from):
            # one process stops behind a step, with a checkpoint; several would stop behind different ones
            with draining() if trainer.args.world_size == 1 else nullcontext():
                trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        trainer.reporter.send(trainer.curve)
    finally:
        trainer.reporter.finish()
    state: TrainerState = trainer.state
    best = None
    trainer.accelerator.wait_for_everyone()  # the first process may still be writing the best step
    if state.best_model_checkpoint:
        best = state.best_global_step
        # by its step, since the path that the state holds is that of a folder which may have moved
        kept = checkpoints.best_checkpoint(trainer.checkpoints_folder, best)
        module = trainer.accelerator.unwrap_model(trainer.model)
        checkpoints.load_weights(module, kept / WEIGHTS)
        trainer.accelerator.wait_for_everyone()  # the first process removes it soon
    return Outcome(
        steps=state.global_step,
        epochs=round(float(state.epoch or 0.0), 4),
        best_step=best,
        rows_per_s=round(trainer.rows_seen / trainer.seconds, 2) if trainer.seconds else None,
        curve=trainer.curve,
        device=str(trainer.args.device),
        stopped_by=trainer.stopped_by(),
        clock=trainer.clock,
    )

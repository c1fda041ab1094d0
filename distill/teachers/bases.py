"""The pretrained model that a teacher starts from, the interface of a method's trainer, and a training run that halves
its batch when memory runs out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from relabel.distill.teachers.manifest import TeacherData
from relabel.distill.teachers.spec import TeacherSpec
from relabel.distill.training import checkpoints
from relabel.distill.training.curves import Outcome
from relabel.distill.training.locations import open_to_readers
from relabel.distill.training.runtime import Halved, halving, is_on_cpu
from relabel.distill.training.spec import TrainingSection, adapted, check_targets
from relabel.distill.training.trainer import CheckpointedTrainer, run_to_end
from relabel.labelers.engines.checkpoints import end_ids, load_tokenizer
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.errors import ConfigError, ModelError, TrainingError
from relabel.manifests.files import Storage
from relabel.manifests.models import OF_A_CONFIG, ResolvedModel, read_weights
from relabel.manifests.process import require, usable_cores
from relabel.manifests.records import LEFT_OUT, fault_of

# ------------------------------------------------------------------------------
# The model that a teacher starts from: looked at before its data is read, loaded when training begins, written when it
# has ended.


PURPOSE = "relabel train"


@dataclass
class TeacherBase:
    """A model that was looked at.

    Args:
        encoder: makes prompts into tokens as the engines do.
        end_id: the token that ends an answer.
        context: longest sequence that it can read, in tokens.
    """

    resolved: ResolvedModel
    config: Any
    tokenizer: Any
    encoder: PromptEncoder
    end_id: int
    context: int


def check_teacher_base(spec: TeacherSpec, resolved: ResolvedModel) -> TeacherBase:
    """Look at config, tokenizer, and the heads of its weights' files.

    Raises:
        ModelError: it is no causal language model, has no fast tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `lora.targets` names layers that it does not have, or it
            can't have `train.gradient_checkpointing`.
        MissingExtraError: a package is absent.
    """
    library = require("transformers", extra="train", purpose=PURPOSE)
    from huggingface_hub.errors import StrictDataclassError  # comes with transformers

    require("accelerate", extra="train", purpose=PURPOSE)
    require("matplotlib", extra="cpu", purpose="The plot of a training")
    if spec.lora is not None:
        require("peft", extra="train", purpose="lora")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        config = library.AutoConfig.from_pretrained(resolved.path)
    except (*OF_A_CONFIG, OSError, StrictDataclassError) as exc:
        raise ModelError(
            f"`init` {resolved.reference!r}: its config.json can't be loaded from {resolved.path}."
        ) from exc
    known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_masked = config.model_type in library.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type not in known or is_masked:
        raise ModelError(
            f"`init` {resolved.reference!r}: a {config.model_type} writes no answers; want a causal language model."
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"`init` {resolved.reference!r}: its weights are quantized, which can't be trained. Name the model that "
            "they were made from, in 16 or 32 bits."
        )
    if spec.lora is not None:
        check_targets(config, spec.lora, key="lora", reference=resolved.reference)
    named_ends(resolved)
    hollow = _read_model(resolved, device="meta")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(hollow)
    tokenizer = load_tokenizer(library, resolved)
    context = int(getattr(config.get_text_config(), "max_position_embeddings", None) or spec.train.max_tokens)
    if spec.train.max_tokens > context:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {resolved.reference!r} reads at most {context} "
            "tokens. Lower it."
        )
    encoder = PromptEncoder(tokenizer, chat_template_kwargs=spec.chat_template_kwargs)
    own = tokenizer.eos_token_id
    end_id = own if own is not None else end_ids(getattr(config, "eos_token_id", None), tokenizer)[0]
    return TeacherBase(resolved, config, tokenizer, encoder, end_id, context)


def named_ends(resolved: ResolvedModel) -> int | list[int] | None:
    """Tokens that end an answer, as the model's generation_config.json has them, if it does.

    Raises:
        ModelError: the file is damaged.
    """
    file = resolved.path / "generation_config.json"
    try:
        named: int | list[int] | None = (
            json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        )
    except (OSError, ValueError, AttributeError) as exc:
        raise ModelError(f"`init` {resolved.reference!r}: {file} can't be read ({fault_of(exc)}).") from exc
    return named


def load_model(spec: TeacherSpec, base: TeacherBase) -> Any:
    """The model to train, in float32; behind peft's wrapper where the spec has `lora`.

    Raises:
        ModelError: its weights can't be loaded, or hold a number that is none.
    """
    reference = base.resolved.reference
    model = _read_model(base.resolved)
    if bad := [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]:
        raise ModelError(f"`init` {reference!r}: its weights hold a number that is none, in {bad[0]}.")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(model)
    if spec.lora is None:
        return model
    return adapted(model, spec.lora, seed=spec.train.seed, key="lora", extra="train")


def _read_model(resolved: ResolvedModel, *, device: str | None = None) -> Any:
    """The model in float32. On the device `meta` it has shapes alone: the heads of its files are read, no tensor.

    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    where = f"`init` {resolved.reference!r}"
    return read_weights(AutoModelForCausalLM, resolved.path, where, device=device, dtype=torch.float32)


def _checkpoint_gradients(model: Any) -> None:
    """
    Raises:
        ConfigError: the model's architecture can't.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    except (ValueError, NotImplementedError) as exc:
        raise ConfigError(
            f"train.gradient_checkpointing: a {model.config.model_type} can't drop its activations. Leave it "
            "out; where memory is short, lower train.batch_size and raise train.accumulation as much."
        ) from exc


def merged(model: Any) -> Any:
    """The model without peft's wrapper, its adapters added to the weights that they are beside; on the CPU."""
    merge = getattr(model, "merge_and_unload", None)
    return (model if merge is None else merge()).cpu().eval()


def write_model(folder: Path, model: Any, base: TeacherBase) -> None:
    """Write a directory that `engine.model` takes: weights as safetensors, config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    base.tokenizer.save_pretrained(folder)
    if hasattr(base.config, "use_cache"):  # a Trainer turns it off, and other libraries would write answers without
        model.config.use_cache = base.config.use_cache
    model.save_pretrained(folder)
    open_to_readers(folder)


# ------------------------------------------------------------------------------
# What trains a teacher, whatever the method: what it is given, and what it gives back.


class Trained(NamedTuple):
    """What training left.

    Args:
        model: the causal language model of transformers, adapters merged, on the CPU.
        halved: whether memory ended at first.
        write_more: writes what the method leaves beside the model, into the teacher's folder.
    """

    model: Any
    outcome: Outcome
    halved: Halved
    write_more: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class TrainingTime:
    """How long a training would take, in seconds; looks at dev left out.

    Args:
        steps: that were timed.
        seconds: at their mean pace; `least` and `most` at that of the fastest and the slowest stretch.
    """

    steps: int
    seconds: float
    least: float
    most: float


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training would do.

    Args:
        tokens: that the model reads, over all steps.
        look_tokens: read and written beside those, in looks at dev.
        dropped: rows left out, by reason.
        time: where it was measured.
    """

    rows: int
    examples: int
    steps: int
    tokens: int
    answer_tokens: int
    look_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    time: TrainingTime | None = field(default=None, metadata=LEFT_OUT)


class TeacherTrainer(Protocol):
    """One method at work on one spec. Making one reads and checks all data, and loads no weights.

    Raises:
        RelabelError: the data does not do for what the spec asks.
    """

    data: TeacherData
    """For the manifest."""
    digest: str
    """Of all that is learned from."""
    labeler: dict[str, Any]
    """Options of the labeler whose prompts are used."""
    templates: dict[str, str]
    """sha256 of its templates, by file name."""
    notes: list[str]
    """Remarks that the user should hear."""

    def __init__(self, spec: Any, base: TeacherBase, storage: Storage) -> None: ...

    def estimate(self) -> TrainingEstimate:
        """What `train` would do."""
        ...

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, going on from the last whole checkpoint.

        Args:
            checkpoints: folder that they are kept in.
            say: where progress goes.
        Raises:
            TrainingError: the loss is not finite, or memory runs out.
            ModelError: the weights can't be loaded.
        """
        ...


@runtime_checkable
class AsksAnEngine(Protocol):
    """A method that asks an engine on the way, some of whose options name secrets."""

    def take_secrets(self, secrets: Mapping[str, Any]) -> None:
        """Take the secrets' values, by option."""
        ...


# ------------------------------------------------------------------------------
# A teacher's training from its last checkpoint to its end, whatever the method, with half the batch if memory ends.


def set_threads(train: TrainingSection) -> None:
    """One below the cores: a thread that a step waits for must not wait for others. Those who say fewer are taken at
    their word.
    """
    if is_on_cpu(train):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() - 1)))


def train_to_end(
    spec: TeacherSpec,
    folder: Path,
    say: Callable[[str], None],
    build: Callable[[int], CheckpointedTrainer],
    *,
    examples: str,
    keys: str = "train.batch_size or train.max_tokens",
    can_halve: bool = True,
) -> Trained:
    """Train, going on from the last whole checkpoint.

    Args:
        folder: of the checkpoints.
        build: makes the trainer, whose batch is halved so often.
        examples: what a batch holds, for errors.
        keys: to lower where memory ends, for errors.
        can_halve: whether half a batch is as good, accumulated twice as often.
    Raises:
        TrainingError: memory ends with half the batch too, or the loss is not finite.
    """
    checkpoints.refuse_other_sharding(
        instead="Teachers are not sharded: take it out, or set it to plain multi-GPU with `method: sft`; where memory "
        "is short, train adapters alone (`lora: {}`)."
    )
    set_threads(spec.train)

    def attempt(halvings: int) -> tuple[Any, Outcome]:
        trainer = build(halvings)
        outcome = run_to_end(trainer, resume_from=checkpoints.last_checkpoint(folder, say))
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.accelerator.free_memory()
        return model, outcome

    def refusal(words: str) -> TrainingError:
        size = spec.train.batch_size
        tried = f"also with half the batch ({size // 2} {examples})"
        if not can_halve or size < 2:
            tried = f"and the batch ({size} {examples}) can't be halved"
        return TrainingError(
            f"out of memory, {tried}: {words}. Set train.gradient_checkpointing: true, with which --resume goes on, or "
            f"begin again with --restart: lower {keys}, or train adapters alone (lora: {{}})."
        )

    batch_size = spec.train.batch_size if can_halve else None
    (model, outcome), halved = halving(attempt, batch_size=batch_size, say=say, refusal=refusal)
    return Trained(merged(model), outcome, halved)

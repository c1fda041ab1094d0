"""The pretrained model that a teacher starts from, and the base class of the methods that train one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from relabel.distill.teachers.manifest import TeacherData
from relabel.distill.teachers.spec import TeacherSpec
from relabel.distill.training.curves import Outcome
from relabel.distill.training.locations import open_to_readers
from relabel.distill.training.runtime import Halved
from relabel.distill.training.spec import adapted, check_targets, open_base
from relabel.labelers.engines.checkpoints import end_ids, load_tokenizer
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.models import ResolvedModel, read_weights
from relabel.manifests.process import require
from relabel.manifests.records import LEFT_OUT, fault_of

# ------------------------------------------------------------------------------
# The model that a teacher starts from: checked before its data is read, loaded when training begins.


@dataclass
class TeacherBase:
    """A model that was checked.

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
    """Check config, tokenizer, and the headers of its weights' files.

    Raises:
        ModelError: it is no causal language model, has no fast tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `lora.targets` names layers that it does not have, or it
            can't have `train.gradient_checkpointing`.
        MissingExtraError: a package is absent.
    """
    library, config = open_base(resolved.path, f"`init` {resolved.reference!r}", extra="train", purpose="relabel train")
    if spec.lora is not None:
        require("peft", extra="train", purpose="lora")
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
        held = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        named: int | list[int] | None = held.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as exc:
        raise ModelError(f"`init` {resolved.reference!r}: {file} can't be read ({fault_of(exc)}).") from exc
    return named


def load_model(spec: TeacherSpec, base: TeacherBase) -> Any:
    """The model to train, in float32; in peft's wrapper where the spec has `lora`.

    Raises:
        ModelError: its weights can't be loaded, or contain NaN or Inf.
    """
    reference = base.resolved.reference
    model = _read_model(base.resolved)
    if bad := [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]:
        raise ModelError(f"`init` {reference!r}: tensor {bad[0]} contains NaN or Inf.")
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
    """The model without peft's wrapper, its adapters merged into the weights; on the CPU."""
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
        write_more: writes further files of the method into the teacher's folder.
    """

    model: Any
    outcome: Outcome
    halved: Halved
    write_more: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training would do.

    Args:
        tokens: that the model reads, over all steps.
        eval_tokens: read and written in evaluations on dev, in addition.
        dropped: rows left out, by reason.
        step_s, seconds: of a step and of all steps, where a probe measured them; evaluations left out.
    """

    rows: int
    examples: int
    steps: int
    tokens: int
    answer_tokens: int
    eval_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    step_s: float | None = field(default=None, metadata=LEFT_OUT)
    seconds: float | None = field(default=None, metadata=LEFT_OUT)


class TeacherTrainer:
    """A method of training, with its spec's data. Making one reads and checks all data, and loads no weights.

    Raises:
        RelabelError: the data does not do for what the spec asks.
    """

    data: TeacherData
    """For the manifest."""
    digest: str
    """Of all training data."""
    labeler: dict[str, Any]
    """Options of the labeler whose prompts are used."""
    templates: dict[str, str]
    """sha256 of its templates, by file name."""
    notes: list[str]
    """Remarks for the user."""
    secrets: Mapping[str, Any]
    """What the options of an engine that the method asks name, by option."""

    def estimate(self) -> TrainingEstimate:
        """What `train` would do."""
        raise NotImplementedError

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, resuming from the last whole checkpoint.

        Args:
            checkpoints: folder that they are kept in.
            say: called with progress, a line each.
        Raises:
            TrainingError: the loss is not finite, or memory runs out.
            ModelError: the weights can't be loaded.
        """
        raise NotImplementedError

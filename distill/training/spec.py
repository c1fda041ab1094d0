"""Spec sections shared by students and teachers: training settings, the dev split, early stopping and LoRA, and the
LoRA adapters built from them. Importing it does not load torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.files import is_url
from relabel.manifests.models import own_code
from relabel.manifests.process import require
from relabel.manifests.specs import PathText, Spec
from relabel.manifests.weights import OF_A_CONFIG

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""Letters, digits, dot, dash and underscore."""


def _local(path: str) -> str:
    if is_url(path):
        raise ValueError(
            f"removed: training at a URL ({path}). Name a local folder, and upload the finished model, say with "
            "`aws s3 sync`"
        )
    return path


OutputText = Annotated[PathText, Field(min_length=1), AfterValidator(_local)]


def as_sources(value: Any) -> Any:
    """A path, a mapping or a list of either as a list of mappings with a path."""
    value = [value] if isinstance(value, str | dict) else value
    if not isinstance(value, list | tuple):
        return value
    return [{"path": source} if isinstance(source, str) else source for source in value]


class LoraSpec(Spec):
    """Low-rank adapters instead of all weights, through peft; merged into the weights when the model is written."""

    r: int = Field(8, ge=1, le=1024)
    """Rank."""
    alpha: float = Field(16.0, gt=0.0)
    """Scale; the update is multiplied by alpha / r."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """On the adapters' input, in training."""
    targets: tuple[str, ...] = ()
    """Names of the layers to adapt. Default: every linear layer but the output matrix."""


class EarlyStop(Spec):
    """Stop when the dev split gets no better."""

    patience: int = Field(3, ge=1)
    """Evaluations without a new best before training stops."""


class DevSplit(Spec):
    """Which rows train and which choose; all rows of one query fall on the same side."""

    by: Literal["query_id", "query"] = "query_id"
    """What must not fall apart: the query's id, or its text (case and white space folded) where ids are not to be
    trusted.
    """
    dev: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of queries that training is evaluated on."""
    seed: int = Field(0, ge=0)
    """A query's side is a hash of this seed and the query alone: it stays where it is when data is added."""


class TrainingSection(Spec):
    """How a model is trained."""

    epochs: float = Field(2, gt=0)
    """Passes over the training rows."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps, whatever `epochs` is."""
    batch_size: int = Field(32, ge=1)
    """Rows of one forward pass on one device."""
    group_by_length: bool = True
    """Rows of like length share a batch, sorted within stretches of fifty batches: little padding, and still mostly
    chance.
    """
    accumulation: int = Field(1, ge=1)
    """Batches for one optimizer step; the loss is the same as of one large batch."""
    learning_rate: float = Field(2e-4, gt=0.0)
    """Peak of the schedule."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """After the warm-up."""
    warmup: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the steps in which the rate rises from 0."""
    weight_decay: float = Field(0.01, ge=0.0)
    """AdamW's, on weight matrices alone."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Clip gradients to this norm; 0 is off."""
    max_tokens: int = Field(256, ge=8)
    """Longest row in tokens; longer ones are cut."""
    seed: int = Field(7, ge=0, lt=2**31)
    """Of all that is drawn: fresh weights, dropout, the order of rows."""
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints. Default: once an epoch."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept while training; all are removed when the model is written."""
    mirror: PathText | None = None
    """URL that each checkpoint is copied to while the training goes on. --resume on another machine takes the last one
    from there.
    """
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 on a GPU that has it and on a CPU with AMX, else fp32."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto` takes a GPU where torch finds one."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third slower."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What several processes share: `ddp` batches alone, `fsdp` weights, gradients and the optimizer's moments as
    well.
    """
    report_to: tuple[Literal["tensorboard", "trackio", "mlflow", "wandb"], ...] = ()
    """Services that the curve is sent to as it grows; each finds its server and its key in its own way."""

    @model_validator(mode="after")
    def _shards_have_no_scaler(self) -> Self:
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "`strategy: fsdp` with `precision: fp16`: a process sees overflow in its own shards alone. Take bf16"
            )
        return self


def open_base(path: Path, where: str, *, extra: str, purpose: str) -> tuple[Any, Any]:
    """transformers, made quiet, and the config of the model that a training starts from.

    Args:
        path: its folder, or its config's file.
        extra, purpose: for the message where a package is absent.
    Raises:
        MissingExtraError: a package is absent.
        ModelError: the config can't be loaded, or is of quantized weights.
    """
    transformers = require("transformers", extra=extra, purpose=purpose)
    require("accelerate", extra=extra, purpose=purpose)
    require("matplotlib", extra="cpu", purpose="The plot of a training")
    from huggingface_hub.errors import StrictDataclassError  # comes with transformers

    transformers.logging.set_verbosity_error()  # at every load it reports weights that a student does not use
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        quantized = dict(getattr(config, "quantization_config", None) or {})
    except (*OF_A_CONFIG, OSError, StrictDataclassError) as exc:
        file = path / "config.json" if path.is_dir() else path
        raise ModelError(f"{where}: its config.json can't be loaded from {path}{own_code(file)}.") from exc
    if quantized:
        raise ModelError(
            f"{where}: its weights are quantized ({quantized.get('quant_method')}), which can't be trained. Name the "
            "model that they were made from, in 16 or 32 bits."
        )
    return transformers, config


# ------------------------------------------------------------------------------
# Low-rank adapters of a language model's linear layers, through peft.


def check_targets(model: Any, lora: LoraSpec, *, key: str) -> None:
    """Check that the model has the layers that are to be adapted: peft itself refuses only where it finds none.

    Args:
        model: on any device.
        key: the spec's, for errors.
    Raises:
        ConfigError: one of them is no layer of weights, or is the output matrix, which shares its weights with the
            embeddings.
    """
    matrices = [model.get_input_embeddings()]
    if model.config.get_text_config().tie_word_embeddings:
        matrices.append(model.get_output_embeddings())
    known = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) > 1 and module not in matrices
    }
    wrong = [target for target in lora.targets if target.rpartition(".")[2] not in known]
    if wrong:
        raise ConfigError(
            f"{key}.targets: no layer that can be adapted is called {wrong[0]}; there are {', '.join(sorted(known))}. "
            "Name some of these, or leave `targets` out to adapt every linear layer but the output matrix."
        )


def adapted(lm: Any, lora: LoraSpec, *, seed: int, key: str, extra: str) -> Any:
    """The model in peft's wrapper, all but the adapters frozen; `merge_and_unload` gives it back with them added.

    Args:
        seed: what the adapters are drawn from; the process's own generator is left alone.
        key: the spec's, for errors.
        extra: the one that brings peft.
    Raises:
        MissingExtraError: peft is absent.
        ModelError: it finds no such layers.
    """
    import torch

    peft = require("peft", extra=extra, purpose=key)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return peft.get_peft_model(lm, config)
    except ValueError as exc:
        raise ModelError(f"{key}: {str(exc).splitlines()[0]}") from exc

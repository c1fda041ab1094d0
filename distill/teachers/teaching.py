"""A teacher from spec to model folder: check, read, train or estimate, write the model card and manifest.

What costs nothing is checked first (spec, model config, data), so that no hour of training ends in a typo. The folder
is a model directory that `engine.model` takes.
"""

import contextlib
import copy
import importlib.metadata
import json
import pkgutil
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from relabel.distill.students.model import student_files
from relabel.distill.teachers.spec import (
    METHODS,
    TEACHER_MANIFEST_VERSION,
    RolloutSpec,
    TeacherData,
    TeacherManifest,
    TeacherSpec,
    method_of,
)
from relabel.distill.training import checkpoints
from relabel.distill.training.loop import Learner, is_on_cpu, precision_of, started_processes, train_to_end
from relabel.distill.training.mirror import mirror_of
from relabel.distill.training.output import (
    BaseModelUsed,
    Made,
    Outcome,
    OutputFolder,
    Product,
    Start,
    TrainingRecord,
    check_services,
    finished_model,
    spec_section,
    train_into,
    training_record,
)
from relabel.distill.training.spec import adapted, check_targets, open_base
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.labelers.engines.transformers import end_ids, load_tokenizer
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.files import Storage, open_to_readers
from relabel.manifests.models import ResolvedModel, resolve_model
from relabel.manifests.process import installed_versions, require, usable_cores
from relabel.manifests.records import LEFT_OUT, digest_of, fault_of, plain
from relabel.manifests.tables import document_line
from relabel.manifests.weights import read_weights

ReportLine = Callable[[str], None]
"""Called with progress and remarks, a line each."""

# ------------------------------------------------------------------------------
# The model that a teacher starts from: checked before the data is read, loaded when training begins.


@dataclass
class TeacherBase:
    """A model that was checked.

    Args:
        encoder: makes prompts into tokens as the engines do.
        end_id: the token that ends an answer that is learned.
        end_ids: all tokens that end an answer, as the engines have them.
    """

    resolved: ResolvedModel
    config: Any
    tokenizer: Any
    encoder: PromptEncoder
    end_id: int
    end_ids: list[int]

    @property
    def vocab_size(self) -> int:
        """Width of the model's logits."""
        return int(self.config.get_text_config().vocab_size)


def check_teacher_base(spec: TeacherSpec, resolved: ResolvedModel) -> TeacherBase:
    """Check config, tokenizer, and the headers of its weights' files.

    Raises:
        ModelError: it is no causal language model, has no fast tokenizer, names no token that ends an answer, or its
            weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `lora.targets` names layers that it does not have, or it
            can't have `train.gradient_checkpointing`.
        MissingExtraError: a package is absent.
    """
    where = f"`init` {resolved.reference!r}"
    library, config = open_base(resolved.path, where, extra="train", purpose="relabel train")
    if spec.lora is not None:
        require("peft", extra="train", purpose="lora")
    kinds = library.models.auto.modeling_auto
    writers = kinds.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    if config.model_type not in writers:
        raise ModelError(f"{where}: a {config.model_type} writes no answers; want a causal language model.")
    file = resolved.path / "generation_config.json"
    try:
        generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as exc:
        raise ModelError(f"{where}: {file} can't be read ({fault_of(exc)}).") from exc
    named = generation.get("eos_token_id") or getattr(config, "eos_token_id", None)
    hollow = _read_model(resolved, device="meta")
    if spec.lora is not None:
        check_targets(hollow, spec.lora, key="lora")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(hollow)
    tokenizer = load_tokenizer(library, resolved)
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or spec.train.max_tokens
    if spec.train.max_tokens > most:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {resolved.reference!r} reads at most {most} tokens. "
            "Lower it."
        )
    encoder = PromptEncoder(tokenizer, chat_template_kwargs=spec.chat_template_kwargs)
    ends = end_ids(named, tokenizer)
    own = tokenizer.eos_token_id
    return TeacherBase(
        resolved=resolved,
        config=config,
        tokenizer=tokenizer,
        encoder=encoder,
        end_id=ends[0] if own is None else own,
        end_ids=ends,
    )


def load_model(spec: TeacherSpec, base: TeacherBase) -> Any:
    """The model to train, in float32; in peft's wrapper where the spec has `lora`.

    Raises:
        ModelError: its weights can't be loaded, or contain NaN or Inf.
    """
    model = _read_model(base.resolved, attention=_attention(spec))
    bad = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    if bad:
        raise ModelError(f"`init` {base.resolved.reference!r}: tensor {bad[0]} contains NaN or Inf.")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(model)
    if spec.lora is None:
        return model
    return adapted(
        model,
        spec.lora,
        seed=spec.train.seed,
        key="lora",
        extra="train",
    )


def shard_decoder(model: Any, device: torch.device) -> None:
    """Cut a teacher over all processes, layer by layer; see `checkpoints.shard`.

    Args:
        model: in peft's wrapper or not. What it wraps is cut: peft calls that alone to write, and the outermost part of
            shards gathers its weights when it is called.
    """
    decoder = model.get_base_model() if hasattr(model, "get_base_model") else model
    checkpoints.shard(decoder, device, decoder.get_decoder().layers)


SHORT_TOKENS = 128
"""Of examples that attention is written out for on a CPU."""


def _attention(spec: TeacherSpec) -> str | None:
    """Attention code of transformers; None is its own choice.

    Written out, a step of 8 rows of 60 tokens took 1.9 s of a CPU core for 2.6 s (SmolLM2-135M): the backward pass of
    torch's fused attention is slow there. It keeps the square of the length in memory, so only short examples have it.
    """
    return "eager" if is_on_cpu(spec.train) and spec.train.max_tokens <= SHORT_TOKENS else None


def _read_model(resolved: ResolvedModel, *, device: str | None = None, attention: str | None = None) -> Any:
    """The model in float32. On the device `meta` it has shapes alone: the headers of its files are read, no tensor.

    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    from transformers import AutoModelForCausalLM

    options = {} if attention is None else {"attn_implementation": attention}  # None would overrule the config's own
    return read_weights(
        AutoModelForCausalLM,
        resolved.path,
        f"`init` {resolved.reference!r}",
        device=device,
        dtype=torch.float32,
        **options,
    )


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


def write_model(folder: Path, model: Any, base: TeacherBase) -> None:
    """Write a directory that `engine.model` takes: weights as safetensors, config, tokenizer and chat template."""
    base.tokenizer.save_pretrained(folder)
    if hasattr(base.config, "use_cache"):  # a Trainer turns it off, and other libraries would write answers without
        model.config.use_cache = base.config.use_cache
    model.save_pretrained(folder)
    open_to_readers(folder)


# ------------------------------------------------------------------------------
# Adapters by themselves: a few megabytes, which `engine.args.lora` lays over the model that they were trained on.


ADAPTER_NAME = "adapter"
"""Folder within a teacher's, where its spec has `lora`."""


class Adapter(NamedTuple):
    """Adapters, apart from the model that they were trained on.

    Args:
        config: peft's.
        weights: by peft's names, on the CPU.
    """

    config: Any
    weights: dict[str, torch.Tensor]


def adapter_of(model: Any) -> Adapter:
    """The adapters of a model in peft's wrapper; merging them later does not change what is returned."""
    peft = require("peft", extra="train", purpose="lora")
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode = True
    weights = peft.get_peft_model_state_dict(model)
    return Adapter(config, {name: weight.detach().cpu().clone() for name, weight in weights.items()})


def write_adapter(folder: Path, adapter: Adapter, base: str) -> None:
    """Write adapters in peft's form.

    Args:
        base: reference of the model that they were trained on.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    adapter.config.base_model_name_or_path = base
    adapter.config.save_pretrained(folder)
    save_file(adapter.weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    open_to_readers(folder)


# ------------------------------------------------------------------------------
# What trains a teacher, whatever the method: what it is given, and what it gives back.


class Trained(NamedTuple):
    """What training left.

    Args:
        model: the causal language model of transformers, adapters merged, on the CPU.
        adapter: what the spec's `lora` trained, None without it.
        write_more: writes further files of the method into the teacher's folder.
    """

    model: Any
    outcome: Outcome
    adapter: Adapter | None = None
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
    identity: str
    """Of the training, the same in all processes."""
    is_first: bool
    """Whether this is the first of the processes that train together, or the only one."""

    def estimate(self) -> TrainingEstimate:
        """What `train` would do."""
        raise NotImplementedError

    def train(self, checkpoints: Path, report: ReportLine) -> Trained:
        """Train, resuming from the last whole checkpoint.

        Args:
            checkpoints: folder that they are kept in.
        Raises:
            TrainingError: the loss is not finite, or memory runs out.
            ModelError: the weights can't be loaded.
        """
        raise NotImplementedError


def train_learner(
    spec: TeacherSpec,
    folder: Path,
    report: ReportLine,
    build: Callable[[Accelerator, int], Learner],
    *,
    identity: str,
    keys: str = "train.batch_size or train.max_tokens",
    can_halve: bool = True,
) -> Trained:
    """Train a teacher, resuming from the last whole checkpoint; see `train_to_end`.

    Args:
        keys: to lower where memory runs out, for errors.
    """
    # one thread fewer than there are cores: a thread that a step waits for must not wait for others. A lower number,
    # set from outside, is kept.
    if is_on_cpu(spec.train):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() - 1)))
    model, outcome = train_to_end(
        build,
        spec.train,
        folder,
        report,
        identity=identity,
        advice="Set train.gradient_checkpointing: true, with which --resume goes on, or begin again with --restart: "
        f"lower {keys}, or train adapters alone (lora: {{}}).",
        can_halve=can_halve,
    )
    if spec.lora is None:
        return Trained(model.eval(), outcome)
    adapter = adapter_of(model)
    return Trained(model.merge_and_unload().eval(), outcome, adapter)


# ------------------------------------------------------------------------------
# A teacher from its spec to its folder.


TEACHER = Product(
    "teacher",
    "train",
    "init",
    ("data", "labeler", "generator"),
    frozenset(
        {
            "name",
            "output",
            "init",
            "labeler",
            "generator",
            "data.runs",
            "data.gold.path",
            "train.device",
            "train.keep_checkpoints",
            "train.mirror",
            "train.gradient_checkpointing",
            "train.strategy",
            "train.report_to",
        }
    ),
)
"""Data, labeler and generator are in the digest of the data; the model has its own digest."""
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")


@dataclass(frozen=True)
class TeacherReport:
    """How `train_teacher` ended.

    Args:
        was_done: the teacher was there already.
        output: its folder.
    """

    manifest: TeacherManifest
    was_done: bool
    output: str


def _prepare(
    spec: TeacherSpec, storage: Storage, cache_dir: Path | None, secrets: Mapping[str, Any], *, is_writer: bool = True
) -> tuple[OutputFolder, TeacherBase, TeacherTrainer, TrainingRecord]:
    """All that is read and checked before weights are loaded."""
    output = OutputFolder(TEACHER, Path(spec.output))
    resolved = resolve_model(spec.init, cache_dir=cache_dir)
    if is_writer:  # the first of several processes may have begun to write before the others get here
        output.check(resolved)
    base = check_teacher_base(spec, resolved)
    check_services(spec.train.report_to)
    precision_of(spec.train)
    trainer: TeacherTrainer = pkgutil.resolve_name(method_of(spec.method).trainer)(spec, base, storage)
    record = training_record(
        TEACHER,
        spec,
        resolved,
        trainer.digest,
        version=TEACHER_MANIFEST_VERSION,
        processes=started_processes(),
    )
    trainer.secrets = secrets
    trainer.identity = digest_of(plain(record))
    trainer.is_first = is_writer
    return output, base, trainer, record


def _report_data(spec: Any, trainer: TeacherTrainer, report: ReportLine) -> None:
    """What is read as the document, and the trainer's remarks.

    Args:
        spec: of the trainer's method.
    """
    gold = trainer.data.gold
    if gold is not None and gold.document is not None:
        report(document_line(gold.path, gold.document, is_named=bool(spec.data.gold.columns.document)))
    for note in trainer.notes:
        report(note)


def train_teacher(
    spec: TeacherSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    report: ReportLine = lambda _: None,
    is_writer: bool = True,
    secrets: Mapping[str, Any] = MappingProxyType({}),
) -> TeacherReport:
    """Train the teacher of a spec.

    Args:
        storage: how runs and gold are reached. The model is looked up in the cache alone (`jobs/delivery.py` brings it
            there).
        is_writer: False in all but the first of several processes that train together: they write nothing.
        secrets: what the options of an engine that the method asks name, by option.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that raise it.
        StaleRunError: the output holds a teacher or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    output, base, trainer, record = _prepare(
        spec,
        storage,
        cache_dir,
        secrets,
        is_writer=is_writer,
    )
    finished = finished_model(
        output,
        record,
        start,
        TeacherManifest,
        is_writer=is_writer,
    )
    if finished is not None:
        return TeacherReport(finished, True, spec.output)
    _report_data(spec, trainer, report)

    def train() -> Made[TeacherManifest]:
        trained = trainer.train(output.checkpoints, report)

        def write(folder: Path) -> dict[str, str]:
            write_model(folder, trained.model, base)
            if trained.adapter is not None:
                write_adapter(folder / ADAPTER_NAME, trained.adapter, base.resolved.reference)
            trained.write_more(folder)
            return student_files(folder)

        manifest = TeacherManifest(
            version=TEACHER_MANIFEST_VERSION,
            relabel=importlib.metadata.version("relabel-ir"),
            name=spec.name,
            method=spec.method,
            fingerprint=record.fingerprint,
            model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
            labeler=trainer.labeler,
            templates=trainer.templates,
            data=trainer.data,
            training=trained.outcome.facts,
            notes=[*trainer.notes, *trained.outcome.notes],
            versions=installed_versions(LIBRARIES),
            spec=spec.model_dump(mode="json"),
        )
        return Made(manifest, trained.outcome.curve, write, render_card)

    manifest = train_into(
        output,
        record,
        start,
        train,
        is_writer=is_writer,
        mirrored=mirror_of(spec.train.mirror, storage, output.checkpoints, report),
    )
    return TeacherReport(manifest, False, spec.output)


def render_card(manifest: TeacherManifest) -> str:
    """Markdown from a teacher's manifest."""
    data = manifest.data
    training = manifest.training
    lines = [
        f"# {manifest.name}",
        "",
        f"A causal language model that answers the labeler `{manifest.labeler['name']}`, by `relabel train` "
        f"{manifest.relabel}: {METHODS[manifest.method].title}.",
        "",
        f"- Starts from: `{manifest.model.reference}` (digest `{manifest.model.digest[:16]}`)",
        f"- Trained: {training.steps} steps, {training.epochs} epochs, on {training.device}.",
    ]
    if training.best_step is not None and data.held_out is not None:
        lines.append(
            f"- Kept: step {training.best_step}, the best mean reward on {data.held_out.rows:,} rows of "
            f"{data.held_out.queries:,} queries that nobody trained on."
        )
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in data.dropped.items()) or "none"
    lines.append(
        f"- Learned from {data.rows:,} rows, {data.answer_tokens:,} tokens of answers; rows left out: {dropped}."
    )
    for run in data.runs:
        fingerprint = (run.fingerprint or "")[:12]
        lines.append(f"- `{run.path}`: {run.labels:,} answers of {run.labeler}, fingerprint `{fingerprint}`")
    gold = data.gold
    if gold is not None:
        columns = {"trusted grades": gold.grade, "chunks": gold.sets, "answers": gold.answers}
        named = ", ".join(f"{what} in column `{column}`" for what, column in columns.items() if column is not None)
        lines.append(f"- `{gold.path}`: {named}")
    lines += [f"- Note: {note}" for note in manifest.notes]
    lines += [
        "",
        "![training curve](curves.svg)",
        "",
        "## Use",
        "",
        "Set `engine.model` of a job to this folder, and `labeler` to the one above with the same options.",
        "Its labels are the work of a model: judge them with trusted grades (`relabel evaluate`) before they decide",
        "anything.",
        "",
        *spec_section(manifest.spec),
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------
# What a training would do, and how long a step takes.


PROBE_STRETCHES = 3
"""Stretches of steps that a probe times, after one that it does not: the first step also loads kernels."""


def estimate_teacher(
    spec: TeacherSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    report: ReportLine = lambda _: None,
    is_timed: bool = False,
    is_writer: bool = True,
    secrets: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingEstimate:
    """What training a spec's teacher would do; writes nothing, and loads no weights unless it is timed.

    Args:
        is_writer: see `train_teacher`.
        is_timed: train some steps to see how long they take.
    Raises:
        RelabelError: as `train_teacher`, before it trains.
    """
    if is_timed:  # steps of a probe are not reported
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"report_to": ()})})
    output, _, trainer, record = _prepare(
        spec,
        storage,
        cache_dir,
        secrets,
        is_writer=is_writer,
    )
    if output.is_finished(record, start):
        report(f"{spec.output}: holds this teacher already; a training would find it and end with nothing to do.")
    else:
        output.check_checkpoints(record, start)
    _report_data(spec, trainer, report)
    estimate = replace(trainer.estimate(), dropped=dict(trainer.data.dropped))
    if not is_timed:
        return estimate
    updates = spec.rollouts.updates if isinstance(spec, RolloutSpec) else 1
    step_s = _probe(trainer, updates=updates, report=report)
    if step_s is None:
        return estimate
    return replace(estimate, step_s=step_s, seconds=round(step_s * estimate.steps, 1))


class _ProbeEnded(Exception):  # noqa: N818 — no error
    """Ends a probe from within its own lines of progress."""


def _probe(trainer: TeacherTrainer, *, updates: int, report: ReportLine) -> float | None:
    """Mean seconds of a step, of a training in a folder that is then removed; None where it ends too soon for that.

    Args:
        trainer: it can't train again.
        updates: steps on the same rollouts: only the first of them samples answers, so they are timed together.
    """
    ends: list[float] = []

    def heard(line: str) -> None:
        if re.match(r"step \d+ of \d+\b", line) is None:
            report(line)
            return
        ends.append(time.perf_counter())
        if len(ends) == updates * (PROBE_STRETCHES + 1):
            raise _ProbeEnded

    with tempfile.TemporaryDirectory(prefix="relabel-") as scratch, contextlib.suppress(_ProbeEnded):
        trainer.train(Path(scratch), heard)
    marks = ends[updates - 1 :: updates]
    if len(marks) < 2:
        return None
    num_steps = updates * (len(marks) - 1)
    return round((marks[-1] - marks[0]) / num_steps, 4)

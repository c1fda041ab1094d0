"""The model that a student starts from: its kind and limits checked, its module built, its texts encoded.

Looking at a model (`check_base`) reads its config, its tokenizer and the heads of its files, so that a wrong one is
refused before weights are loaded or texts encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relabel.distill.students.kinds import KINDS, BaseKind
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_record import STUDENT_VERSION, StudentRecord
from relabel.distill.students.students import check_batches, make_texts, module_class
from relabel.distill.students.token_rows import PairTexts
from relabel.distill.training.adapters import check_targets
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.extras import require
from relabel.manifests.models.model_dirs import config_file
from relabel.manifests.models.references import ResolvedModel
from relabel.manifests.models.tokenizers import read_tokenizer
from relabel.manifests.phi import PhiTable
from relabel.manifests.specs import Columns

OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "mpnet",
    "longformer",
    "roberta-prelayernorm",
)
"""Model types whose position embeddings begin behind the padding token's: two fewer tokens fit than they have
positions.
"""


@dataclass
class Base:
    """A model that was looked at.

    Args:
        limit: longest row that it can read, in tokens; None where it knows none.
    """

    resolved: ResolvedModel
    config: Any
    tokenizer: Any
    limit: int | None


def check_base(spec: DistillSpec, resolved: ResolvedModel) -> Base:
    """Look at config, tokenizer, and the heads of its weights' files.

    Raises:
        ModelError: it is of the other kind, has no tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `student.lora.targets` names layers that it does not have, or
            it is a student of the other kind.
    """
    transformers = require("transformers", extra="cpu", purpose="relabel distill")
    require("accelerate", extra="cpu", purpose="relabel distill")
    require("matplotlib", extra="cpu", purpose="The plot of a training")
    from relabel.distill.students.decoder import load_lm
    from relabel.distill.students.encoder import load_backbone

    transformers.logging.set_verbosity_error()  # it reports weights that a student has no use for, at every load
    transformers.logging.disable_progress_bar()
    path, reference = resolved.path, resolved.reference
    try:
        config = transformers.AutoConfig.from_pretrained(config_file(path))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"model {reference!r}: its config can't be loaded ({_first_line(exc)}).") from exc
    tokenizer = read_tokenizer(transformers, path, reference)
    if not (path / "tokenizer.json").is_file() and not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"model {reference!r}: no fast tokenizer in {path}; a tokenizer.json is wanted.")
    kind = kind_of(config)
    if kind != KINDS[spec.student.kind].base:
        is_what = {"encoder": "is an encoder", "decoder": "is a decoder", None: "is neither an encoder nor a decoder"}[
            kind
        ]
        raise ModelError(
            f"model {reference!r} (a {config.model_type}) {is_what}, and student.kind is {spec.student.kind}. "
            f"Set student.kind to what it is, or name another model."
        )
    load_inner = load_backbone if kind == "encoder" else load_lm
    load_inner(path, f"model {reference!r}", device="meta")  # shapes alone: what is missing would start from noise
    if spec.student.lora is not None:
        check_targets(config, spec.student.lora, key="student.lora", reference=reference)
    limit = _limit(config, tokenizer)
    if limit is not None and spec.train.max_tokens > limit:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {reference!r} reads at most {limit} tokens. Lower it."
        )
    return Base(resolved, config, tokenizer, limit)


def kind_of(config: Any) -> BaseKind | None:
    """`encoder` or `decoder`; None for what is neither."""
    from transformers.models.auto import modeling_auto as auto

    if getattr(config, "is_encoder_decoder", False):
        return None
    if config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        # BERT has a causal head too: what it was trained for decides
        return "encoder"
    return "decoder" if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def _limit(config: Any, tokenizer: Any) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions > 0 and config.model_type in OFFSET_POSITIONS:
        positions -= 2
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit is not None and 0 < limit < 10**9]
    return min(limits) if limits else None


def make_record(spec: DistillSpec, base: Base, heads: dict[str, int], phi: PhiTable, columns: Columns) -> StudentRecord:
    """What the student will be.

    Raises:
        ModelError: the tokenizer has no token for a grade.
        ConfigError: the prompt is off.
    """
    own = module_class(spec.student.kind).own_parts(spec, base.resolved.path, base.tokenizer, heads["relevance"])
    return StudentRecord(
        version=STUDENT_VERSION,
        kind=spec.student.kind,
        name=spec.name,
        heads=heads,
        max_tokens=spec.train.max_tokens,
        columns=columns.model_dump(mode="json", exclude={"gold", "context"}),
        temperature=dict.fromkeys(heads, 1.0),
        phi=phi,
        packs=spec.student.batching == "packed",
        **{"pooling": spec.student.pooling, **own},
    )


def build_module(spec: DistillSpec, base: Base, record: StudentRecord) -> Any:
    """The module to train, its weights loaded; heads of an earlier student are kept where they have the same name
    and size.

    Raises:
        ModelError: weights can't be loaded, a decoder scales its logits, or rows of a batch are not answered apart.
    """
    try:
        module: Any = module_class(record.kind).start(spec, base.resolved.path, base.tokenizer, record)
        check_batches(module.eval(), texts_of(base, record), record, f"model {base.resolved.reference!r}")
        return module
    except (OSError, ValueError, RuntimeError) as exc:
        if isinstance(exc, ModelError | ConfigError):
            raise
        raise ModelError(
            f"model {base.resolved.reference!r}: its weights can't be loaded ({_first_line(exc)})."
        ) from exc


def texts_of(base: Base, record: StudentRecord) -> PairTexts:
    """What encodes this student's pairs."""
    return make_texts(record, base.tokenizer)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().split("\n", 1)[0][:200] or type(exc).__name__

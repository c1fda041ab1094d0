"""The model that a student starts from: its kind and limits checked, its module built, its texts encoded.

Looking at a model (`check_base`) reads config and tokenizer only, so that a wrong one is refused before labels are read
or weights loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.students.specs import DistillSpec, StudentSection
from distill.students.students import STUDENT_NAME, STUDENT_VERSION, StudentRecord, load_heads, make_texts, read_student
from distill.students.texts import PairTexts, grade_token_ids, render_prompt
from manifests.errors import ConfigError, ModelError
from manifests.extras import require
from manifests.models.references import ResolvedModel
from manifests.phi import PhiTable
from manifests.specs import Columns

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
    """Look at config and tokenizer.

    Raises:
        ModelError: it is of the other kind, or has no tokenizer.
        ConfigError: `train.max_tokens` is over its limit, or it is a student of the other kind.
    """
    transformers = require("transformers", extra="cpu", purpose="relabel distill")
    require("accelerate", extra="cpu", purpose="relabel distill")
    transformers.logging.set_verbosity_error()  # it reports weights that a student has no use for, at every load
    transformers.logging.disable_progress_bar()
    path, reference = resolved.path, resolved.reference
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"model {reference!r}: its config or tokenizer can't be loaded ({_first_line(exc)}).") from exc
    if not (path / "tokenizer.json").is_file() and not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"model {reference!r}: no fast tokenizer in {path}; a tokenizer.json is wanted.")
    kind = kind_of(config)
    if kind != spec.student.kind:
        is_what = {"encoder": "is an encoder", "decoder": "is a decoder", None: "is neither an encoder nor a decoder"}[
            kind
        ]
        raise ModelError(
            f"model {reference!r} (a {config.model_type}) {is_what}, and student.kind is {spec.student.kind}. "
            f"Set student.kind to what it is, or name another model."
        )
    limit = _limit(config, tokenizer)
    if limit is not None and spec.train.max_tokens > limit:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {reference!r} reads at most {limit} tokens. Lower it."
        )
    return Base(resolved, config, tokenizer, limit)


def kind_of(config: Any) -> str | None:
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
    prompt, grade_ids = ("", "", ""), []
    if spec.student.kind == "decoder":
        prompt = _prompt(spec.student, base.tokenizer, heads["relevance"])
        grade_ids = grade_token_ids(base.tokenizer, heads["relevance"], after=prompt[2])
    return StudentRecord(
        version=STUDENT_VERSION,
        kind=spec.student.kind,
        name=spec.name,
        heads=heads,
        max_tokens=spec.train.max_tokens,
        columns=columns.model_dump(mode="json", exclude={"gold", "context"}),
        temperature=dict.fromkeys(heads, 1.0),
        phi=phi,
        pooling=spec.student.pooling,
        prompt=prompt,
        grade_ids=grade_ids,
        packs=spec.student.batching == "packed",
    )


def _prompt(section: StudentSection, tokenizer: Any, grades: int) -> tuple[str, str, str]:
    wish = section.prompt
    style = wish.style if wish.style != "auto" else "chat" if tokenizer.chat_template else "plain"
    texts = {name: getattr(wish, name).replace("{top}", str(grades - 1)) for name in ("system", "user", "ending")}
    return render_prompt(tokenizer, style=style, **texts)


def build_module(spec: DistillSpec, base: Base, record: StudentRecord) -> Any:
    """The module to train, its weights loaded; heads of an earlier student are taken over where they have the same name
    and size.

    Raises:
        ModelError: weights can't be loaded, or a decoder scales its logits.
    """
    path = base.resolved.path
    try:
        if record.kind == "decoder":
            return _build_decoder(spec, base, record)
        from distill.students.encoder import EncoderStudent, load_backbone

        section = spec.student
        module = EncoderStudent(
            load_backbone(path), record.heads, pooling=section.pooling, dropout=section.dropout, seed=spec.train.seed
        )
        if (path / STUDENT_NAME).is_file():
            _take_heads(module, path)
    except (OSError, ValueError, RuntimeError) as exc:
        if isinstance(exc, ModelError | ConfigError):
            raise
        raise ModelError(
            f"model {base.resolved.reference!r}: its weights can't be loaded ({_first_line(exc)})."
        ) from exc
    return module


def _take_heads(module: Any, path: Path) -> None:
    """Heads of an earlier student, each whose name and size agree; a new one, or one with another number of grades,
    starts afresh.
    """
    held = read_student(path).heads
    load_heads(module, path, [name for name, head in module.heads.items() if held.get(name) == head.out_features])


def _build_decoder(spec: DistillSpec, base: Base, record: StudentRecord) -> Any:
    import torch

    from distill.students.decoder import DecoderStudent, check_grade_logits, load_lm

    lm = load_lm(base.resolved.path)
    module = DecoderStudent(lm, record.grade_ids)
    probe = make_texts(record, base.tokenizer).encode([("running shoes", "Trail shoe for runners.")])[0]
    check_grade_logits(module, torch.tensor([probe.ids]))
    if spec.student.lora is not None:
        module.adapt(spec.student.lora)
    return module


def texts_of(base: Base, record: StudentRecord) -> PairTexts:
    """What encodes this student's pairs."""
    return make_texts(record, base.tokenizer)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().split("\n", 1)[0][:200] or type(exc).__name__

"""The weights of a student as other libraries keep them: transformers' class for the task where that can say the same,
else sentence-transformers' modules.

Only transformers and safetensors are needed to write either. What transformers loads is loaded again and held against
the student. The modules lie in folders of their own, so that a class that would put a random head on the encoder finds
nothing to load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.logits import softmax
from relabel.distill.students.student_record import StudentRecord
from relabel.distill.students.students import StudentModel
from relabel.distill.students.token_rows import TokenRow
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import ModelError
from relabel.manifests.models.model_dirs import config_file

# B rows, K grades, D hidden

HEAD = "relevance"
MOST_APART = 1e-5
"""|Δp| at most between the student and what transformers loads."""
SMALL = 2.0**-13
"""What goes into a pooler's tanh is this part of the vector, and its head is as many times as large: tanh of so little
is what went in, to a part in 10⁸, and a power of two costs no digit.
"""
ROWS, SEED = 24, 0
MODULES = (
    ("0_Transformer", "sentence_transformers.base.modules.transformer.Transformer"),
    ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
    ("2_Dense", "sentence_transformers.base.modules.dense.Dense"),
)


def write_model(student: StudentModel, folder: Path, say: Callable[[str], None]) -> str:
    """Write weights, config and tokenizer.

    Returns:
        Whose classes load them: `transformers` or `sentence-transformers`.
    Raises:
        ModelError: what was written answers otherwise than the student.
    """
    model = _classifier(student) if student.record.pooling == "cls" else None
    if model is not None:
        model.save_pretrained(folder)
        _write_tokenizer(student, folder)
        if (apart := _apart(student, _reloaded(folder))) <= MOST_APART:
            say(f"transformers: {type(model).__name__}, at most {apart:.1g} from the student")
            return "transformers"
        raise ModelError(
            f"{student.path}: as {type(model).__name__} it answers {apart:.2g} from the student. Nothing was written; "
            "export it to a bundle, and report this with the model's name."
        )
    say(f"sentence-transformers: Transformer, Pooling ({student.record.pooling}), Dense")
    _write_modules(student, folder)
    return "sentence-transformers"


def _classifier(student: StudentModel) -> Any | None:
    """transformers' class for the task with the student's weights; None where it has none of a shape that can say the
    same.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    backbone = student.module.backbone
    config = AutoConfig.from_pretrained(config_file(student.path))
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    config.update(_labels(student.record))
    model = AutoModelForSequenceClassification.from_config(config).eval()
    linear = torch.nn.Linear
    inner = getattr(model.base_model, "pooler", None)
    dense, head = getattr(inner, "dense", inner), getattr(model, "classifier", None)
    if not isinstance(head, linear):
        dense, head = getattr(head, "dense", None), getattr(head, "out_proj", None)
    if not isinstance(dense, linear) or not isinstance(head, linear):
        return None
    weight_KD, bias_K = _folded(student)
    missing = model.base_model.load_state_dict(backbone.state_dict(), strict=False)
    if missing.unexpected_keys or any(not name.startswith("pooler.") for name in missing.missing_keys):
        return None
    with torch.no_grad():
        dense.weight.copy_(torch.eye(*dense.weight.shape) * SMALL)
        dense.bias.zero_()
        head.weight.copy_(weight_KD / SMALL)
        head.bias.copy_(bias_K)
    return model if _apart(student, model) <= MOST_APART else None  # another function than tanh


def _labels(record: StudentRecord) -> dict[str, Any]:
    names = {grade: f"grade {grade}" for grade in range(record.grades)}
    return {
        "num_labels": record.grades,
        "id2label": names,
        "label2id": {name: grade for grade, name in names.items()},
        "problem_type": "single_label_classification",
    }


def _folded(student: StudentModel) -> tuple[Any, Any]:
    """The relevance head's weight [K, D] and bias [K] over its temperature."""
    weight_KD, bias_K = student.module.output_rows()[HEAD]
    temperature = student.record.temperature.get(HEAD, 1.0)
    return weight_KD.detach() / temperature, bias_K.detach() / temperature


def _reloaded(folder: Path) -> Any:
    """What a user gets.

    Raises:
        ModelError: not all of its weights are in the folder.
    """
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"]:
        raise ModelError(f"{folder}: weights are missing: {', '.join(sorted(info['missing_keys']))}.")
    return model.eval()


def _apart(student: StudentModel, model: Any) -> float:
    """The largest |Δp| between a student and a classifier, over drawn rows of all lengths, padded together."""
    import torch

    rng = np.random.default_rng(SEED)
    most = student.record.max_tokens
    vocabulary = len(student.tokenizer)
    lengths = np.linspace(1, most, ROWS).round().astype(int).tolist()
    rows = [
        TokenRow(rng.integers(vocabulary, size=length).tolist(), [0] * (length // 2) + [1] * (length - length // 2))
        for length in lengths
    ]
    batch = student.texts.collate(rows)
    with torch.inference_mode():
        want_BK = student.module(**batch)[HEAD].numpy() / student.record.temperature.get(HEAD, 1.0)
        found_BK = model(**batch).logits.numpy()
    return float(np.abs(softmax(found_BK) - softmax(want_BK)).max())


def _write_modules(student: StudentModel, folder: Path) -> None:
    """Transformer, Pooling and Dense as sentence-transformers keeps them."""
    from safetensors.torch import save_file

    places = [folder / name for name, _ in MODULES]
    for place in places:
        place.mkdir()
    transformer, pooling, dense = places
    student.module.backbone.save_pretrained(transformer)
    _write_tokenizer(student, transformer)
    weight_KD, bias_K = _folded(student)
    grades, width = weight_KD.shape
    save_file({"linear.weight": weight_KD.contiguous(), "linear.bias": bias_K}, dense / "model.safetensors")
    modality = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    identity = "torch.nn.modules.linear.Identity"
    written = {
        transformer / "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": modality,
            "module_output_name": "token_embeddings",
        },
        pooling / "config.json": {
            "embedding_dimension": width,
            "pooling_mode": student.record.pooling,
            "include_prompt": True,
        },
        dense / "config.json": {
            "in_features": width,
            "out_features": grades,
            "bias": True,
            "activation_function": identity,
            "module_input_name": "sentence_embedding",
            "module_output_name": "scores",
        },
        folder / "modules.json": [
            {"idx": place, "name": str(place), "path": name, "type": kind} for place, (name, kind) in enumerate(MODULES)
        ],
        folder / "config_sentence_transformers.json": {
            "activation_fn": identity,
            "default_prompt_name": None,
            "model_type": "CrossEncoder",
            "prompts": {},
        },
    }
    for file, held in written.items():
        file.write_bytes(readable_json(held))


def _write_tokenizer(student: StudentModel, folder: Path) -> None:
    """The tokenizer; what it reads is cut as in training, and text that spells a control token is ordinary text."""
    student.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    held = json.loads(file.read_bytes())
    file.write_bytes(
        readable_json({**held, "model_max_length": student.record.max_tokens, "split_special_tokens": True})
    )

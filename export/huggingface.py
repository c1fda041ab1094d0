"""A student as a folder that Hugging Face's libraries load: the relevance head alone, its temperature folded in.

The weights are those of transformers' class for the task where that can answer the same, else sentence-transformers'
modules. Only transformers and safetensors are needed to write either. What transformers loads is loaded again and
compared with the student. The modules lie in folders of their own, so that a class that would put a random head on the
encoder finds nothing to load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from relabel.distill.students.manifest import StudentManifest, StudentRecord, read_student, read_student_manifest
from relabel.distill.students.model import StudentModel, TokenRow, load_student, softmax, student_digest
from relabel.export.bundles import locked, made_before, new_folder_for, switch
from relabel.export.exporting import student_manifest
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.models import config_file
from relabel.manifests.records import readable_json

CARD_NAME = "README.md"
_HUB = re.compile(r"hf:(?P<repo>[^@]+)(@.*)?")
_SHOWN = ("accuracy", "f1_macro", "kappa_quadratic", "auc")
"""Figures of the test split that the Hub shows."""
_PAIR = '[("red shoe", "A red running shoe, size 9")]'


def render_hub_card(manifest: StudentManifest, record: StudentRecord, library: str, licence: str | None) -> str:
    """Markdown below the Hub's metadata.

    Args:
        library: `transformers` or `sentence-transformers`.
        licence: SPDX expression; the Hub knows them in small letters.
    """
    data = _metadata(manifest, library, licence)
    left_out = [name for name in record.heads if name != "relevance"]
    lines = [
        "---",
        yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {manifest.name}",
        "",
        (
            f"Grades how relevant a document is to a query, 0 to {record.grades - 1}. A student by `relabel distill`, "
            f"exported by `relabel export --format hf`; starts from `{manifest.model.reference.rsplit('/', 1)[-1]}`."
        ),
        "",
        "```python",
        "from sentence_transformers import CrossEncoder",
        "",
        'model = CrossEncoder("path/of/this/folder")',
        f"probabilities = model.predict({_PAIR}, apply_softmax=True)  # calibrated, a column a grade",
        f"expected_grade = probabilities @ {list(range(record.grades))}  # what to rank by",
        "```",
        "",
        *(_TRANSFORMERS if library == "transformers" else _MODULES),
        "",
        f"- Reads at most {record.max_tokens} tokens of a pair; what is longer is cut.",
        "- The temperature that calibrated it is in the head: softmax of the logits is the probabilities.",
        *([f"- Without the student's other heads ({', '.join(left_out)})."] if left_out else []),
        f"- Licence: {licence or 'not stated; ask its authors before you ship it'}",
        "",
    ]
    return "\n".join(lines)


_TRANSFORMERS = [
    "`AutoModelForSequenceClassification.from_pretrained` loads it too, with its own head and `id2label`. The dense",
    "layer before the head does nothing but scale by a power of two, which the head takes back: keep it in float32 or",
    "bfloat16.",
]
_MODULES = [
    "The folder holds modules (Transformer, Pooling, Dense) and no config at its top, so that transformers' Auto",
    "classes refuse it: they would put a random head on the encoder. While it loads, transformers may report",
    "`pooler.*` MISSING, newly initialized: the encoder's own pooler, which nothing here asks.",
]


def _metadata(manifest: StudentManifest, library: str, licence: str | None) -> dict[str, Any]:
    """What the Hub reads; a base model that is not of the Hub is named in the text alone."""
    hub = _HUB.fullmatch(manifest.model.reference)
    figures = {name: manifest.metrics.test.student.get(name) for name in _SHOWN}
    known = {name: float(value) for name, value in figures.items() if value is not None}
    result = {
        "task": {"type": "text-ranking"},
        "dataset": {"type": "private", "name": f"queries held out, judged by {manifest.metrics.test.judged_by}"},
        "metrics": [{"type": name, "value": round(value, 4)} for name, value in known.items()],
    }
    return {
        **({"base_model": hub["repo"]} if hub else {}),
        "library_name": library,
        **({"license": licence.lower()} if licence else {}),
        "pipeline_tag": "text-ranking",
        "tags": ["cross-encoder", "reranker", "relabel"],
        **({"metrics": list(known), "model-index": [{"name": manifest.name, "results": [result]}]} if known else {}),
    }


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
    names = {grade: f"grade {grade}" for grade in range(student.record.grades)}
    config.update(
        {
            "num_labels": student.record.grades,
            "id2label": names,
            "label2id": {name: grade for grade, name in names.items()},
            "problem_type": "single_label_classification",
        }
    )
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


RECORD_NAME = "relabel.json"


def export_to_hub_folder(
    path: Path, target: Path, *, licence: str | None, is_replacing: bool, say: Callable[[str], None] = lambda _: None
) -> tuple[str, list[str], bool]:
    """Write a student's folder for transformers and sentence-transformers.

    Args:
        path: the student's folder.
        licence: SPDX expression.
        is_replacing: take the place of another such folder.
        say: called with progress, a line each.
    Returns:
        Whose classes load it (`transformers` or `sentence-transformers`); heads beyond relevance, which these classes
        have no place for; whether it was there already.
    Raises:
        ConfigError: it is no encoder.
        StaleRunError: `target` holds something else.
        ManifestError, ModelError, MissingExtraError: the student is not whole, or can't be loaded.
    """
    record = read_student(path)
    if record.kind != "encoder":
        raise ConfigError(
            f"{path}: a student of kind {record.kind} has no class there that answers as it does. Export it to a "
            "bundle, or take an encoder."
        )
    student_manifest(path)  # compares its files
    file = path / "manifest.json"
    manifest = read_student_manifest(file.read_bytes(), str(file))
    recipe = {"student": student_digest(path), "relabel": version("relabel-ir"), "licence": licence}
    done = made_before(target, _noted, recipe, is_replacing=is_replacing, what="export for these libraries")
    left_out = [name for name in record.heads if name != HEAD]
    if done is not None:
        return done, left_out, True
    student = load_student(path)
    with new_folder_for(target) as folder:
        library = write_model(student, folder, say)
        text = render_hub_card(manifest, record, library, licence)
        (folder / CARD_NAME).write_text(text, encoding="utf-8")
        (folder / RECORD_NAME).write_bytes(readable_json({**recipe, "library": library}))
        with locked(target, waits=True):
            switch(folder, target)
    return library, left_out, False


def _noted(target: Path) -> tuple[str, Any]:
    """Whose classes load a folder, and the recipe that it was made by."""
    held = json.loads((target / RECORD_NAME).read_bytes())
    return str(held.pop("library")), held

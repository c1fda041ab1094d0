"""A student as a folder that Hugging Face's libraries load: the relevance head alone, its temperature folded in. Form
`hf` answers a logit a grade; `rerank`, for endpoints that want one number a pair, the expected grade as its log-odds.
A decoder's prompt is in the folder's tokenizer, which puts it around each pair.

The weights are those of transformers' class for the task where that can answer the same, else sentence-transformers'
modules. Only transformers and safetensors are needed to write either. The student's graph comes along as ONNX
(`hub_onnx.py`). What was written is loaded again and compared with the student (`hub_parity.py`). The modules lie in
folders of their own, so that a class that would put a random head on the encoder finds nothing to load.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import yaml

from relabel.distill.students.model import (
    PROBES,
    DecoderTexts,
    StudentModel,
    TokenRow,
    load_student,
    save_tokenizer,
    softmax,
    student_digest,
)
from relabel.distill.students.spec import StudentManifest, StudentRecord, read_student
from relabel.export.bundle_facts import CARD_NAME, render_card
from relabel.export.bundles import HUB_RECORD_NAME, Recipe, made_before, new_folder_for
from relabel.export.exporting import Report, pairs_to_compare, student_manifest
from relabel.export.hub_onnx import GRAPHS, GraphFile, folded_head, measure_graphs, write_graphs
from relabel.export.hub_parity import (
    GRAPH,
    HEAD,
    MOST_APART,
    PARTS,
    Form,
    LoadedBack,
    check_folder,
    choose_pairs,
    model_folder,
)
from relabel.export.parity import PairsFile
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import ConfigError, MissingExtraError, ModelError
from relabel.manifests.files import Storage
from relabel.manifests.models import config_file
from relabel.manifests.records import plain, readable_json

_SHOWN = ("accuracy", "f1_macro", "kappa_quadratic", "auc")
"""Figures of the test split that the Hub shows."""


def render_hub_card(
    manifest: StudentManifest,
    record: StudentRecord,
    form: Form,
    score: Score,
    library: str,
    licence: str | None,
    graphs: Sequence[GraphFile],
) -> str:
    """Markdown below the Hub's metadata, in which a base model that is not of the Hub is left out.

    Args:
        library: `transformers` or `sentence-transformers`.
        licence: SPDX expression; the Hub knows them in small letters.
    """
    scheme, _, repository = manifest.model.reference.partition("@")[0].partition(":")
    test = manifest.metrics.test
    figures = {}
    for name in _SHOWN:
        value = test.student.get(name)
        if value is not None:
            figures[name] = float(value)
    metadata: dict[str, Any] = {}
    if scheme == "hf":
        metadata["base_model"] = repository
    metadata["library_name"] = library
    if licence:
        metadata["license"] = licence.lower()
    metadata["pipeline_tag"] = "text-ranking"
    metadata["tags"] = ["cross-encoder", "reranker", "relabel"]
    if figures:
        results = {
            "task": {"type": "text-ranking"},
            "dataset": {"type": "private", "name": f"queries held out, judged by {test.judged_by}"},
            "metrics": [{"type": name, "value": round(value, 4)} for name, value in figures.items()],
        }
        metadata["metrics"] = list(figures)
        metadata["model-index"] = [{"name": manifest.name, "results": [results]}]
    return render_card(
        "hub.md",
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip(),
        name=manifest.name,
        base=manifest.model.reference.rsplit("/", 1)[-1],
        form=form,
        library=library,
        kind=record.kind,
        top=record.grades - 1,
        answers=SCORES[score].card.format(top=record.grades - 1),
        max_tokens=record.max_tokens,
        left_out=[name for name in record.heads if name != HEAD],
        licence=licence,
        graphs=graphs,
    )


# B rows, K grades, D hidden

Score = Literal["expected-grade", "log-odds-relevant"]


@dataclass(frozen=True)
class ScoreForm:
    """Of form `rerank`, what a call answers.

    Args:
        label: its name in the config.
        card: in the card, of the highest grade `top`.
        activation: what makes it of the logit, which is the same.
    """

    label: str
    card: str
    activation: str


SCORES: dict[str, ScoreForm] = {
    "expected-grade": ScoreForm(
        label="expected grade",
        card="expected grade / {top}: 0 to 1",
        activation="torch.nn.modules.activation.Sigmoid",
    ),
    "log-odds-relevant": ScoreForm(
        label="log-odds of the expected grade",
        card="log-odds of expected grade / {top}",
        activation="torch.nn.modules.linear.Identity",
    ),
}
SMALL = 2.0**-13
"""What goes into a pooler's tanh is this part of the vector, and its head is as many times as large: tanh of so little
is what went in, to a part in 10⁸, and a power of two costs no digit.
"""
# Of tanh units that stand for a softplus, to 1e-6.
STEP = 0.75
"""Their spacing."""
SLOPE = 2 / 3
"""Of their argument."""
EDGE = 4.5
"""How far the outermost lie beyond the range in which they do: -67 to 67 in an encoder as wide as MiniLM."""
MODULES = (
    (PARTS[0], "sentence_transformers.base.modules.transformer.Transformer"),
    (PARTS[1], "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
    (PARTS[2], "sentence_transformers.base.modules.dense.Dense"),
)


def write_model(
    student: StudentModel, form: Form, folder: Path, report: Report, score: Score = "expected-grade"
) -> str:
    """Write weights, config and tokenizer.

    Returns:
        Whose classes load them: `transformers` or `sentence-transformers`.
    """
    weight_KD, bias_K = folded_head(student)
    layers = _one_logit(weight_KD, bias_K) if form == "rerank" else _a_logit_a_grade(weight_KD, bias_K)
    is_decoder = student.record.kind == "decoder"
    model = None
    if is_decoder or student.record.pooling == "cls":
        model = _classifier(student, form, score, layers)
    if model is not None:
        model.save_pretrained(folder)
        _write_tokenizer(student, folder)
        # vLLM cuts texts at this length, not at the tokenizer's
        limits = {"max_seq_length": student.record.max_tokens, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_bytes(readable_json(limits))
        report(f"transformers: {type(model).__name__}")
        return "transformers"
    report(f"sentence-transformers: Transformer, Pooling ({_pooling(student)}), Dense")
    if form == "rerank":
        heads = "have one linear layer" if is_decoder else "read BERT's first token"
        report(f"Neither vLLM nor text-embeddings-inference serves these modules: their heads {heads}.")
    _write_modules(
        student,
        form,
        score,
        layers,
        folder,
    )
    return "sentence-transformers"


_Layers: TypeAlias = tuple[Any, Any, Any, Any]
"""Weight [D, D] and bias [D] of a linear layer of the pooled vector, then, after tanh, weight [K, D] and bias [K]."""


def _a_logit_a_grade(weight_KD: Any, bias_K: Any) -> _Layers:
    """The vector through tanh as it is."""
    import torch

    width = weight_KD.shape[1]
    return torch.eye(width) * SMALL, torch.zeros(width), weight_KD / SMALL, bias_K


def _one_logit(weight_KD: Any, bias_K: Any) -> _Layers:
    """Log-odds of the expected grade e of top: log e - log (top - e), of two or three grades.

    Of two grades that is z1 - z0. Of three it is softplus(u) - softplus(v) where u = z2 - z1 + log 2 and v = z0 - z1 +
    log 2, and a softplus is t / 2, which is linear in the vector, and an even function, for which tanh units at equal
    steps stand.
    """
    import torch

    grades, width = weight_KD.shape
    dense_DD = torch.zeros(width, width)
    dense_D = torch.zeros(width)
    weight_1D = torch.zeros(1, width)
    dense_DD[0] = (weight_KD[-1] - weight_KD[0]) / (grades - 1) * SMALL
    weight_1D[0, 0] = 1 / SMALL
    if grades == 3:
        count = (width - 1) // 2
        centres = (np.arange(count) - (count - 1) / 2) * STEP
        at = np.linspace(-1, 1, 4001) * max(centres[-1] - EDGE, STEP)
        units = np.column_stack([np.tanh(SLOPE * (at[:, None] - centres)), np.ones_like(at)])
        even_part = np.logaddexp(0, at) - at / 2
        shares = np.linalg.lstsq(units, even_part, rcond=1e-9)[0][:-1]
        for first, grade, sign in ((1, 2, 1), (1 + count, 0, -1)):
            rows = slice(first, first + count)
            dense_DD[rows] = SLOPE * (weight_KD[grade] - weight_KD[1])
            dense_D[rows] = SLOPE * (bias_K[grade] - bias_K[1] + np.log(2) - torch.from_numpy(centres))
            weight_1D[0, rows] = torch.from_numpy(sign * shares)
    return dense_DD, dense_D, weight_1D, (bias_K[-1:] - bias_K[:1]) / (grades - 1)


def _classifier(student: StudentModel, form: Form, score: Score, layers: _Layers) -> Any | None:
    """transformers' class for the task with the student's weights; None where it has none of a shape that can answer
    the same.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    is_decoder = student.record.kind == "decoder"
    weight_OD, bias_O = folded_head(student)
    if is_decoder and form == "rerank":
        weight_OD = weight_OD[1:] - weight_OD[:1]
        bias_O = bias_O[1:] - bias_O[:1]
    config = AutoConfig.from_pretrained(config_file(student.path))
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    labels = [SCORES[score].label]
    if form == "hf":
        labels = [f"grade {grade}" for grade in range(student.record.grades)]
    if is_decoder and (len(weight_OD) != len(labels) or bias_O.any()):
        return None  # its class has one linear layer, without a bias
    settings = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    if form == "hf":
        settings["problem_type"] = "single_label_classification"
    else:
        settings["sentence_transformers"] = {"activation_fn": SCORES[score].activation}
    if is_decoder:
        settings["pad_token_id"] = _pair_tokenizer(student).pad_token_id
    config.update(settings)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    missing = model.base_model.load_state_dict(student.module.inner.base_model.state_dict(), strict=False)
    if missing.unexpected_keys or any(not name.startswith("pooler.") for name in missing.missing_keys):
        return None
    linear = torch.nn.Linear
    if is_decoder:
        if not isinstance(getattr(model, "score", None), linear):
            return None
        model.score.weight.data.copy_(weight_OD)
        return model
    inner = getattr(model.base_model, "pooler", None)
    dense = getattr(inner, "dense", inner)
    head = getattr(model, "classifier", None)
    if not isinstance(head, linear):
        dense = getattr(head, "dense", None)
        head = getattr(head, "out_proj", None)
    if not isinstance(dense, linear) or not isinstance(head, linear):
        return None
    parameters = (dense.weight, dense.bias, head.weight, head.bias)
    with torch.no_grad():
        for parameter, values in zip(parameters, layers, strict=True):
            parameter.copy_(values)
    if _apart(student, form, model) > MOST_APART:
        return None  # another function than tanh
    return model


def _apart(student: StudentModel, form: Form, model: Any) -> float:
    """The largest |Δp| between an encoder student and a classifier, over drawn rows of all lengths, padded together."""
    import torch

    most = student.record.max_tokens
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, most, 24).round().astype(int).tolist()
    rows = []
    for length in lengths:
        ids = rng.integers(len(student.tokenizer), size=length).tolist()
        first_text = length // 2
        rows.append(TokenRow(ids, [0] * first_text + [1] * (length - first_text)))
    batch = student.texts.collate(rows)
    with torch.inference_mode():
        student_BK = student.module(**batch)[HEAD].numpy()
        logits_BK = model(**batch).logits.numpy()
    probs_BK = softmax(student_BK / student.record.temperature.get(HEAD, 1.0))
    if form == "hf":
        return float(np.abs(softmax(logits_BK) - probs_BK).max())
    expected_B = probs_BK @ np.arange(student.record.grades) / (student.record.grades - 1)
    scores_B = 1 / (1 + np.exp(-logits_BK[:, 0]))
    return float(np.abs(scores_B - expected_B).max())


def _pooling(student: StudentModel) -> str:
    """What sentence-transformers calls it."""
    return "lasttoken" if student.record.kind == "decoder" else student.record.pooling


def _write_modules(student: StudentModel, form: Form, score: Score, layers: _Layers, folder: Path) -> None:
    """Transformer, Pooling and Dense, of one logit two of these, as sentence-transformers keeps them."""
    from safetensors.torch import save_file

    transformer = folder / PARTS[0]
    pooling = folder / PARTS[1]
    modules = list(MODULES)
    dense_layers = [("Identity", *folded_head(student))]
    activation = SCORES["log-odds-relevant"].activation
    if form == "rerank":
        modules.append((PARTS[3], MODULES[-1][1]))
        dense_layers = [("Tanh", *layers[:2]), ("Identity", *layers[2:])]
        activation = SCORES[score].activation
    for name, _ in modules:
        (folder / name).mkdir()
    student.module.inner.base_model.save_pretrained(transformer)
    _write_tokenizer(student, transformer)
    written = {
        transformer / "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
        },
        pooling / "config.json": {
            "embedding_dimension": layers[0].shape[0],
            "pooling_mode": _pooling(student),
            "include_prompt": True,
        },
        folder / "modules.json": [
            {"idx": number, "name": str(number), "path": name, "type": kind}
            for number, (name, kind) in enumerate(modules)
        ],
        folder / "config_sentence_transformers.json": {
            "activation_fn": activation,
            "default_prompt_name": None,
            "model_type": "CrossEncoder",
            "prompts": {},
        },
    }
    for number, (name, weight_OI, bias_O) in enumerate(dense_layers, 2):
        dense = folder / f"{number}_Dense"
        is_last = number == len(modules) - 1
        save_file({"linear.weight": weight_OI.contiguous(), "linear.bias": bias_O}, dense / "model.safetensors")
        written[dense / "config.json"] = {
            "in_features": weight_OI.shape[1],
            "out_features": weight_OI.shape[0],
            "bias": True,
            "activation_function": f"torch.nn.{name}",
            "module_input_name": "sentence_embedding",
            "module_output_name": "scores" if is_last else "sentence_embedding",
        }
    for file, settings in written.items():
        file.write_bytes(readable_json(settings))


def _pair_tokenizer(student: StudentModel) -> Any:
    """The student's tokenizer for these libraries, which pad and cut as its settings are: those of its base. A
    decoder's puts the prompt's tokens around a pair, as others put `[CLS]` and `[SEP]`.
    """
    tokenizer = copy.deepcopy(student.tokenizer)
    tokenizer.padding_side = "right"
    types = [name for name in tokenizer.model_input_names if name == "token_type_ids"]
    tokenizer.model_input_names = ["input_ids", *types, "attention_mask"]  # without a mask padding would be read
    tokenizer.chat_template = None  # sentence-transformers would take a pair for a chat
    tokenizer.model_max_length = student.record.max_tokens
    for name in CALLS:
        tokenizer.init_kwargs.pop(name, None)
    # documents are hostile: text that spells a control token is ordinary text
    tokenizer.split_special_tokens = True
    tokenizer.init_kwargs["split_special_tokens"] = True
    if isinstance(student.texts, DecoderTexts):
        _put_prompt_around(tokenizer, student.texts.prompt_ids)
    return tokenizer


CALLS = ("max_length", "stride", "truncation", "truncation_strategy", "padding", "pad_to_multiple_of")
"""What a base's tokenizer_config.json may hold of the calls that others made."""


def _put_prompt_around(tokenizer: Any, prompt_ids: tuple[list[int], list[int], list[int]]) -> None:
    """Have a tokenizer put a decoder's prompt around two texts, and cut the end of what is too long."""
    from tokenizers.processors import TemplateProcessing

    before, between, after = prompt_ids
    pieces = {"before": before, "between": between, "after": after}
    pieces = {name: ids for name, ids in pieces.items() if ids}
    template = [name for name in ("before", "$A", "between", "$B:0", "after") if name.startswith("$") or name in pieces]
    special_tokens = []
    for name, ids in pieces.items():
        special_tokens.append({"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[name for name in template if name != "$B:0"],  # so transformers reads a pair whose document is empty
        pair=template,
        special_tokens=special_tokens,
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.truncation_side = "right"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # other classes give token types


def _write_tokenizer(student: StudentModel, folder: Path) -> None:
    """The tokenizer as its files have to hold it.

    Raises:
        ModelError: a decoder's, loaded again, reads a pair otherwise than the student.
    """
    from transformers import AutoTokenizer

    save_tokenizer(_pair_tokenizer(student), folder)
    is_decoder = student.record.kind == "decoder"
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_bytes())
    # a decoder's: others put their own marks around texts. And transformers 4, with which optimum comes, does not know
    # the name that transformers 5 gives to this class
    if is_decoder or settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_bytes(readable_json(settings))
    if not is_decoder:
        return
    pairs = [("a", document) for _, document in PROBES]
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded_ids = [loaded(*pair, truncation=True).input_ids for pair in pairs]
    if loaded_ids != [row.ids for row in student.texts.encode(pairs)]:
        raise ModelError(
            f"{student.path}: its tokenizer can't hold the prompt. Nothing was written; export it to a bundle, and "
            "report this with the model's name."
        )


def public_lineage(digest: str, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder was made of, as a bundle's manifest has it, but by digests alone: such a folder is often made
    public, and names no place.

    Args:
        digest, name, manifest: the student's.
    """
    labels = []
    for source in manifest.get("labels") or ():
        digests = {key: source[key] for key in ("fingerprint", "model") if source.get(key)}
        if digests:
            labels.append(digests)
    return {"student": {"digest": digest, "name": name}, "labels": labels, "split": manifest.get("split")}


def export_to_hub_folder(
    path: Path,
    target: Path,
    form: Form,
    *,
    score: Score = "expected-grade",
    storage: Storage,
    pairs: PairsFile | None = None,
    precisions: Sequence[str] | None = None,
    licence: str | None,
    is_replacing: bool,
    report: Report = lambda _: None,
) -> HubFolder:
    """Write a student's folder for transformers and sentence-transformers.

    Args:
        path: the student's folder.
        pairs: what to compare on; the student's own by default.
        precisions: of graphs, of `GRAPHS`. By default fp32 of an encoder that torch can trace, and none of a decoder,
            whose graph is as large as its weights.
        licence: SPDX expression.
        is_replacing: take the place of another such folder.
        report: called with progress, a line each.
    Raises:
        GateError: a library that loads it answers otherwise than the student; nothing is made at `target`.
        ConfigError: no class there answers as it does, or no graph is made in such a precision.
        InputError: there are no pairs to compare a smaller graph on.
        StaleRunError: `target` holds something else.
        ManifestError, ModelError, MissingExtraError: the student is not whole, or can't be loaded.
    """
    record = read_student(path)
    _refuse_form(path, record, form, precisions)
    facts = student_manifest(path)
    manifest = StudentManifest.read(readable_json(facts), f"{path}/manifest.json")
    recipe = _recipe_of(
        path,
        form,
        score=score,
        precisions=precisions,
        licence=licence,
    )
    existing = made_before(
        target,
        _noted,
        Recipe(recipe, _options_in(recipe)),
        is_replacing=is_replacing,
        what="export for these libraries",
    )
    left_out = [name for name in record.heads if name != HEAD]
    if existing is not None:
        return replace(existing, left_out=left_out)
    asked = choose_pairs(record, facts, pairs, storage)
    compared = None
    if set(precisions or ()) - {"fp32"}:
        compared, _ = pairs_to_compare(
            path=path,
            record=record,
            manifest=facts,
            spec=ExportSpec(),
            pairs=pairs,
            storage=storage,
        )
    student = load_student(path)
    with new_folder_for(target) as folder:
        library = write_model(
            student,
            form,
            folder,
            report,
            score,
        )
        graphs = _write_graphs(
            student=student,
            folder=folder,
            form=form,
            library=library,
            precisions=precisions,
            report=report,
        )
        checks = check_folder(
            student=student,
            folder=folder,
            form=form,
            library=library,
            asked=asked,
            report=report,
        )
        parities = []
        if compared is not None:
            parities = measure_graphs(
                student=student,
                folder=folder,
                form=form,
                library=library,
                graphs=graphs,
                pairs=compared,
                report=report,
            )
        card = render_hub_card(
            manifest=manifest,
            record=record,
            form=form,
            score=score,
            library=library,
            licence=licence,
            graphs=graphs,
        )
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        notes = {
            "lineage": public_lineage(recipe["student"], record.name, facts),
            "library": library,
            "compared_on": asked.source,
            "checks": plain(checks),
            "graphs": plain(graphs),
            "parity": plain(parities),
        }
        (folder / HUB_RECORD_NAME).write_bytes(readable_json({**recipe, **notes}))
    return HubFolder(library, checks, graphs, left_out, was_done=False)


def _refuse_form(path: Path, record: StudentRecord, form: Form, precisions: Sequence[str] | None) -> None:
    """
    Raises:
        ConfigError: no class there answers as the student does, or no graph is made in such a precision.
    """
    if record.kind not in ("encoder", "decoder"):
        raise ConfigError(
            f"{path}: a student of kind {record.kind} has no class there that answers as it does. Export it to a "
            "bundle, or take an encoder or a decoder."
        )
    if form == "rerank" and record.grades > 3:
        raise ConfigError(
            f"{path}: has {record.grades} grades, and the heads of rerank endpoints can say the expected grade of two "
            "or three in one number. Take --format hf, or serve a bundle: docs/deploy/serving/rerank.py."
        )
    unknown = [name for name in precisions or () if name not in GRAPHS]
    if unknown:
        raise ConfigError(f"--precisions {unknown[0]}: a graph in such a folder is one of {', '.join(GRAPHS)}.")


def _recipe_of(
    path: Path, form: Form, *, score: Score, precisions: Sequence[str] | None, licence: str | None
) -> dict[str, Any]:
    """What a folder is made of: another export of the same need not be made again."""
    recipe: dict[str, Any] = {
        "student": student_digest(path),
        "form": form,
        "relabel": version("relabel-ir"),
        "licence": licence,
        "precisions": None if precisions is None else list(precisions),
    }
    if form == "rerank":
        recipe["score"] = score
    return recipe


def _write_graphs(
    student: StudentModel, folder: Path, form: Form, library: str, precisions: Sequence[str] | None, report: Report
) -> list[GraphFile]:
    """The folder's graphs. Of one that nobody asked for, that it can't be made is reported.

    Raises:
        ModelError, MissingExtraError: one that was asked for can't be made.
    """
    if precisions is not None:
        return write_graphs(
            student,
            folder,
            form,
            library,
            precisions,
            report,
        )
    if student.record.kind == "decoder":
        return []
    try:
        return write_graphs(
            student,
            folder,
            form,
            library,
            ("fp32",),
            report,
        )
    except (ModelError, MissingExtraError) as exc:
        shutil.rmtree((model_folder(folder, library) / GRAPH).parent, ignore_errors=True)
        report(f"without a graph (onnx/): {exc}")
        return []


@dataclass(frozen=True)
class HubFolder:
    """What an export for these libraries came to.

    Args:
        library: whose classes load it: `transformers` or `sentence-transformers`.
        checks: what each library answered.
        graphs: as ONNX.
        left_out: heads beyond relevance, which these classes have no place for.
        was_done: it was there already.
    """

    library: str
    checks: list[LoadedBack]
    graphs: list[GraphFile]
    left_out: list[str]
    was_done: bool


def _options_in(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a user chose of a recipe."""
    return {name: recipe.get(name) for name in ("form", "score", "licence", "precisions")}


def _noted(target: Path) -> tuple[HubFolder, Recipe]:
    """A folder that was made before, and the recipe that it was made by."""
    recipe = json.loads((target / HUB_RECORD_NAME).read_bytes())
    library = str(recipe.pop("library"))
    checks = recipe.pop("checks", None)
    graphs = recipe.pop("graphs", None)
    recipe.pop("lineage", None)
    recipe.pop("compared_on", None)
    recipe.pop("parity", None)
    if checks is None or graphs is None:  # of a relabel that did not load what it wrote, or wrote no graph
        return HubFolder(library, [], [], [], was_done=True), Recipe(None, _options_in(recipe))
    made = HubFolder(
        library=library,
        checks=[LoadedBack(**check) for check in checks],
        graphs=[GraphFile(**graph) for graph in graphs],
        left_out=[],
        was_done=True,
    )
    return made, Recipe(recipe, _options_in(recipe))

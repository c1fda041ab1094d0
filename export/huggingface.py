"""A student as a folder that Hugging Face's libraries load: the relevance head alone, its temperature folded in. Form
`hf` answers a logit a grade; `rerank`, for endpoints that want one number a pair, the expected grade as its log-odds.
A decoder's prompt is in the folder's tokenizer, which puts it around each pair.

The weights are those of transformers' class for the task where that can answer the same, else sentence-transformers'
modules. Only transformers and safetensors are needed to write either. What transformers loads is loaded again and
compared with the student. The modules lie in folders of their own, so that a class that would put a random head on the
encoder finds nothing to load.
"""

from __future__ import annotations

import copy
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import yaml

from relabel.distill.students.manifest import StudentManifest, StudentRecord, read_student, read_student_manifest
from relabel.distill.students.model import (
    PROBES,
    DecoderTexts,
    StudentModel,
    TokenRow,
    load_student,
    softmax,
    student_digest,
)
from relabel.export.bundles import locked, made_before, new_folder_for, switch
from relabel.export.exporting import student_manifest
from relabel.export.loader import Encoder
from relabel.export.parity import expected_grade
from relabel.manifests.errors import ConfigError, InputError, ModelError, ServerGoneError
from relabel.manifests.models import config_file
from relabel.manifests.records import readable_json
from relabel.manifests.secrets import redacted, shortened

# ------------------------------------------------------------------------------
# A student as a folder that Hugging Face's libraries load: the relevance head alone, its temperature folded in. Form
# `hf` answers a logit a grade; `rerank`, for endpoints that want one number a pair, the expected grade as its log-
# odds. A decoder's prompt is in the folder's tokenizer, which puts it around each pair. The weights are those of
# transformers' class for the task where that can answer the same, else sentence-transformers' modules. Only
# transformers and safetensors are needed to write either. What transformers loads is loaded again and compared with
# the student. The modules lie in folders of their own, so that a class that would put a random head on the encoder
# finds nothing to load.


CARD_NAME = "README.md"
_HUB = re.compile(r"hf:(?P<repo>[^@]+)(@.*)?")
_SHOWN = ("accuracy", "f1_macro", "kappa_quadratic", "auc")
"""Figures of the test split that the Hub shows."""
_PAIR = '[("red shoe", "A red running shoe, size 9")]'


def render_hub_card(
    manifest: StudentManifest, record: StudentRecord, form: Form, score: Score, library: str, licence: str | None
) -> str:
    """Markdown below the Hub's metadata.

    Args:
        library: `transformers` or `sentence-transformers`.
        licence: SPDX expression; the Hub knows them in small letters.
    """
    top = record.grades - 1
    usage = {
        "hf": [
            f"probabilities = model.predict({_PAIR}, apply_softmax=True)  # calibrated, a column a grade",
            f"expected_grade = probabilities @ {list(range(record.grades))}  # what to rank by",
        ],
        "rerank": [f"scores = model.predict({_PAIR})  # {SCORES[score][1].format(top=top)}, what to rank by"],
    }[form]
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
            f"exported by `relabel export --format {form}`; starts from "
            f"`{manifest.model.reference.rsplit('/', 1)[-1]}`."
        ),
        "",
        "```python",
        "from sentence_transformers import CrossEncoder",
        "",
        'model = CrossEncoder("path/of/this/folder")',
        *usage,
        "```",
        "",
        *_loading(record, form, library),
        "",
        f"- Reads at most {record.max_tokens} tokens of a pair; what is longer is cut.",
        "- The temperature that calibrated it is in the head"
        + (": softmax of the logits is the probabilities." if form == "hf" else "."),
        *([f"- Without the student's other heads ({', '.join(left_out)})."] if left_out else []),
        f"- Licence: {licence or 'not stated; ask its authors before you ship it'}",
        "",
    ]
    return "\n".join(lines)


def _loading(record: StudentRecord, form: Form, library: str) -> list[str]:
    """What the card says of the classes and servers that load it."""
    is_decoder = record.kind == "decoder"
    if library == "sentence-transformers":
        return [*_MODULES, *(_PROMPT if is_decoder else [])]
    if is_decoder:
        return [*_PROMPT, *(_DECODER_SERVERS if form == "rerank" else [])]
    return _TRANSFORMERS if form == "hf" else _SERVERS


_PROMPT = [
    "The tokenizer puts the prompt around a pair: call it with query and document as its two texts, and truncation.",
    "Of a pair that is too long it cuts the document, as in training, unless the query fills more than half of the",
    "room: then it cuts the query too.",
]
_DECODER_SERVERS = [
    "",
    "One logit a pair, the log-odds of the expected grade over the highest. vLLM (`--runner pooling --dtype float32`)",
    "serves it as `/rerank` and `/score`; `relabel conform URL BUNDLE` compares such a server with the bundle.",
]
_TRANSFORMERS = [
    "`AutoModelForSequenceClassification.from_pretrained` loads it too, with its own head and `id2label`. The dense",
    "layer before the head does nothing but scale by a power of two, which the head takes back: keep it in float32 or",
    "bfloat16.",
]
_SERVERS = [
    "One logit a pair, the log-odds of the expected grade over the highest. `AutoModelForSequenceClassification` loads",
    "it; vLLM (`--dtype float32`) and text-embeddings-inference serve it as `/rerank` and `/score`; `relabel conform",
    "URL BUNDLE` compares such a server with the bundle. Keep the head in float32: its tanh units stand for the",
    "logarithms of the expected grade.",
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
Form = Literal["hf", "rerank"]
Score = Literal["expected-grade", "log-odds-relevant"]
SCORES: dict[str, tuple[str, str, str]] = {
    "expected-grade": ("expected grade", "expected grade / {top}: 0 to 1", "torch.nn.modules.activation.Sigmoid"),
    "log-odds-relevant": (
        "log-odds of the expected grade",
        "log-odds of expected grade / {top}",
        "torch.nn.modules.linear.Identity",
    ),
}
"""Of form `rerank`, what a call answers: its name, what the card says, and what makes it of the logit, which is the
same.
"""
MOST_APART = 1e-5
"""|Δp| at most between the student and what transformers loads; of `rerank`, of the expected grade over the highest."""
SMALL = 2.0**-13
"""What goes into a pooler's tanh is this part of the vector, and its head is as many times as large: tanh of so little
is what went in, to a part in 10⁸, and a power of two costs no digit.
"""
STEP, SLOPE, EDGE = 0.75, 2 / 3, 4.5
"""Of tanh units that stand for a softplus, to 1e-6: their spacing, the slope of their argument, and how far the
outermost lie beyond the range in which they do: -67 to 67 in an encoder as wide as MiniLM.
"""
ACTIVATION = "torch.nn.{}"
ROWS, SEED = 24, 0
MODULES = (
    ("0_Transformer", "sentence_transformers.base.modules.transformer.Transformer"),
    ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
    ("2_Dense", "sentence_transformers.base.modules.dense.Dense"),
)


def write_model(
    student: StudentModel, form: Form, folder: Path, say: Callable[[str], None], score: Score = "expected-grade"
) -> str:
    """Write weights, config and tokenizer.

    Returns:
        Whose classes load them: `transformers` or `sentence-transformers`.
    Raises:
        ModelError: what was written answers otherwise than the student.
    """
    layers = {"hf": _a_logit_a_grade, "rerank": _one_logit}[form](*_folded(student))
    is_decoder = student.record.kind == "decoder"
    model = _classifier(student, form, score, layers) if is_decoder or student.record.pooling == "cls" else None
    if model is not None:
        model.save_pretrained(folder)
        _write_tokenizer(student, folder)
        (folder / "sentence_bert_config.json").write_bytes(  # vLLM cuts texts at this length, not at the tokenizer's
            readable_json({"max_seq_length": student.record.max_tokens, "do_lower_case": False})
        )
        if (apart := _apart(student, form, _reloaded(folder), folder)) <= MOST_APART:
            say(f"transformers: {type(model).__name__}, at most {apart:.1g} from the student")
            return "transformers"
        raise ModelError(
            f"{student.path}: as {type(model).__name__} it answers {apart:.2g} from the student. Nothing was written; "
            "export it to a bundle, and report this with the model's name."
        )
    say(f"sentence-transformers: Transformer, Pooling ({_pooling(student)}), Dense")
    if form == "rerank":
        heads = "have one linear layer" if is_decoder else "read BERT's first token"
        say(f"Neither vLLM nor text-embeddings-inference serves these modules: their heads {heads}.")
    _write_modules(student, form, score, layers, folder)
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
    dense_DD, dense_D, weight_1D = torch.zeros(width, width), torch.zeros(width), torch.zeros(1, width)
    dense_DD[0] = (weight_KD[-1] - weight_KD[0]) / (grades - 1) * SMALL
    weight_1D[0, 0] = 1 / SMALL
    bias_1 = (bias_K[-1:] - bias_K[:1]) / (grades - 1)
    if grades == 3:
        count = (width - 1) // 2
        places = (np.arange(count) - (count - 1) / 2) * STEP
        at = np.linspace(-1, 1, 4001) * max(places[-1] - EDGE, STEP)
        units = np.column_stack([np.tanh(SLOPE * (at[:, None] - places)), np.ones_like(at)])
        parts = np.linalg.lstsq(units, np.logaddexp(0, at) - at / 2, rcond=1e-9)[0][:-1]
        for first, grade, sign in ((1, 2, 1), (1 + count, 0, -1)):
            held = slice(first, first + count)
            dense_DD[held] = SLOPE * (weight_KD[grade] - weight_KD[1])
            dense_D[held] = SLOPE * (bias_K[grade] - bias_K[1] + np.log(2) - torch.from_numpy(places))
            weight_1D[0, held] = torch.from_numpy(sign * parts)
    return dense_DD, dense_D, weight_1D, bias_1


def _classifier(student: StudentModel, form: Form, score: Score, layers: _Layers) -> Any | None:
    """transformers' class for the task with the student's weights; None where it has none of a shape that can say the
    same.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    is_decoder, (weight_OD, bias_O) = student.record.kind == "decoder", _folded(student)
    if is_decoder and form == "rerank":
        weight_OD, bias_O = weight_OD[1:] - weight_OD[:1], bias_O[1:] - bias_O[:1]
    config = AutoConfig.from_pretrained(config_file(student.path))
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    names = {"hf": [f"grade {grade}" for grade in range(student.record.grades)], "rerank": [SCORES[score][0]]}[form]
    if is_decoder and (len(weight_OD) != len(names) or bias_O.any()):
        return None  # its class has one linear layer, without a bias
    config.update(
        {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: place for place, name in enumerate(names)},
            **({"problem_type": "single_label_classification"} if form == "hf" else {}),
            **({"sentence_transformers": {"activation_fn": SCORES[score][2]}} if form == "rerank" else {}),
            **({"pad_token_id": _pair_tokenizer(student).pad_token_id} if is_decoder else {}),
        }
    )
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
    dense, head = getattr(inner, "dense", inner), getattr(model, "classifier", None)
    if not isinstance(head, linear):
        dense, head = getattr(head, "dense", None), getattr(head, "out_proj", None)
    if not isinstance(dense, linear) or not isinstance(head, linear):
        return None
    with torch.no_grad():
        for place, values in zip((dense.weight, dense.bias, head.weight, head.bias), layers, strict=True):
            place.copy_(values)
    return model if _apart(student, form, model) <= MOST_APART else None  # another function than tanh


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


def _apart(student: StudentModel, form: Form, model: Any, folder: Path | None = None) -> float:
    """The largest |Δp| between a student and a classifier, over drawn rows of all lengths, padded together; of a
    decoder, over drawn texts as the folder's tokenizer reads them.
    """
    import torch
    from transformers import AutoTokenizer

    rng = np.random.default_rng(SEED)
    most = student.record.max_tokens
    vocabulary = len(student.tokenizer)
    lengths = np.linspace(1, most, ROWS).round().astype(int).tolist()
    rows = [
        TokenRow(rng.integers(vocabulary, size=length).tolist(), [0] * (length // 2) + [1] * (length - length // 2))
        for length in lengths
    ]
    with torch.inference_mode():
        if student.record.kind == "decoder":
            pairs = [("a", student.tokenizer.decode(row.ids)) for row in rows]
            reading = AutoTokenizer.from_pretrained(folder)
            batch = reading(*map(list, zip(*pairs, strict=True)), truncation=True, padding=True, return_tensors="pt")
            want_BK = student.logits(pairs)[HEAD]
        else:
            batch = student.texts.collate(rows)
            want_BK = student.module(**batch)[HEAD].numpy()
        found_BK = model(**batch).logits.numpy()
    probs_BK = softmax(want_BK / student.record.temperature.get(HEAD, 1.0))
    if form == "hf":
        return float(np.abs(softmax(found_BK) - probs_BK).max())
    expected_B = probs_BK @ np.arange(student.record.grades) / (student.record.grades - 1)
    return float(np.abs(1 / (1 + np.exp(-found_BK[:, 0])) - expected_B).max())


def _pooling(student: StudentModel) -> str:
    """What sentence-transformers calls it."""
    return "lasttoken" if student.record.kind == "decoder" else student.record.pooling


def _write_modules(student: StudentModel, form: Form, score: Score, layers: _Layers, folder: Path) -> None:
    """Transformer, Pooling and Dense, of one logit two of these, as sentence-transformers keeps them."""
    from safetensors.torch import save_file

    transformer, pooling = (folder / name for name, _ in MODULES[:2])
    modules = list(MODULES)
    folded = [("Identity", *_folded(student))]
    if form == "rerank":
        modules.append(("3_Dense", MODULES[-1][1]))
        folded = [("Tanh", *layers[:2]), ("Identity", *layers[2:])]
    for name, _ in modules:
        (folder / name).mkdir()
    student.module.inner.base_model.save_pretrained(transformer)
    _write_tokenizer(student, transformer)
    modality = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    written = {
        transformer / "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": modality,
            "module_output_name": "token_embeddings",
        },
        pooling / "config.json": {
            "embedding_dimension": layers[0].shape[0],
            "pooling_mode": _pooling(student),
            "include_prompt": True,
        },
        folder / "modules.json": [
            {"idx": place, "name": str(place), "path": name, "type": kind} for place, (name, kind) in enumerate(modules)
        ],
        folder / "config_sentence_transformers.json": {
            "activation_fn": SCORES[score if form == "rerank" else "log-odds-relevant"][2],
            "default_prompt_name": None,
            "model_type": "CrossEncoder",
            "prompts": {},
        },
    }
    for place, (name, weight_OI, bias_O) in enumerate(folded, 2):
        dense, is_last = folder / f"{place}_Dense", place == len(modules) - 1
        save_file({"linear.weight": weight_OI.contiguous(), "linear.bias": bias_O}, dense / "model.safetensors")
        written[dense / "config.json"] = {
            "in_features": weight_OI.shape[1],
            "out_features": weight_OI.shape[0],
            "bias": True,
            "activation_function": ACTIVATION.format(name),
            "module_input_name": "sentence_embedding",
            "module_output_name": "scores" if is_last else "sentence_embedding",
        }
    for file, held in written.items():
        file.write_bytes(readable_json(held))


def _pair_tokenizer(student: StudentModel) -> Any:
    """The tokenizer; a decoder's puts the prompt's tokens around a pair, as others put `[CLS]` and `[SEP]`."""
    from tokenizers.processors import TemplateProcessing

    if not isinstance(student.texts, DecoderTexts):
        return student.tokenizer
    tokenizer = copy.deepcopy(student.tokenizer)
    tokenizer.chat_template = None  # sentence-transformers would take a pair for a chat
    tokenizer.padding_side, tokenizer.pad_token = "right", tokenizer.pad_token or tokenizer.eos_token
    before, between, after = student.texts.prompt_ids
    pieces = {"before": before, "between": between, "after": after}
    whole = [name for name in ("before", "$A", "between", "$B:0", "after") if pieces.get(name, True)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[name for name in whole if name != "$B:0"],  # so transformers reads a pair whose document is empty
        pair=whole,
        special_tokens=[
            {"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)}
            for name, ids in pieces.items()
            if ids
        ],
    )
    return tokenizer


def _write_tokenizer(student: StudentModel, folder: Path) -> None:
    """The tokenizer; what it reads is cut as in training, and text that spells a control token is ordinary text.

    Raises:
        ModelError: a decoder's, loaded again, reads a pair otherwise than the student.
    """
    from transformers import AutoTokenizer

    _pair_tokenizer(student).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    held = json.loads(file.read_bytes())
    if student.record.kind == "decoder":  # other classes put their own marks around texts, or give token types
        held |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    file.write_bytes(
        readable_json({**held, "model_max_length": student.record.max_tokens, "split_special_tokens": True})
    )
    if student.record.kind == "decoder":
        pairs = [("a", document) for _, document in PROBES]
        reading, rows = AutoTokenizer.from_pretrained(folder), student.texts.encode(pairs)
        if [reading(*pair, truncation=True).input_ids for pair in pairs] != [row.ids for row in rows]:
            raise ModelError(
                f"{student.path}: its tokenizer can't hold the prompt. Nothing was written; export it to a bundle, and "
                "report this with the model's name."
            )


RECORD_NAME = "relabel.json"


def export_to_hub_folder(
    path: Path,
    target: Path,
    form: Form,
    *,
    score: Score = "expected-grade",
    licence: str | None,
    is_replacing: bool,
    say: Callable[[str], None] = lambda _: None,
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
        ConfigError: no class there answers as it does.
        StaleRunError: `target` holds something else.
        ManifestError, ModelError, MissingExtraError: the student is not whole, or can't be loaded.
    """
    record = read_student(path)
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
    student_manifest(path)  # compares its files
    file = path / "manifest.json"
    manifest = read_student_manifest(file.read_bytes(), str(file))
    recipe = {"student": student_digest(path), "form": form, "relabel": version("relabel-ir"), "licence": licence}
    recipe |= {"score": score} if form == "rerank" else {}
    done = made_before(target, _noted, recipe, is_replacing=is_replacing, what="export for these libraries")
    left_out = [name for name in record.heads if name != HEAD]
    if done is not None:
        return done, left_out, True
    student = load_student(path)
    with new_folder_for(target) as folder:
        library = write_model(student, form, folder, say, score)
        text = render_hub_card(manifest, record, form, score, library, licence)
        (folder / CARD_NAME).write_text(text, encoding="utf-8")
        (folder / RECORD_NAME).write_bytes(readable_json({**recipe, "library": library}))
        with locked(target, waits=True):
            switch(folder, target)
    return library, left_out, False


def _noted(target: Path) -> tuple[str, Any]:
    """Whose classes load a folder, and the recipe that it was made by."""
    held = json.loads((target / RECORD_NAME).read_bytes())
    return str(held.pop("library")), held


# ------------------------------------------------------------------------------
# Asking a running rerank server for the scores of a query's documents, by the APIs that such servers have.


TIMEOUT_S = 60.0


class Api(NamedTuple):
    """How a server is asked and answers.

    Args:
        path: of the endpoint, below the server's address.
        body: of a query, its documents and the model's name.
        scores: of a reply: (place of the document, score), in any order.
    """

    path: str
    body: Callable[[str, Sequence[str], str], dict[str, Any]]
    scores: Callable[[Any], list[tuple[int, float]]]


def _text_pair(query: str, documents: Sequence[str], model: str) -> dict[str, Any]:
    # vLLM refuses what is too long unless it is asked to cut
    return {"model": model, "text_1": query, "text_2": list(documents), "truncate_prompt_tokens": -1}


def _indexed(key: str | None, score: str) -> Callable[[Any], list[tuple[int, float]]]:
    def read(reply: Any) -> list[tuple[int, float]]:
        return [(int(one["index"]), float(one[score])) for one in (reply if key is None else reply[key])]

    return read


APIS: Mapping[str, Api] = {
    "cohere": Api(
        "/rerank",
        lambda query, documents, model: {"model": model, "query": query, "documents": list(documents)},
        _indexed("results", "relevance_score"),
    ),
    "tei": Api(
        "/rerank", lambda query, documents, _: {"query": query, "texts": list(documents)}, _indexed(None, "score")
    ),
    "vllm-score": Api("/score", _text_pair, _indexed("data", "score")),
    "openai-score": Api("/v1/score", _text_pair, _indexed("data", "score")),
}
"""Cohere's and Jina's `/rerank` (vLLM and llama.cpp have it too), text-embeddings-inference, and vLLM's score task."""
KSERVE = "kserve-v2"
"""Triton and OpenVINO Model Server: token ids in, the graph's heads out; `auto` asks it where the URL ends in `/infer`.
"""


class RerankServer:
    """A server that answers `scores`.

    Args:
        url: its address, with or without the endpoint's path; of `kserve-v2` without it, `model` is needed.
        api: a name of `APIS`, `kserve-v2`, or `auto`: the first that answers a made-up pair.
        model: its name there.
        key: sent as a bearer token, and never shown.
        encoder: of the bundle, for `kserve-v2`.
    Raises:
        InputError: no API answers there.
        ServerGoneError: nothing listens there.
    """

    def __init__(self, url: str, api: str, model: str, key: str | None, encoder: Encoder) -> None:
        self._url, self._model, self._key, self._encoder = url.rstrip("/"), model, key, encoder
        self.api = api
        if api != "auto":
            return
        faults = []
        for name in (KSERVE,) if self._url.endswith("/infer") else APIS:
            self.api = name
            try:
                self.scores("wool", ["wool socks"])
                return
            except InputError as exc:
                faults.append(f"{name}: {exc}")
        raise InputError(f"{redacted(url)}: no rerank API answers there. " + " ".join(faults))

    def scores(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """A score a document, float64 [N], in their order.

        Raises:
            InputError: the reply is an error, or is not one score a document; names what came.
        """
        if self.api == KSERVE:
            return self._expected_grades([(query, document) for document in documents])
        api = APIS[self.api]
        reply = self._post(api.path, api.body(query, documents, self._model))
        try:
            found = api.scores(reply)
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"its reply is not one of {self.api}: {shortened(json.dumps(reply), 200)}") from exc
        if sorted(place for place, _ in found) != list(range(len(documents))):
            raise InputError(f"{len(documents)} documents were sent, and its reply scores {len(found)}")
        scores_N = np.array([score for _, score in sorted(found)])
        if not np.isfinite(scores_N).all():
            raise InputError("its reply holds scores that are not finite")
        return scores_N

    def _expected_grades(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        batch = self._encoder.collate(self._encoder.encode(pairs))
        inputs = [
            {"name": name, "shape": list(ids.shape), "datatype": "INT64", "data": ids.ravel().tolist()}
            for name, ids in batch.items()
        ]
        path = "" if self._url.endswith("/infer") else f"/v2/models/{self._model}/infer"
        reply = self._post(path, {"inputs": inputs})
        found = {one["name"]: one for one in reply.get("outputs", ())} if isinstance(reply, dict) else {}
        if "relevance" not in found:
            raise InputError(f"its reply has no output `relevance`: {shortened(json.dumps(reply), 200)}")
        probs_NK = np.array(found["relevance"]["data"], float).reshape(found["relevance"]["shape"])
        return np.asarray(expected_grade(probs_NK) / (probs_NK.shape[1] - 1))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        url = self._url if not path or self._url.endswith(path) else self._url + path
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as exc:
            said = f"{redacted(url)} answers {exc.code} {shortened(exc.read(2000).decode(errors='replace'), 200)}"
            raise (ServerGoneError if exc.code in (429, 502, 503, 504) else InputError)(said) from exc
        except ValueError as exc:
            raise InputError(f"{redacted(url)}: not a URL of http, or its reply is not JSON ({exc})") from exc
        except OSError as exc:
            raise ServerGoneError(f"{redacted(url)}: no answer ({getattr(exc, 'reason', exc)}).") from exc

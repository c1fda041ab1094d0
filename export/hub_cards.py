"""The card of a folder for the Hub: metadata that the Hub reads, and how to use it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from relabel.distill.students.student_manifest import StudentManifest
from relabel.distill.students.student_record import StudentRecord

CARD_NAME = "README.md"
_HUB = re.compile(r"hf:(?P<repo>[^@]+)(@.*)?")
_SHOWN = ("accuracy", "f1_macro", "kappa_quadratic", "auc")
"""Figures of the test split that the Hub is told."""
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

"""The card of a data set of labels: README.md with the metadata that `datasets` and the Hugging Face Hub read, what
each column is, and what made the labels.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import PurePosixPath

import pyarrow as pa
import yaml

from relabel.manifests.run_labels import RunLabels
from relabel.manifests.secrets import counted

CARD_NAME = "README.md"
COLUMNS = {
    "row_id": "place of the pair in the run's input",
    "query_id": "of the input",
    "doc_id": "of the input",
    "query": "the search",
    "document": "the text; the model may have read less of a long one",
    "status": "`ok`: the answer could be read; others are not in this file",
    "grade": "relevance as the model wrote it, 0 to {top}",
    "probs": "the model's probability of each grade, where it gives them",
    "outside_mass": "probability that went to no grade",
    "expected_grade": "sum of grade times probability",
    "evidence": "spans of the document that the model quoted",
    "intent": "what the searcher wants, by the model",
    "reasoning": "the model's reasons",
    "flags": "remarks on the answer",
    "samples": "every answer, where the model was asked several times",
    "prompt_tokens": "that this label took",
    "output_tokens": "that this label took",
    "reused": "taken over from an earlier run",
    "key": "identity of prompt, model and settings",
    "origin": "the run that asked, of a reused label",
    "gold": "a trusted grade of the input, not the model's",
}
"""What each column is; a labeler's own are its page's."""
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
"""The Hub's words for a data set below so many rows."""


def render_dataset_card(run: RunLabels, schema: pa.Schema, rows: int) -> str:
    """Markdown of the card.

    Args:
        run: whose labels they are.
        schema: of the data.
        rows: in it.
    """
    top = run.grades - 1
    labeler = run.plan.facts.labeler.name
    columns = ["| column | type | what it is |", "|---|---|---|"]
    for field in schema:
        about = COLUMNS.get(field.name, "of labeler {labeler}").format(top=top, labeler=labeler)
        columns.append(f"| `{field.name}` | `{field.type}` | {about} |")
    # no `configs`: of a folder whose card has one, `datasets` keeps rows by the folder's name alone, and loads those of
    # another folder of that name
    metadata = {
        "pretty_name": run.plan.name,
        "task_categories": ["text-ranking"],
        "size_categories": [_size(rows)],
        "tags": ["relevance-judgments", "llm-as-a-judge", "relabel"],
    }
    return "\n".join(
        [
            "---",
            yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            "",
            f"# {run.plan.name}",
            "",
            f"Relevance of documents to queries: {counted(rows, 'pair')}, graded 0 to {top} by a model. "
            "They are its judgments, not people's: measure them against some of yours.",
            "",
            "## Columns",
            "",
            *columns,
            "",
            "## Made by",
            "",
            *_provenance(run),
            "",
            "Licence: not stated. What may be done with it hangs on the texts, and on the terms of the model.",
            "",
        ]
    )


def _size(rows: int) -> str:
    return next((name for below, name in SIZES if rows < below), "n>1M")


def _provenance(run: RunLabels) -> Sequence[str]:
    tally = run.found.tally
    lines = [
        f"- relabel {version('relabel-ir')} wrote this file; the run's fingerprint is `{run.plan.fingerprint}`, a "
        "digest of input, columns, labeler, prompts, engine and model",
        f"- labeler `{run.plan.facts.labeler.name}`; prompts by sha256: {_templates(run)}",
    ]
    for engine in run.found.all_engines:
        name = str(engine.get("model", ""))
        if name.startswith("/"):  # a folder of this machine says nothing elsewhere
            name = PurePosixPath(name).name
        model = f"{name} (digest `{str(engine.get('model_digest', ''))[:16]}`)".lstrip()
        lines.append(f"- model {model} by {engine.get('family', '')} {engine.get('version', '')}".rstrip())
        lines += [f"- note: {note}" for note in engine.get("notes", ())]
    lines.append(
        f"- of {run.plan.rows:,} pairs {tally.num_quarantined:,} have no label, since no answer could be read, and are "
        "not here"
    )
    return lines


def _templates(run: RunLabels) -> str:
    digests = run.plan.parts.get("templates") or {}
    return ", ".join(f"{name} `{digest[:16]}`" for name, digest in digests.items()) or "none"

"""Small models that know the format of a labeler's answers and no grade, and specs of the reinforcement that they are
to learn by: their rewards differ, so that weights, coefficients and moments move at every step.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.command_lines import Line
from tests.teachers.chunked import write_questions
from tests.teachers.models import write_tiny_decoder

ROWS = 6
TEACHINGS = {
    "grpo": Line("train by-grade.yaml", parent="teaching"),
    "graph-grpo": Line("train by-node.yaml", parent="teaching"),
    "grpo-with-looks": Line("train looked-at.yaml", parent="teaching"),
    "res-rag": Line("train by-evidence.yaml", parent="teaching"),
}
STEPS = {"grpo": 6, "graph-grpo": 12, "grpo-with-looks": 4, "res-rag": 6}
"""Two epochs of three generations each; those of graph-grpo are used twice; a third of the rows is checked alone, or
each question is a step.
"""
_TRAIN = {"epochs": 2, "batch_size": 4, "accumulation": 2, "learning_rate": 1e-3, "max_tokens": 160, "seed": 7}
SPECS: dict[str, dict[str, Any]] = {
    "by-grade": {
        "method": "grpo",
        "init": "speaks-r1",
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 4, "templates": "templates-r1"},
        "rollouts": {"group": 4},
        "train": {**_TRAIN, "save_every": 2},
        "output": "out/by-grade",
    },
    "by-node": {
        "method": "graph-grpo",
        "init": "speaks-graph-grpo",
        "labeler": {"name": "graph-grpo", "max_text_tokens": 2, "templates": "templates-graph-grpo"},
        "rollouts": {"group": 4},
        "credit": {"learning_rate": 1e-2},
        "train": {**_TRAIN, "save_every": 4},
        "output": "out/by-node",
    },
    "looked-at": {
        "method": "grpo",
        "init": "speaks-r1",
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 4, "templates": "templates-r1"},
        "rollouts": {"group": 4},
        "split": {"dev": 0.34, "seed": 1},
        "train": {**_TRAIN, "save_every": 2, "eval_every": 1},
        "output": "out/looked-at",
    },
    "by-evidence": {
        "method": "res-rag",
        "init": "writes",
        "labeler": {"name": "evidence-set"},
        "generator": {"name": "fake"},
        "train": {
            "epochs": 1,
            "batch_size": 4,
            "accumulation": 1,
            "learning_rate": 1e-3,
            "max_tokens": 4000,
            "save_every": 2,
            "seed": 7,
        },
        "output": "out/by-evidence",
    },
}


def write_teachings(folder: Path) -> None:
    """Models, templates, pairs with grades and scores, and the specs of `TEACHINGS`."""
    from benchmarks.grpo_learns import make_setting, show_format

    folder.mkdir(parents=True, exist_ok=True)
    for labeler, steps in (("r1", 30), ("graph-grpo", 60)):
        setting = make_setting(labeler, folder, num_rows=ROWS)
        show_format(setting, labeler, steps=steps, batch=16)
        setting.tokenizer.save_pretrained(folder / f"speaks-{labeler}")
        setting.model.save_pretrained(folder / f"speaks-{labeler}")
    rows = [
        {name: getattr(row.pair, name) for name in ("query_id", "query", "doc_id", "document")} | row.gold
        for row in setting.rows
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "words.parquet")
    gold = {"path": "words.parquet", "grade": "grade"}
    nodes = {"subject": "subject", "attribute": "attribute"}
    write_tiny_decoder(folder / "writes")
    questions = {"path": str(write_questions(folder / "questions.parquet").relative_to(folder))}
    for name, spec in SPECS.items():
        more = nodes if spec["method"] == "graph-grpo" else {}
        data = {"gold": questions if spec["method"] == "res-rag" else gold | more}
        (folder / f"{name}.yaml").write_text(json.dumps({"name": name, "data": data, **spec}))

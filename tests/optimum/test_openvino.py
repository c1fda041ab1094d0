"""The lines of docs/hub.md about OpenVINO, in the environment of optimum-intel: what they load answers as the
student.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.distill.students.model import load_student
from relabel.export.specs import ParitySpec
from tests.docs.pages import DOCS, blocks
from tests.export.test_huggingface import made  # noqa: F401

PYTHON = os.environ.get("RELABEL_OPTIMUM_INTEL", "")
PAIRS = [(f"red shoe {number % 4}", "a red shoe of the size " * (1 + number % 7)) for number in range(28)]
LINES = next(block.text for block in blocks(DOCS / "hub.md") if "openvino.convert_model" in block.text)


@pytest.mark.skipif(not PYTHON, reason="optimum-intel is not installed here: `make test-optimum`")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_measured_graph_in_openvino_scores_as_the_student(
    relabel: Callable[..., Any],
    made: Callable[..., Path],  # noqa: F811
    folder: Path,
    pooling: str,
) -> None:
    student = made("bert", pooling, 3, 384)
    assert relabel("export", str(student), "--to", "out", "--format", "rerank").code == 0
    place = "out" if pooling == "cls" else "out/0_Transformer"
    lines = LINES.replace("FOLDER/o", f"{place}/o").replace("FOLDER", "out")
    script = f"{lines}\nimport json\nprint(json.dumps(model.predict({PAIRS!r}).tolist()))\n"
    done = subprocess.run(
        [PYTHON, "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scores_B = np.array(json.loads(done.stdout.splitlines()[-1]))
    want_B = load_student(student).probabilities(PAIRS)["relevance"] @ np.arange(3) / 2
    assert want_B.std() > 0.01
    assert np.abs(scores_B - want_B).max() <= ParitySpec().fp32_max_abs

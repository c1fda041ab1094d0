"""Figures that others published, from labels that others wrote; the data stay outside the repository."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("RELABEL_TEST_DATA", Path(__file__).parents[2] / "../shared/data")).resolve()
LABELS = DATA / "llm_labels"

pytestmark = pytest.mark.skipif(
    not (LABELS / "published_check.parquet").is_file(),
    reason=f"no llm_labels in {DATA}: RELABEL_TEST_DATA names the folder of real data",
)


def published() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((LABELS / "published_values.json").read_text(encoding="utf-8"))
    return values


def judged(relabel: Callable[..., Any], *where: str) -> dict[str, Any]:
    path = str(LABELS / "published_check.parquet")
    picked = [argument for one in where for argument in ("--where", one)]
    arguments = ("--label", "llm_label", "--grade", "human_grade", "--resamples", "50", "--output", "json")
    found: dict[str, Any] = relabel("evaluate", path, "--qrels", path, *picked, *arguments).json
    return found


def test_the_eleven_published_kappas(relabel: Callable[..., Any]) -> None:
    kappas = published()["cohen_kappa"]["dl23"]
    assert len(kappas) == 11
    for judge, kappa in kappas.items():
        found = judged(relabel, f"judge={judge}")
        assert found["figures"]["kappa"]["value"] == pytest.approx(kappa, abs=1e-9), judge
        assert found["resampled"] == "rows"

"""Figures that others published, from labels that others wrote; the data stay outside the repository."""

from __future__ import annotations

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


@pytest.mark.parametrize("dataset", ["dl19", "dl20", "dl21"])
def test_the_published_confusion_matrices(relabel: Callable[..., Any], dataset: str) -> None:
    found = judged(relabel, "judge=umbrela_zeroshot_gpt-4", f"dataset={dataset}")
    assert found["confusion"] == published()["confusion_rows_human_cols_llm"][dataset]
    assert found["figures"]["kappa"]["value"] == pytest.approx(
        published()["kappa_recomputed_from_confusion"][dataset]["graded"], abs=1e-12
    )


@pytest.mark.parametrize("cut", [1, 2])
def test_the_kappas_of_binary_cuts_come_by_maps(relabel: Callable[..., Any], cut: int) -> None:
    path = str(LABELS / "published_check.parquet")
    cut_map = ",".join(f"{grade}={int(grade >= cut)}" for grade in range(4))
    arguments = (
        "--label",
        "llm_label",
        "--grade",
        "human_grade",
        "--map",
        cut_map,
        "--map-labels",
        cut_map,
        "--resamples",
        "0",
    )
    where = ("--where", "judge=umbrela_zeroshot_gpt-4", "--where", "dataset=dl21")
    found = relabel("evaluate", path, "--qrels", path, *where, *arguments, "--output", "json").json
    expected = published()["kappa_recomputed_from_confusion"]["dl21"][f"ge{cut}"]
    assert found["figures"]["kappa"]["value"] == pytest.approx(expected, abs=1e-12)

"""From the student to the machine that serves: exported, published, pulled, and asked through its own loader, it says
what `score` says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.distill.conftest import make_pairs
from tests.export.conftest import HOSTILE
from tests.publish.conftest import url  # noqa: F401

LOADING = """
import json
from load import Student
student = Student(BUNDLE, provider="cpu", threads=1)
pairs = [tuple(pair) for pair in json.loads(open(sys.argv[1], encoding="utf-8").read())]
print(json.dumps(student.probabilities(pairs)["relevance"].tolist()))
"""


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_published_and_pulled_bundle_scores_as_relabel_score_does(
    kind: str,
    request: pytest.FixtureRequest,
    url: str,  # noqa: F811
    relabel: Callable[..., Any],
    deployed: Callable[..., Any],
    tmp_path: Path,
) -> None:
    student, bundle = map(
        request.getfixturevalue, ("student", "bundle") if kind == "encoder" else ("decoder", "decoder_bundle")
    )
    rows = [{"query": query, "document": document} for query, document in HOSTILE[3:]] + make_pairs(seed=4)[:60]
    rows = [
        {"query_id": f"q{place}", "query": row["query"], "doc_id": "d", "document": row["document"]}
        for place, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")

    out = tmp_path / "scores"
    assert (
        relabel(
            "score",
            str(student),
            "--input",
            str(tmp_path / "pairs.parquet"),
            "--to",
            str(out),
            "--columns",
            "document=document",
        ).code
        == 0
    )
    manifest = json.loads((out / "manifest.json").read_bytes())
    scored = {
        row["row_id"]: row["probs"]
        for file in manifest["labels"]
        for row in pq.read_table(out / file["path"]).to_pylist()
    }
    assert len(scored) == len(rows)

    name = json.loads((bundle / "manifest.json").read_bytes())["name"]
    assert relabel("publish", str(bundle), url, "--channel", "stable", "--anyway").code == 0
    assert relabel("pull", f"{url}/{name}@stable", str(tmp_path / "served")).code == 0
    (tmp_path / "texts.json").write_text(json.dumps([(row["query"], row["document"]) for row in rows]))
    done = deployed(tmp_path / "served" / "current", LOADING, str(tmp_path / "texts.json"))
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout))
    np.testing.assert_allclose(found, np.array([scored[row] for row in range(len(rows))]), atol=1e-4)
    assert np.ptp(found, axis=0).max() > 0.01, "answers that are all the same would prove nothing"

"""What `relabel run` prints at its end is golden, text and JSON, down to the order of keys."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Relabel = Callable[..., Any]


def test_the_result_of_a_run_is_golden(
    folder: Path,
    relabel: Relabel,
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    golden: Callable[[str, str], None],
) -> None:
    """But for what the clock says."""
    write_pairs()
    job = write_job({})
    found = re.sub(r'(seconds|start_s)": [0-9.e-]+', r'\1": 0.5', relabel("run", job, "--output", "json").out)
    golden("run/result.json", json.dumps(json.loads(found), indent=1) + "\n")
    shutil.rmtree(folder / "out")
    golden("run/result.txt", re.sub(r"in [0-9.]+ s, [0-9.,]+ pairs/s|[0-9.,]+ tokens/s", "…", relabel("run", job).out))

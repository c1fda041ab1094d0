"""Only `jobs/` reads the environment, and it settles what a variable means before anything else is done."""

from __future__ import annotations

import ast
import os

import pytest

from relabel.jobs.cli import main
from tests.docs.pages import ROOT

READ_BELOW = {"manifests/failpoints.py", "labelers/engines/vllm.py", "export/puller.py"}
"""What a fault test arms before anything is imported; what is written for vLLM, which has no other way to be set; and a
program of its own, which `relabel pull --script` hands out.
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
        ({"AWS_REGION": ""}, None),
        ({}, None),
    ],
)
def test_a_region_counts_by_either_of_its_names(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: str | None
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.setenv(name, "put back")  # so that what `main` sets is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--version"])
    botocore = pytest.importorskip("botocore.session")
    assert botocore.Session().get_config_variable("region") == found


def test_no_room_below_jobs_reads_the_environment() -> None:
    reading = set()
    for room in ("manifests", "labelers", "distill", "export"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                    reading.add(str(file.relative_to(ROOT)))
    assert reading == READ_BELOW

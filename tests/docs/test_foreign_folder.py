"""The schedulers' files of docs/deploy lead to the same output from any working directory."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS
from tests.docs.worlds import call, write_pairs

DEPLOY = sorted(path for path in (DOCS / "deploy").rglob("*") if path.is_file())


def test_what_a_scheduler_calls_needs_no_working_directory() -> None:
    for path in DEPLOY:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        assert not re.search(r"\bcd |WorkingDirectory=", text), path
        named = re.findall(r"[^\s,'\"\[\]]+\.ya?ml\b", text)
        for word in named:
            assert word.startswith("/") or path.suffix == ".sbatch", f"{path}: {word}"


@pytest.mark.parametrize("name", ["cron/relabel", "systemd/relabel@.service"])
def test_a_scheduled_run_from_the_root_writes_next_to_its_job_file_and_the_next_one_labels_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "deploy" / name).read_text()
    (line,) = re.findall(r"(?:ExecStart=|\* relabel )(/opt/relabel/bin/relabel run .*)", text)
    (tmp_path / "jobs").mkdir()
    write_pairs(tmp_path, last=8)
    job = (
        "{name: ecom, input: {path: ../pairs.parquet}, labeler: {name: direct}, engine: {name: fake}, output: "
        "'../out/${date}', shards: 1}"
    )
    (tmp_path / "jobs/ecom.yaml").write_text(job)
    line = re.sub(r"/srv/relabel|/var/lib/node_exporter/textfile", str(tmp_path), line.partition(" >>")[0]).replace(
        "\\%", "%"
    )
    line = (
        line.replace("%i", "ecom")
        .replace("--until 06:00", "--for 1h")
        .replace("/opt/relabel/bin/relabel", "printf '%s\\n'")
    )
    words = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    monkeypatch.chdir("/")
    codes = [call(*words), call(*words)]
    assert codes == [0, 0 if "--done-ok" in words else 10]
    (day,) = (tmp_path / "out").iterdir()
    assert len(list(day.glob("receipts/*/*.json"))) == 1

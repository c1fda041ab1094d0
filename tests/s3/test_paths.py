"""Every path of every command takes `s3://`; storage options are never shown; other filesystems are dealt with
honestly.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests import seaweed
from tests.engines.conftest import model_dir  # noqa: F401
from tests.s3.conftest import ROWS, Outcome, call, put_parquet

TEMPLATE = Path(__file__).parents[2] / "labelers" / "templates" / "r3a"


def test_templates_are_read_from_s3_and_are_part_of_the_job(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str
) -> None:
    name = sorted(path.name for path in TEMPLATE.glob("*.j2"))[0]
    store = open_run_store(f"{s3}/templates", Storage(), single_writer=True)
    store.put(name, (TEMPLATE / name).read_bytes())
    job = write_job({"labeler": {"templates": f"{s3}/templates"}})
    done = relabel("run", job)
    assert done.returncode == 0, done.stderr
    store.put(name, b"Heed this. " + (TEMPLATE / name).read_bytes())
    refused = relabel("run", job)
    assert refused.returncode == 3, refused.stderr
    assert f"templates.{name}" in refused.stderr
    absent = relabel("run", job, "--set", f"labeler.templates={s3}/nowhere")
    assert absent.returncode == 3
    assert "is not a folder" in absent.stderr


def test_job_files_outputs_and_labels_are_taken_from_urls_by_every_command(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    """The commands that the other tests of this folder do not call with URLs alone."""
    store = open_run_store(s3, Storage(), single_writer=True)
    pairs = pq.read_table(write_pairs_apart(write_job, s3, tmp_path))
    for name, rows in (("one", pairs.slice(0, 30)), ("two", pairs.slice(30))):
        put_parquet(f"{s3}/{name}.parquet", rows)
        job = write_job({"input": {"path": f"{s3}/{name}.parquet"}, "output": f"{s3}/out-{name}", "shards": 1})
        store.put(f"{name}.yaml", job.read_bytes())
        for command in ("plan", "doctor", "run", "status", "verify", "retry"):
            done = relabel(command, f"{s3}/{name}.yaml")
            assert done.returncode == 0, (command, done.stderr)
    for code in (0, 10):
        merged = relabel("merge", f"{s3}/out-one", f"{s3}/out-two", "--to", f"{s3}/week")
        assert merged.returncode == code, merged.stderr
    assert relabel("verify", f"{s3}/week").returncode == 0
    graded = pairs.append_column("grade", [[row % 3 for row in range(ROWS)]])
    put_parquet(f"{s3}/human.parquet", graded)
    file = json.loads(open_run_store(f"{s3}/week", Storage()).read("manifest.json"))["labels"][0]["path"]
    judged = relabel("evaluate", f"{s3}/week/{file}", "--qrels", f"{s3}/human.parquet", "--resamples", "0")
    assert judged.returncode == 0, judged.stderr
    for line in (("report", f"{s3}/week"), ("compare", f"{s3}/out-one", f"{s3}/week")):
        done = relabel(*line, "--to" if line[0] == "report" else "--html", f"{s3}/pages/{line[0]}.html")
        assert done.returncode == 0, done.stderr
        assert b"</html>" in open_run_store(f"{s3}/pages", Storage()).read(f"{line[0]}.html")


def write_pairs_apart(write_job: Callable[..., Path], s3: str, folder: Path) -> Path:
    """The pairs of `write_job`, as a local file."""
    write_job()
    copy = folder / "pairs.parquet"
    copy.write_bytes(open_run_store(s3, Storage()).read("pairs.parquet"))
    return copy


def test_storage_options_open_the_door_and_are_written_nowhere(
    write_job: Callable[..., Path],
    relabel: Callable[..., Outcome],
    s3: str,
    s3_server: seaweed.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"key": seaweed.KEY, "secret": seaweed.SECRET, "endpoint_url": s3_server.url}
    job = write_job({"storage_options": {"s3": {**options, "secret": "${env.MY_STORE_PASSWORD}"}}})
    for name in s3_server.environment:
        monkeypatch.delenv(name, raising=False)
    closed = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    given = {**closed, "MY_STORE_PASSWORD": seaweed.SECRET}
    said = ""
    for arguments, code in (
        (("run", job), 0),
        (("status", job), 0),
        (("run", job, "--set", "engine.seed=9"), 3),
        (("run", job, "--set", f"storage_options.s3.secret={seaweed.SECRET}x"), 3),
        (("run", job, "--set", f"storage_options.s3={seaweed.SECRET}"), 3),
        (("run", job, "--set", f"storage_options.s3.{{={seaweed.SECRET}"), 3),
        (("run", job, "--set", "storage_options.s3.no_such_option=1"), 3),
        (("run", job, "--set", "engine.sed=1"), 3),
    ):
        done = (call if arguments == ("run", job) else relabel)(*arguments, **given)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        said += done.stdout + done.stderr
    store = open_run_store(f"{s3}/out", Storage.of({"s3": options}))
    held = b"".join(store.read(name) for name in store.etags(""))
    assert len(store.etags("receipts")) >= 3
    for secret in (seaweed.SECRET, seaweed.KEY):
        assert secret not in said
        assert secret.encode() not in held
    assert "MY_STORE_PASSWORD" not in held.decode("latin-1")


def test_doctor_says_whether_commits_hold_there(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    job = write_job()
    well = relabel("doctor", job)
    assert well.returncode == 0, well.stdout
    assert "heeds conditions" in json.loads(well.stdout)["job"]["output"]
    through(lambda exchange: "careless")
    ill = relabel("doctor", job)
    assert ill.returncode == 3
    assert "ignores it" in json.loads(ill.stdout)["job"]["output"]

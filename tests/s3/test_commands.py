"""A job whose input and output are on S3: planned, run, looked at, verified and retried, as on a disk; killed and
resumed; many at once.
"""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.run.loop import RunLoop
from relabel.manifests.asks import Answer
from relabel.manifests.errors import InputError, StoreUnreachableError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.plan import Plan
from relabel.manifests.rows import make_plan, read_chunks
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import TAIL_BYTES, ObjectStore, UrlFile, open_run_store, read_whole
from tests import seaweed
from tests.s3.conftest import ROWS, Outcome, labels, put_parquet


@pytest.fixture
def undisturbed(write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]) -> dict[str, str]:
    """Labels of a run that nobody disturbs, at an output of its own."""
    done = relabel("run", write_job({"output": f"{s3}/undisturbed"}, name="undisturbed.yaml"))
    assert done.returncode == 0, done.stderr
    return labels(f"{s3}/undisturbed")


def test_a_job_on_s3_runs_from_plan_to_retry(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    job = write_job()
    planned = relabel("plan", job)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["chunks_open"] == 10
    done = relabel("run", job)
    assert done.returncode == 0, done.stderr
    first = labels(f"{s3}/out")
    status = json.loads(relabel("status", f"{s3}/out").stdout)
    assert status["is_finished"]
    assert {shard["state"] for shard in status["shards"]} == {"done"}
    verified = relabel("verify", job)
    assert verified.returncode == 0, verified.stderr
    retried = relabel("retry", job)
    assert retried.returncode == 0, retried.stderr
    assert relabel("verify", f"{s3}/out").returncode == 0
    assert labels(f"{s3}/out").keys() != first.keys()


def test_answers_that_a_stop_left_open_are_kept_as_objects_and_not_asked_again(
    write_job: Callable[..., Path],
    undisturbed: dict[str, str],
    s3: str,
    relabel: Callable[..., Outcome],
    open_fresh: Callable[..., ObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(RunLoop):
        def _poll(self) -> list[Answer]:
            if self.progress.requests >= 25:
                self.stop.now()
            return super()._poll()

    job = write_job(args={"capacity": 8, "batch": 4})
    with monkeypatch.context() as patch:
        patch.setattr("relabel.jobs.run.answer_journal.PUT_EVERY_S", 0.0)
        patch.setattr("relabel.jobs.run.answer_journal.PUT_FEW_EVERY_S", 0.0)
        patch.setattr("relabel.jobs.run.loop.CHECK_EVERY_S", 0.0)
        patch.setattr("relabel.jobs.run.label.RunLoop", Stopped)
        assert relabel("run", job).returncode == 20
    assert len(open_fresh().names("journal")) > 1
    done = relabel("run", job)
    assert done.returncode == 0, done.stderr
    assert labels(f"{s3}/out") == undisturbed
    assert open_fresh().names("journal") == []
    whole = json.loads(relabel("status", f"{s3}/undisturbed").stdout)["stages"]
    assert json.loads(done.stdout)["stages"] == whole


def test_nothing_to_do_takes_a_few_requests_one_listing_of_receipts_and_reads_none(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], through: Callable[..., seaweed.Proxy]
) -> None:
    job = write_job()
    assert relabel("run", job).returncode == 0
    proxy = through()
    again = relabel("run", job)
    assert again.returncode == 10, again.stderr
    assert not [seen for seen in proxy.seen if seen.method not in ("GET", "HEAD")]
    assert not [seen for seen in proxy.seen if "/receipts/shard" in seen.path]
    assert sum("prefix=" in seen.path and "receipts" in seen.path for seen in proxy.seen) == 1
    assert sum(seen.path.endswith("/manifest.json") for seen in proxy.seen) == 1
    assert len(proxy.seen) <= 7, "\n".join(f"{s.method} {s.path} {s.status}" for s in proxy.seen)


def test_a_store_that_stays_down_ends_in_20_with_all_progress_kept(
    write_job: Callable[..., Path],
    s3: str,
    relabel: Callable[..., Outcome],
    undisturbed: dict[str, str],
    through: Callable[..., seaweed.Proxy],
) -> None:
    job = write_job({"run": {"store_retry_s": 1, "lease_s": 5}})
    commits = 0

    def decide(exchange: seaweed.Exchange) -> str:
        nonlocal commits
        commits += exchange.method == "PUT" and "/receipts/" in exchange.path
        return "503" if commits > 3 else "pass"

    proxy = through(decide)
    ended = relabel("run", job)
    assert ended.returncode == 20, ended.stderr
    assert "503 SlowDown" in ended.stderr
    assert "run the same command again" in ended.stderr
    proxy.decide = lambda exchange: "pass"
    assert len(open_run_store(f"{s3}/out", Storage()).etags("receipts")) == 3
    assert relabel("run", job).returncode == 0
    assert labels(f"{s3}/out") == undisturbed


def test_wrong_credentials_and_a_missing_bucket_are_reported_at_once(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    job = write_job()
    for changed, said in (
        ({"AWS_SECRET_ACCESS_KEY": "wrong-9f3ab"}, "the secret key is not the one of this access key"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "the access key is not known there"),
    ):
        refused = relabel("run", job, **changed)
        assert refused.returncode == 3, refused.stderr
        assert said in refused.stderr
        assert "wrong-9f3ab" not in refused.stderr + refused.stdout
    missing = relabel("run", job, "--set", "output=s3://no-such-bucket-here/out")
    assert missing.returncode == 3, missing.stderr
    assert "no-such-bucket-here" in missing.stderr
    assert "there is no such bucket" in missing.stderr


def test_one_writer_is_no_crew(write_job: Callable[..., Path], relabel: Callable[..., Outcome]) -> None:
    refused = relabel("run", write_job({"run": {"single_writer": True}}), "--workers", "2")
    assert (refused.returncode, "single_writer" in refused.stderr) == (2, True)


def test_a_store_that_ignores_conditions_is_refused_and_works_for_a_single_writer(
    write_job: Callable[..., Path],
    s3: str,
    relabel: Callable[..., Outcome],
    undisturbed: dict[str, str],
    through: Callable[..., seaweed.Proxy],
) -> None:
    job = write_job()
    through(lambda exchange: "careless")
    refused = relabel("run", job)
    assert refused.returncode == 3, refused.stderr
    assert "has no conditional writes, or accepts" in refused.stderr
    assert "single_writer" in refused.stderr
    assert set(open_run_store(f"{s3}/out", Storage()).etags("")) == {"leases/probe"}
    vouched = relabel("run", job, "--set", "run.single_writer=true")
    assert vouched.returncode == 0, vouched.stderr
    assert labels(f"{s3}/out") == undisturbed
    assert json.loads(vouched.stdout)["rows"] == ROWS


# `relabel convert` and `compare` with sources, targets and runs on S3.


# Labels reused from S3 to S3.


def test_a_run_on_s3_takes_over_from_s3(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    first = relabel("run", write_job({"output": f"{s3}/first"}, name="first.yaml"))
    assert first.returncode == 0, first.stderr
    labelled = json.loads(first.stdout)["labelled"]
    second = write_job({"output": f"{s3}/second", "reuse": f"{s3}/first", "run": {"chunk_rows": 7}}, name="second.yaml")
    planned = relabel("plan", second)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["estimate"]["rows_reused"] == [labelled] * 3
    done = relabel("run", second)
    assert done.returncode == 0, done.stderr
    assert relabel("verify", f"{s3}/second").returncode == 0
    manifest = json.loads(open_run_store(f"{s3}/second", Storage()).read("manifest.json"))
    assert manifest["rows"]["reused"] == labelled
    assert manifest["reused_from"][0]["output"] == f"{s3}/first"


# Leases on a real server: one holder, dead by the server's own dates, taken over on condition; a sleeper that wakes
# harms nobody.


"""A lease of three seconds is dead by then: the server's dates are whole seconds."""


# What a shard reads from S3 is what its columns weigh; a file that is replaced while it is read is reported.


READ_ROWS, GROUP = 4000, 500


def text(chance: random.Random, length: int) -> str:
    """Text that does not compress away."""
    return "".join(chance.choices(string.ascii_letters + string.digits, k=length))


@pytest.fixture
def table() -> pa.Table:
    """Queries of ten rows each, with a column that no job reads and that is twenty times as large as the others."""
    chance = random.Random(5)
    rows = range(READ_ROWS)
    return pa.table(
        {
            "embedding": [text(chance, 2000) for _ in rows],
            "query_id": [f"q{row // 10}" for row in rows],
            "query": [text(chance, 20) for row in rows],
            "crawl": [text(chance, 400) for row in rows],
            "doc_id": [f"d{row}" for row in rows],
            "document": [text(chance, 300) for _ in rows],
        }
    )


def planned(url: str, *, shards: int) -> tuple[Dataset, Plan, dict[str, bytes]]:
    dataset = open_dataset(InputSpec(path=(url,)), Storage())
    plan, plan_files = make_plan(dataset, {}, name="job", shards=shards, chunk_rows=64)
    return dataset, plan, plan_files


def weight(data: bytes, groups: range, columns: tuple[str, ...] = ("query_id", "query", "doc_id", "document")) -> int:
    """Compressed bytes of the columns that a job reads, in some row groups."""
    metadata = pq.read_metadata(pa.BufferReader(data))
    leaves = [leaf for leaf in range(metadata.num_columns) if metadata.schema.column(leaf).path in columns]
    return sum(metadata.row_group(group).column(leaf).total_compressed_size for group in groups for leaf in leaves)


def test_a_shard_fetches_at_most_a_fifth_more_than_its_columns_weigh(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    data = put_parquet(f"{s3}/pairs.parquet", table, row_group_size=GROUP)
    proxy = through()
    dataset, plan, _ = planned(f"{s3}/pairs.parquet", shards=4)
    assert not plan.is_scattered
    for number, shard in enumerate(plan.shards):
        proxy.seen.clear()
        rows = [pair for chunk in read_chunks(dataset, shard, None, range(len(shard.chunks))) for pair in chunk.pairs]
        assert len(rows) == shard.rows
        fetched = sum(seen.sent_bytes for seen in proxy.seen)
        touched = range(shard.first_row // GROUP, (shard.first_row + shard.rows - 1) // GROUP + 1)
        weighs = weight(data, touched)
        assert weighs <= fetched <= 1.2 * weighs + TAIL_BYTES, f"shard {number}: {fetched} for {weighs}"
        assert len(proxy.seen) <= 4 * len(touched) + 1


def test_a_file_that_is_replaced_while_it_is_read_is_reported(table: pa.Table, s3: str) -> None:
    url = f"{s3}/pairs.parquet"
    put_parquet(url, table, row_group_size=GROUP)
    dataset, plan, _ = planned(url, shards=1)
    chunks = read_chunks(dataset, plan.shards[0], None, range(len(plan.shards[0].chunks)))
    next(chunks)
    put_parquet(url, table.slice(0, READ_ROWS - 10), row_group_size=GROUP)
    with pytest.raises(InputError, match="replaced while it was read"):
        list(chunks)
    with pytest.raises(InputError, match="changed while this run was under way"):
        next(read_chunks(dataset, plan.shards[0], None, [0]))


def test_an_object_that_was_written_again_between_two_runs_is_refused_if_its_texts_are_others(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome], through: Callable[..., seaweed.Proxy]
) -> None:
    """Size and footer stay, so that the ETag alone shows it."""
    url = f"{s3}/pairs.parquet"
    job = write_job({"shards": 4})

    def put(letter: str) -> bytes:
        ids = [f"q{row // 6}" for row in range(ROWS)]
        texts = [letter * 20] * ROWS
        pairs = pa.table({"query_id": ids, "query": texts, "doc_id": ids, "document": texts})
        return put_parquet(url, pairs, compression="none", use_dictionary=False, write_statistics=False)

    first = put("a")
    assert relabel("run", job, "--shard", "0/4").returncode == 0
    assert len(put("b")) == len(first)
    refused = relabel("run", job)
    assert refused.returncode == 3
    assert f"{url}: written again since the plan" in refused.stderr
    put("a")
    proxy = through()
    done = relabel("run", job, "--shard", "1/4")
    assert done.returncode == 0, done.stderr
    assert "written again" not in done.stderr, "equal bytes have an equal ETag"
    of_input = [seen for seen in proxy.seen if "pairs.parquet" in seen.path]
    assert len(of_input) <= 3, "its footer at the start and at the opening, and its rows"


def test_reads_are_tried_again_and_a_short_reply_is_no_file(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    url = f"{s3}/pairs.parquet"
    data = put_parquet(url, table, row_group_size=GROUP)
    verdicts = iter(["cut", "503", "refuse", "drop", *["pass"] * 100])
    proxy = through(lambda exchange: next(verdicts))
    assert read_whole(url, Storage()) == data
    proxy.decide = lambda exchange: "cut"
    with pytest.raises(StoreUnreachableError, match="no good answer"):
        UrlFile(url, Storage(retry_s=0.5))

"""However a batch ends, each row gets its own answer and nothing is paid twice, whatever stops the run and when."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from relabel.labelers.engines.openai_batches import FAILED_IN_A_ROW, PATIENCE_LOOKS
from relabel.manifests.asks import Answer
from relabel.manifests.errors import ModelError, ServerGoneError
from relabel.manifests.records import BatchRecord

from .batch_endings import AGAIN, ANSWERED, ENDINGS, KEPT, NUM_REQUESTS, PLAIN, Ending, Lines, bodies_as, jsonl
from .batch_server import BatchServer
from .conftest import MODEL, echo, requests_for, run_all
from .scripted_server import Call, Json, Raw, Reset, ScriptedServer

ARGS = {"mode": "chat", "batch": True, "batch_poll_s": 0.5, "backoff_s": 0.001}
GRADES = [number % 3 for number in range(NUM_REQUESTS)]


class Records:
    """Records that outlive the engine, as those of an output do."""

    def __init__(self) -> None:
        self.by_name: dict[str, BatchRecord] = {}

    def load(self) -> list[BatchRecord]:
        return list(self.by_name.values())

    def keep(self, record: BatchRecord) -> None:
        self.by_name[record.name] = record


class Cut:
    """A provider that gives no reply to one request, once it is done, until the engine is gone."""

    def __init__(self, provider: BatchServer, at: int) -> None:
        self._provider = provider
        self._left = at
        self._guard = threading.Lock()
        self.is_reached = threading.Event()
        self._is_over = threading.Event()

    def post(self, call: Call) -> Json | Reset:
        return self._hold(self._provider(call))

    def get(self, path: str) -> Json | Raw:
        return self._hold(self._provider.get(path))

    def end(self) -> None:
        self._is_over.set()

    def _hold(self, reply: Any) -> Any:
        with self._guard:
            self._left -= 1
            is_here = self._left == 0
        if is_here:
            self.is_reached.set()
            self._is_over.wait(20)
        return reply


@contextmanager
def engine_over(connect: Any, server: ScriptedServer, records: Records, **args: Any) -> Iterator[Any]:
    engine = connect(server, **{**ARGS, **args})
    engine.use_records(records)
    try:
        yield engine
    finally:
        engine.close()


def grades_of(answers: list[Answer]) -> list[int]:
    return [int(answer.text[-len("0</score>")]) for answer in answers]


def num_handed_over(provider: BatchServer) -> int:
    return sum(len(batch["lines"]) for batch in provider.batches.values())


def label(connect: Any, server: ScriptedServer, records: Records, **args: Any) -> list[Answer]:
    with engine_over(connect, server, records, **args) as engine:
        return run_all(engine, requests_for(NUM_REQUESTS))


def start(serve: Any, ending: Ending, answers: Callable[[Call], Json] = echo) -> tuple[BatchServer, ScriptedServer]:
    provider = BatchServer(answers, ending=ending)
    server: ScriptedServer = serve(provider)
    server.gets = provider.get
    return provider, server


@pytest.mark.parametrize("name", [*ANSWERED, *AGAIN])
def test_each_row_gets_its_own_answer_however_its_batch_ends(name: str, serve: Any, connect: Any) -> None:
    provider, server = start(serve, ENDINGS[name])
    assert grades_of(label(connect, server, Records())) == GRADES
    assert num_handed_over(provider) == NUM_REQUESTS + ENDINGS[name].again


@pytest.mark.parametrize("name", KEPT)
def test_a_batch_of_which_nothing_can_be_read_is_kept_and_never_paid_again(
    name: str, serve: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ending = ENDINGS[name]
    provider, server = start(serve, ending)
    records = Records()
    for _ in range(2):
        with pytest.raises((ServerGoneError, ModelError)) as end:
            label(connect, server, records)
        assert ending.text in str(end.value)
        assert "batch-0" in str(end.value) or "file-0" in str(end.value)
        (record,) = records.load()
        assert f"batches/{record.name}.json" in str(end.value)
        assert num_handed_over(provider) == NUM_REQUESTS
    provider.ending = PLAIN
    assert grades_of(label(connect, server, records)) == GRADES, "the answers are there now"
    assert num_handed_over(provider) == NUM_REQUESTS


VARIANTS = ("status ", "error file ", "output file ")
"""Of one ending; no more than one of each is cut off everywhere."""
CUT = [name for name in (*ANSWERED, *AGAIN) if not name.startswith(VARIANTS)]
CUT += ["status COMPLETED", "error file {}", "output file None first"]


@pytest.mark.parametrize("name", CUT)
def test_a_run_that_is_cut_off_at_any_request_pays_no_more(name: str, serve: Any, connect: Any) -> None:
    for at in range(1, 9):
        provider, server = start(serve, ENDINGS[name])
        cut = Cut(provider, at)
        server.script = cut.post
        server.gets = cut.get
        records = Records()
        answers: list[Answer] = []
        with engine_over(connect, server, records) as engine:
            for request in requests_for(NUM_REQUESTS):
                engine.submit(request)
            until = time.monotonic() + 60
            while len(answers) < NUM_REQUESTS and not cut.is_reached.is_set():
                answers += engine.poll()
                assert time.monotonic() < until
        cut.end()
        if not cut.is_reached.is_set():
            break
        assert grades_of(label(connect, server, records)) == GRADES, at
        assert num_handed_over(provider) == NUM_REQUESTS + ENDINGS[name].again, at
        server.close()


SAID = {
    "status unknown first": "zombie",
    "output file None first": '"output_file_id": null',
    "file 404 first": "No such File object",
    "file a page first": "maintenance",
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_odd_is_said_at_once_with_the_servers_own_text(
    name: str, serve: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, server = start(serve, ENDINGS[name])
    with caplog.at_level(logging.WARNING):
        label(connect, server, Records())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "batch batch-0 at " in warning
    assert SAID[name] in warning


def test_patience_ends_after_so_many_looks_and_waiting_takes_none(serve: Any, connect: Any, waits: Any) -> None:
    _, server = start(serve, KEPT["status unknown"])
    with pytest.raises(ServerGoneError, match=f"after {PATIENCE_LOOKS} looks"):
        label(connect, server, Records())
    assert waits.count(0.5) == PATIENCE_LOOKS - 1


def test_a_server_that_wants_no_request_for_long_ends_the_run_at_once(serve: Any, connect: Any) -> None:
    _, server = start(serve, Ending(shown=lambda reply, batch, nth: Json({"error": {}}, 503, {"retry-after": "9000"})))
    with pytest.raises(ServerGoneError, match=r"wants no request for 9000 s.*finds the batches that are out"):
        label(connect, server, Records())


def test_a_row_whose_line_can_never_be_read_stops_no_other_and_is_asked_once_more(serve: Any, connect: Any) -> None:
    """It is given up alone, under its other seeds too, and after a restart."""

    def read(file: Lines) -> Raw:
        return jsonl([broken(line) if "<think>5</think>" in json.dumps(line) else line for line in file.lines])

    def broken(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "response": {"status_code": 200, "body": {"choices": []}}}

    provider, server = start(serve, Ending(read=read))
    records = Records()
    others = [grade for number, grade in enumerate(GRADES) if number != 5]
    for _ in range(2):
        answers = label(connect, server, records)
        bad = answers.pop(5)
        assert (bad.finish, '"choices": []' in bad.detail) == ("error", True)
        assert grades_of(answers) == others
        assert num_handed_over(provider) == NUM_REQUESTS + 1
    with engine_over(connect, server, records) as engine:
        again = [request._replace(seed=7) for request in requests_for(NUM_REQUESTS)[5:6]]
        assert run_all(engine, again)[0].finish == "error"
    assert num_handed_over(provider) == NUM_REQUESTS + 2


@pytest.mark.parametrize("state", ["failed", "expired", "cancelled"])
def test_batches_that_answer_nothing_end_the_run_after_a_few(state: str, serve: Any, connect: Any) -> None:
    def shown(reply: Json, batch: int, nth: int) -> Json:
        counts = {"total": NUM_REQUESTS, "completed": 0, "failed": 0}
        errors = {"data": [{"message": "queue is full"}]}
        return Json({"id": reply.payload["id"], "status": state, "request_counts": counts, "errors": errors})

    provider, server = start(serve, Ending(shown=shown))
    with pytest.raises(ServerGoneError, match=f"answered nothing of the last {FAILED_IN_A_ROW} batches: queue is full"):
        label(connect, server, Records())
    assert len(provider.batches) == FAILED_IN_A_ROW


def under_its_name(call: Call) -> Json:
    reply = echo(call)
    return Json({**reply.payload, "model": MODEL})


def label_after_a_trial(connect: Any, server: ScriptedServer, records: Records, **args: Any) -> list[Answer]:
    """As a run does, whose first request is a chat about a made-up pair."""
    requests = requests_for(NUM_REQUESTS)
    with engine_over(connect, server, records, **args) as engine:
        engine.prepare([requests[0].ask])
        return run_all(engine, requests)


def test_a_batch_that_another_model_answered_is_kept_and_taken_with_a_flag(serve: Any, connect: Any) -> None:
    ending = Ending(read=bodies_as(lambda body: {**body, "model": "cheap-mini"}))
    provider, server = start(serve, ending, under_its_name)
    records = Records()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"batch-0 .*cheap-mini.*other_model: flag"):
            label_after_a_trial(connect, server, records)
    answers = label_after_a_trial(connect, server, records, other_model="flag")
    assert grades_of(answers) == GRADES
    assert all("other_model" in answer.flags for answer in answers)
    assert num_handed_over(provider) == NUM_REQUESTS


def test_a_row_that_another_model_answered_in_a_batch_is_given_up_with_the_reason(serve: Any, connect: Any) -> None:
    def swapped(file: Lines) -> Raw:
        file.lines[5]["response"]["body"]["model"] = "cheap-mini"
        return jsonl(file.lines)

    provider, server = start(serve, Ending(read=swapped), under_its_name)
    answers = label_after_a_trial(connect, server, Records())
    given_up = [answer for answer in answers if answer.finish == "error"]
    assert len(given_up) == 1
    assert "cheap-mini" in given_up[0].detail
    assert num_handed_over(provider) == NUM_REQUESTS

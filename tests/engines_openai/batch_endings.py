"""How a provider's batches end, odd in one thing each: a table of endings and what is expected of each."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .scripted_server import Json, Raw, error

Payload = dict[str, Any]
NUM_REQUESTS = 12
COUNTS = {"total": NUM_REQUESTS, "completed": NUM_REQUESTS, "failed": 0}


class Lines(NamedTuple):
    """A file that is read.

    Args:
        which: `output` or `error`.
        batch, nth: numbers of its batch, from 0, and of this read of it, from 1.
    """

    lines: list[Payload]
    which: str
    batch: int
    nth: int


def jsonl(lines: list[Any]) -> Raw:
    return Raw("\n".join(map(json.dumps, lines)).encode())


@dataclass(frozen=True)
class Ending:
    """What is odd about a provider's batches.

    Args:
        outcome: `answered`: all rows, each handed over once. `kept`: nothing can be read now, so the run ends, and only
            what `again` says is handed over when it starts again. `again`: the provider gave nothing for some.
        text: the server's own, that a message has to repeat.
        again: requests that are handed over twice.
        begun: from the reply to a batch's beginning to what is replied.
        shown: from a batch as it is shown, its number from 0 and the look's from 1, to what is replied.
        listed: from a page of the list to what is replied.
        read: what a file holds.
    """

    outcome: Literal["answered", "kept", "again"] = "answered"
    text: str = ""
    again: int = 0
    begun: Callable[[Payload], Any] = lambda payload: payload
    shown: Callable[[Json, int, int], Json | Raw] = lambda reply, batch, nth: reply
    listed: Callable[[Payload], Any] = lambda payload: payload
    read: Callable[[Lines], Json | Raw] = lambda file: jsonl(file.lines)


PLAIN = Ending()


def _showing(*, first: int = 10**9, **changes: Any) -> Callable[[Json, int, int], Json]:
    """Shown with these values; the first looks alone, if so many are given."""
    return lambda reply, batch, nth: Json({**reply.payload, **changes}) if nth <= first else reply


def _shown_as(other: Json | Raw, *, first: int = 10**9) -> Callable[[Json, int, int], Json | Raw]:
    return lambda reply, batch, nth: other if nth <= first else reply


def _read_as(other: Callable[[Lines], Json | Raw], *, first: int = 10**9) -> Callable[[Lines], Json | Raw]:
    return lambda file: other(file) if file.nth <= first else jsonl(file.lines)


def _lines_as(change: Callable[[Payload], Any]) -> Callable[[Lines], Raw]:
    return lambda file: jsonl([change(line) for line in file.lines])


def bodies_as(change: Callable[[Any], Any]) -> Callable[[Lines], Raw]:
    return _lines_as(lambda line: {**line, "response": {**line["response"], "body": change(line["response"]["body"])}})


def _responses_as(change: Callable[[Payload], Any]) -> Callable[[Lines], Raw]:
    return _lines_as(lambda line: {**line, "response": change(line["response"])})


def _first_half(file: Lines) -> Raw:
    return jsonl(file.lines[: len(file.lines) // 2])


def _of_first_batch(read: Callable[[Lines], Json | Raw]) -> Callable[[Lines], Json | Raw]:
    return lambda file: read(file) if file.batch == 0 else jsonl(file.lines)


def _first_batch_shown(**changes: Any) -> Callable[[Json, int, int], Json]:
    return lambda reply, batch, nth: Json({**reply.payload, **changes}) if batch == 0 else reply


def _refused(line: Payload) -> Payload:
    body = {"error": {"message": "internal"}}
    return {**line, "response": {"status_code": 500, "body": body}}


def _packed_twice(response: Payload) -> str:
    return json.dumps({**response, "body": json.dumps(response["body"])})


def _half_broken(file: Lines) -> Raw:
    half = len(file.lines) // 2
    broken = [{**line, "response": {"status_code": 200, "body": {"result": "broken"}}} for line in file.lines[half:]]
    return jsonl([*file.lines[:half], *broken])


WAITING = (
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "canceling",
    "queued",
    "pending",
    "running",
    "IN_PROGRESS",
    "in-progress",
    "InProgress",
    "In Progress",
    "JOB_STATE_PENDING",
    "created",
    "Submitted",
)
COMPLETED = ("COMPLETED", "Completed", "complete", "succeeded", "JOB_STATE_SUCCEEDED", "ended", "Done")
NO_FILE: tuple[Any, ...] = (None, "", {}, [], 0.5, True)

ANSWERED = {
    "plain": PLAIN,
    **{f"status {word} first": Ending(shown=_showing(first=70, status=word)) for word in WAITING},
    **{f"status {word}": Ending(shown=_showing(status=word)) for word in COMPLETED},
    **{f"error file {value!r}": Ending(shown=_showing(error_file_id=value)) for value in NO_FILE},
    **{f"output file {value!r} first": Ending(shown=_showing(first=2, output_file_id=value)) for value in NO_FILE},
    "status unknown first": Ending(shown=_showing(first=2, status="zombie")),
    "batch 404 first": Ending(shown=_shown_as(error(404, "No batch found"), first=2)),
    "batch 503 first": Ending(shown=_shown_as(error(503, "try later"), first=3)),
    "batch a page first": Ending(shown=_shown_as(Raw(b"<html>maintenance</html>"), first=2)),
    "batch within another object": Ending(
        begun=lambda payload: {"job": payload}, shown=lambda reply, batch, nth: Json({"job": reply.payload})
    ),
    "list without object": Ending(begun=lambda payload: {"job": payload}, listed=lambda payload: payload["data"]),
    "beginning without id": Ending(begun=lambda payload: {"status": "ok"}),
    "beginning without id, list without metadata": Ending(
        begun=lambda payload: {"accepted": True},
        listed=lambda payload: {**payload, "data": [{**one, "metadata": None} for one in payload["data"]]},
    ),
    "beginning without id, another name for the list": Ending(
        begun=lambda payload: {"accepted": True}, listed=lambda payload: {"jobs": payload["data"]}
    ),
    "file 404 first": Ending(read=_read_as(lambda file: error(404, "No such File object"), first=2)),
    "file 503 first": Ending(read=_read_as(lambda file: error(503, "try later"), first=3)),
    "file empty first": Ending(read=_read_as(lambda file: Raw(b""), first=2)),
    "file a page first": Ending(read=_read_as(lambda file: Raw(b"<html>maintenance</html>"), first=2)),
    "file cut off first": Ending(shown=_showing(request_counts=COUNTS), read=_read_as(_first_half, first=2)),
    "file cut off within a line first": Ending(
        read=_read_as(lambda file: Raw(jsonl(file.lines).raw[: 5 * len(json.dumps(file.lines[0]))]), first=2)
    ),
    "file with a mark and empty lines": Ending(
        read=lambda file: Raw(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(line).encode() for line in file.lines))
    ),
    "file with another's lines": Ending(
        read=lambda file: jsonl([*({**line, "custom_id": f"x{line['custom_id']}"} for line in file.lines), *file.lines])
    ),
    "file with a broken line": Ending(read=lambda file: Raw(b'{"custom_\n' + jsonl(file.lines).raw)),
    "lines twice": Ending(read=lambda file: jsonl(file.lines * 2)),
    "lines twice, then failed": Ending(read=lambda file: jsonl([*file.lines, *map(_refused, file.lines)])),
    "lines twice, first failed": Ending(read=lambda file: jsonl([*map(_refused, file.lines), *file.lines])),
    "lines as text": Ending(read=_lines_as(json.dumps)),
    "responses as text": Ending(read=_responses_as(json.dumps)),
    "bodies as text": Ending(read=bodies_as(json.dumps)),
    "bodies as text in text": Ending(read=_responses_as(_packed_twice)),
    "responses without status": Ending(read=_responses_as(lambda response: {"body": response["body"]})),
    "responses with status as text": Ending(read=_responses_as(lambda response: {**response, "status_code": "200"})),
    "responses without body": Ending(read=_responses_as(lambda response: response["body"])),
}

FOREIGN_BODIES: dict[str, Callable[[Any], Any]] = {
    "bodies within another object": lambda body: {"result": body},
    "bodies in parts": lambda body: [{"type": "text", "text": "<score>1</score>"}],
    "bodies of another API": lambda body: {"type": "message", "content": [{"type": "text", "text": "result 1"}]},
    "bodies encoded": lambda body: base64.b64encode(json.dumps({"result": body}).encode()).decode(),
    "bodies numbers": lambda body: 7,
    "bodies null": lambda body: None,
}

KEPT = {
    **{
        f"output file {value!r}": Ending("kept", '"id": "batch-0"', shown=_showing(output_file_id=value))
        for value in NO_FILE
    },
    "status unknown": Ending("kept", "zombie", shown=_showing(status="zombie")),
    "status null": Ending("kept", '"status": null', shown=_showing(status=None)),
    "batch 404": Ending("kept", "No batch found", shown=_shown_as(error(404, "No batch found"))),
    "batch 500": Ending("kept", "try later", shown=_shown_as(error(500, "try later"))),
    "batch a page": Ending("kept", "maintenance", shown=_shown_as(Raw(b"<html>maintenance</html>"))),
    "batch a list": Ending("kept", "not here", shown=_shown_as(Json(["not here"]))),
    "file 404": Ending("kept", "No such File object", read=lambda file: error(404, "No such File object")),
    "file 503": Ending("kept", "try later", read=lambda file: error(503, "try later")),
    "file empty": Ending("kept", "they are empty", read=lambda file: Raw(b"")),
    "file a page": Ending("kept", "maintenance", read=lambda file: Raw(b"<html>maintenance</html>")),
    "file of others' lines": Ending(
        "kept", "custom_id", read=_lines_as(lambda line: {**line, "custom_id": f"x{line['custom_id']}"})
    ),
    "lines without a word": Ending(
        "kept", '"response": null', read=_lines_as(lambda line: {**line, "response": None, "error": None})
    ),
    **{name: Ending("kept", '"custom_id": ', read=bodies_as(change)) for name, change in FOREIGN_BODIES.items()},
    "cancelled without files or counts": Ending(
        "kept", "cancelled", shown=_showing(status="cancelled", output_file_id=None)
    ),
    "cancelled, with answers, without files": Ending(
        "kept", "cancelled", shown=_showing(status="cancelled", output_file_id=None, request_counts={"completed": 5})
    ),
    "expired, counts not filled in": Ending(
        "kept",
        "expired",
        shown=_showing(status="expired", output_file_id=None, request_counts={"total": 0, "completed": 0, "failed": 0}),
    ),
    "beginning without id, never listed": Ending(
        "kept", "come back", begun=lambda payload: {"text": "come back"}, listed=lambda payload: {"data": []}
    ),
    "beginning without id, no list": Ending(
        "kept", "other page", begun=lambda payload: {"text": "come back"}, listed=lambda payload: "other page"
    ),
}

AGAIN = {
    "cancelled partly": Ending(
        "again", again=6, shown=_first_batch_shown(status="cancelled"), read=_of_first_batch(_first_half)
    ),
    "Canceled partly": Ending(
        "again", again=6, shown=_first_batch_shown(status="Canceled"), read=_of_first_batch(_first_half)
    ),
    "completed partly": Ending("again", again=6, read=_of_first_batch(_first_half)),
    "completed partly against its counts": Ending(
        "again", again=6, shown=_first_batch_shown(request_counts=COUNTS), read=_of_first_batch(_first_half)
    ),
    "half of the lines broken": Ending("again", again=6, read=_of_first_batch(_half_broken)),
    "cancelled before its begin": Ending(
        "again",
        again=12,
        shown=_first_batch_shown(
            status="cancelled", output_file_id=None, request_counts={"total": 12, "completed": 0, "failed": 0}
        ),
    ),
    "expired before its begin": Ending(
        "again",
        again=12,
        shown=_first_batch_shown(status="EXPIRED", output_file_id={}, request_counts={"total": 12, "completed": 0}),
    ),
    "failed": Ending("again", again=12, shown=_first_batch_shown(status="FAILED", output_file_id=None)),
    "every line failed": Ending("again", again=12, read=_of_first_batch(_lines_as(_refused))),
    "every line unanswered": Ending(
        "again",
        again=12,
        read=_of_first_batch(_lines_as(lambda line: {**line, "response": None, "error": {"code": "batch_expired"}})),
    ),
}

ENDINGS = ANSWERED | KEPT | AGAIN

"""What providers write about batches: a batch, a list of them, and the lines of their files.

Wrapped or not, in any case of letters, with JSON within a string: what can be read is read, and nothing is made up. Of
what can't be read its text is kept, for messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from relabel.labelers.engines.openai_complaints import Complaint, read_complaint, shown
from relabel.labelers.engines.openai_replies import Reply, ReplyError, parse_reply, read_chat

State = Literal["waiting", "completed", "failed", "expired", "cancelled", "unknown"]

_WORDS: dict[State, str] = {
    "waiting": (
        "validating validated created submitted registered pending queued queueing enqueued in_queue scheduled waiting "
        "not_started preparing starting started running in_progress processing preprocessing postprocessing ongoing "
        "active finalizing finalising uploading cancelling canceling cancellation_requested cancel_requested paused "
        "expiring updating"
    ),
    "completed": (
        "completed complete succeeded success successful done finished ended partially_completed partially_succeeded "
        "partial completed_with_errors"
    ),
    "failed": "failed failure fail error errored invalid rejected",
    "expired": "expired timeout timed_out timeout_exceeded",
    "cancelled": "cancelled canceled aborted",
}
_STATES: dict[str, State] = {}
for _state, _words in _WORDS.items():
    _STATES |= dict.fromkeys(_words.split(), _state)


def state_of(status: Any) -> State:
    """What a batch's status means: `InProgress`, `IN-PROGRESS` and `JOB_STATE_IN_PROGRESS` are one."""
    if not isinstance(status, str):
        return "unknown"
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", status)
    word = re.sub(r"[\W_]+", "_", apart).strip("_").lower()
    word = re.sub(r"^(?:(?:batch|job|state|status)_)+", "", word)
    return _STATES.get(word, "unknown")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, or a file for one, as the provider shows it. What is absent is empty.

    Args:
        name: the provider's own.
        label: the one that we gave it.
        status: as it is written, for messages; `state` is what it means.
        input_file, output, errors: the provider's names for its files.
        num_answered, num_failed: requests, by the provider's count; None where it does not count.
        complaint: why it failed.
        text: all that the provider wrote, in one short line.
    """

    name: str
    label: str
    status: str
    state: State
    input_file: str
    output: str
    errors: str
    num_answered: int | None
    num_failed: int | None
    complaint: Complaint
    text: str

    @property
    def files(self) -> list[str]:
        """Of its results, answers first."""
        return [file for file in (self.output, self.errors) if file]

    @property
    def is_unanswered(self) -> bool:
        """Whether by the provider's own report none of its requests was answered, and so none is paid for."""
        if self.state == "failed":
            return not self.num_answered
        if self.state == "completed":
            return self.num_answered == 0 and bool(self.num_failed)
        return self.num_answered == 0


@dataclass(frozen=True, slots=True)
class Line:
    """What a batch's file holds of one request.

    Args:
        ask: what names the request; empty where that can't be read.
        reply: the answer, if it holds one.
        error: what it holds in its place, for `ApiClient.judge`; None where nothing can be read.
        status: HTTP's, of the error; 0 where it has none.
        text: in short, of a file's first line and of each without an answer.
    """

    ask: str = ""
    reply: Reply | None = None
    error: Any = None
    status: int = 0
    text: str = ""

    @property
    def is_readable(self) -> bool:
        """Whether it shows what became of the request."""
        return self.reply is not None or self.error is not None

    def outweighs(self, other: Line) -> bool:
        """Of two lines about one request the answer counts, then an error that can be read."""
        if self.reply is not None:
            return other.reply is None
        return self.is_readable and not other.is_readable


@dataclass(frozen=True, slots=True)
class Results:
    """What came of a batch.

    Args:
        batch: as it ended; None if it was never handed over.
        lines: by ask, as far as there are any.
        has_output: its file of answers was read.
        num_output: how many of its requests that file names.
        sample: the first line that is no answer, in short.
        torn: a line of that file that names no request at all: it may still be written.
    """

    batch: Batch | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    has_output: bool = False
    num_output: int = 0
    sample: str = ""
    torn: str = ""

    @property
    def is_readable(self) -> bool:
        """Whether at least one line shows what became of a request."""
        return any(line.is_readable for line in self.lines.values())

    @property
    def is_usable(self) -> bool:
        """Whether one may go on with what there is, though something lacks for long."""
        assert self.batch is not None
        return self.batch.is_unanswered or (self.has_output and self.is_readable)

    def lack(self) -> str:
        """What is not there, of a batch that has ended and whose files could be read; empty where nothing lacks."""
        batch = self.batch
        assert batch is not None
        if batch.is_unanswered:
            return ""
        if not batch.output:
            return f"it has ended ({batch.status}) and names no file of answers: {batch.text}"
        if not self.lines:
            return f"its files name none of its requests: {self.sample or 'they are empty'}"
        if batch.num_answered is not None and self.num_output < batch.num_answered:
            return f"its file of answers names {self.num_output:,} of {batch.num_answered:,} requests"
        if self.torn:
            return f"a line of its file of answers can't be read: {self.torn}"
        return ""

    def may_be_charged(self, line: Line | None) -> bool:
        """Whether an answer may have been charged that can't be read."""
        if self.batch is None or self.batch.is_unanswered or self.batch.state == "failed":
            return False
        return line is None or not line.is_readable or line.status == 200


class Listing(NamedTuple):
    """A page of the provider's list of batches."""

    batches: list[Batch]
    has_more: bool


def results_of(batch: Batch, contents: Mapping[str, list[Line]], asks: set[str]) -> Results:
    """What a batch's files hold of its requests; lines about others are left out."""
    lines = dict[str, Line]()
    sample = ""
    for file in batch.files:
        for line in contents.get(file, ()):
            sample = sample or line.text
            if line.ask not in asks:
                continue
            earlier = lines.get(line.ask)
            if earlier is None or line.outweighs(earlier):
                lines[line.ask] = line
    output = contents.get(batch.output, [])
    in_output = {line.ask for line in output}
    torn = [line.text for line in output if not line.ask]
    return Results(
        batch=batch,
        lines=lines,
        has_output=batch.output in contents,
        num_output=len(in_output & asks),
        sample=sample,
        torn=torn[0] if torn else "",
    )


def read_batch(raw: bytes) -> Batch:
    """A batch or file as a reply shows it, perhaps within another object.

    Raises:
        ReplyError: it is no JSON, or an error in place of a batch.
    """
    payload = parse_reply(raw)
    shown_as = _inner(payload)
    batch = _batch_of(shown_as, text=_text_of(raw))
    if not batch.name and isinstance(payload, dict) and payload.get("error"):
        raise ReplyError("the reply is an error")
    return batch


def read_listing(raw: bytes) -> Listing:
    """A page of the list of batches: a list, or an object that holds one.

    Raises:
        ReplyError: there is no list.
    """
    payload = parse_reply(raw)
    has_more = isinstance(payload, dict) and payload.get("has_more") is True
    if isinstance(payload, dict):
        lists = [value for value in payload.values() if isinstance(value, list)]
        if not lists and payload.get("data", ()) is not None:
            raise ReplyError("the reply holds no list")
        payload = lists[0] if lists else []
    if not isinstance(payload, list):
        raise ReplyError("the reply holds no list")
    batches = [_batch_of(_inner(value)) for value in payload]
    return Listing([batch for batch in batches if batch.name], has_more)


def read_lines(raw: bytes) -> list[Line]:
    """The lines of a batch's file, those too that can't be read."""
    lines = list[Line]()
    for text in raw.removeprefix(b"\xef\xbb\xbf").splitlines():
        if text.strip():
            lines.append(_read_line(text, is_first=not lines))
    return lines


def _read_line(raw: bytes, *, is_first: bool) -> Line:
    """One line. A reply within counts as one with status 200 where no status is given."""
    try:
        payload = _unpacked(parse_reply(raw))
    except ReplyError:
        payload = None
    if not isinstance(payload, dict):
        return Line(text=_text_of(raw))
    ask = _id_of(payload.get("custom_id"))
    response = _unpacked(payload.get("response"))
    if not isinstance(response, dict):
        return _unanswered_line(ask, payload.get("error"), raw)
    body = _unpacked(response.get("body"))
    if body is None and "choices" in response:
        body = response
    status = _count(response.get("status_code"))
    if status is None:
        status = 200 if _is_chat(body) else 0
    if status == 0:
        return _unanswered_line(ask, payload.get("error"), raw)
    if status != 200:
        return Line(ask, error=body, status=status, text=_text_of(raw))
    try:
        reply = read_chat(body)
    except ReplyError:
        error = body if _is_error(body) else None
        return Line(ask, error=error, status=status, text=_text_of(raw))
    return Line(ask, reply, text=_text_of(raw) if is_first else "")


def _unanswered_line(ask: str, error: Any, raw: bytes) -> Line:
    """A line without a reply: a request that was not answered, where it has a reason."""
    has_reason = any(read_complaint({"error": error}))
    return Line(ask, error={"error": error} if has_reason else None, text=_text_of(raw))


def _batch_of(payload: Any, text: str = "") -> Batch:
    values = payload if isinstance(payload, dict) else {}
    status = values.get("status")
    metadata = values.get("metadata")
    label = _id_of(metadata.get("relabel")) if isinstance(metadata, dict) else ""
    counts = values.get("request_counts")
    if not isinstance(counts, dict) or counts.get("total") == 0:  # some providers never fill it in
        counts = {}
    return Batch(
        name=_id_of(values.get("id")),
        label=label,
        status=shown(status) if isinstance(status, str) else "absent",
        state=state_of(status),
        input_file=_id_of(values.get("input_file_id")),
        output=_id_of(values.get("output_file_id")),
        errors=_id_of(values.get("error_file_id")),
        num_answered=_count(counts.get("completed")),
        num_failed=_count(counts.get("failed")),
        complaint=read_complaint(values.get("errors")),
        text=text,
    )


def _inner(payload: Any) -> Any:
    """The object that has an id, where another one is around it (`{"job": {…}}`)."""
    if not isinstance(payload, dict) or _id_of(payload.get("id")):
        return payload
    inner = [value for value in payload.values() if isinstance(value, dict) and _id_of(value.get("id"))]
    return inner[0] if inner else payload


def _unpacked(value: Any) -> Any:
    """JSON in a string counts as that JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_reply(value.encode("utf-8", "replace"))
    except ReplyError:
        return value


def _id_of(value: Any) -> str:
    """A name that a provider gives; some write `{}` or nothing where there is none, and some count."""
    if isinstance(value, str):
        return value.strip()
    return str(value) if type(value) is int else ""


def _count(value: Any) -> int | None:
    """A number that may be written as text; None where it is none."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return int(value)
    return value if type(value) is int and value >= 0 else None


def _is_chat(body: Any) -> bool:
    return isinstance(body, dict) and "choices" in body


def _is_error(body: Any) -> bool:
    """Whether a reply with status 200 is an error all the same. A form that is not known here is none."""
    if not isinstance(body, dict):
        return False
    parts: list[Any] = [body]
    choices = body.get("choices")
    if isinstance(choices, list):
        parts += choices
    return any(isinstance(part, dict) and _has_error(part) for part in parts)


def _has_error(part: dict[str, Any]) -> bool:
    return any(part.get(name) for name in ("error", "errors", "detail", "base_resp"))


def _text_of(raw: bytes) -> str:
    """What a server wrote, in one short line."""
    return shown(raw[: 64 << 10].decode("utf-8", "replace"), 400)

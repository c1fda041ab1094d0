"""HTTP client of one server with bounded concurrency and retries."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, NoReturn, TypeVar

from relabel.labelers.engines.openai_connections import (
    Connections,
    OpenAiArgs,
    most_output,
)
from relabel.labelers.engines.openai_replies import (
    NOT_SAID,
    Complaint,
    Costs,
    Reply,
    ReplyError,
    Usage,
    parse_reply,
    read_complaint,
    read_model_names,
    shown,
)
from relabel.manifests.asks import Finish
from relabel.manifests.errors import ModelError, ServerGoneError, StoreError
from relabel.manifests.files import out_of_files
from relabel.manifests.process import require
from relabel.manifests.specs import BATCH_PRICE

# A request is tried again after 408, 425, 429 and 5xx, time-outs, broken connections and replies without the API's
# form. Between tries it waits a random time below an exponential bound (full jitter), and no less than the server
# wants. What another try can't help is the row's fate (`Failure`) where the row may be the reason, and the run's where
# it can't be: no server, the key is refused, the model is unknown, the credit is used up. An error may come as HTTP
# 200: it is handled by its own code.
#
# Not stamina: what decides here is whether a try may have been charged, how long the server wants us to wait, whether
# any server was there, and when to end the run. Of a retry library that would leave the loop of `_send` alone.


ReadT = TypeVar("ReadT")

FAILED_IN_A_ROW = 32
"""Requests given up or refused (or twice the concurrency, if that is more) with no answer in between: the server is to
blame, not the rows.
"""
CHARS_PER_TOKEN = 4
"""Bytes of UTF-8, where neither the server nor a tokenizer counts tokens."""
MOST_PAGE = 64 << 10
"""Bytes of a page that is searched for words."""

_RETRIED = frozenset({408, 425, 429, 498})


class Failure(NamedTuple):
    """A request that got no answer.

    Args:
        finish: what that makes of its ask.
        detail: why, for a person.
        status: the HTTP status that decided it; 0 for none.
    """

    finish: Finish
    detail: str
    status: int = 0

    def raise_at_start(self, stage: str, *, at: str) -> NoReturn:
        """End the start of an engine whose server does not answer a labeler's stage.

        Args:
            at: the server's address.
        Raises:
            ModelError: it refuses such requests.
            ServerGoneError: it does not answer.
        """
        if self.status == 0:
            raise ServerGoneError(
                f"the server at {at} is not ready: stage {stage!r}: {self.detail}. The same command may work later."
            )
        raise ModelError(
            f"the server at {at} does not take stage {stage!r}: {self.detail}. engine.args.extra_body: {{FIELD: null}} "
            "leaves a field out that it does not know, engine.args.max_tokens_field names the answer's limit."
        )


class _Try(NamedTuple):
    """A try that may be repeated: why it failed, how long the server wants us to wait, whether anybody was there, and
    whether an answer may have been charged that did not reach us.
    """

    reason: str
    wait_s: float = 0.0
    was_heard: bool = True
    may_be_charged: bool = False


class ApiClient:
    """One server's API.

    Args:
        key: sent as a bearer token and nowhere else; None sends none.
        pause: how to wait; tests put their own.
        now: seconds since 1970.
    """

    def __init__(
        self,
        args: OpenAiArgs,
        key: str | None,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.costs = Costs(args.price_per_million_input, args.price_per_million_output)
        self.slots = asyncio.Semaphore(args.concurrency)
        self._args, self._pause, self._now = args, pause, now
        self._key = key
        self.at = shown(args.base_url)
        """The server's address, as messages name it."""
        self._accepted: tuple[str, dict[str, Any], Callable[[Any], Reply]] | None = None
        """The first request that was answered, to find out whether such still are."""
        self.listed: dict[str, dict[str, Any]] = {}
        """What the server lists, as `model_names` says."""
        self.is_counting = False
        """Whether tokens are counted here, since the server does not say."""
        self._library = require("httpx", extra="openai", purpose="The openai engine")
        self._rng = random.Random()
        self._num_heard = 0
        self._failed_in_a_row = 0
        self._connections = Connections(args, key)

    def __repr__(self) -> str:
        return f"ApiClient({self._args.served_model!r})"

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    async def model_names(self) -> dict[str, dict[str, Any]] | None:
        """What the server lists at `/models`, by name; None if it has no such list, or not for this key.

        Raises:
            ServerGoneError: no server answers.
        """
        try:
            found = await self._send("GET", "/models", None, _parsed(read_model_names), is_trial=True)
        except ModelError:  # a key may be good for answers alone: the first of them shows
            return None
        if not isinstance(found, Failure):
            self.listed = found
            return found
        if found.status == 0:
            raise ServerGoneError(f"the server at {self.at} is not ready: {found.detail}")
        return None

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[Any], Reply],
        *,
        is_trial: bool = False,
    ) -> Reply | Failure:
        """Send a request until it is answered, or has failed for good, and count what it is charged.

        Args:
            read: makes an answer of the reply's JSON, or raises ReplyError.
            is_trial: an unknown path or model is a Failure as well, for finding out what the server offers.
        Raises:
            ModelError: the key is refused, or the server does not know the model.
            ServerGoneError: no server answers any request, or the server wants none for a long time.
        """
        content = _content(body)
        most = _most(content, body)
        found = await self._send("POST", path, content, _parsed(read), is_trial=is_trial, most=most)
        if isinstance(found, Failure):
            return found
        self._accepted = self._accepted or (path, body, read)
        found = self.counted(found, body)
        self.costs.add(found.usage)
        return found

    def counted(self, found: Reply, body: Mapping[str, Any]) -> Reply:
        """A reply with its tokens, counted here where the server does not."""
        usage = found.usage
        if usage.prompt and (usage.output or not found.text):
            return found
        self.is_counting = True
        prompt = body.get("prompt") or "".join(turn["content"] for turn in body.get("messages", ()))
        ids = found.token_ids if found.token_ids is not None else found.reasoning + found.text
        counts = [len(held) if isinstance(held, list) else _num_tokens(held) for held in (prompt, ids)]
        return found._replace(usage=Usage(usage.prompt or counts[0], usage.cached, usage.output or counts[1]))

    @property
    def names(self) -> str:
        """Models that the server lists, as a message shows them."""
        return shown(", ".join(sorted(self.listed)[:20]))

    async def fetch(self, path: str, read: Callable[[bytes], ReadT]) -> ReadT | Failure:
        """Get what is there; an unknown path is a Failure."""
        return await self._send("GET", path, None, read, is_trial=True)

    async def upload(self, path: str, name: str, text: str, read: Callable[[bytes], ReadT]) -> ReadT | Failure:
        """Send a file for batches; one that is sent twice costs nothing."""
        file = (name, text.encode("utf-8", "replace"), "application/jsonl")
        form = self._library.Request("POST", "http://server", data={"purpose": "batch"}, files={"file": file})
        kind = form.headers["content-type"]
        return await self._send("POST", path, form.read(), read, is_trial=True, kind=kind)

    async def post_once(
        self, path: str, body: dict[str, Any], read: Callable[[bytes], ReadT]
    ) -> ReadT | Failure | None:
        """Send what must not be done twice, once; None where nobody knows what became of it."""
        found = await self._try("POST", path, _content(body), read, is_trial=True)
        return None if isinstance(found, _Try) else found

    def judge(self, status: int, body: bytes) -> Failure | None:
        """What a reply that is no answer means for its ask; None where another try may help."""
        complaint = self._complaint(body)
        if status == 200 and not complaint.is_said:
            return None
        found = self._refused(status, complaint, is_trial=True)
        return found if isinstance(found, Failure) else None

    def charge_batch(self, usage: Usage, body: dict[str, Any]) -> None:
        """Count an answer that came in a batch; `NOT_SAID` for one that may have come."""
        if usage == NOT_SAID:
            self.costs.doubt(_most(_content(body), body), BATCH_PRICE)
        else:
            self.costs.add(usage, BATCH_PRICE)

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[bytes], ReadT],
        *,
        is_trial: bool,
        most: Usage | None = None,
        kind: str = "application/json",
    ) -> ReadT | Failure:
        """Try a request until it is answered, or has failed for good.

        Args:
            most: what each try may be charged.
        """
        heard_before = self._num_heard
        tries: list[_Try] = []
        while True:
            outcome = await self._try(method, path, content, read, is_trial=is_trial, kind=kind)
            if not isinstance(outcome, _Try):
                if (
                    isinstance(outcome, Failure)
                    and (outcome.finish == "error" or outcome.status == 403)
                    and not is_trial
                ):
                    await self._blame("refused all of", f", and that of the start: {outcome.detail}")
                return outcome
            if outcome.may_be_charged and most is not None:
                self.costs.doubt(most)
            tries.append(outcome)
            if len(tries) >= self._args.max_tries:
                break
            await self._wait(len(tries), outcome.wait_s)
        self.costs.given_up += 1
        if not any(one.was_heard for one in tries) and self._num_heard == heard_before:
            raise ServerGoneError(
                f"no server answers at {self.at} (engine.args.base_url), after {len(tries)} tries: {tries[-1].reason}. "
                "Start the server, or fix the address; the same command then continues."
            )
        await self._blame(
            "answered none of", f", each tried {self._args.max_tries} times; the last time: {tries[-1].reason}"
        )
        return Failure("error", f"no usable reply in {len(tries)} tries; the last one: {tries[-1].reason}")

    async def _blame(self, did: str, why: str) -> None:
        """Count a request without a usable answer, and end the run if the server, rather than single rows, is the
        cause.

        Args:
            did: the server, of the last requests.
        """
        self._failed_in_a_row += 1
        number = self._failed_in_a_row
        if number < max(FAILED_IN_A_ROW, 2 * self._args.concurrency):
            return
        self._failed_in_a_row = 0
        if self._accepted is None or isinstance(await self.post(*self._accepted, is_trial=True), Failure):
            raise ServerGoneError(
                f"the server at {self.at} {did} the last {number} requests{why}. Fix the server; the same command "
                "then continues."
            )

    async def _try(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[bytes], ReadT],
        *,
        is_trial: bool,
        kind: str = "application/json",
    ) -> ReadT | Failure | _Try:
        """One request. The errors of the HTTP library hold the request, and that the key: none is chained or shown."""
        library = self._library
        self.costs.requests += 1
        try:
            async with asyncio.timeout(self._args.timeout_s):  # httpx's own limit restarts with every byte
                reply = await self._connections.send(method, path, content, kind=kind)
        except (TimeoutError, library.ReadTimeout, library.WriteTimeout):
            return _Try(f"no reply within {self._args.timeout_s:g} s", may_be_charged=True)
        except (library.ConnectError, library.ConnectTimeout) as exc:
            if (why := out_of_files(exc)) is not None:
                raise StoreError(f"engine.args.concurrency is {self._args.concurrency}, and {why}") from None
            return _Try(f"no connection ({shown(str(exc)) or type(exc).__name__})", was_heard=False)
        except library.RequestError as exc:
            return _Try(f"the connection broke ({type(exc).__name__})", may_be_charged=True)
        self._num_heard += 1
        if reply.status_code != 200:
            wait_s = self._wanted_wait(reply.headers.get("retry-after", ""))
            return self._refused(reply.status_code, self._complaint(reply.content), wait_s, is_trial=is_trial)
        plain = self._without_key(reply.content)
        try:
            found = read(plain)
        except ReplyError as exc:
            complaint = self._complaint(plain, is_json=True)
            if method == "POST" and complaint.is_said:
                return self._refused(200, complaint, is_trial=is_trial)
            return _Try(f"{exc} ({_words(plain) or 'it is empty'})", may_be_charged=True)
        if method == "POST":  # some list their models to anybody
            self._failed_in_a_row = 0
        return found

    def _refused(self, status: int, complaint: Complaint, wait_s: float = 0.0, *, is_trial: bool) -> Failure | _Try:
        said = f"HTTP {status}" + (f": {shown(complaint.message)}" if complaint.message else "")
        status = complaint.status if status == 200 else status
        wait_s = wait_s or complaint.wait_s
        subject = complaint.subject(status, may_pass=wait_s > 0)
        if subject == "credit":
            raise ServerGoneError(
                f"the server at {self.at} says that the credit or quota is used up ({said}). Raise it there; the same "
                "command then continues with the rows that are open."
            )
        if subject == "overlong":
            return Failure("overlong", f"the server finds the prompt too long ({said})", status)
        if status in _RETRIED or (status >= 500 and status != 501) or (subject == "busy" and status in (400, 403)):
            return _Try(said, wait_s)
        if status in (401, 403):
            if status == 401 or self._accepted is None:
                # of a key that is not accepted the server's own words stay out: some repeat a part of it
                have = (
                    f"the key in {self._args.api_key_env}"
                    if self._key
                    else f"no key ({self._args.api_key_env} is not set)"
                )
                why = said if status == 403 else f"HTTP {status}"
                raise ModelError(
                    f"the server at {self.at} refuses {have} ({why}). Put a valid key into that variable, or name "
                    "another in api_key_env."
                )
            # moderation, at some providers
            return Failure("refused", f"the server refused this request ({said})", status)
        if subject == "filter":
            return Failure("refused", f"the server's content filter refused the request ({said})", status)
        if status == 404 and not is_trial:
            raise ModelError(
                f"the server at {self.at} knows no model {self._args.served_model!r}, or no such path ({said})"
                f"{f'; it lists {self.names}' if self.listed else ''}. Check "
                "engine.args.served_model, and "
                "engine.args.base_url, which ends in /v1 at most servers."
            )
        if 300 <= status < 400:
            raise ModelError(
                f"the server at {self.at} sends us elsewhere (HTTP {status}); write that address into "
                "engine.args.base_url."
            )
        return Failure("error", f"the server refused the request ({said})", status)

    async def _wait(self, num_failed: int, wanted_s: float) -> None:
        args = self._args
        if wanted_s > args.max_wait_s:
            raise ServerGoneError(
                f"the server at {self.at} wants no request for {wanted_s:.0f} s, more than engine.args.max_wait_s = "
                f"{args.max_wait_s:g}. Run the same "
                "command again then; what is committed stays."
            )
        bound = min(args.max_backoff_s, args.backoff_s * 2.0 ** min(num_failed - 1, 60))
        seconds = wanted_s + self._rng.uniform(0.0, bound)
        self.costs.retries += 1
        await self._pause(seconds)

    def _wanted_wait(self, text: str) -> float:
        """Seconds that `Retry-After` asks for: a number, or a date; 0 where it says nothing readable."""
        try:
            return _bounded(float(text))
        except ValueError:
            pass
        try:
            return _bounded(parsedate_to_datetime(text).timestamp() - self._now())
        except (ValueError, TypeError, OverflowError):
            return 0.0

    def _complaint(self, raw: bytes, *, is_json: bool = False) -> Complaint:
        """What an error says, as far as it can be read: of JSON, else its text."""
        plain = self._without_key(raw)
        try:
            return read_complaint(parse_reply(plain))
        except ReplyError:
            return Complaint() if is_json else Complaint(message=_words(plain))

    def _without_key(self, raw: bytes) -> bytes:
        """A server that repeats our key is not quoted."""
        if self._key is not None and len(self._key) > 3 and self._key.encode() in raw:
            return raw.replace(self._key.encode(), b"***")
        return raw


def _parsed(read: Callable[[Any], ReadT]) -> Callable[[bytes], ReadT]:
    return lambda raw: read(parse_reply(raw))


def _words(raw: bytes) -> str:
    """What a reply says without the marks of a page."""
    return shown(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", raw[:MOST_PAGE].decode("utf-8", "replace")))


def _content(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _num_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // CHARS_PER_TOKEN)


def _most(content: bytes, body: dict[str, Any]) -> Usage:
    """What a request may be charged: no prompt has more tokens than bytes."""
    return Usage(len(content), 0, most_output(body))


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), 1e9) if seconds == seconds else 0.0

"""A client of an OpenAI-compatible API with bounded concurrency and retries, which counts what it is charged. Only this
module sends the key.

A request is tried again after 408, 425, 429 and 5xx, time-outs, broken connections and replies without the API's form.
Between tries the client waits a random time below an exponential bound (full jitter), and no less than the server
wants. What another try can't help is the row's fate (`Failure`) where the row may be the reason. An error may come as
HTTP 200: it is handled by its own code.

What would end the run (the credit is used up, the key is refused, the model is unknown, ...) is a suspicion, and the
*trial request* decides it: the first one that was answered, at the start, which holds no row's text. If that is refused
too, the run ends; if it is answered, the row is the reason. So no piece of a row's text that a server repeats in an
error ends a run. At the start, where nothing was answered yet, the request is the trial itself.

Its neighbours: `openai_replies.py` (answers), `openai_failures.py` (what becomes of a request without one),
`openai_complaints.py` (what an error is about), `openai_streams.py` (replies in pieces) and `openai_evidence.py` (which
model answered, and what it read).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from relabel.labelers.engines.openai_complaints import (
    Complaint,
    read_complaint,
    reset_of_headers,
    shown,
    wait_of_headers,
)
from relabel.labelers.engines.openai_evidence import ModelNames, PromptCounts
from relabel.labelers.engines.openai_failures import (
    Failure,
    Refusals,
    RefusedReply,
    Unanswered,
    names_in,
    prompt_text,
)
from relabel.labelers.engines.openai_options import OpenAiArgs
from relabel.labelers.engines.openai_replies import (
    OTHER_MODEL,
    CutOffError,
    OtherModelError,
    Reply,
    ReplyError,
    Usage,
    parse_reply,
)
from relabel.labelers.engines.openai_streams import StreamEndError, StreamError, is_stream, joined_stream
from relabel.manifests.asks import Charge
from relabel.manifests.errors import ModelError, RelabelError, ServerGoneError, StoreError
from relabel.manifests.files import out_of_files
from relabel.manifests.process import require
from relabel.manifests.specs import price_of

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHARS_PER_TOKEN = 4
"""Bytes of UTF-8, where neither the server nor a tokenizer counts tokens."""
NAME_TRIALS = 2
"""Requests that show whether a strange name of the model is always given."""
FAILED_IN_A_ROW = 32
"""Requests given up or refused (or twice the concurrency, if that is more) with no answer in between: the server is to
blame, not the rows.
"""
CONNECT_S = 10.0
"""Longest wait for a connection."""
SHORT_WAIT_S = 2.0
"""A wait that needs no message."""
NO_SERVER_YET = "no-server-yet"
"""A kind of note."""
MOST_OUTPUT_TOKENS = 32_768
"""Tokens that an answer without a limit is taken for."""

# Not stamina: what decides here is whether a try may have been charged, how long the server wants us to wait, whether
# any server was there, and when to end the run. Of a retry library that would leave the loop of `send` alone.


class ApiClient:
    """One server's API.

    Args:
        key: sent as a bearer token and nowhere else; None sends none.
        pause: how to wait; tests put their own.
    """

    def __init__(self, args: OpenAiArgs, key: str | None, *, pause: Callable[[float], Awaitable[object]]) -> None:
        self.counts = Counter[str]()
        """Of requests, tries and tokens, decisions and start-up checks included, by name."""
        self.cost = 0.0
        """Of the tokens, in the prices' currency."""
        self.lost = Charge()
        """The most that replies may have been charged which were lost on the way."""
        self.slots = asyncio.Semaphore(args.concurrency)
        self.pause = pause
        self._args = args
        self._key = key
        self.at = shown(args.base_url)
        """The server's address, as messages name it."""
        self.notes: list[str] = []
        """What the replies of the start prove that the user should know; later ones are logged."""
        self._names = ModelNames(args.served_model)
        self._prompts = PromptCounts()
        self._noted = set[str]()
        self._is_started = False
        self._trial: tuple[str, dict[str, Any], Callable[[Any], Reply]] | None = None
        """The first request that was answered, to find out whether such still are."""
        self._trial_lock = asyncio.Lock()
        self._num_trials_answered = 0
        self._end: RelabelError | None = None
        """What the trial request proved to be the run's end."""
        self.listed: dict[str, dict[str, Any]] = {}
        """What the server lists, see `model_names`."""
        self.is_counting = False
        """Whether tokens are counted here, since the server does not."""
        self._refusals = Refusals(args, at=self.at, has_key=bool(key))
        self._num_heard = 0
        self._failed_in_a_row = 0
        self._library = require("httpx", extra="openai", purpose="The openai engine")
        self._free: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []
        self._certificates: Any = False
        if args.base_url.startswith("https:"):  # 0.1 s to read them, so only where there is a connection to prove
            self._certificates = self._library.create_ssl_context(trust_env=False)
            self._certificates.load_default_certs()  # the machine's own and the library's

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def model_names(self) -> dict[str, dict[str, Any]]:
        """What the server lists at `/models`, by name; nothing if it has no such list, or not for this key.

        Raises:
            ServerGoneError: no server answers.
        """
        try:
            models = await self.send("GET", "/models", lambda raw: _model_names(parse_reply(raw)))
        except ModelError:  # a key may be good for answers alone: the first of them shows
            return {}
        if not isinstance(models, Failure):
            self.listed = models
            self._refusals.listed = models
        elif models.status == 0 and not models.is_malformed:
            raise ServerGoneError(f"the server at {self.at} is not ready: {models.detail}")
        return self.listed

    @property
    def names(self) -> str:
        """Models that the server lists, as a message shows them."""
        return names_in(self.listed)

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[Any], Reply], *, is_trial: bool = False
    ) -> Reply | Failure:
        """Send a request until it is answered, or has failed for good, and count what it is charged.

        Args:
            read: makes an answer of the reply's JSON, or raises ReplyError.
            is_trial: an unknown path or model is a Failure as well, for finding out what the server offers.
        Raises:
            ModelError: the key is refused, or the server does not know the model.
            ServerGoneError: no server answers any request, or the server wants none for a long time.
        """
        outcome = await self.send(
            "POST",
            path,
            lambda raw: self.counted(read(parse_reply(raw)), body),
            body,
            is_trial=is_trial,
        )
        if isinstance(outcome, Failure):
            is_refused = outcome.status == 403 or (outcome.finish == "error" and outcome.status != 0)
            if is_refused and not is_trial:
                await self._blame("refused all of", f", and that of the start: {outcome.detail}")
            return outcome
        self._trial = self._trial or (path, body, read)
        self.charge(outcome.usage)
        return outcome

    async def start_notes(self) -> list[str]:
        """What the replies of the start prove, for the user. If they bear a wholly different model's name, the trial
        request is asked again first: a gateway that has a name of its own for the model gives it always.
        """
        for _ in range(NAME_TRIALS):
            if self._names.adopted is not None and self._trial is not None:
                await self.post(*self._trial, is_trial=True)
        if self._names.adopted is not None:
            self._note(
                "adopted",
                f"The server at {self.at} answers as {self._names.adopted!r}, not as {self._args.served_model!r}: "
                "this is taken for its own name of that model.",
            )
        self._is_started = True
        return self.notes

    def counted(self, reply: Reply, body: Mapping[str, Any]) -> Reply:
        """A reply compared with what was asked, with its tokens: counted here where the server does not.

        Raises:
            OtherModelError: another model gave it, and such answers are refused.
        """
        reply = self._of_model(reply)
        usage = reply.usage
        prompt = body.get("prompt") or prompt_text(body)
        if isinstance(prompt, str) and self._prompts.is_cut(prompt, usage.prompt):
            reply = self._cut(reply, len(prompt))
        if usage.prompt and (usage.output or not reply.text):
            return reply
        self.is_counting = True
        written: str | list[int] = reply.reasoning + reply.text
        if reply.token_ids is not None:
            written = reply.token_ids
        prompt_tokens = usage.prompt or _num_tokens(prompt)
        output_tokens = usage.output or _num_tokens(written)
        return reply._replace(usage=Usage(prompt_tokens, usage.cached, output_tokens))

    def _of_model(self, reply: Reply) -> Reply:
        """The reply, flagged if another model gave it.

        Raises:
            OtherModelError: such answers are refused.
        """
        names = self._names
        adopted = names.adopted
        is_accepted = names.is_accepted(reply.model)
        if adopted is not None and names.adopted is None and self._is_started:
            self._note(
                "unadopted",
                f"The server at {self.at} now answers as {reply.model!r}, after {names.replies_as_adopted} answers as "
                f"{adopted!r}: those may be another model's. From here on such answers count as that.",
            )
        if is_accepted:
            if names.is_new_form(reply.model):
                self._note(
                    reply.model,
                    f"The server at {self.at} answers as {reply.model!r}, a form of {names.asked!r}.",
                )
            return reply
        if self._args.other_model == "flag":
            self._note(
                OTHER_MODEL,
                f"The server at {self.at} answers as another model, {reply.model!r} instead of {names.asked!r}: flag "
                f"`{OTHER_MODEL}`.",
            )
            return reply._replace(flags=(*reply.flags, OTHER_MODEL))
        self._note(
            OTHER_MODEL,
            f"The server at {self.at} answers as another model, {reply.model!r} instead of {names.asked!r}: such "
            "answers are not taken, and asked again. engine.args.other_model: flag takes them, with a flag.",
        )
        raise OtherModelError(
            f"the reply bears another model's name, {reply.model!r} instead of {names.asked!r}", reply.usage
        )

    def _cut(self, reply: Reply, num_chars: int) -> Reply:
        """What becomes of an answer to a prompt that the server cut."""
        count = reply.usage.prompt
        self._note(
            "cut",
            f"The server at {self.at} cuts long prompts: it counts {count} tokens of {num_chars} characters. Such rows "
            "are `overlong`. Give it more context (Ollama: num_ctx), or lower engine.max_prompt_tokens.",
        )
        why = f"the server read {count} tokens of a prompt of {num_chars} characters: it cut the rest"
        return reply._replace(text="", reasoning="", finish="overlong", detail=why)

    def _note(self, kind: str, message: str) -> None:
        """Report something to the user, each kind once."""
        if kind in self._noted:
            return
        self._noted.add(kind)
        if self._is_started:
            logger.warning("%s", message)
        else:
            self.notes.append(message)

    def charge(self, usage: Usage, part: float = 1.0) -> None:
        """Count a reply, at this part of the prices."""
        self.counts.update(prompt_tokens=usage.prompt, cached_tokens=usage.cached, output_tokens=usage.output)
        self.cost += price_of(self._args, usage.prompt, usage.output, part=part) or 0.0

    def doubt(self, body: dict[str, Any], part: float = 1.0) -> None:
        """Count a reply to a request that is lost: what the server charged for it can't be known. No prompt has more
        tokens than bytes; an answer without a limit is taken for `MOST_OUTPUT_TOKENS`.
        """
        prompt = len(content_of(body))
        limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens"))
        output = next((limit for limit in limits if isinstance(limit, int)), MOST_OUTPUT_TOKENS)
        price = price_of(self._args, prompt, output, part=part) or 0.0
        self.lost = self.lost.plus(Charge(prompt + output, price))

    async def upload(self, name: str, text: str, read: Callable[[bytes], T]) -> T | Failure:
        """Send a file for batches; one that is sent twice costs nothing."""
        file = (name, text.encode("utf-8", "replace"), "application/jsonl")
        form = self._library.Request("POST", "http://server", data={"purpose": "batch"}, files={"file": file})
        return await self.send(
            "POST",
            "/files",
            read,
            form.read(),
            kind=form.headers["content-type"],
        )

    def judge(self, status: int, payload: Any) -> Failure | None:
        """What a batch's reply that is no answer means for its ask; None where another try may help.

        Raises:
            ServerGoneError: the credit is used up, by a status or code of the server's own.
        """
        complaint = _complaint(self._without_key(json.dumps(payload).encode()))
        if status == 200 and not any(complaint):
            return None
        outcome = self._refused(RefusedReply(status, complaint, is_trial=True))
        if outcome.suspicion is not None:
            named = complaint.status if status == 200 else status
            if named in (401, 402) or complaint.is_of_credit:
                raise outcome.suspicion
            return None  # words alone
        return outcome if isinstance(outcome, Failure) else None

    async def send(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None = None,
        *,
        is_trial: bool = True,
        kind: str = "application/json",
    ) -> T | Failure:
        """Try a request until it is answered, or has failed for good.

        Args:
            content: a body, whose answer each try may be charged for; or bytes.
            is_trial: it holds no row: what it is refused for is never the row's.
            kind: of the content.
        """
        heard_before = self._num_heard
        tries: list[Unanswered] = []
        is_settled = False
        begun_s = time.monotonic()
        while True:
            outcome = await self._try(
                method,
                path,
                read,
                content,
                is_trial=is_trial,
                kind=kind,
            )
            suspicion = outcome.suspicion if isinstance(outcome, Failure | Unanswered) else None
            if suspicion is not None and not is_settled:
                if is_trial or self._trial is None:
                    raise suspicion
                await self._settle(suspicion)
                is_settled = True
            if not isinstance(outcome, Unanswered):
                return outcome
            if outcome.may_be_charged and isinstance(content, dict):
                self.doubt(content)
            tries.append(outcome)
            if len(tries) >= self._args.max_tries:
                break
            if outcome.wait_s > self._args.max_wait_s:
                raise self._refusals.too_long_a_wait(outcome.wait_s)
            self.counts["retries"] += 1
            if self._num_heard == 0 and not outcome.was_heard:
                self._report_waiting(outcome.reason, time.monotonic() - begun_s)
            await self._back_off(outcome, len(tries))
        self.counts["given_up"] += 1
        last = tries[-1].reason
        if not any(attempt.was_heard for attempt in tries) and self._num_heard == heard_before:
            raise ServerGoneError(
                f"no server answers at {self.at} (engine.args.base_url), after {len(tries)} tries: {last}. "
                "Start the server, or fix the address's host, port or /v1; the same command then continues. Any other "
                "path is another model, for another output."
            )
        await self._blame("answered none of", f", each tried {self._args.max_tries} times; the last time: {last}")
        forms = {attempt.malformed for attempt in tries}
        return Failure(
            "error",
            f"no usable reply in {len(tries)} tries; the last one: {last}",
            is_malformed=len(forms) == 1 and "" not in forms,
        )

    async def try_once(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None = None,
        *,
        kind: str = "application/json",
    ) -> T | Failure | Unanswered:
        """One request that holds no row."""
        outcome = await self._try(
            method,
            path,
            read,
            content,
            is_trial=True,
            kind=kind,
        )
        if isinstance(outcome, Failure | Unanswered) and outcome.suspicion is not None:
            raise outcome.suspicion
        return outcome

    async def _try(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None,
        *,
        is_trial: bool,
        kind: str,
    ) -> T | Failure | Unanswered:
        """One request, and what its reply means."""
        self.counts["http_requests"] += 1
        raw = content_of(content) if isinstance(content, dict) else content
        response = await self._response(method, path, raw, kind)
        if isinstance(response, Unanswered):
            return response
        self._num_heard += 1
        plain = self._without_key(response.content)
        body = content if isinstance(content, dict) else {}
        if response.status_code != 200:
            refused = RefusedReply(
                status=response.status_code,
                complaint=_complaint(plain),
                is_trial=is_trial,
                body=body,
                wait_s=wait_of_headers(response.headers),
                reset_s=reset_of_headers(response.headers),
            )
            return self._refused(refused)
        try:
            if method == "POST" and is_stream(plain, response.headers.get("content-type", "")):
                plain = joined_stream(plain)
            answer = read(plain)
        except OtherModelError as exc:
            self.charge(exc.usage)
            return Unanswered(str(exc))
        except StreamEndError as exc:
            return Unanswered(str(exc), may_be_charged=True)
        except StreamError as exc:
            return Unanswered(str(exc), may_be_charged=True, malformed=str(exc))
        except ReplyError as exc:
            complaint = _complaint(plain, otherwise=Complaint())
            if method == "POST" and any(complaint):
                return self._refused(RefusedReply(200, complaint, is_trial=is_trial, body=body))
            return Unanswered(
                f"{exc} ({_words(plain) or 'it is empty'})",
                may_be_charged=True,
                malformed="" if isinstance(exc, CutOffError) else str(exc),
            )
        if method == "POST":  # some list their models to anybody
            self._failed_in_a_row = 0
        return answer

    async def _response(self, method: str, path: str, content: bytes | None, kind: str) -> httpx.Response | Unanswered:
        """One request's whole reply, whatever it is. The errors of the HTTP library hold the request, and that the key:
        none is chained or shown.

        Raises:
            StoreError: the process may open no more files.
        """
        library = self._library
        try:
            async with asyncio.timeout(self._args.timeout_s):  # httpx's own limit restarts with every byte
                return await self._request(method, path, content, kind)
        except (TimeoutError, library.ReadTimeout, library.WriteTimeout):
            return Unanswered(f"no reply within {self._args.timeout_s:g} s", may_be_charged=True)
        except (library.ConnectError, library.ConnectTimeout) as exc:
            why = out_of_files(exc)
            if why is not None:
                raise StoreError(f"engine.args.concurrency is {self._args.concurrency}, and {why}") from None
            return Unanswered(f"no connection ({shown(str(exc)) or type(exc).__name__})", was_heard=False)
        except library.RequestError as exc:
            return Unanswered(f"the connection broke ({type(exc).__name__})", may_be_charged=True)

    async def _request(self, method: str, path: str, content: bytes | None, kind: str) -> httpx.Response:
        """One request and its whole reply, by a client of its own, which is put back.

        httpx scans its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64
        clients with one each take 1 ms (2026-11-20).
        """
        client = self._free.pop() if self._free else self._new_client()
        try:
            headers = {"content-type": kind} if content is not None else {}
            url = self._args.base_url.rstrip("/") + path
            return await client.request(method, url, content=content, headers=headers)
        finally:
            self._free.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        library = self._library
        timeout_s = self._args.timeout_s
        headers = {"accept-encoding": "gzip"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        # trust_env is off: the environment (proxies, .netrc with other credentials) is not this folder's to read.
        # Redirects stay off, as httpx has them: they would carry the key elsewhere.
        client: httpx.AsyncClient = library.AsyncClient(
            headers=headers,
            timeout=library.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=library.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=20.0),
            trust_env=False,
            verify=self._certificates,
        )
        self._clients.append(client)
        return client

    def _refused(self, reply: RefusedReply) -> Failure | Unanswered:
        return self._refusals.outcome_of(reply, was_answered=self._trial is not None)

    async def _back_off(self, outcome: Unanswered, num_tries: int) -> None:
        """Wait before the next try."""
        await self.pause(outcome.wait_s + random.uniform(0.0, self._longest_wait_s(num_tries)))

    def _longest_wait_s(self, num_tries: int) -> float:
        """Before the next try, after so many."""
        return min(self._args.max_backoff_s, self._args.backoff_s * 2.0 ** (num_tries - 1))

    def _report_waiting(self, reason: str, took_s: float) -> None:
        """Say once that no server answers yet, and how long it is tried; not where the end is near.

        Args:
            took_s: of the first try, which a host that drops packets makes 10 s.
        """
        if NO_SERVER_YET in self._noted:
            return
        self._noted.add(NO_SERVER_YET)
        left_s = sum(self._longest_wait_s(count) + took_s for count in range(1, self._args.max_tries))
        if left_s > SHORT_WAIT_S:
            logger.warning("no server answers at %s yet (%s): trying for up to %.0f s", self.at, reason, left_s)

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
        await self._settle(
            ServerGoneError(
                f"the server at {self.at} {did} the last {number} requests{why}. Fix the server; the same command "
                "then continues."
            )
        )

    async def _settle(self, suspicion: RelabelError) -> None:
        """Ask the trial request again: if it is not answered, the run ends; else the rows are the reason.

        Raises:
            RelabelError: what the trial request is refused for, or the suspicion.
        """
        num_answered = self._num_trials_answered
        async with self._trial_lock:
            if self._end is not None:
                raise self._end
            if self._num_trials_answered > num_answered:  # another row's suspicion was settled in the meantime
                return
            try:
                is_answered = self._trial is not None and await self._is_answered(*self._trial)
            except RelabelError as exc:
                self._end = exc
                raise
            if not is_answered:
                self._end = suspicion
                raise suspicion
            self._num_trials_answered += 1

    async def _is_answered(self, path: str, body: dict[str, Any], read: Callable[[Any], Reply]) -> bool:
        """Whether the trial request is answered, in as many tries as any. It is sent as no trial, so that a refused key
        or an unknown model ends the run.

        Raises:
            RelabelError: it is refused in a way that ends the run.
        """
        for num_tries in range(1, self._args.max_tries + 1):
            outcome = await self._try(
                "POST",
                path,
                lambda raw: self.counted(read(parse_reply(raw)), body),
                body,
                is_trial=False,
                kind="application/json",
            )
            if isinstance(outcome, Reply):
                self.charge(outcome.usage)
                return True
            if outcome.suspicion is not None:
                raise outcome.suspicion
            if isinstance(outcome, Failure):
                return False
            if outcome.may_be_charged:
                self.doubt(body)
            if outcome.wait_s > self._args.max_wait_s:
                raise self._refusals.too_long_a_wait(outcome.wait_s)
            await self._back_off(outcome, num_tries)
        return False

    def _without_key(self, raw: bytes) -> bytes:
        """A server that repeats our key is not quoted."""
        if self._key is None or len(self._key) <= 3:
            return raw
        return raw.replace(self._key.encode(), b"***")


def _model_names(payload: Any) -> dict[str, dict[str, Any]]:
    """What `/models` lists, by name; nothing if it has another form."""
    models = payload.get("data") if isinstance(payload, dict) else None
    if not isinstance(models, list):
        return {}
    return {model["id"]: model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)}


def _num_tokens(text: str | list[int]) -> int:
    """Tokens of a text, about; of ids, their number."""
    if isinstance(text, list):
        return len(text)
    return math.ceil(len(text.encode("utf-8", "replace")) / CHARS_PER_TOKEN)


def _complaint(plain: bytes, otherwise: Complaint | None = None) -> Complaint:
    """An error as far as it can be read: of JSON; of anything else its text, where no `otherwise` is given."""
    try:
        return read_complaint(parse_reply(plain))
    except ReplyError:
        return otherwise if otherwise is not None else Complaint(message=_words(plain))


def _words(raw: bytes) -> str:
    """A reply's words without the marks of a page."""
    text = raw[: 64 << 10].decode("utf-8", "replace")
    return shown(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", text))


def content_of(body: dict[str, Any]) -> bytes:
    """A request's body as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

"""What becomes of a request that the openai engine's server did not answer: its row's fate, another try, or perhaps the
end of the run.

What would end the run (the credit is used up, the key is refused, the model is unknown, ...) is a *suspicion*: whether
it is true, the client finds by its trial request (see `ApiClient`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from relabel.labelers.engines.openai_complaints import Complaint, Subject, shown
from relabel.labelers.engines.openai_options import OpenAiArgs
from relabel.manifests.asks import Finish
from relabel.manifests.errors import ModelError, RelabelError, ServerGoneError

BUSY = frozenset({408, 425, 429, 498})
"""Statuses below 500 after which the same request may be answered."""
WAITS = frozenset({408, 425, 429, 498, 503, 529})
"""Statuses whose words may state a wait."""


class Failure(NamedTuple):
    """A request that got no answer.

    Args:
        finish: what that makes of its ask.
        detail: why, for a person.
        status: the HTTP status that decided it; 0 for none.
        suspicion: what ends the run, if the trial request is refused too.
        is_malformed: each try was a good reply in another form than the API's, always the same one.
    """

    finish: Finish
    detail: str
    status: int = 0
    suspicion: RelabelError | None = None
    is_malformed: bool = False

    def raise_at_start(self, stage: str, *, at: str) -> NoReturn:
        """End the start of an engine whose server does not answer a labeler's stage.

        Args:
            at: the server's address.
        Raises:
            ModelError: it refuses such requests.
            ServerGoneError: it does not answer.
        """
        if self.is_malformed:
            raise ModelError(
                f"the server at {at} answers stage {stage!r} with something else than the API's replies: "
                f"{self.detail}. Check engine.args.base_url, which ends in /v1 at most servers, and "
                "engine.args.extra_body."
            )
        if self.status == 0:
            raise ServerGoneError(
                f"the server at {at} is not ready: stage {stage!r}: {self.detail}. The same command may work later."
            )
        raise ModelError(
            f"the server at {at} does not take stage {stage!r}: {self.detail}. engine.args.extra_body: {{FIELD: null}} "
            "leaves a field out that it does not know, {stream: true} asks for a stream, engine.args.max_tokens_field "
            "names the answer's limit."
        )


class Unanswered(NamedTuple):
    """A try that may be repeated.

    Args:
        reason: why it failed.
        wait_s: how long the server wants us to wait.
        was_heard: whether anybody was there.
        may_be_charged: whether an answer may have been charged that did not reach us.
        malformed: what is wrong with the form of a good reply.
        suspicion: what ends the run, if the trial request is refused too.
    """

    reason: str
    wait_s: float = 0.0
    was_heard: bool = True
    may_be_charged: bool = False
    malformed: str = ""
    suspicion: RelabelError | None = None


class RefusedReply(NamedTuple):
    """A reply that is no answer.

    Args:
        status: HTTP's.
        complaint: what it reports.
        is_trial: the request holds no row.
        body: of the request.
        wait_s: how long the headers want us to wait.
        reset_s: when they promise that a limit is reset, if nothing demands a wait.
    """

    status: int
    complaint: Complaint
    is_trial: bool
    body: Mapping[str, Any] = MappingProxyType({})
    wait_s: float = 0.0
    reset_s: float = 0.0


class Refusals:
    """Reads a server's refusals.

    Args:
        at: the server's address, as messages name it.
        has_key: whether requests carry a key.
    """

    def __init__(self, args: OpenAiArgs, *, at: str, has_key: bool) -> None:
        self._args = args
        self._at = at
        self._has_key = has_key
        self.listed: Mapping[str, Any] = {}
        """Models that the server lists, by name."""

    def outcome_of(self, reply: RefusedReply, *, was_answered: bool) -> Failure | Unanswered:
        """What a reply that is no answer means: the row's fate, another try, or perhaps the run's end (`suspicion`).

        Args:
            was_answered: whether the trial request once was.
        """
        complaint = reply.complaint
        report = f"HTTP {reply.status}"
        if complaint.message:
            report += f": {shown(complaint.message)}"
        status = complaint.status if reply.status == 200 else reply.status
        wait_s = reply.wait_s or complaint.delay_s
        subject = _subject(complaint, status, reply.body, may_pass=wait_s > 0 or complaint.wait_s > 0)
        if status == 200:  # an error that names no status
            status = 500
        is_busy = _is_busy(status, subject)
        detail = f"the server refused the request ({report})"
        if subject == "credit":
            no_credit = self._no_credit(report)
            if is_busy or status == 402:
                return Unanswered(report, wait_s, suspicion=no_credit)
            return Failure("error", detail, status, no_credit)
        if subject == "overlong":
            return Failure("overlong", f"the server finds the prompt too long ({report})", status)
        if is_busy:
            return self._busy(status, reply, report, wait_s)
        if subject == "filter" and status != 401:
            return Failure("refused", f"the server's content filter refused the request ({report})", status)
        is_of_key = status == 401 or (status == 403 and not (was_answered and reply.is_trial))
        if is_of_key:
            return self._key_refused(status, complaint, report, was_answered=was_answered)
        if status == 403:
            return Failure("refused", detail, status)
        if status == 404 and not reply.is_trial:
            return Failure("error", detail, status, self._unknown_model(report))
        if 300 <= status < 400:
            return Failure("error", detail, status, self._elsewhere(status))
        return Failure("error", detail, status)

    def too_long_a_wait(self, wait_s: float) -> ServerGoneError:
        """The run's end where a server wants no request for longer than the options allow."""
        return ServerGoneError(
            f"the server at {self._at} wants no request for {wait_s:.0f} s, more than engine.args.max_wait_s = "
            f"{self._args.max_wait_s:g}. Run the same command again then; what is committed stays."
        )

    def _busy(self, status: int, reply: RefusedReply, report: str, wait_s: float) -> Unanswered:
        """A try to be repeated. A wait that is in words counts where the status speaks of a wait, and ends no run
        by itself.
        """
        if wait_s > 0 or status not in WAITS:
            return Unanswered(report, wait_s)
        words_s = reply.complaint.wait_s
        if words_s > self._args.max_wait_s:
            return Unanswered(report, suspicion=self.too_long_a_wait(words_s))
        if words_s == 0 and reply.reset_s <= self._args.max_wait_s:
            words_s = reply.reset_s
        return Unanswered(report, words_s)

    def _key_refused(self, status: int, complaint: Complaint, report: str, *, was_answered: bool) -> Failure:
        """A refusal for the key, unless the trial request is answered: then moderation of the row, at some providers,
        where it does not speak of a key.
        """
        variable = self._args.api_key_env
        have = f"the key in {variable}" if self._has_key else f"requests without a key ({variable} is not set)"
        # of a key that is not accepted the server's own words stay out: some repeat a part of it
        why = report if status == 403 else f"HTTP {status}"
        suspicion: RelabelError
        if was_answered:
            suspicion = ServerGoneError(
                f"the server at {self._at} now refuses {have}, and the request of the start too ({why}). Have it "
                "opened again, or put another key into that variable; the same command then continues."
            )
        else:
            suspicion = ModelError(
                f"the server at {self._at} refuses {have} ({why}). Put a valid key into that variable, or name "
                "another in api_key_env."
            )
        is_moderation = status == 403 and not complaint.is_of_key
        finish: Finish = "refused" if is_moderation else "error"
        return Failure(finish, f"the server refused the request ({why})", status, suspicion)

    def _no_credit(self, report: str) -> ServerGoneError:
        return ServerGoneError(
            f"the server at {self._at} says that the credit or quota is used up ({report}). Raise it there; the "
            "same command then continues with the rows that are open."
        )

    def _unknown_model(self, report: str) -> ModelError:
        lists = f"; it lists {names_in(self.listed)}" if self.listed else ""
        return ModelError(
            f"the server at {self._at} knows no model {self._args.served_model!r}, or no such path ({report})"
            f"{lists}. Check engine.args.served_model, and engine.args.base_url, which ends in /v1 at most servers."
        )

    def _elsewhere(self, status: int) -> ModelError:
        return ModelError(
            f"the server at {self._at} sends us elsewhere (HTTP {status}); write that address into "
            "engine.args.base_url."
        )


def names_in(listed: Mapping[str, Any]) -> str:
    """Models that a server lists, as a message shows them."""
    return shown(", ".join(sorted(listed)[:20]))


def _is_busy(status: int, subject: Subject) -> bool:
    """Whether the same request may be answered later."""
    if status in BUSY:
        return True
    if status >= 500:
        return status != 501
    return subject == "busy" and status in (400, 403)


def _subject(complaint: Complaint, status: int, body: Mapping[str, Any], *, may_pass: bool) -> Subject:
    """What a complaint is about by the server's own words, without those of the prompt that it repeats."""
    subject = complaint.subject(status, may_pass=may_pass)
    if not subject or not complaint.message:
        return subject
    own = complaint.without_echo(prompt_text(body))
    if own == complaint:
        return subject
    return own.subject(status, may_pass=may_pass)


def prompt_text(body: Mapping[str, Any]) -> str:
    """A request's prompt, as far as it is text."""
    prompt = body.get("prompt")
    if prompt is None:
        return "".join(turn["content"] for turn in body.get("messages", ()))
    return prompt if isinstance(prompt, str) else ""

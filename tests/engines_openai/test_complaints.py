"""What an error is about, how long it asks to wait, and what may end a run: codes and the trial request, never words
that may be a row's own.
"""

import time
from collections import Counter
from email.utils import formatdate
from typing import Any

import pytest

from relabel.labelers.engines.openai_complaints import read_complaint, reset_of_headers, span_of, wait_of_headers
from relabel.manifests.errors import ModelError, ServerGoneError

from .conftest import Waits, ask_for, echo, requests_for, run_all
from .scripted_server import Call, Json, error

# ------------------------------------------------------------------------------
# Subjects.


def google(message: str, delay: Any = None) -> Any:
    details: list[Any] = [{"@type": "quota", "violations": [{"quotaId": "PerMinute"}]}]
    if delay is not None:
        details.append({"@type": "retry", "retryDelay": delay})
    return [{"error": {"code": 429, "message": message, "status": "RESOURCE_EXHAUSTED", "details": details}}]


QUOTA = "You have exceeded your current quota, check your plan and billing"
SUBJECTS: list[tuple[int, Any, str]] = [
    (429, google(QUOTA, "41s"), "busy"),
    (429, google(QUOTA, {"seconds": 41}), "busy"),
    (429, google(f"{QUOTA}. Please retry in 3.5s."), "busy"),
    (429, google(QUOTA), "busy"),
    (429, {"error": {"message": QUOTA, "code": "insufficient_quota"}}, "credit"),
    (429, {"error": {"message": f"{QUOTA}; try again in 20s", "code": "insufficient_quota"}}, "credit"),
    (429, {"error": {"message": QUOTA}}, "credit"),
    (403, {"error": {"message": "no", "code": "billing_not_active"}}, "credit"),
    (400, {"error": {"message": "no", "type": "budget_exceeded", "code": "400"}}, "credit"),
    (400, {"error": {"message": "The credit balance is too low", "type": "invalid_request_error"}}, "credit"),
    (503, {"error": {"message": "no", "code": "insufficient_quota"}}, "credit"),
    (402, {}, "credit"),
    (500, {"error": {"message": "can't parse: he had insufficient funds", "type": "server_error"}}, ""),
    (500, {"error": {"message": "can't parse: a moderation queue", "type": "server_error"}}, ""),
    (500, {"error": {"message": "at pos 900: tokens above the maximum of 20", "type": "server_error"}}, ""),
    (500, {"error": {"message": "prompt has 900 tokens, more than 512"}}, "overlong"),
    (500, {"error": {"message": "no", "code": "context_length_exceeded"}}, "overlong"),
    (400, {"error": {"message": "unexpected text near 'flagged by the users' at 4"}}, ""),
    (400, {"error": {"message": 'unexpected "the prompt is too long" in the template'}}, ""),
    (400, {"error": {"message": "proxy: {'error': 'this prompt is too long'}"}}, "overlong"),
    (400, {"error": {"message": "no", "code": "content_filter"}}, "filter"),
]


@pytest.mark.parametrize(("status", "payload", "subject"), SUBJECTS)
def test_what_a_complaint_is_about(status: int, payload: Any, subject: str) -> None:
    complaint = read_complaint(payload)
    assert complaint.subject(status, may_pass=complaint.wait_s > 0) == subject


WORDS = [
    "insufficient funds",
    "credits exhausted",
    "balance too low",
    "out of credits",
    "spending limit",
    "exceeded their budget",
    "budget exceeded",
    "payment required",
    "past invoices",
    "recharge",
    "content policy",
    "moderation",
    "guardrail",
    "flagged by",
    "prompts longer than the maximum",
    "too many tokens to fit",
    "rate limit",
    "too many requests",
    "overloaded",
    "unauthorized",
    "api key",
    "permission",
    "model not found",
    "does not exist",
    "invalid",
    "try again in 90 minutes",
    "wait 3 days",
]
STATUSES = [200, 400, 401, 403, 404, 422, 429, 500, 503]


@pytest.mark.parametrize("status", STATUSES)
def test_words_of_a_row_that_an_error_repeats_end_no_run(status: int, serve: Any, connect: Any) -> None:
    """Every word that the reader knows, echoed for one row each: that row is the server's failure, the others are
    answered. A 403 may be moderation, so there the row is `refused`.
    """
    rows = {2 * number + 1: words for number, words in enumerate(WORDS)}

    def script(call: Call) -> Json:
        number = int(call.body["messages"][-1]["content"].split("document ")[1].split()[0])
        words = rows.get(number)
        if words is None:
            return echo(call)
        message = f"Failed to parse input at pos 12: the old man on the hill wrote {words} in his letter"
        return Json({"error": {"message": message, "type": "server_error"}}, status)

    engine = connect(serve(script), max_tries=2, concurrency=4)
    requests = requests_for(2 * len(WORDS))
    engine.prepare([requests[0].ask])
    for number, words in rows.items():
        document = f"document {number} : the old man on the hill wrote {words} in his letter"
        requests[number] = requests[number]._replace(ask=ask_for(f"q{number}", document))
    for answer in run_all(engine, requests):
        wanted = ["stop"]
        if answer.request_id in rows:
            wanted = ["error", "refused"] if status == 403 else ["error"]
        assert answer.finish in wanted, (rows.get(answer.request_id), answer)


SUSPICIONS: list[tuple[int, Any]] = [
    (402, {}),
    (429, {"error": {"message": "no", "code": "insufficient_quota"}}),
    (400, {"error": {"message": "The credit balance is too low", "type": "invalid_request_error"}}),
    (403, {"error": {"message": "closed", "code": "access_denied"}}),
    (401, {"error": {"message": "no"}}),
    (404, {"error": {"message": "no such model"}}),
    (307, {}),
    (503, {"error": {"message": "try again in 90 minutes"}}),
]


@pytest.mark.parametrize(("status", "payload"), SUSPICIONS)
def test_what_would_end_a_run_is_decided_by_the_trial_request(
    status: int, payload: Any, serve: Any, connect: Any
) -> None:
    is_over = False

    def script(call: Call) -> Json:
        is_bad = is_over or "document 2" in call.raw.decode()
        return Json(payload, status) if is_bad else echo(call)

    server = serve(script)
    engine = connect(server, concurrency=1, max_tries=2)
    engine.prepare([requests_for(1)[0].ask])
    answers = run_all(engine, requests_for(4))
    assert [answer.finish for answer in answers] == ["stop", "stop", "error", "stop"]
    is_over = True
    before = len(server.calls)
    with pytest.raises((ServerGoneError, ModelError)) as caught:
        run_all(engine, requests_for(2))
    assert isinstance(caught.value, ModelError) == (status in (404, 307))
    assert len(server.calls) == before + 2, "a row, and the trial"


def test_of_many_rows_that_are_refused_at_once_one_has_the_trial_asked(serve: Any, connect: Any) -> None:
    seen = Counter[str]()

    def script(call: Call) -> Json:
        is_row = "Document: document" in call.body["messages"][-1]["content"]
        seen["row" if is_row else "trial"] += 1
        reply = error(403, "closed", "access_denied") if seen["trial"] > 1 or is_row else echo(call)
        reply.after_s = 0.1
        return reply

    engine = connect(serve(script), concurrency=16)
    engine.prepare([ask_for("q", "7")])
    with pytest.raises(ServerGoneError, match="now refuses the key in OPENAI_API_KEY"):
        run_all(engine, requests_for(16))
    assert seen["trial"] == 2


# ------------------------------------------------------------------------------
# Waits.

DELAYS: list[tuple[Any, float]] = [
    ("34s", 34),
    ("34.07s", 34.07),
    ("0.2s", 0.2),
    ("20ms", 0.02),
    ("7m12s", 432),
    ("1h2m3s", 3723),
    ("6m0s", 360),
    ("6 seconds", 6),
    ("2 minutes and 5 seconds", 125),
    ("12", 12),
    (12, 12),
    (1.5, 1.5),
    ({"seconds": 34}, 34),
    ({"seconds": "34", "nanos": 500_000_000}, 34.5),
    ("soon", 0),
    ("3 months", 0),
    (-3, 0),
    (True, 0),
    (None, 0),
    ("9" * 400, 0),
]


@pytest.mark.parametrize(("text", "seconds"), DELAYS)
def test_spans_of_time(text: Any, seconds: float) -> None:
    assert span_of(text) == pytest.approx(seconds)
    assert read_complaint({"error": {"details": [{"retryDelay": text}]}}).wait_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("Please try again in 7m12s. Need more?", 432),
        ("Please retry in 34.07s.", 34.07),
        ("try again in 20ms", 0.02),
        ("Please retry after 6 seconds.", 6),
        ("please wait about 2 minutes", 120),
        ("wait for 3 months", 0),
        ("again and again", 0),
    ],
)
def test_waits_in_words(message: str, seconds: float) -> None:
    assert read_complaint({"error": {"message": message}}).wait_s == pytest.approx(seconds)


def test_waits_in_headers() -> None:
    assert wait_of_headers({"retry-after": "7"}) == 7
    assert wait_of_headers({"retry-after-ms": "250", "retry-after": "1"}) == 0.25
    assert wait_of_headers({"retry-after": "1m"}) == 60
    assert wait_of_headers({"retry-after": "soon"}) == 0
    assert 20 < wait_of_headers({"retry-after": formatdate(time.time() + 30, usegmt=True)}) <= 30
    limits = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6.5s"}
    others = {"x-ratelimit-remaining-requests": "90", "x-ratelimit-reset-requests": "24h"}
    assert reset_of_headers(limits | others) == 6.5


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("payload", "headers", "least"),
    [
        (google(QUOTA, "34s"), {}, 34),
        ({"error": {"message": "try again in 34s"}}, {}, 34),
        ({"error": {"message": "slow down", "retry_after_ms": 34_000}}, {}, 34),
        ({"error": {"message": "slow down"}}, {"retry-after-ms": "34000"}, 34),
        (
            {"error": {"message": "slow down"}},
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "34s"},
            34,
        ),
        (
            {"error": {"message": "slow down"}},
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "24h"},
            0,
        ),
    ],
)
def test_waits_are_heeded_wherever_they_stand(
    status: int, payload: Any, headers: dict[str, str], least: float, serve: Any, connect: Any, waits: Waits
) -> None:
    seen = Counter[bytes]()

    def script(call: Call) -> Json:
        seen[call.raw] += 1
        return Json(payload, status, headers) if seen[call.raw] == 1 else echo(call)

    engine = connect(serve(script), backoff_s=0.5)
    assert run_all(engine, requests_for(1))[0].finish == "stop"
    assert len(waits) == 1
    assert least <= waits[0] <= least + 0.5

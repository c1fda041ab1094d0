"""Why there is no verdict in an answer: nothing was generated, it was refused, cut off, or out of format."""

from __future__ import annotations

import re

from relabel.manifests.asks import Answer
from relabel.manifests.errors import VerdictError

_REFUSAL_CHARS = 300
_REFUSAL = re.compile(
    r"(?:i(?:['’]m| am) (?:\w+ )?sorry|(?:i )?apologi[sz]e|sorry,|my apologies|as an ai\b|unfortunately,? i "
    r"|i (?:can ?not|can['’]t|won['’]t|will not|am unable|am not able|must decline|['’]m unable|['’]m not able)"
    r"|i['’]m (?:unable|not able)|(?:this|your) request (?:can ?not|violates))",
    re.IGNORECASE,
)


def require_generated(answer: Answer) -> None:
    """Raise where nothing was generated at all.

    Raises:
        VerdictError: `overlong` if the prompt did not fit, `engine` if the engine failed at this request.
    """
    if answer.finish == "overlong":
        raise VerdictError("overlong", answer.detail or "the prompt does not fit")
    if answer.finish == "error":
        raise VerdictError("engine", answer.detail or "the engine failed at this request")


def unreadable(answer: Answer, reason: str) -> VerdictError:
    """Why there is no verdict in an answer that is out of format: `refused`, `truncated` or `format`."""
    if answer.finish == "refused":
        return VerdictError("refused", answer.detail or "the server refused to answer")
    if answer.finish == "length":
        return VerdictError("truncated", f"the answer ran into its length limit: {reason}")
    if _REFUSAL.match(answer.text[:_REFUSAL_CHARS].lstrip()):
        return VerdictError("refused", f"the model declined: {reason}")
    return VerdictError("format", reason)

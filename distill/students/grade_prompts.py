"""What a decoder reads around a pair, and the tokens that it may answer with."""

from __future__ import annotations

import re
from typing import Any

from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.models.chat_templates import ChatTemplate


def render_prompt(tokenizer: Any, *, style: str, system: str, user: str, ending: str) -> tuple[str, str, str]:
    """The prompt's three pieces of template text, see `DecoderTexts`.

    Args:
        style: `chat` renders the tokenizer's chat template, `plain` joins system, user and `ending` by blank lines.
        user: text with `{query}` and `{document}`, once each and in this order.
    Raises:
        ConfigError: `user` lacks a place or has it twice, or `chat` is asked of a tokenizer without a chat template.
    """
    if user.count("{query}") != 1 or user.count("{document}") != 1 or user.index("{query}") > user.index("{document}"):
        raise ConfigError("`student.prompt.user` wants {query} and then {document}, once each.")
    if style == "chat":
        if not tokenizer.chat_template:
            raise ConfigError(
                "`student.prompt.style` is chat, and the model's tokenizer has no chat template. Use plain."
            )
        turns = [("system", system)] if system else []
        try:
            text = ChatTemplate(tokenizer).text([*turns, ("user", user)])
        except (ConfigError, ModelError) as exc:
            raise type(exc)(f"{exc} Or use `student.prompt.style: plain`.") from exc
    else:
        text = "\n\n".join(filter(None, (system, user, ending)))
    found = re.split(r"\{query\}|\{document\}", text)
    if len(found) != 3:
        raise ConfigError("the chat template shows the pair not once; use `student.prompt.style: plain`.")
    return found[0], found[1], found[2]


def grade_token_ids(tokenizer: Any, grades: int, *, after: str) -> list[int]:
    """The tokens `0` to `K-1` as they stand right after the prompt's end.

    Args:
        after: the prompt's last piece.
    Raises:
        ModelError: a grade is no single token there, is unknown, or two grades share one.
    """
    end = list(tokenizer(after, add_special_tokens=False).input_ids)
    found = []
    for grade in range(grades):
        ids = list(tokenizer(f"{after}{grade}", add_special_tokens=False).input_ids)
        if ids[: len(end)] != end or len(ids) != len(end) + 1 or ids[-1] == tokenizer.unk_token_id:
            raise ModelError(
                f"the tokenizer has no token of its own for grade {grade} after the prompt's end {after[-20:]!r} (it "
                f"makes {ids[len(end) :] or ids} of it). Take another model, or end the prompt otherwise "
                "(student.prompt)."
            )
        found.append(ids[-1])
    if len(set(found)) != grades:
        raise ModelError(f"the tokenizer gives several grades one token ({found}); take another model.")
    return found

"""A model's chat template, as all who write prompts use it: engines, training, students.

A template never sees a turn's text. It is rendered with a mark in place of each text, which is proof that every text is
in the prompt, in order, and keeps templates from cutting, rewriting or obeying what the texts hold (thinking models'
templates cut thoughts out of earlier answers). White space at a text's ends stays visible, since many templates strip
it.
"""

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.process import WhenUsed
from relabel.manifests.weights import OF_A_CONFIG

jinja2 = WhenUsed("jinja2")

DAY = "template_day"
"""The key of `chat_template_kwargs` with the day that a template shows, as 2026-11-25; no template sees the key."""
DEFAULT_DAY = "2026-01-01"
"""Where there is no plan that settles one: what a student or a teacher was trained on stays as it was."""
SET_BY_US = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "strftime_now"})
"""Arguments of `apply_chat_template` that no user sets."""

_PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role | capitalize + '\n' + m.content + '\n\n' }}{% endfor %}"
    "{{ '### Assistant\n' }}"
)
"""For base models, which have no tokens for turns: headers in words."""
_MARK = re.compile(r"Qz(\d+)Zq")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_OPENED = re.compile(
    rf"([<\[◁])([\w:.-]*(?:{_THOUGHT.pattern})[\w:.-]*|[\w:.-]+(?=[>\]▷]\s*\Z))([>\]▷])(?!.*\1/\2\3).*\Z", re.I | re.S
)
"""A tag that is not closed to the end: of a thought, or the last thing there."""

Turn = tuple[str, str]
"""Role and text."""


class Around(NamedTuple):
    """What a template puts around the texts of turns.

    Args:
        pieces: its own text before, between and after the turns' texts, white space at their ends included.
        order: number of the turn whose text is between two pieces; a template may show a turn again.
        is_folded: the system turn's text opens the first user turn.
    """

    pieces: list[str]
    order: list[int]
    is_folded: bool


class ChatTemplate:
    """The template of one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        kwargs: passed to the template (`enable_thinking`); `chat_template` is a template's name or its text.
    Raises:
        ConfigError: one of them is not the user's to set, there are several templates and none is chosen, or a turn's
            text would be lost.
        ModelError: the template can't render a user turn.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        overridden = sorted(SET_BY_US & self._kwargs.keys())
        if overridden:
            raise ConfigError(f"chat_template_kwargs: `{overridden[0]}` is set by relabel itself. Leave it out.")
        day = self._kwargs.pop(DAY, DEFAULT_DAY)
        try:
            noon = datetime.combine(date.fromisoformat(str(day)), time(12))
        except ValueError as exc:
            raise ConfigError(f"chat_template_kwargs.{DAY}: want a day such as 2026-11-25, got {day!r}.") from exc
        own = tokenizer.chat_template
        chosen = self._kwargs.get("chat_template")
        self.is_own = bool(own or chosen)
        """Whether the model has a template, or one was named."""
        named = sorted(own) if isinstance(own, dict) else []
        wanted = str(chosen or "default")
        if (chosen or named) and wanted not in named and "{" not in wanted:
            raise ConfigError(
                f"{tokenizer.name_or_path}: has no chat template named {wanted!r}"
                + (f", but {', '.join(named)}. Choose one by" if named else ". Leave out")
                + " chat_template_kwargs.chat_template (in a job, below `engine`), or write a whole template there."
            )
        if not self.is_own:
            self._kwargs["chat_template"] = _PLAIN
        self._kwargs["strftime_now"] = noon.strftime
        self._proven = functools.lru_cache(maxsize=256)(self._prove)
        self.opened = ""
        """What the prompt ends with from an opened tag on, of a thought or of all answers; else empty."""
        self.opened_tag = ""
        """That tag."""
        self.close_thought = ""
        """What closes it, if it is a thought."""
        match: re.Match[str] | None = None
        with contextlib.suppress(ConfigError):  # which is raised of real turns
            match = _OPENED.search(self.around([("system", "a"), ("user", "a")]).pieces[-1])
        if match is not None:
            self.opened = match[0]
            self.opened_tag = match.expand(r"\1\2\3")
            if _THOUGHT.search(self.opened_tag):
                self.close_thought = match.expand(r"\n\1/\2\3\n\n")

    def around(self, turns: Sequence[Turn]) -> Around:
        """What the template puts around turns, with the generation prompt at the end.

        Raises:
            ConfigError: a turn's text would be lost, or be in another order.
            ModelError: the template fails.
        """
        # NUL represents all of a text but the white space at its ends
        shape = []
        for role, text in turns:
            edges = text.replace(text.strip(), "\0", 1) if text.strip() else f"{text}\0"
            shape.append((role, edges))
        return self._proven(tuple(shape))

    def text(self, turns: Sequence[Turn]) -> str:
        """The whole prompt, with a thought that it opens closed again."""
        around = self.around(turns)
        texts = [turns[number][1].strip() for number in around.order]
        texts.append(self.close_thought)
        return "".join(piece + text for piece, text in zip(around.pieces, texts, strict=True))

    def _prove(self, shape: tuple[Turn, ...]) -> Around:
        """See `around`.

        Args:
            shape: the turns with NUL in place of their texts, white space at the ends left.
        """
        marked = [(role, edges.replace("\0", f"Qz{number}Zq")) for number, (role, edges) in enumerate(shape)]
        ways = [(marked, False)]
        if [role for role, _ in shape[:2]] == ["system", "user"]:
            ways.append(([("user", f"{marked[0][1]}\n\n{marked[1][1]}"), *marked[2:]], True))
        failure: Exception | None = None
        for asked, is_folded in ways:
            try:
                rendered = self._tokenizer.apply_chat_template(
                    [{"role": role, "content": text} for role, text in asked],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._kwargs,
                )
            except (jinja2.TemplateError, *OF_A_CONFIG) as exc:
                failure = exc
                continue
            pieces = _MARK.split(rendered)
            failure = None
            order = [int(number) for number in pieces[1::2]]
            if list(dict.fromkeys(order)) == list(range(len(shape))):
                return Around(pieces[::2], order, is_folded)
        advice = "Take another one (chat_template_kwargs.chat_template: a name or the text), or another model."
        name = self._tokenizer.name_or_path
        if failure is not None:
            raise ModelError(
                f"{name}: its chat template can't render turns of {', '.join(role for role, _ in shape)} ({failure}); "
                f"it is not one for chats, or not for so many turns. {advice}"
            ) from failure
        number = min(set(range(len(shape))) - set(order), default=None)
        raise ConfigError(
            f"{name}: its chat template {'moves' if number is None else 'leaves out'} turn {(number or 0) + 1} of "
            f"{len(shape)} ({shape[number or 0][0]}), so that the model would not read what is asked. {advice} A "
            "labeler that asks in one turn may do."
        )


def start_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text, without those that it puts after one."""
    plain = list(tokenizer("a", add_special_tokens=False).input_ids)
    whole = list(tokenizer("a", add_special_tokens=True).input_ids)
    for start in range(len(whole)):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def may_show_day(folder: Path, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tokenizer's chat template, or one among `chat_template_kwargs`, asks for the day at all."""
    files = [folder / "tokenizer_config.json", folder / "chat_template.json", *folder.glob("*.jinja")]
    files += folder.glob("additional_chat_templates/*.jinja")
    texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
    return any("strftime_now" in text for text in (*texts, str(kwargs.get("chat_template"))))


def day_of(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The day among `chat_template_kwargs`, if it is there."""
    return {key: value for key, value in (kwargs or {}).items() if key == DAY}

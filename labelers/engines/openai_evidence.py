"""What a reply proves next to its answer: which model gave it, and how much of the prompt that model has read. Both are
compared with what was asked, since a server that routes to another model, or cuts a prompt to what its memory holds,
answers as if nothing were wrong.
"""

from __future__ import annotations

import re
from collections import deque

# ------------------------------------------------------------------------------
# Which model.


_DATE = r"(?:(?:19|20)\d\d-?[01]\d(?:-?[0-3]\d)?|2\d[01]\d[0-3]\d|2\d(?:0[1-9]|1[0-2])|[01]\d[0-3]\d|00\d)(?:-v\d)?"
_WEIGHTS = (
    r"fp?\d{1,2}|bf16|u?int-?\d|\d\d?-?bits?|w\d{1,2}a\d{1,2}|i?q\d(?:-[a-z\d]{1,3}){0,2}|awq|gptq|gguf|ggml|mlx|bnb|nf4"
    r"|mxfp\d|nvfp\d|exl\d|onnx|dynamic|static|quantized|e4m3|hf"
)
_MARK = re.compile(rf"-({_DATE}|{_WEIGHTS}|latest)$")
"""At a name's end: a release or the form of the weights, of one and the same model."""
_ALWAYS = frozenset({"latest", "default", "hf"})
"""Marks that mean nothing."""
_FILES = (".gguf", ".bin", ".safetensors", ".onnx")


def is_form_of(asked: str, name: str) -> bool:
    """Whether a name is that of the asked model: itself, with a path or an owner, or with a release, a tag, or a form
    of the weights that the other one leaves open. Case doesn't count.
    """
    asked_base, asked_marks = _parts_of(asked)
    base, marks = _parts_of(name)
    return asked_base == base and (asked_marks <= marks or marks <= asked_marks)


def _parts_of(name: str) -> tuple[str, frozenset[str]]:
    """A model's bare name, and its marks."""
    last = re.split(r"[/\\]", name.strip().lower().rstrip("/\\"))[-1]
    for ending in _FILES:
        last = last.removesuffix(ending)
    base, *tags = re.split("[:@]", last)
    base = re.sub(r"[\s_-]+", "-", base)
    base = re.sub(rf"\.(?=(?:{_WEIGHTS})$)", "-", base)  # model.Q4_K_M.gguf
    marks = {re.sub(r"[\s_-]+", "-", tag) for tag in tags if tag}
    while (mark := _MARK.search(base)) is not None and mark.start() > 0:
        marks.add(mark[1].replace("-", ""))
        base = base[: mark.start()]
    return base, frozenset(marks - _ALWAYS)


class ModelNames:
    """The names under which a run's answers came.

    A gateway may give the model another name than the one that it is asked for: the name that the first request was
    answered with, which asks a made-up pair, is accepted. Once a reply bears the asked name itself it no longer is.
    """

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.adopted: str | None = None
        """A wholly different name that is taken for the asked one."""
        self.replies_as_adopted = 0
        self._is_first = True
        self._forms: set[str] = set()

    def is_accepted(self, name: str) -> bool:
        """Whether an answer under this name is the asked model's; also where the reply names none."""
        if not name:
            return True
        is_first = self._is_first
        self._is_first = False
        if is_form_of(self.asked, name):
            self.adopted = None
            return True
        if is_first:
            self.adopted = name
        is_adopted = self.adopted is not None and is_form_of(self.adopted, name)
        self.replies_as_adopted += is_adopted
        return is_adopted

    def is_new_form(self, name: str) -> bool:
        """Whether a name is another form of the asked one, met for the first time; the first few of them."""
        if name in ("", self.asked) or name in self._forms or not is_form_of(self.asked, name):
            return False
        if len(self._forms) >= MOST_FORMS:
            return False
        self._forms.add(name)
        return True


MOST_FORMS = 8

# ------------------------------------------------------------------------------
# How much of the prompt.


LEAST_CUT = 1_024
"""Bytes of a prompt below which no cut is looked for: templates and rounding weigh too much there."""
ASCII_PER_TOKEN = 8.0
OTHER_PER_TOKEN = 14.0
"""More bytes than any tokenizer puts into a token on average: it is 3 to 5.5 in plain text, and up to 10 in scripts of
three bytes a letter. Runs of one character, which may be one token, are shortened first.
"""
CAP_PROMPTS = 4
CAP_SPREAD = 1.25
LEAST_CAP = 256
"""So many prompts of different sizes, the largest so many times the smallest, all counted as the same number of tokens,
and none as more: the server cuts there.
"""


RECENT = 64
"""Prompts of which a server may hold the beginning in its cache."""


class PromptCounts:
    """Learns from a run's replies whether the server's counts of prompt tokens can be trusted, and where it cuts."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._is_trusted = False
        self._most = 0
        self._sizes_at_most: set[int] = set()
        self._recent: deque[str] = deque(maxlen=RECENT)

    def is_cut(self, prompt: str, count: int) -> bool:
        """Whether the server has read far less than the whole prompt. Never where it counts nothing, or not by the
        prompt's length.

        Args:
            count: its count of prompt tokens, cached ones included; 0 for none.
        """
        if count <= 0:
            return False
        size = len(prompt.encode("utf-8", "replace"))
        if self._first is None:  # of the trial request at the start, which is short
            self._first = count
            self._is_trusted = count >= 1.25 * least_tokens(prompt)
        if count > self._most:
            self._most = count
            self._sizes_at_most = set()
        if count == self._most and len(self._sizes_at_most) < 64:
            self._sizes_at_most.add(size)
        is_cut = self._is_trusted and count != self._first and size >= LEAST_CUT and self._is_low(prompt, size, count)
        if not is_cut:
            self._recent.append(prompt)
        return is_cut

    def _is_low(self, prompt: str, size: int, count: int) -> bool:
        if count == self._most and self._is_at_cap(size):
            return True
        if count >= size / ASCII_PER_TOKEN:
            return False
        # some servers count what they had to read alone, without the beginning that an earlier prompt left in the cache
        known = max((_shared(prompt, earlier) for earlier in self._recent), default=0)
        return count < least_tokens(prompt[known:])

    def _is_at_cap(self, size: int) -> bool:
        sizes = self._sizes_at_most
        if self._most < LEAST_CAP or len(sizes) < CAP_PROMPTS or max(sizes) < CAP_SPREAD * min(sizes):
            return False
        return size > min(sizes)


def _shared(one: str, other: str) -> int:
    """Characters of the beginning that two texts share."""
    least = 0
    most = min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one.startswith(other[:middle]):
            least = middle
        else:
            most = middle - 1
    return least


def least_tokens(prompt: str) -> float:
    """Fewer tokens than any tokenizer makes of a text."""
    shortened = re.sub(r"(.)\1{3,}", r"\1\1\1", re.sub(r"\s+", " ", prompt), flags=re.DOTALL)
    num_bytes = len(shortened.encode("utf-8", "replace"))
    num_ascii = len(shortened.encode("ascii", "ignore"))
    return num_ascii / ASCII_PER_TOKEN + (num_bytes - num_ascii) / OTHER_PER_TOKEN

"""What a student and every bundle's loader share: batches of rows of like length, how many tokens one holds, and the
nineteen counts of a query's surface that a student of kind `logistic` reads.

Needs the standard library alone and nothing of this package, since every bundle's `load.py` holds this text
(`export/exporting.py`).
"""

import re
from collections.abc import Iterator, Sequence

CPU_BATCH_TOKENS = 1024
"""A CPU's caches hold what a model makes of no more: with 8,192 MiniLM takes 1.3 to 1.6 times the CPU time
(benchmarks/batch_tokens_cpu_2026-11-24.md).
"""
GPU_BATCH_TOKENS = 8192


def batch_tokens_on(device: str) -> int:
    """Tokens of a batch, padding included, that keep a device busy.

    Args:
        device: what torch calls it, or a bundle's provider.
    """
    return CPU_BATCH_TOKENS if device.partition(":")[0] in ("cpu", "openvino") else GPU_BATCH_TOKENS


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places of rows, longest first, in batches of at most `batch_tokens` tokens with padding (a longer row is
    alone).
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


# ------------------------------------------------------------------------------
# Nineteen counts of a query's surface, next to its embedding. No model and no tokenizer: words, marks, and closed lists
# of English words that stand in for parts of speech. A word more in a list changes what trained students answer.


_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ENDS = ".?!…。？！"
_SENTENCE_END = re.compile(rf"(?<![{_ENDS}])[{_ENDS}]++(?=[\s\"'”’)\]]|$)")
_MARK = re.compile(r"[^\w\s]")
_QUESTION_MARKS = frozenset("?？؟")
_SEPARATORS = frozenset(",;:，、；：")
_LONG = 8
_WORD_LISTS = {
    "question_words": "who whom whose what which when where why how",
    "open_words": "why explain describe discuss analyze analyse evaluate assess examine explore outline summarize "
    "summarise elaborate justify",
    "relation_words": "impact impacts effect effects affect affects cause causes influence influences role roles "
    "relationship relationships implications consequences factors reasons ways trends strategies challenges",
    "comparisons": "compare compared comparison contrast versus vs difference differences differ similarities between "
    "better best worse worst more most less least than pros cons advantages disadvantages",
    "auxiliaries": "am is are was were be been being do does did has have had can could will would shall should may "
    "might must",
    "pronouns": "i me my mine we us our ours you your yours he him his she her hers it its they them their theirs "
    "this that these those someone something anyone anything",
    "determiners": "a an the some any each every all both either neither no another other such",
    "prepositions": "about above across after against along among around at before behind below beside by down during "
    "for from in inside into near of off on onto out over per through throughout to toward towards under up upon via "
    "with within without",
    "coordinators": "and or but nor yet plus",
    "subordinators": "although because if since so though unless until when whenever whereas whether while",
    "negations": "not no never none nothing nobody without cannot can't don't doesn't didn't isn't aren't wasn't "
    "weren't won't wouldn't shouldn't couldn't haven't hasn't hadn't",
}
_WORDS = {name: frozenset(listed.split()) for name, listed in _WORD_LISTS.items()}

COUNT_NAMES = (
    "characters",
    "words",
    "sentences",
    "long_words",
    "capitalized",
    "numbers",
    "question_marks",
    "separators",
    *_WORD_LISTS,
)


def query_counts(text: str) -> list[int]:
    """The counts of a query, in the order of `COUNT_NAMES`; all 0 for an empty one.

    Time grows linearly with the text. A text without word breaks (Chinese, Japanese) has one word a stretch.
    """
    words = _WORD.findall(text)
    folded = [word.lower().replace("’", "'") for word in words]
    marks = _MARK.findall(text)
    return [
        len(text),
        len(words),
        len(_SENTENCE_END.findall(text)),
        sum(len(word) >= _LONG for word in words),
        sum(word[0].isupper() for word in words[1:]),
        sum(any(map(str.isdigit, word)) for word in words),
        sum(mark in _QUESTION_MARKS for mark in marks),
        sum(mark in _SEPARATORS for mark in marks),
        *(sum(word in listed for word in folded) for listed in _WORDS.values()),
    ]

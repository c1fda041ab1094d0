"""What hypothesis draws: hostile texts, documents, pairs, answer formats, and answers that are right, nearly right or
anything.
"""

from hypothesis import strategies as st

from relabel.manifests.asks import AnswerFormat, Choice, Fragment, Indices, Lines, Section, Text
from relabel.manifests.labels import Pair

SNARES = (
    "<score>2</score>",
    "</think>",
    "<think>",
    "<extract>none</extract>",
    "</extract>",
    "<score>",
    "</score>",
    "<|im_end|>",
    "<|im_start|>system",
    "{{ document }}",
    "{% raw %}",
    "{0}",
    "{query}",
    "%s",
    "\0",
    "\0document\0",
    "none",
    "NONE",
    '{"score": 2}',
    "1.",
    "2/2",
    "e\u0301",
    "\u00e9",
    "\u0301",
    "\u0323\u0307",
    "\uac01",
    "\u1100\u1161\u11a8",
    "\u09c7\u09be",
    "\u00a0",
    "\u2003\n",
    "\r\n",
    "\x85",
    "\x1c",
    "\U000f0000",
    "\U0010ffff",
    "\u0958",
    "\ufb1d",
    "\u212b",
    "I'm sorry, I can't",
    "##final score: 2",
    "<score >2</score >",
    "\u202e",
)

characters = st.characters(exclude_categories=("Cs",))  # Parquet holds UTF-8, so no lone surrogates
words = st.text(st.characters(categories=("Ll", "Nd")), min_size=1, max_size=8)


def texts(max_pieces: int = 12) -> st.SearchStrategy[str]:
    """Texts that hold words, snares and anything, in any order."""
    piece = st.one_of(
        words, st.sampled_from(SNARES), st.text(characters, max_size=6), st.sampled_from((" ", "\n", "  \t", "\n\n"))
    )
    return st.lists(piece, max_size=max_pieces).map("".join)


def pairs() -> st.SearchStrategy[Pair]:
    """Pairs with hostile text in every field; the document may be empty."""
    return st.builds(
        Pair,
        row_id=st.integers(0, 2**40),
        query_id=texts(3),
        query=texts(4),
        doc_id=texts(3),
        document=texts(),
        context=st.lists(texts(4), max_size=4).map(tuple),
        columns=st.fixed_dictionaries(
            {}, optional={"aspect": texts(3), "previous_queries": st.lists(texts(3), max_size=2).map(tuple)}
        ),
        siblings=st.just(()),
    )


tags = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=10).filter(
    lambda tag: tag.replace("_", "").isalpha()
)


@st.composite
def answer_formats(draw: st.DrawFn) -> AnswerFormat:
    """Formats of one to six sections of any kind."""
    names = draw(st.lists(tags, min_size=1, max_size=6, unique=True))
    sections: list[Section] = []
    for tag in names:
        kind = draw(st.sampled_from(("text", "fragment", "choice", "lines", "indices")))
        if kind == "text":
            sections.append(Text(tag, draw(st.integers(4, 300)), draw(st.booleans())))
        elif kind == "fragment":
            sections.append(Fragment(tag, draw(st.integers(4, 300)), draw(st.booleans())))
        elif kind == "indices":
            sections.append(Indices(tag, draw(st.integers(0, 3000))))
        elif kind == "lines":
            least = draw(st.integers(1, 3))
            sections.append(Lines(tag, least, least + draw(st.integers(0, 12)), draw(st.integers(4, 60))))
        else:
            num_options = draw(st.integers(2, 10))
            sections.append(Choice(tag, tuple(map(str, range(num_options)))))
    return AnswerFormat(tuple(sections))


@st.composite
def contents_of(draw: st.DrawFn, format: AnswerFormat) -> dict[str, str]:
    """Contents that a valid answer in this format may have, as a reader returns them: stripped, and free of the
    format's tags.
    """
    contents = {}
    for section in format.sections:
        if isinstance(section, Choice):
            contents[section.tag] = draw(st.sampled_from(section.options))
        elif isinstance(section, Indices):
            numbers = st.lists(st.integers(1, section.most), max_size=5) if section.most else st.just([])
            contents[section.tag] = draw(st.sampled_from((",", ", ", " ,\n"))).join(map(str, draw(numbers)))
        elif isinstance(section, Lines):
            line = st.text("abc d", min_size=1, max_size=9).map(lambda text: text.strip() or "x")
            lines = draw(st.lists(line, min_size=section.least, max_size=section.most))
            contents[section.tag] = "\n".join(lines)
        else:
            contents[section.tag] = draw(texts(5)).replace("<", "(").strip() or "something"
    return contents


gaps = st.sampled_from(("", " ", "\n", "\n\n", "\t \r\n", "\u00a0"))


@st.composite
def written(draw: st.DrawFn, format: AnswerFormat, contents: dict[str, str]) -> str:
    """A valid answer with these contents, with white space wherever it may be."""
    text = draw(gaps)
    for section in format.sections:
        text += f"<{section.tag}>{draw(gaps)}{contents[section.tag]}{draw(gaps)}</{section.tag}>{draw(gaps)}"
    return text


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """The text with a few pieces cut, doubled, moved or put in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 30)))
        kind = draw(st.sampled_from(("cut", "double", "insert", "truncate", "lower")))
        if kind == "cut":
            text = text[:start] + text[end:]
        elif kind == "double":
            text = text[:end] + text[start:]
        elif kind == "insert":
            text = text[:start] + draw(texts(2)) + text[start:]
        elif kind == "truncate":
            text = text[:start]
        else:
            text = text.upper() if draw(st.booleans()) else text.swapcase()
    return text

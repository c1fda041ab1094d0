"""What servers do wrong, as a table: what scores would the bundle give if it were asked with this mistake?

A server answers in steps: it takes the texts, makes tokens of them, changes the rows of tokens, asks the model, makes a
score of the probabilities, and replies. `RIGHT` has each step as the bundle was trained; a mistake replaces one of
them. `explain` computes the scores of every mistake, and of two together, and finds the ones that a server gives.

A further mistake is a function and a line of `mistakes_of`.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from relabel.distill.students.model import softmax
from relabel.export.loader import Student, choose_model, load_tokenizer
from relabel.export.parity import HEAD, expected_grade

# N pairs, K grades, T tokens, D hidden

Pair = tuple[str, str]
Row = tuple[list[int], list[int]]
"""Token ids, and segment numbers or counts, as the loader's `Encoder` gives them."""
Request = Sequence[Pair]
"""Pairs that go to the server together."""

SAME = 1e-4
"""Scores from 0 to 1 that differ by no more are the same: no mistake is looked for."""
EXPLAINED = 0.9
"""A mistake is named that explains this share of the squared differences. Squares, since a mistake may change few
pairs, and a change of precision changes all of them a little.
"""
ENOUGH = 0.999
"""A mistake that explains this share is named alone; what is left shows once it is mended."""
CUTS = (64, 128, 256, 384, 512, 1024, 2048)
"""Lengths in tokens at which servers cut by default."""


# ------------------------------------------------------------------------------
# The bundle that is asked, rightly or wrongly.


class Subject:
    """A bundle that is asked as a server may ask it. Each distinct pair is tokenized once, and each distinct row
    answered once, since most mistakes change few of them.
    """

    def __init__(self, student: Student) -> None:
        import onnxruntime

        self.student = student
        self.encoder = student.encoder
        self.inputs = student.encoder.inputs
        self.tokenizer = load_tokenizer(student.folder / self.inputs.tokenizer)
        self.temperature = float((student.manifest.get("temperature") or {}).get(HEAD, 1.0))
        self.options = onnxruntime.RunOptions()
        self.options.log_severity_level = 4  # that the graph can't take so many tokens is no news for the terminal
        self._answers: dict[Any, np.ndarray] = {}
        self._rows: dict[Any, Row] = {}

    def probabilities(self, rows: Sequence[Row], head: str = HEAD) -> np.ndarray:
        """Of rows that are asked alone, [N, K]."""

        def answer(row: Row) -> np.ndarray:
            return np.asarray(self.run(self.encoder.collate([row]), head)[0])

        return np.stack([self.once((head, *map(tuple, row)), partial(answer, row)) for row in rows])

    def once(self, key: tuple[Any, ...], answer: Callable[[], np.ndarray]) -> np.ndarray:
        """An answer [K], computed the first time that its key is asked for."""
        if key not in self._answers:
            self._answers[key] = answer()
        return self._answers[key]

    def rows(self, tokens: Callable[["Subject", Request], list[Row]], pairs: Request) -> list[Row]:
        """What a way to make tokens makes of pairs, each the first time that it is asked for."""
        new = [pair for pair in dict.fromkeys(pairs) if (tokens, pair) not in self._rows]
        if new:
            self._rows |= {(tokens, pair): row for pair, row in zip(new, tokens(self, new), strict=True)}
        return [self._rows[tokens, pair] for pair in pairs]

    def run(self, batch: Mapping[str, np.ndarray], head: str = HEAD) -> np.ndarray:
        """Of a batch as it is, [N, K]."""
        probs_NK: np.ndarray = self.student.session.run([head], batch, self.options)[0]
        return probs_NK


# ------------------------------------------------------------------------------
# The steps of a server, as they should be.


@dataclass(frozen=True)
class Steps:
    """How a server answers a request.

    Args:
        texts: of a pair, before they become tokens.
        tokens: rows of a request's pairs.
        rows: what is changed in them.
        answers: probabilities [N, K] of a request's rows.
        score: one number [N] of each distribution, from 0 to 1.
        reply: the scores of a request, in the order of its documents.
    """

    texts: Callable[[Pair], Pair]
    tokens: Callable[[Subject, Request], list[Row]]
    rows: Callable[[Row], Row]
    answers: Callable[[Subject, Sequence[Row]], np.ndarray]
    score: Callable[[np.ndarray], np.ndarray]
    reply: Callable[[np.ndarray], np.ndarray]

    def scores(self, subject: Subject, requests: Sequence[Request]) -> np.ndarray:
        """Of all pairs of all requests, [N]."""
        replies = []
        for request in requests:
            pairs = [self.texts(pair) for pair in request]
            rows = [self.rows(row) for row in subject.rows(self.tokens, pairs)]
            probs_NK = self.answers(subject, rows)
            replies.append(self.reply(self.score(probs_NK.astype(float))))
        return np.concatenate(replies)


def expected_share(probs_NK: np.ndarray) -> np.ndarray:
    """The expected grade over the highest one, [N]: the score that a bundle gives."""
    return np.asarray(expected_grade(probs_NK) / (probs_NK.shape[1] - 1))


RIGHT = Steps(
    texts=lambda pair: pair,
    tokens=lambda subject, pairs: subject.encoder.encode(pairs),
    rows=lambda row: row,
    answers=lambda subject, rows: subject.probabilities(rows),
    score=expected_share,
    reply=lambda scores_N: scores_N,
)


# ------------------------------------------------------------------------------
# Scales: not wrong, since they order as the bundle does.


@dataclass(frozen=True)
class Scale:
    """A scale that a server may score on.

    Args:
        share: from its scores to the expected grade from 0 to 1.
    """

    name: str
    share: Callable[[np.ndarray], np.ndarray]


def sigmoid(values_N: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(values_N, -500, 500))))


def logit(shares_N: np.ndarray) -> np.ndarray:
    inside_N = np.clip(shares_N, 1e-7, 1 - 1e-7)
    return np.asarray(np.log(inside_N) - np.log1p(-inside_N))


EXPECTED = Scale("the expected grade from 0 to 1", np.asarray)


def scales_of(num_grades: int) -> list[Scale]:
    """Those that serving stacks give, the bundle's own first."""
    top = num_grades - 1
    scales = [
        EXPECTED,
        Scale("the log-odds of the expected grade", sigmoid),
        Scale("sigmoid applied twice", logit),
    ]
    if top > 1:
        scales.append(Scale(f"the expected grade from 0 to {top}", lambda scores_N: scores_N / top))
    return scales


# ------------------------------------------------------------------------------
# Mistakes with texts.


def swapped(pair: Pair) -> Pair:
    return pair[1], pair[0]


def without_query(pair: Pair) -> Pair:
    return "", pair[1]


def without_document(pair: Pair) -> Pair:
    return pair[0], ""


def lower_case(pair: Pair) -> Pair:
    return pair[0].lower(), pair[1].lower()


def with_prefixes(pair: Pair) -> Pair:
    return f"query: {pair[0]}", f"passage: {pair[1]}"


# ------------------------------------------------------------------------------
# Mistakes with tokens.


def cut(
    subject: Subject,
    pairs: Request,
    *,
    most: int | None = None,
    side: str | None = None,
    has_special: bool = True,
    spells_control: bool = False,
) -> list[Row]:
    """Rows of an encoder.

    Args:
        most: tokens of a row; the student's own number by default.
        side: on which texts are cut; the student's by default.
        has_special: special tokens are put around the texts.
        spells_control: `[SEP]` in a text becomes the control token.
    """
    tokenizer = subject.tokenizer
    tokenizer.encode_special_tokens = not spells_control
    tokenizer.enable_truncation(
        most or subject.encoder.max_tokens,
        strategy="longest_first",
        direction=side or subject.inputs.truncation_side,
    )
    encoded = tokenizer.encode_batch(list(pairs), add_special_tokens=has_special)
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return [(encoding.ids, encoding.type_ids) for encoding in encoded]


def cut_document_only(subject: Subject, pairs: Request) -> list[Row]:
    """The query is kept as far as it goes, and the document has the rest."""
    tokenizer = subject.tokenizer
    room = subject.encoder.max_tokens - tokenizer.num_special_tokens_to_add(True)
    rows = []
    for query, document in pairs:
        query_tokens = tokenizer.encode(query, add_special_tokens=False)
        document_tokens = tokenizer.encode(document, add_special_tokens=False)
        query_tokens.truncate(room)
        document_tokens.truncate(room - len(query_tokens.ids))
        whole = tokenizer.post_process(query_tokens, document_tokens, add_special_tokens=True)
        rows.append((whole.ids, whole.type_ids))
    return rows


def one_text(subject: Subject, pairs: Request) -> list[Row]:
    """Query and document are joined by a blank, without the tokens between them."""
    tokenizer = subject.tokenizer
    tokenizer.enable_truncation(subject.encoder.max_tokens, direction=subject.inputs.truncation_side)
    encoded = tokenizer.encode_batch([f"{query} {document}" for query, document in pairs])
    tokenizer.no_truncation()
    return [(encoding.ids, encoding.type_ids) for encoding in encoded]


def prompted(
    subject: Subject, pairs: Request, *, most: int | None = None, side: str = "right", has_template: bool = True
) -> list[Row]:
    """Rows of a decoder: the pieces of its prompt around the texts' tokens, which are cut to what room is left."""
    before, between, after = subject.inputs.prompt_ids if has_template else ([], [], [])
    room = (most or subject.encoder.max_tokens) - len(before) - len(between) - len(after)
    rows = []
    for query, document in pairs:
        query_ids = subject.tokenizer.encode(query, add_special_tokens=False).ids
        document_ids = subject.tokenizer.encode(document, add_special_tokens=False).ids
        query_ids = _cut_ids(query_ids, room, side)
        document_ids = _cut_ids(document_ids, room - len(query_ids), side)
        rows.append((before + query_ids + between + document_ids + after, list[int]()))
    return rows


def _cut_ids(ids: list[int], most: int, side: str) -> list[int]:
    if most <= 0:
        return []
    return ids[-most:] if side == "left" else ids[:most]


def in_one_piece(subject: Subject, pairs: Request) -> list[Row]:
    """A decoder's prompt and texts are one text, in which control tokens are read, and nothing is cut."""
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.encode_special_tokens = False
    before, between, after = (tokenizer.decode(ids, skip_special_tokens=False) for ids in subject.inputs.prompt_ids)
    texts = [f"{before}{query}{between}{document}{after}" for query, document in pairs]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [(encoding.ids, list[int]()) for encoding in encoded]


# ------------------------------------------------------------------------------
# Mistakes with rows of tokens.


def without_types(row: Row) -> Row:
    ids, types = row
    return ids, [0] * len(types)


def twice_marked(row: Row) -> Row:
    """The tokenizer puts its special tokens around a text that has them."""
    ids, types = row
    return ids[:1] + ids + ids[-1:], types[:1] + types + types[-1:]


def first_twice(row: Row) -> Row:
    ids, types = row
    return ids[:1] + ids, types


def stripped(row: Row, first: int, last: int) -> Row:
    """Without so many tokens at the beginning and at the end."""
    ids, types = row
    return ids[first : len(ids) - last], types


# ------------------------------------------------------------------------------
# Mistakes with the model.


def of_another_head(subject: Subject, rows: Sequence[Row], head: str) -> np.ndarray:
    return subject.probabilities(rows, head)


def padded(
    subject: Subject,
    rows: Sequence[Row],
    *,
    is_masked: bool = True,
    is_other_side: bool = False,
    is_full: bool = False,
    counts_padding: bool = False,
) -> np.ndarray:
    """The rows of a request in one batch, padded otherwise than in training.

    Args:
        is_masked: the model is shown which tokens are padding.
        is_other_side: padding is put where the student had none.
        is_full: all rows are padded to the student's `max_tokens`, and not to the longest one.
        counts_padding: positions begin at the padding and not at the text.
    """
    encoder = subject.encoder
    if is_other_side:
        encoder = copy.copy(encoder)
        other = "left" if subject.inputs.padding_side == "right" else "right"
        encoder.inputs = replace(subject.inputs, padding_side=other)
    width = max(len(ids) for ids, _ in rows)
    if is_full:
        width = max(width, encoder.max_tokens)

    def answer(row: Row) -> np.ndarray:
        batch = encoder.collate([row], width=width)
        if not is_masked:
            batch["attention_mask"] = np.ones_like(batch["attention_mask"])
        if counts_padding:
            batch["position_ids"] = np.arange(width, dtype=np.int64)[None, :]
        return np.asarray(subject.run(batch)[0])

    settings = ("padded", width, is_masked, is_other_side, counts_padding)
    # of the batch only the width changes what a row is answered
    return np.stack([subject.once((settings, *map(tuple, row)), partial(answer, row)) for row in rows])


class PoolingGraph:
    """An encoder's graph that also gives the vectors of its tokens, so that they can be pooled in another way.

    Raises:
        LookupError: the graph has no such vectors with a linear head after them, or its weights lie in another file.
        ImportError: onnx is not installed.
    """

    def __init__(self, subject: Subject) -> None:
        import onnx
        import onnxruntime

        student = subject.student
        chosen = choose_model(student.manifest["models"], student.precision)
        if len(chosen.get("files", ())) > 1:
            raise LookupError("the weights lie in a file of their own")
        model = onnx.load(str(student.folder / chosen["path"]))
        self._made_by = {name: node for node in model.graph.node for name in node.output}
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        head = self._before(HEAD, ("Gemm",))
        vector_name, weight_name, bias_name = head.input
        is_transposed = any(attribute.name == "transB" and attribute.i for attribute in head.attribute)
        self._weight_DK = weights[weight_name].T if is_transposed else weights[weight_name]
        self._bias_K = weights[bias_name]
        last_layer = self._before(vector_name, ("LayerNormalization", "RMSNormalization"))
        self._tokens = last_layer.output[0]
        model.graph.output.append(onnx.helper.make_tensor_value_info(self._tokens, onnx.TensorProto.FLOAT, None))
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self._temperature = subject.temperature

    def _before(self, name: str, operators: Sequence[str]) -> Any:
        """The nearest node of these operators that a result is made of."""
        pending = [name]
        for result in pending:
            node = self._made_by.get(result)
            if node is None:
                continue
            if node.op_type in operators:
                return node
            pending += [name for name in node.input if name not in pending]
        raise LookupError(f"nothing of {', '.join(operators)} before {name}")

    def answers(self, subject: Subject, rows: Sequence[Row], pooling: str) -> np.ndarray:
        """Probabilities [N, K] by `mean`, `max`, or the `first` or `last` token."""

        def answer(row: Row) -> np.ndarray:
            batch = subject.encoder.collate([row])
            (tokens_1TD,) = self._session.run([self._tokens], batch, subject.options)
            logits_K = _pooled(tokens_1TD[0], pooling) @ self._weight_DK + self._bias_K
            return np.asarray(softmax(logits_K[None, :] / self._temperature)[0])

        return np.stack([subject.once((pooling, *map(tuple, row)), partial(answer, row)) for row in rows])


def _pooled(tokens_TD: np.ndarray, pooling: str) -> np.ndarray:
    """The vector [D] of a row without padding."""
    if pooling == "mean":
        return np.asarray(tokens_TD.mean(0))
    if pooling == "max":
        return np.asarray(tokens_TD.max(0))
    return np.asarray(tokens_TD[0] if pooling == "first" else tokens_TD[-1])


# ------------------------------------------------------------------------------
# Mistakes with the score of a distribution.


def reversed_labels(probs_NK: np.ndarray) -> np.ndarray:
    return 1 - expected_share(probs_NK)


def likeliest_grade(probs_NK: np.ndarray) -> np.ndarray:
    return np.asarray(probs_NK.argmax(1) / (probs_NK.shape[1] - 1))


def highest_probability(probs_NK: np.ndarray) -> np.ndarray:
    return np.asarray(probs_NK.max(1))


def constant(probs_NK: np.ndarray, value: float) -> np.ndarray:
    return np.full(len(probs_NK), value)


def softmax_twice(probs_NK: np.ndarray) -> np.ndarray:
    return expected_share(softmax(probs_NK))


def untempered(probs_NK: np.ndarray, temperature: float) -> np.ndarray:
    return expected_share(softmax(np.log(np.maximum(probs_NK, 1e-30)) * temperature))


def one_probability(probs_NK: np.ndarray, grade: int) -> np.ndarray:
    return np.asarray(probs_NK[:, grade])


# ------------------------------------------------------------------------------
# Mistakes with the reply.


def best_first(scores_N: np.ndarray) -> np.ndarray:
    return np.sort(scores_N)[::-1]


def first_for_all(scores_N: np.ndarray) -> np.ndarray:
    return np.full(len(scores_N), scores_N[0])


# ------------------------------------------------------------------------------
# The table.


@dataclass(frozen=True)
class Mistake:
    """A mistake of a server.

    Args:
        name: as a reader is shown it.
        step: of `Steps`.
        done: instead.
        hangs_on_batch: it changes a pair's score by the other pairs of its request.
    """

    name: str
    step: str
    done: Callable[..., Any]
    hangs_on_batch: bool = False


COMMON = (
    Mistake("query and document are swapped", "texts", swapped),
    Mistake("the query is missing", "texts", without_query),
    Mistake("the document is missing", "texts", without_document),
    Mistake("texts are made lower case", "texts", lower_case),
    Mistake("`query: ` and `passage: ` are put before the texts", "texts", with_prefixes),
    Mistake("padding is not masked", "answers", partial(padded, is_masked=False), hangs_on_batch=True),
    Mistake(
        "all rows are padded to the student's length, and padding is not masked",
        "answers",
        partial(padded, is_masked=False, is_full=True),
    ),
    Mistake("labels in reverse order", "score", reversed_labels),
    Mistake("the most probable grade, not the distribution", "score", likeliest_grade),
    Mistake("the highest probability, whatever its grade", "score", highest_probability),
    Mistake("softmax over one logit: 1 for every pair", "score", partial(constant, value=1.0)),
    Mistake("0.5 for every pair: a head of zeros", "score", partial(constant, value=0.5)),
    Mistake("softmax applied twice", "score", softmax_twice),
    Mistake("scores come back sorted, and not in the order of the documents", "reply", best_first, hangs_on_batch=True),
    Mistake("all documents of a request have the first one's score", "reply", first_for_all, hangs_on_batch=True),
)
"""Mistakes with any student."""
ENCODER = (
    Mistake("the document alone is cut, and not the longer text", "tokens", cut_document_only),
    Mistake("query and document are one text, without the tokens between them", "tokens", one_text),
    Mistake("special tokens are left out", "tokens", partial(cut, has_special=False)),
    Mistake("special tokens come twice", "rows", twice_marked),
    Mistake("token types are left out", "rows", without_types),
    Mistake("control tokens in texts are read as control tokens", "tokens", partial(cut, spells_control=True)),
)
DECODER = (
    Mistake("prompt and texts become tokens in one piece, and are not cut", "tokens", in_one_piece),
    Mistake("the template is missing", "tokens", partial(prompted, has_template=False)),
    Mistake("the first token comes twice", "rows", first_twice),
    Mistake("positions count the padding", "answers", partial(padded, counts_padding=True), hangs_on_batch=True),
)
POOLINGS = {"first": "by the first token", "last": "by the last token", "mean": "by the mean", "max": "by the maximum"}


def mistakes_of(subject: Subject, longest: int) -> list[Mistake]:
    """The table for a bundle.

    Args:
        longest: tokens of the longest pair that is asked; what is cut beyond is not cut.
    """
    student = subject.student
    inputs = subject.inputs
    grades = student.heads[HEAD]
    table = [*COMMON]
    if inputs.kind == "encoder":
        table += ENCODER
        table += _cuts(subject, cut, longest)
        table += _poolings(subject)
    if inputs.kind == "decoder":
        before, _, after = map(len, inputs.prompt_ids)
        table += DECODER
        table += [
            Mistake("the instruction before the pair is missing", "rows", partial(stripped, first=before, last=0)),
            Mistake("the template's end is missing", "rows", partial(stripped, first=0, last=after)),
            Mistake("both ends of the template are missing", "rows", partial(stripped, first=before, last=after)),
        ]
        table += _cuts(subject, prompted, longest)
    if inputs.kind != "logistic":
        other = "left" if inputs.padding_side == "right" else "right"
        name = f"texts are padded on the {other}"
        to_full = partial(padded, is_other_side=True, is_full=True)
        table += [
            Mistake(name, "answers", partial(padded, is_other_side=True), hangs_on_batch=True),
            Mistake(f"{name}, to the student's length", "answers", to_full),
        ]
    for head in student.heads:
        if head != HEAD:
            table.append(Mistake(f"another head: {head}", "answers", partial(of_another_head, head=head)))
    if abs(subject.temperature - 1) > 1e-3:
        without = partial(untempered, temperature=subject.temperature)
        table.append(Mistake("the calibrating temperature is left out", "score", without))
    if grades > 2:  # of two grades the one is the score itself, the other is labels in reverse order
        for grade in range(grades):
            alone = partial(one_probability, grade=grade)
            table.append(Mistake(f"the probability of grade {grade} alone", "score", alone))
    return table


def _cuts(subject: Subject, read: Callable[..., list[Row]], longest: int) -> Iterator[Mistake]:
    """Other lengths, and the other side, at which texts are cut."""
    own = subject.encoder.max_tokens
    other = "left" if subject.inputs.truncation_side == "right" else "right"
    yield Mistake(f"long texts are cut on the {other}", "tokens", partial(read, side=other))
    lengths = {*CUTS, own // 4, own // 2, own * 3 // 4}
    lengths.discard(own)
    for most in sorted(lengths):
        if 8 <= most < longest:
            yield Mistake(f"texts are cut at {most} tokens, not at {own}", "tokens", partial(read, most=most))
    if longest > own:
        yield Mistake(f"texts are not cut at {own} tokens", "tokens", partial(read, most=longest))


def _poolings(subject: Subject) -> Iterator[Mistake]:
    """Other ways to make one vector of the tokens', where onnx is here to find them in the graph."""
    try:
        graph = PoolingGraph(subject)
    except (ImportError, LookupError):
        return
    for pooling, how in POOLINGS.items():
        yield Mistake(f"another pooling: {how}", "answers", partial(graph.answers, pooling=pooling))


# ------------------------------------------------------------------------------
# The search.


@dataclass(frozen=True)
class Explanation:
    """The mistake that gives a server's scores.

    Args:
        name: of the mistake, or of two; where the pairs can't tell several apart, of all.
        scale: of the scores besides.
        explained: share of the squared differences, 0 to 1.
        furthest: the largest difference that is left, of scores from 0 to 1.
    """

    name: str
    scale: str
    explained: float
    furthest: float


@dataclass(frozen=True)
class Comparison:
    """What a server gave, and how far it is from what is right.

    Args:
        requests: pairs that were asked together.
        served: its scores, [N].
        apart: [N], their distance from the right ones, on the scale that is nearest.
        counted: bool [N], whether a pair is looked at.
        most: the root mean square of differences that a change of precision makes.
    """

    requests: Sequence[Request]
    served: np.ndarray
    apart: np.ndarray
    counted: np.ndarray
    most: float

    @property
    def total(self) -> float:
        """The sum of squared differences."""
        return float((self.apart[self.counted] ** 2).sum())

    def probe(self, number: int) -> "Comparison":
        """The different pairs that are furthest off, each asked alone."""
        pairs = list(itertools.chain.from_iterable(self.requests))
        rows: dict[Pair, int] = {}
        for row in np.argsort(-self.apart, kind="stable").tolist():
            if self.counted[row] and len(rows) < number:
                rows.setdefault(pairs[row], row)
        chosen = list(rows.values())
        return replace(
            self,
            requests=[[pair] for pair in rows],
            served=self.served[chosen],
            apart=self.apart[chosen],
            counted=np.ones(len(chosen), dtype=bool),
        )


PROBED = 8
"""Pairs by which a mistake is dismissed early: a large model takes minutes for all."""
PROMISING = 0.5
"""Share of the squared differences of these pairs that it has to explain."""
TIE = 1e-10
"""Sums of squared differences that are this near leave two mistakes alike."""


def explain(subject: Subject, compared: Comparison, *, combines: bool) -> Explanation | None:
    """The mistake whose scores are the server's; None where none is.

    Args:
        combines: two mistakes together are tried where no one alone explains enough.
    """
    table = mistakes_of(subject, longest_of(subject, compared.requests))
    best = _nearest(subject, compared, [(mistake,) for mistake in table])
    if not combines or (best is not None and best.explained >= ENOUGH):
        return best
    is_cheap = subject.inputs.kind == "encoder"
    pairs = [pair for pair in itertools.combinations(table, 2) if _go_together(*pair, is_cheap=is_cheap)]
    together = _nearest(subject, compared, pairs)
    if together is None:
        return best
    if best is None:
        return together
    return together if 1 - together.explained < (1 - best.explained) / 10 else best


def _go_together(first: Mistake, second: Mistake, *, is_cheap: bool) -> bool:
    """Whether two mistakes can be made together, and are tried: what hangs on the batch can't be dismissed early, so
    it is tried with mistakes that need no further answer of the model.
    """
    if first.step == second.step:
        return False
    if is_cheap and not first.hangs_on_batch and not second.hangs_on_batch:
        return True
    return not {first.step, second.step}.isdisjoint({"score", "reply"})


@dataclass(frozen=True)
class Trial:
    """How far a server's scores, on one scale, are from those that some mistakes give."""

    name: str
    scale: Scale
    left: float
    furthest: float


def _nearest(subject: Subject, compared: Comparison, candidates: Sequence[tuple[Mistake, ...]]) -> Explanation | None:
    """The candidate that leaves the smallest differences, if it explains the server's scores."""
    probe = compared.probe(PROBED)
    trials = []
    for mistakes in candidates:
        hangs_on_batch = any(mistake.hangs_on_batch for mistake in mistakes)
        if not hangs_on_batch and not _is_promising(subject, probe, mistakes):
            continue
        name = ", and ".join(mistake.name for mistake in mistakes)
        for scale, apart_N in _differences(subject, compared, mistakes):
            left = float((apart_N**2).sum())
            trials.append(Trial(name, scale, left, float(apart_N.max(initial=0.0))))
    least = min((trial.left for trial in trials), default=np.inf)
    num_counted = int(compared.counted.sum())
    is_near = np.sqrt(least / max(1, num_counted)) <= compared.most
    if not is_near or not compared.total:
        return None
    explained = 1 - least / compared.total
    if explained < EXPLAINED:
        return None
    alike = [trial for trial in trials if trial.left <= least + TIE]
    scale_names = [scale.name for scale in scales_of(subject.student.heads[HEAD])]
    best = min(alike, key=lambda trial: scale_names.index(trial.scale.name))
    names = [trial.name for trial in alike if trial.scale.name == best.scale.name]
    return Explanation("; or ".join(names[:3]), best.scale.name, explained, best.furthest)


def _is_promising(subject: Subject, probe: Comparison, mistakes: Sequence[Mistake]) -> bool:
    left = [float((apart_N**2).sum()) for _, apart_N in _differences(subject, probe, mistakes)]
    return min(left, default=np.inf) < (1 - PROMISING) * probe.total


def _differences(
    subject: Subject, compared: Comparison, mistakes: Sequence[Mistake]
) -> Iterator[tuple[Scale, np.ndarray]]:
    """On each scale, how far a server's scores are from those that these mistakes give; none where a server with them
    could not answer, since the graph does not take such rows.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    steps = replace(RIGHT, **{mistake.step: mistake.done for mistake in mistakes})
    try:
        scores_N = steps.scores(subject, compared.requests)
    except (Fail, InvalidArgument, RuntimeException):
        return
    for scale in scales_of(subject.student.heads[HEAD]):
        yield scale, np.abs(scores_N - scale.share(compared.served))[compared.counted]


def longest_of(subject: Subject, requests: Sequence[Request]) -> int:
    """Tokens of the longest pair, not cut."""
    prompt = sum(map(len, subject.inputs.prompt_ids))
    pairs = itertools.chain.from_iterable(requests)
    lengths = [len(subject.tokenizer.encode(query, document).ids) for query, document in pairs]
    return prompt + max(lengths)

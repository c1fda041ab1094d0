"""Judgments as search tools import and export them: OpenSearch's Search Relevance Workbench, Elasticsearch's
`_rank_eval`, Quepid and the Rated Ranking Evaluator (RRE); and what people answered in Label Studio.

Each form is a function that reads its rows and one that writes them, and an entry of `FORMS` in `manifests/forms.py`.
Read rows have the columns `query_id`, `doc_id` and `grade`, and `query`, the query's text, where the form holds it; a
form that knows a query by its text alone has the text in both. To be written, rows have `query_id`, `query`, `doc_id`
and `grade`.
"""

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from relabel.manifests.errors import InputError

csv.field_size_limit(sys.maxsize)  # else a field of more than 128 KiB is an error

TEXT_COLUMNS = ("query_id", "query", "doc_id", "grade")
"""Of a form that holds the texts of queries."""


@dataclass(frozen=True)
class Heading:
    """What a file of judgments says besides its rows.

    Args:
        name: of the judgments.
        index: that the documents are in.
        template: the name of a file with a search request.
        request: the parsed search request, in whose texts `{{query}}` and `{{query_id}}` stand for the query.
    """

    name: str = "relabel"
    index: str | None = None
    template: str | None = None
    request: Any = None


ReadText = Callable[[str, str], dict[str, list[Any]]]
"""Reads the rows of a file, of its path, for messages, and its text. Raises InputError: it is not of this form."""


def delimiter_of(text: str) -> str:
    """What divides the columns of CSV: the comma, or what its first line has in place of any. A spreadsheet writes the
    semicolon where the comma is the decimal mark.
    """
    header = text.partition("\n")[0]
    return next((mark for mark in (",", ";", "\t") if mark in header), ",")


def sheet_row(row: int) -> str:
    """A row of CSV, counted from 0 below the header, as a spreadsheet shows it."""
    return f"row {row + 2} (the header is row 1)"


class Rating(NamedTuple):
    """One judgment of a file, the grade as it is written there."""

    query_id: str
    query: str | None
    doc_id: str
    grade: Any


def ratings_table(ratings: Iterable[Rating]) -> dict[str, list[Any]]:
    """Columns of rows."""
    rows = list(ratings)
    return {name: [getattr(row, name) for row in rows] for name in Rating._fields}


class JudgedQuery(NamedTuple):
    """A query with the grades of its documents, by their ids."""

    query_id: str
    query: str
    grades: dict[str, int | None]


def by_query(tables: Iterable[pa.Table]) -> list[JudgedQuery]:
    """Queries in the order in which they first come; a pair without a grade has None."""
    queries: dict[str, JudgedQuery] = {}
    for table in tables:
        for row in table.to_pylist():
            query = queries.setdefault(row["query_id"], JudgedQuery(row["query_id"], row["query"], {}))
            grade = row["grade"]
            query.grades[row["doc_id"]] = None if grade is None else int(grade)
    return list(queries.values())


# ------------------------------------------------------------------------------
# JSON: what is not there, twice there or of another kind is named by its place.


class _Place(NamedTuple):
    """A value of a JSON file, and where it lies."""

    where: str
    value: Any

    def get(self, name: str) -> "_Place":
        """A member of an object; a value of None where it has none."""
        if not isinstance(self.value, dict):
            raise InputError(f"{self.where}: an object is wanted, not {_shown(self.value)}.")
        return _Place(f"{self.where}.{name}", self.value.get(name))

    def items(self) -> Iterator["_Place"]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise InputError(f"{self.where}: a list is wanted, not {_shown(self.value)}.")
        for place, item in enumerate(self.value):
            yield _Place(f"{self.where}[{place}]", item)

    def text(self) -> str:
        """A text, or a whole number as its digits."""
        if isinstance(self.value, str):
            return self.value
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        raise InputError(f"{self.where}: a text is wanted, not {_shown(self.value)}.")


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has {twice[:60]!r} twice, of which one would be lost")
    return found


def _parsed(path: str, text: str) -> _Place:
    try:
        return _Place(path, json.loads(text, object_pairs_hook=_without_repeats))
    except ValueError as exc:
        raise InputError(f"{path}: not readable as JSON: {exc}.") from exc


def names_at_top(text: str) -> set[str]:
    """The names that a file's form shows by: those of the top object of JSON, or of the first of a list, and of what a
    hit there was stored as, or of a first line of CSV.
    """
    if not text.lstrip().startswith(("{", "[")):
        return set(text.split("\n", 1)[0].strip().split(delimiter_of(text)))
    try:
        top = json.loads(text)
    except ValueError:
        return set()
    if isinstance(top, list):
        return set(top[0]) if top and isinstance(top[0], dict) else set()
    try:
        return {*top, *top["hits"]["hits"][0]["_source"]}
    except (LookupError, TypeError):
        return set(top)


def _write_json(file: Path, content: Any) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        json.dump(content, out, ensure_ascii=False, indent=1)
        out.write("\n")


# ------------------------------------------------------------------------------
# OpenSearch: the body of `PUT _plugins/_search_relevance/judgments`. Ratings are texts of numbers, and a query is known
# by its text.


def read_opensearch(path: str, text: str) -> dict[str, list[Any]]:
    """As imported, or as `GET _plugins/_search_relevance/judgments/ID` answers."""
    return ratings_table(_opensearch_ratings(_parsed(path, text)))


def _opensearch_ratings(top: _Place) -> Iterator[Rating]:
    if top.get("hits").value is not None:
        found = list(top.get("hits").get("hits").items())
        if len(found) != 1:
            raise InputError(f"{top.where}: {len(found)} judgment lists are in it, and one is read. Get one by its id.")
        top = found[0].get("_source")
    for judged in top.get("judgmentRatings").items():
        query = judged.get("query").text()
        for rating in judged.get("ratings").items():
            yield Rating(query, query, rating.get("docId").text(), rating.get("rating").value)


def write_opensearch(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], heading: Heading) -> None:
    """The body of an import."""
    queries = [
        {
            "query": judged.query,
            "ratings": [{"docId": doc, "rating": f"{grade}.0"} for doc, grade in judged.grades.items()],
        }
        for judged in by_query(tables)
    ]
    content = {
        "name": heading.name,
        "description": "Written by relabel",
        "type": "IMPORT_JUDGMENT",
        "judgmentRatings": queries,
    }
    _write_json(file, content)


# ------------------------------------------------------------------------------
# Elasticsearch and OpenSearch: the body of `GET INDEX/_rank_eval`.


METRIC = {"dcg": {"k": 10, "normalize": True}}
"""What a written request measures: nDCG@10."""


def read_rank_eval(path: str, text: str) -> dict[str, list[Any]]:
    """The ratings of all requests; requests themselves are not read."""
    return ratings_table(_rank_eval_ratings(_parsed(path, text)))


def _rank_eval_ratings(top: _Place) -> Iterator[Rating]:
    for request in top.get("requests").items():
        query = request.get("id").text()
        for rating in request.get("ratings").items():
            yield Rating(query, None, rating.get("_id").text(), rating.get("rating").value)


def write_rank_eval(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], heading: Heading) -> None:
    """A request a query, each the heading's with the query in its place."""
    requests = [
        {
            "id": judged.query_id,
            "request": filled(heading.request, judged),
            "ratings": [{"_index": heading.index, "_id": doc, "rating": grade} for doc, grade in judged.grades.items()],
        }
        for judged in by_query(tables)
    ]
    _write_json(file, {"requests": requests, "metric": METRIC})


def filled(request: Any, judged: JudgedQuery) -> Any:
    """A search request with the query's text and id in place of `{{query}}` and `{{query_id}}`."""
    if isinstance(request, dict):
        return {name: filled(value, judged) for name, value in request.items()}
    if isinstance(request, list):
        return [filled(item, judged) for item in request]
    if isinstance(request, str):
        values = {"{{query}}": judged.query, "{{query_id}}": judged.query_id}
        return re.sub(r"\{\{query(_id)?\}\}", lambda found: values[found[0]], request)
    return request


# ------------------------------------------------------------------------------
# Quepid: CSV of `query,docid,rating`, as its cases export and import it. Quepid takes white space off both ends of what
# it imports, and puts a space before a query that a spreadsheet would take for a formula.


QUEPID_NAMES = ("query", "docid", "rating")
QUEPID_DETAILED = ("Query Text", "Doc ID", "Rating")
"""Columns, among others, of a case's detailed export."""
_QUEPID_SPACE = " \t\n\v\f\r\0"
QUEPID_UNWRITABLE = r"^[ \t\n\x0b\x0c\r\x00]|[ \t\n\x0b\x0c\r\x00]$|^$"
_FORMULA = ("=", "+", "-", "@")


def read_quepid(path: str, text: str) -> dict[str, list[Any]]:
    """Rows of a case, or of its detailed export; a query without ratings gives none."""
    if set(QUEPID_DETAILED) <= names_at_top(text):
        return ratings_table(_detailed_ratings(path, text))
    return ratings_table(_quepid_ratings(path, text))


_DETAILED_FIELD = re.compile(r'"((?:[^"]|"")*)"(?=,|\r?\n|$)|([^,\r\n]*)')
"""Quepid doubles every quote of a field, and puts quotes around those alone that hold a comma or a line break."""


def _detailed_ratings(path: str, text: str) -> Iterator[Rating]:
    """Documents that a case returned, each with its rating or none; a query without documents ends after its text."""
    delimiter = delimiter_of(text)
    records = _detailed_records(text)
    if delimiter != ",":  # a spreadsheet wrote it again, with the quotes that CSV has
        records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names = next(records, [])
    for number, fields in enumerate(records):
        row = dict(zip(names, fields, strict=False))
        query, doc, rating = (row.get(name, "").strip(_QUEPID_SPACE) for name in QUEPID_DETAILED)
        if rating and not doc:
            raise InputError(f"{path}: {sheet_row(number)} has a rating and no document.")
        if doc:
            yield Rating(query, query, doc, None if rating in ("", "NaN") else rating)


def _detailed_records(text: str) -> Iterator[list[str]]:
    text = text.rstrip("\r\n") + "\n"  # so that a last field that is empty counts
    fields: list[str] = []
    position = 0
    while position < len(text):
        field = _DETAILED_FIELD.match(text, position)
        assert field is not None, "an empty field matches anywhere"
        fields.append((field[1] if field[1] is not None else field[2]).replace('""', '"'))
        position = field.end()
        if text.startswith(",", position):
            position += 1
            continue
        position += 2 if text.startswith("\r\n", position) else 1
        if any(fields):
            yield fields
        fields = []


def _quepid_ratings(path: str, text: str) -> Iterator[Rating]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=True)
    try:
        names = tuple(next(reader, ()))
        if names != QUEPID_NAMES:
            raise InputError(f"{path}: its first line is {','.join(names)[:60]!r}, not {','.join(QUEPID_NAMES)!r}.")
        for number, row in enumerate(reader):
            if len(row) > len(QUEPID_NAMES):
                raise InputError(
                    f"{path}: {sheet_row(number)} has {len(row)} fields, and {len(QUEPID_NAMES)} are wanted."
                )
            fields = [value.strip(_QUEPID_SPACE) for value in row]
            fields += [""] * (len(QUEPID_NAMES) - len(fields))
            query, doc, rating = fields
            if rating and not doc:
                raise InputError(f"{path}: {sheet_row(number)} has a rating and no docid.")
            if doc:
                yield Rating(query, query, doc, rating or None)
    except csv.Error as exc:
        raise InputError(f"{path}: line {reader.line_num} can't be read ({exc}).") from exc


def write_quepid(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], _heading: Heading) -> None:
    """A line a judgment, ended by a line feed alone, since Quepid compares the first line with its names. Where a grade
    is None, the rating is empty.
    """
    with file.open("w", encoding="utf-8", newline="") as out:
        out.write(",".join(QUEPID_NAMES) + "\n")
        for judged in by_query(tables):
            guard = " " if judged.query.startswith(_FORMULA) else ""
            for doc, grade in judged.grades.items():
                rating = "" if grade is None else grade
                out.write(f"{_field(guard + judged.query)},{_field(doc)},{rating}\n")


def _field(text: str) -> str:
    if re.search('[,"\r\n]', text) is None:
        return text
    return '"' + text.replace('"', '""') + '"'


# ------------------------------------------------------------------------------
# RRE: `ratings.json`, whose topics hold groups of queries that share their documents; each level may be left out.
# Documents are `{"3": ["d1"]}` by gain, or `{"d1": {"gain": 3}}`. Quepid's export has them in each query.


PLACEHOLDER = "$query"


def read_rre(path: str, text: str) -> dict[str, list[Any]]:
    """The documents of each query."""
    return ratings_table(_rre_ratings(_parsed(path, text)))


def _rre_ratings(top: _Place) -> Iterator[Rating]:
    placeholder = top.get("query_placeholder").value or PLACEHOLDER
    for topic in _level(top, "topics"):
        for group in _level(topic, "query_groups"):
            for asked in _level(group, "queries"):
                query = asked.get("placeholders").get(placeholder).text()
                documents = asked.get("relevant_documents")
                if documents.value is None:
                    documents = group.get("relevant_documents")
                for doc, gain in _gains(documents):
                    yield Rating(query, query, doc, gain)


def _level(node: _Place, name: str) -> Iterator[_Place]:
    """What a node holds of a level; the node itself where the level is left out."""
    held = node.get(name)
    if held.value is None:
        yield node
    else:
        yield from held.items()


def _gains(documents: _Place) -> Iterator[tuple[str, Any]]:
    if documents.value is None:
        return
    if not isinstance(documents.value, dict):
        raise InputError(f"{documents.where}: an object is wanted, not {_shown(documents.value)}.")
    for name, held in documents.value.items():
        place = _Place(f"{documents.where}.{name}", held)
        if isinstance(held, list):
            for doc in place.items():
                yield doc.text(), name
        else:
            yield name, place.get("gain").value


def write_rre(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], heading: Heading) -> None:
    """A group a query, its documents by gain."""
    groups = []
    for judged in by_query(tables):
        documents: dict[str, list[str]] = {}
        for doc, grade in judged.grades.items():
            documents.setdefault(str(grade), []).append(doc)
        asked = {"template": heading.template, "placeholders": {PLACEHOLDER: judged.query}}
        groups.append({"name": judged.query, "queries": [asked], "relevant_documents": documents})
    _write_json(file, {"id_field": "id", "index": heading.index, "query_groups": groups})


# ------------------------------------------------------------------------------
# Label Studio: tasks with what was predicted, which it imports, and its exports JSON and JSON-MIN, in which each task
# comes back with the answers of people. A task's data names the pair; the answers are those of the controls `grade` and
# `why` of the labeling interface.


PEOPLE_COLUMNS = (*TEXT_COLUMNS, "who", "when", "why")
"""Of judgments that say who made them."""
GRADE_CONTROL = "grade"
WHY_CONTROL = "why"
_DOCUMENT_OBJECT = "document"
LABEL_STUDIO_MARKS = ("data", "annotations")
LABEL_STUDIO_MIN_MARKS = ("annotator", "annotation_id")


class Answer(NamedTuple):
    """What a person answered of a pair, the grade as it is written there."""

    query_id: str
    query: str | None
    doc_id: str
    grade: Any
    who: str | None
    when: str | None
    why: str | None
    review_order: str | None


def write_label_studio(file: Path, tables: Iterable[pa.Table], model: str) -> None:
    """A task a row, in the order of the rows.

    Args:
        tables: all columns are the task's data; the one called `judge_grade`, where it is there, is the prediction.
        model: whose prediction that is.
    """
    tasks = []
    for table in tables:
        for row in table.to_pylist():
            task: dict[str, Any] = {"data": row}
            if "judge_grade" in row:
                predicted = {
                    "from_name": GRADE_CONTROL,
                    "to_name": _DOCUMENT_OBJECT,
                    "type": "choices",
                    "value": {"choices": [str(row["judge_grade"])]},
                }
                task["predictions"] = [{"model_version": model, "result": [predicted]}]
            tasks.append(task)
    _write_json(file, tasks)


def read_label_studio(path: str, text: str) -> dict[str, list[Any]]:
    """A row for each answer of a person; what was skipped or has no grade is none. Predictions are no answers."""
    answers = list(_answers(_parsed(path, text)))
    return {name: [getattr(answer, name) for answer in answers] for name in Answer._fields}


def _answers(top: _Place) -> Iterator[Answer]:
    for task in top.items():
        if task.get("data").value is None:
            yield from _flat_answers(task)
            continue
        data = task.get("data")
        annotations = task.get("annotations")
        if annotations.value is None:
            continue
        for annotation in annotations.items():
            if annotation.get("was_cancelled").value:
                continue
            given = _given(annotation)
            if GRADE_CONTROL not in given:
                continue
            yield Answer(
                query_id=data.get("query_id").text(),
                query=data.get("query").value,
                doc_id=data.get("doc_id").text(),
                grade=given[GRADE_CONTROL],
                who=_person(annotation.get("completed_by")),
                when=annotation.get("updated_at").value or annotation.get("created_at").value,
                why=given.get(WHY_CONTROL),
                review_order=data.get("review_order").value,
            )


def _flat_answers(task: _Place) -> Iterator[Answer]:
    """The answer of a row of JSON-MIN, whose controls lie next to the data."""
    grade = _one_value(task.get(GRADE_CONTROL).value)
    if grade is None:
        return
    yield Answer(
        query_id=task.get("query_id").text(),
        query=task.get("query").value,
        doc_id=task.get("doc_id").text(),
        grade=grade,
        who=_person(task.get("annotator")),
        when=task.get("updated_at").value or task.get("created_at").value,
        why=_one_value(task.get(WHY_CONTROL).value),
        review_order=task.get("review_order").value,
    )


def _given(annotation: _Place) -> dict[str, Any]:
    """What an annotation says, by control: of choices, a rating, a number or a text area."""
    given = {}
    for region in annotation.get("result").items():
        control = region.get("from_name").value
        value = region.get("value")
        for kind in ("choices", "rating", "number", "text"):
            held = _one_value(value.get(kind).value)
            if held is not None:
                given[control] = held
    return given


def _one_value(value: Any) -> Any:
    """A value, or that of a list of one; several lines of a text area are one text."""
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        return "\n".join(map(str, value))
    return value[0] if value else None


def _person(place: _Place) -> str | None:
    """The address of a person, or the number where an export has no more."""
    if place.value is None:
        return None
    if isinstance(place.value, dict):
        email = place.get("email")
        return place.get("id").text() if email.value is None else email.text()
    return place.text()

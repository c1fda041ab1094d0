"""Which columns of a file a job reads, and whether each holds what it should."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.plain_columns import is_id_type, is_number_type, plain_type
from relabel.manifests.labels import Reads
from relabel.manifests.spec_faults import nearest
from relabel.manifests.specs import Columns
from relabel.manifests.trees import NODE


def resolve_columns(columns: Columns, names: Sequence[str], path: str, *, reads_context: bool) -> Columns:
    """The columns by name: which hold the document, and the context where it is wanted and there.

    Args:
        names: of the columns that are there.
    Raises:
        InputError: nothing there can be the document.
    """
    document = columns.document
    if not document:
        document = ("document",) if "document" in names else tuple(name for name in ("title", "body") if name in names)
        if not document:
            raise InputError(
                f"{path}: no column for the document: neither `document` nor `title` nor `body` is there. It has "
                f"{', '.join(names)}. Name them in input.columns.document."
            )
    context = columns.context or ("context" if "context" in names else None)
    return columns.model_copy(update={"document": document, "context": context if reads_context else None})


def check_types(
    columns: Columns,
    reads: Reads,
    schema: pa.Schema,
    path: str,
    first_types: dict[str, str],
    *,
    first_path: str,
    folders: Collection[str] = (),
) -> None:
    """Refuse a file without one of the columns, with two of one name, or with one of another type.

    Args:
        folders: columns that the names of its folders hold.
        first_types: of the files before, by column; filled in here.
    Raises:
        InputError: which, what it holds and what is wanted.
    """
    wanted: dict[str, tuple[list[str], str, Callable[[pa.DataType], bool]]] = {
        "input.columns.query_id": ([columns.query_id], "a string or a whole number", is_id_type),
        "input.columns.query": ([columns.query], "a string", _is_text),
        "input.columns.doc_id": ([columns.doc_id], "a string or a whole number", is_id_type),
        "input.columns.document": (list(columns.document), "a string", _is_text),
        "input.columns.context": ([columns.context] if columns.context else [], "a list of strings", _is_text_list),
        "input.columns.gold": ([columns.gold] if columns.gold else [], "a number", is_number_type),
        **{f"for the labeler: {one.about}": ([one.name], *INPUT_KINDS[one.kind]) for one in reads.columns},
    }
    for role, (names, allowed, test) in wanted.items():
        for name in names:
            count = schema.names.count(name) or int(name in folders)
            if count != 1:
                hint = nearest(name, schema.names)
                what = "no column" if count == 0 else f"{count} columns named"
                raise InputError(
                    f"{path}: {what} `{name}` ({role}); it has {', '.join([*schema.names, *folders])}."
                    + (f" Did you mean `{hint}`?" if hint and not count else "")
                )
            if name in folders:  # always text, which a grade is read from as from a file of text
                if not test(pa.large_string()) and test is not is_number_type:
                    raise InputError(f"{path}: `{name}` ({role}) is the name of a folder; {allowed} is wanted.")
                continue
            kind = schema.field(name).type
            if not test(plain_type(kind)):
                raise InputError(f"{path}: column `{name}` ({role}) holds {kind}; {allowed} is wanted.")
            family = _family(plain_type(kind))
            if family is not None and first_types.setdefault(name, family) != family:
                raise InputError(
                    f"{path}: column `{name}` holds {kind}, while {first_path} holds {first_types[name]} there. Make "
                    "the files agree."
                )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _is_text_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(kind) or (pa.types.is_large_list(kind) and _is_text(kind.value_type)))


CHUNK = pa.struct(
    [
        ("n", pa.int32()),
        ("heading_path", pa.large_list(pa.large_string())),
        ("text", pa.large_string()),
        ("token_len", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
    ]
)
"""What a chunk of a document holds at least: `document[start:end]` is `text`; `n` counts from 1."""


def _is_list_of(wanted: pa.StructType) -> Callable[[pa.DataType], bool]:
    """Whether a type is a list of structs that have these fields, whatever else they have."""
    is_as_wanted: dict[pa.DataType, Callable[[pa.DataType], bool]] = {
        pa.int32(): pa.types.is_integer,
        pa.large_string(): _is_text,
    }
    tests = {field.name: is_as_wanted.get(field.type, _is_text_list) for field in wanted}

    def is_list(kind: pa.DataType) -> bool:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
            return bool(pa.types.is_null(kind))
        held = {field.name: plain_type(field.type) for field in kind.value_type}
        return all(name in held and test(held[name]) for name, test in tests.items())

    return is_list


STRUCT_KINDS: dict[str, pa.StructType] = {"list<chunk>": CHUNK, "list<node>": NODE}
"""By kind of a labeler's input column that is a list of structs: the fields that are read."""
INPUT_KINDS: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "string": ("a string", _is_text),
    "list<string>": ("a list of strings", _is_text_list),
    "list<chunk>": ("a list of chunks as `relabel pairs chunk` writes them", _is_list_of(CHUNK)),
    "list<node>": ("a document's tree as `relabel pairs tree` writes it", _is_list_of(NODE)),
}
"""By kind of a labeler's input column: what it holds, in words and as a test."""


def _family(kind: pa.DataType) -> str | None:
    """What must agree between files: text is text, however stored, and numbers of any type are numbers; None for the
    type of a column without values, which agrees with all.
    """
    if pa.types.is_null(kind):
        return None
    names = {"text": _is_text, "numbers": is_number_type, "lists of text": _is_text_list}
    return next((name for name, test in names.items() if test(kind)), str(kind))

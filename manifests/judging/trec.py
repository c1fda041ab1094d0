"""TREC's two text forms: qrels (`qid 0 docid grade`) and run files (`qid Q0 docid rank score tag`), one row a line,
fields by white space.

White space is what Python's `str.split` takes for it, since that is what the readers of such files do (ir_measures
among them): an id with any of it inside would fall apart, so it can't be written.
"""

from __future__ import annotations

QRELS_COLUMNS = ("query_id", "iteration", "doc_id", "grade")
RUN_COLUMNS = ("query_id", "q0", "doc_id", "rank", "score", "tag")
EXAMPLES = {QRELS_COLUMNS: "`qid 0 docid grade`", RUN_COLUMNS: "`qid Q0 docid rank score tag`"}

FIELD = r"[^\s\x1c-\x1f]+"
"""One field of a line, for regular expressions whose `\\s` is Unicode's White_Space; Python counts four separators of
ASCII beside it.
"""
UNWRITABLE = "[\\s\\x1c-\\x1f\ufeff]|^$"
"""What an id can't hold: white space, and the mark of byte order, which readers drop at a file's beginning. Nor may it
be empty.
"""
WHOLE = r"^[+-]?[0-9]{1,9}(\.0*)?$"
"""A grade as text: a whole number, which may be written `1.`, as some assessors' exports have it."""
BEYOND_GRADES = 10**9
"""Numbers of this size and larger are no grades: more than the nine digits of `WHOLE`."""
FIRST_RANK = 1

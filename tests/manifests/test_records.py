"""A record becomes JSON with its fields in order, and the same record again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import pytest
from pydantic import Field

from relabel.manifests.records import LEFT_OUT, checked, plain


class Span(NamedTuple):
    start: int
    end: int | None


@dataclass(frozen=True)
class Inner:
    spans: list[Span]
    by_name: dict[str, Span]


@dataclass(frozen=True)
class Outer:
    z: str
    a: tuple[Inner, ...]


RECORD = Outer("é", (Inner([Span(1, None)], {"b": Span(2, 3)}), Inner([], {})))


def test_records_within_records_become_objects_with_their_fields_in_order_and_come_back() -> None:
    inner = '{"spans": [{"start": 1, "end": null}], "by_name": {"b": {"start": 2, "end": 3}}}'
    text = json.dumps(plain(RECORD), ensure_ascii=False)
    assert text == '{"z": "é", "a": [' + inner + ', {"spans": [], "by_name": {}}]}'
    assert checked(Outer, json.loads(text)) == RECORD


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="spans"):
        checked(Outer, {"z": "", "a": [{"spans": 3, "by_name": {}}]})


@dataclass(frozen=True, kw_only=True)
class Sparse:
    note: str | None = field(default=None, metadata=LEFT_OUT)
    in_: Annotated[int, Field(alias="in")]
    at_ten: Annotated[float, Field(alias="ndcg@10")] = 0.5
    null: int | None


def test_json_does_without_a_left_out_field_and_has_the_aliases_of_names_that_python_does_not_take() -> None:
    for record, text in (
        (Sparse(in_=3, null=None), '{"in": 3, "ndcg@10": 0.5, "null": null}'),
        (Sparse(note="x", in_=0, null=1), '{"note": "x", "in": 0, "ndcg@10": 0.5, "null": 1}'),
    ):
        assert json.dumps(plain(record)) == text
        assert checked(Sparse, json.loads(text)) == record

"""Every registered kind of student is whole: its class has what a kind must have, and what it refuses are keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from relabel.distill.students import spec as kinds
from relabel.distill.students.model import module_class
from relabel.distill.students.spec import KINDS, DistillSpec, student_schema, takers
from relabel.manifests.errors import ConfigError
from relabel.manifests.specs import validate_spec

MEMBERS = ("own_parts", "texts", "start", "load", "save", "inner", "layers", "output_rows")


@pytest.mark.parametrize("name", list(KINDS))
def test_a_kind_has_a_class_with_every_member_and_refuses_keys_that_there_are(name: str) -> None:
    found = module_class(name)
    assert [member for member in MEMBERS if not hasattr(found, member)] == []
    for key in KINDS[name].refuses:
        section, _, field = key.partition(".")
        assert field in DistillSpec.model_fields[section].annotation.model_fields, key
        assert takers(key), key


def test_the_schema_lists_the_kinds_and_another_is_refused(spec: Callable[..., dict[str, Any]]) -> None:
    assert student_schema()["$defs"]["StudentSection"]["properties"]["kind"]["enum"] == list(KINDS)
    with pytest.raises(ConfigError, match="there are encoder, decoder"):
        validate_spec(DistillSpec, spec(student={"kind": "reader"}), where="student.yaml")


def test_a_kind_is_one_value_that_spec_and_schema_follow(
    monkeypatch: pytest.MonkeyPatch, spec: Callable[..., dict[str, Any]]
) -> None:
    bare = replace(KINDS["encoder"], has_nodes=False, refuses=("train.batch_size",))
    monkeypatch.setitem(kinds.KINDS, "bare", bare)
    values = spec(student={"kind": "bare"})
    with pytest.raises(ConfigError, match=r"keys like `train.batch_size` are for encoders and decoders"):
        validate_spec(DistillSpec, values, where="student.yaml")
    monkeypatch.setitem(kinds.KINDS, "bare", replace(bare, refuses=()))
    assert validate_spec(DistillSpec, values, where="student.yaml").student.kind == "bare"
    values = spec(student={"kind": "bare", "heads": {"relevance": 3, "subject": 5}})
    with pytest.raises(ConfigError, match="an encoder has the head relevance alone"):
        validate_spec(DistillSpec, values, where="student.yaml")

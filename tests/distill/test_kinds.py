"""Every registered kind of student is whole: its class has what a kind must have, and what it refuses are keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

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

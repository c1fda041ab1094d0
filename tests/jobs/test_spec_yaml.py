"""YAML's traps: what a plain word means for each key of each spec, bombs, loops, and files that are no text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from relabel.jobs.job import load_job
from relabel.jobs.settings import lay_over
from relabel.jobs.spec_yaml import parse_yaml
from relabel.manifests.errors import ConfigError
from relabel.manifests.specs import DisputedText, Spec, _kinds
from tests.spec_models import spec_models

NUMBERS: dict[str, float | None] = {
    "8": 8,
    "+8": 8,
    "-8": -8,
    '"8"': 8,
    "0o10": 8,
    "0x10": 16,
    "1e3": 1000,
    "0.5": 0.5,
    ".5": 0.5,
    "5.": 5,
    "2e-1": 0.2,
    "010": 10,
    "08": 8,
    "1_000": 1000,
    "9" * 400: int("9" * 400),
    **dict.fromkeys(
        ["0b11", "-0x10", "1:30", "06:00", "1:30.5", ".inf", "-.INF", ".nan", "inf", "nan", "1e400", "1,000", "٣"]
    ),
    **dict.fromkeys(["yes", "No", "on", "OFF", "true", "False", "y", "=", "[8]", "{a: 8}", "2026-11-20"]),
}
"""A value as written, and the number that it is; None is none."""
TRUTHS = {"yes": True, "No": False, "on": True, "OFF": False, "true": True, "False": False, "y": True}
TEXTS = {
    "no": "no",
    "Yes": "Yes",
    "on": "on",
    "010": "010",
    "1:30": "1:30",
    "1_000": "1_000",
    "06:00": "06:00",
    "2026-11-20": "2026-11-20",
    "=": "=",
}


def fields() -> Iterator[tuple[str, type[Spec], str]]:
    for model in spec_models():
        for name in model.model_fields:
            yield f"{model.__name__}.{name}", model, name


class Undescribed(Spec, use_attribute_docstrings=False):
    """Its descriptions need not be sought in the source, which takes most of making a model."""


@functools.cache
def alone(model: type[Spec], name: str) -> type[Spec]:
    """A spec of that field alone."""
    field = model.model_fields[name]
    return create_model("One", __base__=Undescribed, **{name: (field.annotation, field)})  # type: ignore[call-overload, no-any-return]


def read(model: type[Spec], name: str, text: str) -> Any:
    """The field's value where it is written so, in a file and after --set alike; a ValidationError's text if it is
    refused.
    """
    values = parse_yaml(f"{name}: {text}")
    assert repr(lay_over({}, [f"{name}={text}"])) == repr(values)
    try:
        return getattr(alone(model, name).model_validate(values), name)
    except ValidationError as exc:
        return exc if exc.errors()[0]["loc"][0] == name else None


def test_every_number_and_truth_of_every_spec_is_read_right_or_refused_by_its_key() -> None:
    taken = 0
    for where, model, name in fields():
        kinds = _kinds(model, name)
        if Any in kinds or not kinds & {int, float, bool}:
            continue
        for text, number in NUMBERS.items():
            got = read(model, name, text)
            if isinstance(got, ValidationError):
                continue
            if isinstance(got, dict | tuple):
                read_as = [*(got.values() if isinstance(got, dict) else got)]
                assert read_as == [8 if number is None else number], f"{where}: {text} is read as {got!r}"
                continue
            right: list[Any] = (
                [TRUTHS[text]] if bool in kinds and text in TRUTHS else [number] if number is not None else []
            )
            right += [text] if isinstance(got, str) and str in kinds else []
            right += [bool(number)] if kinds == {bool} and number in (0, 1) else []
            assert [got, isinstance(got, bool)] in [[one, isinstance(one, bool)] for one in right], (
                f"{where}: {text} is read as {got!r}"
            )
            taken += 1
    assert taken > 500


def test_every_text_of_every_spec_takes_words_that_old_yaml_has_for_something_else() -> None:
    taken = 0
    for where, model, name in fields():
        if _kinds(model, name) - {type(None)} != {str}:
            continue
        for text in TEXTS:
            got = read(model, name, text)
            if not isinstance(got, ValidationError):
                assert got == text, f"{where}: {text} is read as {got!r}"
                taken += 1
        for text in ("true", "8", "0x10", ".inf", "[x]", "{a: 1}"):
            got = read(model, name, text)
            assert isinstance(got, ValidationError) or got == ("x",), f"{where} takes {text}"
    assert taken > 100


def test_a_key_that_takes_anything_refuses_words_that_are_read_in_two_ways() -> None:
    free = [(where, model, name) for where, model, name in fields() if Any in _kinds(model, name)]
    assert {name for _, _, name in free} >= {"storage_options", "chat_template_kwargs"}
    for where, model, name in free:
        for text in ("no", "On", "010", "1_000", "1:30", "0b1", "08"):
            for shape in ("{{s3: {{anon: {}}}}}", "{{s3: {{a: [{}]}}}}"):
                got = read(model, name, shape.format(text))
                assert isinstance(got, ValidationError), f"{where} takes {text} for {got!r}"
                assert "put it in quotes" in str(got) or "valid" in str(got)
            quoted = read(model, name, f'{{s3: {{anon: "{text}"}}}}')
            assert isinstance(quoted, ValidationError) or quoted["s3"] == {"anon": text}


@pytest.mark.parametrize(
    "text", ["yes", "NO", "off", "010", "-08", "00.5", "1_000", "1_0.5", "1:30", "190:20:30.15", "0b1", "-0x10", "0x_1"]
)
def test_words_that_two_versions_read_differently_are_known(text: str) -> None:
    assert type(parse_yaml(text)) is DisputedText
    assert type(parse_yaml(f"'{text}'")) is str


def refusal_of(path: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_job(path, **{"environment": {}, **arguments})
    return str(refused.value)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"\xff\xfen\x00a\x00", ("byte 0 is not UTF-8", "Save the file as UTF-8")),
        (b"name: caf\xe9\n", ("byte 9 is not UTF-8",)),
        (b"name: x\n" * (1 << 18), ("larger than 1 MiB",)),
        (b"PAR1" + bytes(100), ("not YAML", "U+0000")),
        (b"\xed\xa0\x80", ("not UTF-8",)),
    ],
    ids=["utf-16", "latin-1", "huge", "parquet", "surrogate"],
)
def test_bytes_that_are_no_spec_are_refused(folder: Path, data: bytes, parts: tuple[str, ...]) -> None:
    (folder / "job.yaml").write_bytes(data)
    message = refusal_of("job.yaml")
    for part in ("job.yaml", *parts):
        assert part in message


def test_an_endless_file_and_a_name_that_is_none_are_refused() -> None:
    assert "larger than 1 MiB" in refusal_of("/dev/zero")
    assert "can't be read" in refusal_of("job\0.yaml")


def test_a_mark_of_byte_order_and_windows_line_ends_are_no_fault(write_job: Callable[..., str], folder: Path) -> None:
    path = write_job()
    text = (folder / path).read_text()
    (folder / "windows.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_job("windows.yaml", environment={}).spec == load_job(path, environment={}).spec


def test_a_disputed_secret_is_not_shown(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job(), overrides=["storage_options.s3.secret=0123_4567"])
    assert "s3.secret is a word that YAML 1.1 and 1.2 read differently" in message
    assert "0123" not in message

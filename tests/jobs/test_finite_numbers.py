"""NaN and infinity are no number of ours: every option and every key of a spec that takes a number refuses them, and
names itself.

Made from the table of commands and from the models of all spec files, so that a new option or key is held to it.
Infinity means something nowhere: limits that may be left off are left out, or 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from pydantic import ValidationError

from relabel.jobs.cli import relabel as table
from relabel.manifests.specs import Spec
from tests.jobs.conftest import folder, no_scheduler, relabel  # noqa: F401
from tests.spec_models import spec_models

TEXTS = ["nan", "-nan", "inf", "-inf", "Infinity", "1e400", "-1e400"]
NUMBERS = [math.nan, math.inf, -math.inf]
SHAPES: list[Callable[[Any], Any]] = [
    lambda one: one,
    lambda one: [one],
    lambda one: {"key": one},
    lambda one: {"key": {"inner": [one]}},
]
FINITE = [0.5, 1, 10.0]


def options(group: click.Group = table, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option that takes a number with a point, with the words of its command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from options(command, (*before, name))
        elif command is not None:
            for option in command.params:
                if isinstance(option.type, click.types.FloatParamType):
                    yield (*before, name), option.opts[-1]


OPTIONS = list(options())


def keys() -> list[tuple[type[Spec], str]]:
    """Every key of a spec that takes a number with a point, alone, in a list or in a mapping, or anything at all."""
    return [
        (model, name)
        for model in spec_models()
        for name in model.model_fields
        if any(accepts(model, name, one) for one in shaped(FINITE))
    ]


def shaped(numbers: list[Any]) -> list[Any]:
    return [shape(one) for one in numbers for shape in SHAPES]


def accepts(model: type[Spec], key: str, value: Any) -> bool:
    """Whether no error is about the key; errors about keys that are missing next to it say nothing."""
    try:
        model.model_validate({key: value})
    except ValidationError as exc:
        return all(error["loc"][:1] != (key,) for error in exc.errors(include_input=False)) and all(
            error["loc"] for error in exc.errors()
        )
    return True


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=lambda one: one if isinstance(one, str) else " ".join(one))
def test_an_option_refuses_it_and_is_named(
    relabel: Callable[..., Any],  # noqa: F811
    words: tuple[str, ...],
    option: str,
    text: str,
) -> None:
    done = relabel(*words, f"{option}={text}", *needed(words))
    done.refused(2, option)


def needed(words: tuple[str, ...]) -> list[str]:
    """What the command must be given alongside, so that nothing else is wrong."""
    command: Any = table
    for word in words:
        command = command.get_command(click.Context(command), word)
    needed = [one for one in command.params if one.required]
    return [word for one in needed for word in ([one.opts[-1], "x"] if isinstance(one, click.Option) else ["x"])]


def test_the_table_has_options_with_numbers_and_the_models_have_keys() -> None:
    assert (("bench",), "--slo-ms") in OPTIONS
    assert (("pull",), "--watch") in OPTIONS
    found = {f"{model.__name__}.{key}" for model, key in keys()}
    assert {
        "LossSection.temperature",
        "BenchSpec.rates",
        "EngineSpec.chat_template_kwargs",
        "VllmArgs.extra",
        "SplitSection.dev",
    } <= found


@pytest.mark.parametrize("model", spec_models(), ids=lambda model: f"{model.__module__}.{model.__qualname__}")
def test_no_key_of_a_spec_takes_it_in_any_shape(model: type[Spec]) -> None:
    assert [(key, value) for key in model.model_fields for value in shaped(NUMBERS) if accepts(model, key, value)] == []
    numeric = [key for key in model.model_fields if not any(accepts(model, key, value) for value in shaped(["word"]))]
    assert [(key, value) for key in numeric for value in shaped(list(TEXTS)) if accepts(model, key, value)] == []

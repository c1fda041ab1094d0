"""What is reported where an output belongs to another job: the texts of prompts and the values that differ, no
digests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.prompts import TEMPLATES_READ

OLD, NEW = "Judge by the title.", "Judge by the body."


@pytest.fixture
def begun(relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str]) -> str:
    """A job with prompts of its own in `prompts`, of which the output has a plan."""
    write_pairs()
    job = write_job({"labeler": {"name": "direct", "templates": "prompts"}})
    assert relabel("templates", "export", "direct", "prompts").code == 0
    edit(lambda text: f"{text}\n{OLD}\nSame.\n")
    assert relabel("run", job).code == 0
    TEMPLATES_READ.clear()  # as a later process finds it
    return job


def edit(change: Callable[[str], str]) -> None:
    file = Path("prompts/system.j2")
    file.write_text(change(file.read_text()))


MANY = "\n".join(f"Rule {number}." for number in range(30))


@pytest.mark.parametrize(
    ("new", "settings", "shown", "absent"),
    [
        (NEW, (), [f"-{OLD}\n", f"+{NEW}\n", " Same.\n"], ["more", "stages"]),
        (NEW, ("engine.seed=8",), [f"-{OLD}\n", "engine.seed: was 7, is 8"], ["stages"]),
        (MANY, (), ["+Rule 0.", "… and 22 more"], ["Rule 29"]),
        (OLD, ("engine.seed=8",), ["engine.seed: was 7, is 8"], ["system.j2", "stages"]),
    ],
)
def test_the_prompts_are_shown_where_they_differ(
    begun: str,
    relabel: Callable[..., Any],
    new: str,
    settings: tuple[str, ...],
    shown: list[str],
    absent: list[str],
) -> None:
    edit(lambda text: text.replace(OLD, new))
    done = relabel("run", begun, *(part for one in settings for part in ("--set", one)))
    done.refused(3, "out/ecom: belongs to another job", *shown)
    assert not re.search("[0-9a-f]{16}", done.err), done
    assert not [word for word in absent if word in done.err], done


def test_prompts_of_another_labeler_are_not_set_against_each_other(begun: str, relabel: Callable[..., Any]) -> None:
    done = relabel("run", begun, "--set", "labeler.name=umbrela", "--set", "labeler.templates=null")
    done.refused(3, 'labeler.name: was "direct", is "umbrela"')
    assert "@@" not in done.err
    assert not re.search("[0-9a-f]{16}", done.err), done

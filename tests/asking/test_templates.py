"""`relabel templates export`: what it writes is what is asked, and a job file keeps all but the one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.job import load_job
from relabel.jobs.spec_yaml import parse_yaml, with_key
from relabel.labelers.registry import LABELERS, labeler_class
from relabel.manifests.errors import ConfigError

JOB = """\
# A job of mine.
name: mine   # by me
input: {path: pairs.parquet}

labeler:     # who asks
  name: NAME   # the one
  # and how often
  attempts: 2

engine: {name: fake}
output: out
"""


def digests(job: str) -> dict[str, str]:
    found: dict[str, str] = load_job(job).labeler.template_digests
    return found


@pytest.mark.parametrize("name", sorted(LABELERS))
def test_a_job_over_what_was_exported_asks_what_it_asked_until_a_file_is_edited(
    relabel: Callable[..., Any], folder: Path, name: str
) -> None:
    Path("jobs").mkdir()
    job = Path("jobs/mine.yaml")
    job.write_text(JOB.replace("NAME", name))
    before = digests(str(job))
    done = relabel("templates", "export", name, "prompts", "--job", str(job), "--output", "json")
    assert done.code == 0, done
    assert done.json["files"] == sorted(path.name for path in Path("prompts").iterdir())
    assert set(done.json["files"]) >= set(before)
    assert job.read_text() == JOB.replace("NAME   # the one", f"{name}   # the one\n  templates: ../prompts")
    assert load_job(str(job)).spec.labeler.templates == "prompts"
    assert digests(str(job)) == before
    file = Path("prompts", sorted(before)[0])
    file.write_text(file.read_text() + "\nBe strict.\n")
    assert {name for name, digest in digests(str(job)).items() if digest != before[name]} == {file.name}


def test_without_a_job_the_lines_for_one_are_said_and_they_work(relabel: Callable[..., Any], folder: Path) -> None:
    said = relabel("templates", "export", "r3a", "prompts").out
    lines = parse_yaml(said[said.index("labeler:") :])
    assert lines == {"labeler": {"name": "r3a", "templates": "prompts"}}
    Path("job.yaml").write_text(json.dumps({**parse_yaml(JOB), **lines}))
    assert digests("job.yaml") == labeler_class("r3a")(labeler_class("r3a").Options(name="r3a")).template_digests


def test_files_that_are_there_are_replaced_only_by_force_and_a_refusal_writes_nothing(
    relabel: Callable[..., Any], folder: Path
) -> None:
    Path("job.yaml").write_text(JOB.replace("NAME", "direct"))
    relabel("templates", "export", "r3a", "prompts", "--job", "job.yaml").refused(2, "its labeler is direct, not r3a")
    relabel("templates", "export", "r3", "prompts").refused(3, 'No labeler "r3"', "Did you mean r3a?")
    relabel("templates", "export", "r3a", "s3://b/prompts").refused(2, "DIR is a folder on this machine")
    assert not Path("prompts").exists()
    assert relabel("templates", "export", "r3a", "prompts").code == 0
    Path("prompts/verdict.j2").write_text("mine")
    Path("prompts/intent.j2").unlink()
    relabel("templates", "export", "r3a", "prompts").refused(2, "prompts/", "is there already", "--force")
    assert not Path("prompts/intent.j2").exists()
    assert Path("prompts/verdict.j2").read_text() == "mine"
    assert relabel("templates", "export", "r3a", "prompts", "--force").code == 0
    assert Path("prompts/verdict.j2").read_text() != "mine"


def test_a_labeler_whose_templates_lie_elsewhere_is_refused(
    relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(labeler_class("direct")):  # type: ignore[misc]
        def __init__(self, options: Any) -> None:
            super().__init__(options)
            self.template_digests = {"system.j2": "0" * 64}

    monkeypatch.setattr("relabel.labelers.template_files.labeler_class", lambda _: Elsewhere)
    from relabel.labelers.template_files import template_files

    with pytest.raises(ConfigError, match=r"its template system.j2 does not lie in .*/templates"):
        template_files("direct")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("labeler: {name: r3a} # one", "labeler: {name: r3a, templates: p} # one"),
        ('{"labeler": {"name": "r3a"}}', '{"labeler": {"name": "r3a", "templates": "p"}}'),
        ("labeler:\n    name: r3a", "labeler:\n    name: r3a\n    templates: p"),
        ("labeler:\n  templates: old # was\n  name: r3a\n", "labeler:\n  templates: p # was\n  name: r3a\n"),
        ("labeler:\n  templates:\n  name: r3a\n", None),
        ("labeler:\n  name: >\n    r3a\n  grades: 3\n", "labeler:\n  name: >\n    r3a\n  grades: 3\n  templates: p\n"),
        ("a: &a {name: r3a}\nlabeler: *a\n", None),
        ("labeler: r3a\n", None),
        ("name: r3a\n", None),
    ],
)
def test_a_key_is_put_where_the_file_s_own_form_has_it(text: str, wanted: str | None) -> None:
    assert with_key(text, "labeler", "templates", "p") == wanted


_WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)


@given(
    before=st.dictionaries(_WORDS, st.one_of(_WORDS, st.integers(), st.lists(_WORDS)), max_size=3),
    section=st.dictionaries(_WORDS, st.one_of(_WORDS, st.booleans(), st.dictionaries(_WORDS, _WORDS)), min_size=1),
    path=_WORDS,
    style=st.sampled_from([None, True, False]),
)
def test_whatever_the_spec_only_the_key_is_another(
    before: dict[str, Any], section: dict[str, Any], path: str, style: bool | None
) -> None:
    before.pop("labeler", None)
    text = yaml.safe_dump({**before, "labeler": section}, default_flow_style=style, allow_unicode=True, sort_keys=False)
    edited = with_key(text, "labeler", "templates", path)
    if edited is not None:
        assert parse_yaml(edited) == {**parse_yaml(text), "labeler": {**parse_yaml(text)["labeler"], "templates": path}}

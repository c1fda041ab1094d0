"""`${date}` and `${env.NAME}`: resolved once, recorded, never a secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs import settings
from relabel.jobs.job import load_job
from relabel.manifests.errors import ConfigError, UsageError


def refusal_of(path: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_job(path, **{"environment": {}, **arguments})
    return str(error.value)


def test_variables_are_resolved_in_every_string_and_recorded(write_job: Callable[..., str]) -> None:
    path = write_job(
        {"output": "out/${env.REGION}/${date}", "input": {"path": ["in/${date:%Y/%m/%d}/a", "b"]}, "shards": "${env.N}"}
    )
    job = load_job(path, environment={"REGION": "eu", "N": "5"}, day="2026-11-19")
    assert job.spec.output == "out/eu/2026-11-19"
    assert job.spec.input.path == ("in/2026/11/19/a", "b")
    assert job.spec.shards == 5
    assert job.variables == {"date": "2026-11-19", "date:%Y/%m/%d": "2026/11/19", "env.REGION": "eu", "env.N": "5"}


def test_a_flag_and_a_variable_of_the_job_are_resolved_too(write_job: Callable[..., str]) -> None:
    job = load_job(
        write_job(),
        environment={"X": "left", "RELABEL_NAME": "n-${env.X}", "RELABEL_DATE": "2026-01-02"},
        overrides=["output=out/${date}"],
    )
    assert (job.spec.name, job.spec.output) == ("n-left", "out/2026-01-02")


def test_two_dollars_are_for_a_brace_as_it_is(write_job: Callable[..., str]) -> None:
    job = load_job(write_job({"output": "out/$${date}-$5-{x}"}), environment={})
    assert job.spec.output == "out/${date}-$5-{x}"
    assert job.variables == {}


def test_a_value_that_looks_like_a_variable_is_not_resolved_again(write_job: Callable[..., str]) -> None:
    assert load_job(write_job({"output": "${env.A}"}), environment={"A": "${date}"}).spec.output == "${date}"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("${dat}", "no variable ${dat}: known are ${date}, ${date:FORMAT}, ${env.NAME}. Did you mean ${date}?"),
        ("${user}", "no variable ${user}: known are ${date}"),
        ("${env.}", "no variable ${env.}"),
        ("${}", "no variable ${}"),
        ("${env.REGION}", "the variable REGION is not set"),
        ("${date", "brace is not closed"),
        ("${date:}", "no format after the colon"),
        ("${date:%H}", "%H is not a date format: known are %%"),
        ("${date:%Y%}", "is not a date format"),
        ("${env.MY_API_KEY}", "looks like a secret"),
        ("${env.AWS_SECRET_ACCESS_KEY}", "looks like a secret"),
        ("${env.GITHUB_TOKEN}", "looks like a secret"),
    ],
)
def test_what_can_not_be_resolved_names_the_key_and_the_cause(
    write_job: Callable[..., str], text: str, part: str
) -> None:
    message = refusal_of(
        write_job({"output": f"out/{text}"}),
        environment={"MY_API_KEY": "sk-1", "AWS_SECRET_ACCESS_KEY": "s", "GITHUB_TOKEN": "t"},
    )
    assert f"job.yaml: `output` = out/{text}: " in message
    assert part in message
    assert "sk-1" not in message


@pytest.mark.parametrize("name", ["MAX_TOKENS", "MONKEY", "REGION", "AUTHOR"])
def test_an_innocent_name_is_no_secret(write_job: Callable[..., str], name: str) -> None:
    assert load_job(write_job({"output": f"out/${{env.{name}}}"}), environment={name: "7"}).spec.output == "out/7"


@pytest.mark.parametrize("text", ["yesterday", "2026-02-30", "20261119", "2026-11-19T00:00", ""])
def test_a_day_that_is_none_is_a_usage_error(write_job: Callable[..., str], text: str) -> None:
    path = write_job({"output": "out/${date}"})
    with pytest.raises(UsageError, match="--date"):
        load_job(path, environment={}, day=text)
    with pytest.raises(UsageError, match="RELABEL_DATE"):
        load_job(path, environment={"RELABEL_DATE": text})


def test_a_date_flag_that_changes_nothing_is_reported_and_the_variable_is_not(write_job: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="does not use"):
        load_job(write_job(), environment={}, day="2026-11-19")
    assert load_job(write_job(), environment={"RELABEL_DATE": "2026-11-19"}).variables == {}


def test_a_run_across_midnight_keeps_the_day_that_it_began_on(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    days = iter([date(2026, 11, 19), date(2026, 11, 20)])
    monkeypatch.setattr(settings, "today", lambda: next(days))
    write_pairs()
    path = write_job({"output": "out/${date}", "name": "n-${date}"})
    assert relabel("run", path).code == 0
    manifest = json.loads((folder / "out/2026-11-19/manifest.json").read_bytes())
    assert manifest["spec"]["output"] == str(folder / "out/2026-11-19")
    assert manifest["spec"]["name"] == "n-2026-11-19"
    assert manifest["variables"] == {"date": "2026-11-19"}
    assert sorted(one.name for one in (folder / "out").iterdir()) == ["2026-11-19"]


def test_the_day_is_that_of_utc_whatever_the_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    import time
    from datetime import UTC, datetime

    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert settings.today() == datetime.now(UTC).date()
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_yesterday_is_run_again_and_looked_at_by_date(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    path = write_job({"output": "out/${date}"})
    assert relabel("run", path, "--date", "2026-11-19").code == 0
    assert relabel("run", path, "--date", "2026-11-19").code == 10
    assert relabel("run", path, "--date", "2026-11-18").code == 0
    done = relabel("status", path, "--date", "2026-11-19", "--output", "json")
    assert (done.code, done.json["output"].endswith("out/2026-11-19")) == (0, True)
    assert relabel("verify", path, "--date", "2026-11-19").code == 0
    assert relabel("plan", path, "--date", "2026-11-18", "--output", "json").json["variables"] == {"date": "2026-11-18"}
    assert relabel("run", path, "--date", "today").code == 2

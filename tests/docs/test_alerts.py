"""The alerts that the docs give: rules over metrics that a run writes, and units that say when one failed."""

import configparser
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from relabel.jobs.output import Exit
from relabel.jobs.run.progress import MetricsFile
from tests.docs.pages import DOCS

RULES = DOCS / "deploy/prometheus/relabel.rules.yaml"
UNITS = sorted((DOCS / "deploy/systemd").glob("*.service"))


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"relabel_\w+", expression))


def written(tmp_path: Path, code: int) -> dict[str, float]:
    """What a run that ended with a code says to Prometheus."""
    file = MetricsFile(tmp_path / "relabel.prom", job="ecom", shard="0/1")
    file.write(code)
    families = text_string_to_metric_families((tmp_path / "relabel.prom").read_text())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_rules_name_metrics_that_a_run_writes(tmp_path: Path) -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    assert {key for rule in group["rules"] for key in rule} == {"alert", "expr", "for", "annotations"}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == 4
    known = written(tmp_path, 0)
    for rule in group["rules"]:
        assert metrics_in(rule["expr"]) <= set(known), rule["alert"]
        for name in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert name in ("job", "shard")


def test_a_job_that_never_succeeded_is_an_alert_too(tmp_path: Path) -> None:
    """Before a first success there is no time of one, so that no time since it can be too long; and a run whose engine
    crashes every night ends in 20, which waits for nobody.
    """
    rules = {one["alert"]: one for one in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
    never = rules["RelabelNeverDone"]
    has, lacks = never["expr"].split(" unless ")
    names = set(written(tmp_path, Exit.PARTIAL))
    assert metrics_in(rules["RelabelNotDone"]["expr"]).isdisjoint(names), "it is blind here"
    assert has in names
    assert lacks not in names
    assert lacks in written(tmp_path, Exit.DONE)
    assert never["for"] == "2d"


def test_a_code_is_an_alert_exactly_where_it_waits_for_a_person(tmp_path: Path) -> None:
    (rule,) = [one for one in yaml.safe_load(RULES.read_text())["groups"][0]["rules"] if "exit_code" in one["expr"]]
    quiet = {int(code) for code in re.findall(r"relabel_exit_code != (\d+)", rule["expr"])}
    assert quiet == {Exit.DONE, Exit.NOTHING_TO_DO, Exit.PARTIAL, Exit.LOCKED}
    assert set(re.split(r"relabel_exit_code != \d+", rule["expr"])) == {"", " and "}
    assert written(tmp_path, Exit.OVER_LIMIT)["relabel_exit_code"] == Exit.OVER_LIMIT


def test_every_service_reports_its_failure_by_the_unit_that_sends_alerts(tmp_path: Path) -> None:
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(path.read_text())
        if path.name == "relabel-failed@.service":
            assert "%i failed on %H" in unit["Service"]["ExecStart"]
            assert "OnFailure" not in unit["Unit"], "it would call itself"
        else:
            assert unit["Unit"]["OnFailure"] == "relabel-failed@%n.service"

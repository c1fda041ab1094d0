"""The Dockerfiles install what the pages say, and start programs that there are."""

import json
import shlex
import tomllib

import pytest

from relabel.export import puller
from tests.docs.pages import DOCS, ROOT

FILES = sorted((DOCS / "deploy/docker").glob("*.Dockerfile"))
INSTALLED = {"label-node": DOCS / "scheduling.md", "puller": DOCS / "publish.md"}
"""The page that says how such a machine is set up."""


def instructions(name: str) -> list[tuple[str, str]]:
    lines = (DOCS / f"deploy/docker/{name}.Dockerfile").read_text().splitlines()
    found = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
    assert {word for word, _ in found} <= {"FROM", "ARG", "RUN", "ENV", "COPY", "WORKDIR", "USER", "ENTRYPOINT"}
    return found


def test_every_dockerfile_has_a_page() -> None:
    assert {path.name.removesuffix(".Dockerfile") for path in FILES} == set(INSTALLED)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_a_dockerfile_runs_is_what_its_page_says(name: str) -> None:
    runs = [line for word, line in instructions(name) if word == "RUN"]
    assert runs
    page = INSTALLED[name].read_text()
    for line in runs:
        assert f"`{line}`" in page or f"\n{line}\n" in page, f"{INSTALLED[name]} says nothing of: {line}"


@pytest.mark.parametrize("name", INSTALLED)
def test_it_has_a_python_that_is_new_enough_and_runs_as_nobody(name: str) -> None:
    found = dict(instructions(name))
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    version = tuple(map(int, found["FROM"].removeprefix("python:").removesuffix("-slim").split(".")))
    assert version >= tuple(map(int, needed.removeprefix(">=").split(".")))
    assert found["USER"] == "nobody"


def test_the_image_of_the_kubernetes_jobs_has_what_they_ask_for() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    name, _, extras = dict(instructions("label-node"))["ARG"].partition("=")
    assert name == "EXTRAS"
    assert set(extras.split(",")) <= set(known)
    for job in ("indexed-job.yaml", "cronjob.yaml"):
        asks_for_gpu = "nvidia.com/gpu" in (DOCS / "deploy/kubernetes" / job).read_text()
        assert set(extras.split(",")) == ({"gpu", "s3"} if asks_for_gpu else {"cpu", "s3"}), job


def test_the_puller_takes_the_arguments_that_its_first_line_gives(capsys: pytest.CaptureFixture[str]) -> None:
    first = (DOCS / "deploy/docker/puller.Dockerfile").read_text().splitlines()[0]
    entry = json.loads(dict(instructions("puller"))["ENTRYPOINT"])
    program, script, *arguments = [*entry, *shlex.split(first.partition("IMAGE ")[2])]
    assert (program, script) == ("python3", "pull.py")
    assert script in dict(instructions("puller"))["COPY"].split()
    assert arguments[-1] in dict(instructions("puller"))["COPY"].split()
    with pytest.raises(SystemExit):
        puller.main([*arguments, "--no-such-option"])
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err

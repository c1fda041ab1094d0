"""What a relative path counts from: in the file its folder, next to it the working directory; and work that lies by the
old rule.
"""

import json
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, get_args

import pytest

from relabel.jobs import settings
from relabel.jobs.job import load_job, open_run
from relabel.jobs.settings import Places, absolute, mark_of, path_of, placed, resolved
from relabel.labelers.registry import engine_class, engine_names
from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.specs import InputSpec, JobSpec, PathMark, validate_spec
from tests.jobs.conftest import JOB
from tests.spec_models import spec_models

NOT_PLACES = {
    "Columns": {"query_id", "query", "doc_id", "document", "context", "gold"},
    "GoldSource": {"grade"},
    "GraphGold": {"subject", "attribute"},
    "EvidenceGold": {"answers", "sets"},
    "SftGold": {"sets"},
    "VllmSection": {"url"},
    "LoraSpec": {"targets"},
    "PromptSpec": {"system", "user", "ending"},
    "LossSection": {"targets"},
    "DistillSpec": {"name", "require", "storage_options"},
    "TeacherSpec": {"name", "method", "chat_template_kwargs", "storage_options"},
    "AuditSpec": {"require"},
    "JobSpec": {"name", "storage_options"},
    "LabelerOptions": {"name"},
    "EngineSpec": {"name", "chat_template_kwargs"},
    "ExportSpec": {"licence"},
    "BenchSpec": {"precisions", "shapes"},
    "StudentArgs": {"device"},
    "BundleArgs": {"device", "precision"},
    "RerankerArgs": {"api", "api_key_env", "device", "served_model"},
    "PointwiseOptions": {"instruction"},
    "EnsembleOptions": {"instructions"},
    "TransformersArgs": {"device"},
    "VllmArgs": {"quantization", "extra"},
    "OpenAiArgs": {"base_url", "served_model", "api_key_env", "control_texts", "extra_body"},
    "FakeArgs": {"crash_on"},
}
"""Keys that hold texts, and no path."""


def _holds_text(annotation: Any) -> bool:
    return annotation in (str, Any) or any(
        _holds_text(part) for part in get_args(annotation) if not isinstance(part, str)
    )


def test_every_key_that_holds_a_text_is_marked_as_a_path_or_known_to_be_none() -> None:
    unmarked: dict[str, set[str]] = {}
    for model in spec_models():
        own = set(model.model_fields) - {
            name for base in model.__mro__[1:] for name in getattr(base, "model_fields", ())
        }
        texts = {
            name
            for name in own
            if _holds_text(model.model_fields[name].annotation) and mark_of(model.model_fields[name]) is None
        }
        if texts:
            unmarked[model.__name__] = texts
    assert unmarked == NOT_PLACES


@pytest.mark.parametrize(
    ("text", "folder", "mark", "path"),
    [
        ("out", "/srv/jobs", PathMark.PATH, "/srv/jobs/out"),
        ("../../out/a", "/srv/relabel/jobs", PathMark.PATH, "/srv/out/a"),
        ("./a//b/", "/srv", PathMark.PATH, "/srv/a/b"),
        ("/out/../x", "/srv", PathMark.PATH, "/out/../x"),
        ("s3://b/../x", "/srv", PathMark.PATH, "s3://b/../x"),
        ("in/*.parquet", "/srv/[a]", PathMark.PATTERN, "/srv/[[]a]/in/*.parquet"),
        ("in/a.parquet", "/srv/[a]", PathMark.PATTERN, "/srv/[a]/in/a.parquet"),
        ("*.parquet", "/srv/[a]", PathMark.PATH, "/srv/[a]/*.parquet"),
        ("hf:org/name", "/srv", PathMark.MODEL, "hf:org/name"),
        ("pypi:a==1", "/srv", PathMark.MODEL, "pypi:a==1"),
        ("models/x", "/srv", PathMark.MODEL, "/srv/models/x"),
        ("hf:org/name", "/srv", PathMark.PATH, "/srv/hf:org/name"),
        ("~/x", "/srv", PathMark.PATH, "/home/me/x"),
        ("~", None, PathMark.PATH, "/home/me"),
        ("./~x", "/srv", PathMark.PATH, "/srv/~x"),
    ],
)
def test_a_path_is_placed(
    monkeypatch: pytest.MonkeyPatch, text: str, folder: str | None, mark: PathMark, path: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert placed(text, folder, mark) == path


def test_every_marked_key_counts_from_the_file_and_from_here_where_it_is_set_next_to_it() -> None:
    seen = set()
    for model in spec_models():
        for name, info in model.model_fields.items():
            mark = mark_of(info)
            if mark is not None:
                seen.add(name)
                file = Places("f", "/jobs", "/here")
                assert path_of("a/b", mark, file, ("x", name)) == "/jobs/a/b"
                assert path_of("a/b", mark, file._replace(outside=frozenset({("x",)})), ("x", name)) == "a/b"
    assert {"path", "output", "reuse", "templates", "model", "lora", "cache_dir"} <= seen


def test_paths_in_lists_and_inner_specs_are_found(tmp_path: Path) -> None:
    values = {**JOB, "input": {"path": ["a", "s3://b/c", "*.parquet"]}, "reuse": ["r"]}
    values |= {"labeler": {"name": "r3a", "templates": "t"}, "engine": {"name": "x", "model": "m"}}
    spec = resolved(validate_spec(JobSpec, values, where="f"), Places("f", "/jobs", str(Path.cwd())))
    assert spec.input.path == ("/jobs/a", "s3://b/c", "/jobs/*.parquet")
    assert (spec.labeler.templates, spec.engine.model, spec.output, spec.reuse) == (
        "/jobs/t",
        "/jobs/m",
        "/jobs/out/ecom",
        ("/jobs/r",),
    )
    assert absolute(InputSpec(path=("a", "/b"))).path == (str(Path.cwd() / "a"), "/b")


@pytest.fixture
def elsewhere(
    folder: Path,
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """`elsewhere(changes)`: a job file in jobs/ alongside the pairs; the working directory is some other folder, unless
    it stays.
    """
    write_pairs()

    def write(changes: dict[str, Any] | None = None, *, moves: bool = True) -> Path:
        (folder / "jobs").mkdir(exist_ok=True)
        write_job(
            {"input": {"path": "../pairs.parquet"}, "output": "../out/ecom", **(changes or {})}, path="jobs/ecom.yaml"
        )
        if moves:
            os.chdir(tmp_path_factory.mktemp("elsewhere"))  # the fixture `folder` goes back in the end
        return folder / "jobs" / "ecom.yaml"

    return write


def test_a_run_lands_in_one_place_wherever_it_is_called_from(
    elsewhere: Callable[..., Path], relabel: Any, folder: Path
) -> None:
    job = elsewhere(moves=False)
    fingerprints = {relabel("plan", "jobs/ecom.yaml", "--output", "json").json["fingerprint"]}
    assert relabel("run", "jobs/ecom.yaml", "--output", "json").json["output"] == "out/ecom"
    for cwd in (folder / "jobs", Path("/")):
        os.chdir(cwd)
        call = os.path.relpath(job)
        assert relabel("run", call).code == 10
        fingerprints.add(relabel("plan", call, "--output", "json").json["fingerprint"])
        assert relabel("status", call, "--output", "json").json["is_finished"]
        assert relabel("verify", call).code == 0
    assert len(fingerprints) == 1
    held = json.loads((folder / "out/ecom/manifest.json").read_text())["spec"]
    assert (held["output"], held["input"]["path"]) == (str(folder / "out/ecom"), [str(folder / "pairs.parquet")])
    assert json.loads((folder / "out/ecom/plan.json").read_text())["files"][0]["path"] == str(folder / "pairs.parquet")


def test_a_whole_path_below_the_shells_working_directory_is_no_secret(
    elsewhere: Callable[..., Path], relabel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = elsewhere(moves=False)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setenv("OLDPWD", str(folder / "jobs"))
    assert relabel("run", str(job)).code == 0
    relabel("plan", str(folder / "absent.yaml")).refused(3, str(folder / "absent.yaml"))


def test_the_same_job_in_another_checkout_has_the_same_fingerprint(
    elsewhere: Callable[..., Path], tmp_path: Path, folder: Path
) -> None:
    job = elsewhere()
    other = tmp_path / "checkout" / "jobs"
    other.mkdir(parents=True)
    (other / "ecom.yaml").write_text(job.read_text())
    shutil.copy(folder / "pairs.parquet", other.parent)
    found = [open_run(load_job(str(path), environment={})).plan for path in (job, other / "ecom.yaml")]
    assert found[0].fingerprint == found[1].fingerprint
    assert str(tmp_path) not in json.dumps(found[0].parts)


def test_what_is_set_next_to_the_file_counts_from_the_working_directory(elsewhere: Callable[..., Path]) -> None:
    job = str(elsewhere())
    spec = load_job(
        job, environment={"RELABEL_REUSE": "[r, ~/s]", "RELABEL_CACHE": "c"}, overrides=["output=o", "engine.args={}"]
    ).spec
    assert absolute(spec).output == str(Path.cwd() / "o")
    assert absolute(spec).reuse == (str(Path.cwd() / "r"), str(Path.home() / "s"))
    assert load_job(job, environment={"HOME": "/h"}, overrides=["output=${env.HOME}/o"]).spec.output == "/h/o"


def test_a_linked_file_counts_from_where_the_link_lies(
    elsewhere: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    job = elsewhere()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "linked.yaml").symlink_to(job)
    assert load_job(str(tmp_path / "a" / "linked.yaml"), environment={}).spec.output == str(tmp_path / "out" / "ecom")


def test_a_home_on_the_command_line_is_found_where_no_shell_expands_it(
    elsewhere: Callable[..., Path], relabel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere()
    monkeypatch.setenv("HOME", str(folder))
    assert relabel("run", "~/jobs/ecom.yaml", "--metrics=~/ecom.prom").code == 0
    assert (folder / "ecom.prom").is_file()
    assert relabel("verify", "~/out/ecom").code == 0
    relabel("verify", "~nobody-here/out").refused(3, "~nobody-here/out")
    assert relabel("run", "~/jobs/ecom.yaml", "--set", "output=~/other").code == 0
    assert (folder / "other/manifest.json").is_file()


@pytest.mark.parametrize(
    "engine", [name for name in engine_names() if any(map(mark_of, engine_class(name).Args.model_fields.values()))]
)
def test_no_path_of_an_engine_enters_the_fingerprint(
    write_job: Callable[..., str], write_pairs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    write_pairs()
    found = engine_class(engine)
    monkeypatch.setattr(found, "model_digest", staticmethod(lambda _: "0" * 64))
    marked = [name for name, info in found.Args.model_fields.items() if mark_of(info)]
    args = {"base_url": "http://x/v1", "served_model": "m"} if engine == "openai" else {}

    def parts(places: dict[str, str]) -> dict[str, Any]:
        job = load_job(
            write_job({"engine": {"name": engine, "model": "m", "args": {**args, **places}}}), environment={}
        )
        return job.parts(job.open_dataset())

    one, other = (dict.fromkeys(marked, f"{folder}/x") for folder in ("a", "/b"))
    assert parts(one) == parts(other)
    assert str(Path.cwd()) not in json.dumps(parts(one))


# `${date}` and `${env.NAME}`: resolved once, recorded, never a secret.


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
        ("${dat}", "no variable ${dat}: known are ${date}, ${date:FORMAT} and ${env.NAME}"),
        ("${user}", "no variable ${user}: known are ${date}"),
        ("${env.}", "no variable ${env.}"),
        ("${}", "no variable ${}"),
        ("${env.REGION}", "the variable REGION is not set"),
        ("${date", "brace is not closed"),
        ("${date:}", "want a format of a day after the colon"),
        ("${date:%H}", "known are %% %G"),
        ("${date:%Y%}", "want a format of a day"),
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

"""The key: from the variable that the job names, into one header, and nowhere else."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main
from relabel.jobs.environment import keep_arguments, keep_environment
from relabel.jobs.job import load_job
from relabel.labelers.engines.openai import OpenAi
from relabel.manifests.errors import ConfigError
from relabel.manifests.secrets import forget_secrets, redacted

from .conftest import KEY, ask_for, requests_for, run_all
from .scripted_server import MODEL, Json, ScriptedServer, chat, error

JOB: dict[str, Any] = {
    "name": "shoes",
    "input": {"path": "pairs.parquet"},
    "labeler": {"name": "r3a", "context": "none", "attempts": 2},
    "engine": {
        "name": "openai",
        "args": {"served_model": MODEL, "api_key_env": "TEACHER_KEY", "backoff_s": 0.0, "max_tries": 2},
    },
    "output": "out",
    "run": {"chunk_rows": 3, "max_failed_fraction": 1.0},
}


@pytest.fixture
def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"query_id": f"q{n // 3}", "query": f"shoe {n // 3}", "doc_id": f"d{n}", "document": f"a red shoe {n}"}
        for n in range(9)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")

    def write(server: ScriptedServer, **args: Any) -> str:
        job = copy.deepcopy(JOB)
        job["engine"]["args"] |= {"base_url": server.url} | args
        Path("job.yaml").write_text(yaml.safe_dump(job))
        return "job.yaml"

    return write


def telltale(call: Any) -> Json:
    """Every tenth request fails with the key in the server's words; other answers are fine and hold it as well."""
    if call.number % 5 == 4:
        return error(400, f"bad request from {KEY}")
    return chat(
        f"<think>{KEY}</think><intent>shoes</intent>"
        if "intent" in call.body["messages"][-1]["content"] and len(call.body["messages"]) == 2
        else f"<think>{KEY}</think><extract>none</extract><score>0</score>"
    )


def test_the_key_is_in_the_header_and_nowhere_else(
    serve: Any, write_job: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server = serve(telltale)
    job = write_job(server)
    for command in (["plan"], ["run"], ["run", "--output", "json"], ["verify"], ["status"], ["retry"], ["doctor"]):
        with pytest.raises(SystemExit):
            main([command[0], job, *command[1:]])
    assert len(server.calls) > 9
    for call in server.calls:
        assert call.headers["authorization"] == f"Bearer {KEY}"
        assert [name for name, value in call.headers.items() if KEY in value] == ["authorization"]
        assert KEY.encode() not in call.raw
    out, err = capfd.readouterr()
    assert KEY not in out + err + caplog.text
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"plan.json", "manifest.json"} <= {file.name for file in files}
    for file in files:
        found = (
            json.dumps(pq.read_table(file).to_pylist(), default=str)
            if file.suffix == ".parquet"
            else file.read_text(errors="replace")
        )
        assert KEY not in found, file
    rows = [row for file in (tmp_path / "out" / "labels").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert {row["reasoning"] for row in rows} == {"***"}, "the test's server did not repeat the key"


def test_no_repr_dump_or_pickle_shows_the_key(serve: Any, write_job: Any, connect: Any) -> None:
    job = load_job(write_job(serve(telltale)), environment={"TEACHER_KEY": KEY, "RELABEL_ENGINE__SEED": "3"})
    assert job.spec.engine.seed == 3
    other = load_job("job.yaml", environment={"RELABEL_ENGINE__SEED": "3"})
    assert job.parts(job.open_dataset()) == other.parts(other.open_dataset()), "the key changes the plan"
    assert job.secrets["api_key_env"].get_secret_value() == KEY
    shown = [
        repr(job),
        str(job.secrets),
        repr(job.secrets),
        f"{job.secrets['api_key_env']}",
        job.spec.model_dump_json(),
        repr(job.spec),
    ]
    shown += [json.dumps(job.parts(job.open_dataset()), default=str), pickle.dumps(job.spec).decode("latin-1")]
    engine = connect(serve(telltale))
    shown += [
        repr(engine),
        repr(engine._client),
        repr(engine._client._connections),
        repr(engine._client._connections._all),
        repr(engine.facts()),
        repr(engine.costs()),
    ]
    assert not any(KEY in text for text in shown)


def test_faults_on_the_wire_do_not_show_the_key(serve: Any, connect: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    engine = connect(serve(lambda _: error(500, f"who sent {KEY}?")), max_tries=2)
    answer = run_all(engine, requests_for(1))[0]
    assert answer.finish == "error"
    assert "who sent ***?" in answer.detail
    engine.close()
    assert KEY not in caplog.text


def test_a_key_in_place_of_a_variables_name_is_refused_and_not_shown(serve: Any, write_job: Any) -> None:
    job = load_job(write_job(serve(telltale), api_key_env="sk-mistake-123"))
    for use in (OpenAi.model_digest, OpenAi.check, lambda spec: OpenAi(spec)):
        with pytest.raises(ConfigError, match="name of an environment variable") as caught:
            use(job.spec.engine)
        assert "mistake" not in str(caught.value)


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_key_of_our_own_specs_is_no_secret_whatever_it_sounds_like(
    is_variable: bool, serve: Any, write_job: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    server = serve(telltale)
    flags = ["--set", "engine.args.max_tokens_field=max_completion_tokens"]
    if is_variable:
        monkeypatch.setenv("RELABEL_ENGINE__ARGS__MAX_TOKENS_FIELD", "max_completion_tokens")
        flags = []
    with pytest.raises(SystemExit):
        main(["run", write_job(server), *flags])
    assert "max_completion_tokens" in server.calls[0].body, capfd.readouterr().err
    forget_secrets()
    names = ["labeler.max_think_tokens", "engine.args.api_key_env", "storage_options.token", "api_token"]
    keep_arguments([f"--set={name}=value-of-{name}" for name in names])
    keep_environment({f"RELABEL_{name.upper().replace('.', '__')}": f"set-to-{name}" for name in names})
    for name in names:
        is_secret = name in ("storage_options.token", "api_token")
        assert (redacted(f"value-of-{name}") == "***") == (redacted(f"set-to-{name}") == "***") == is_secret, name
    forget_secrets()


def test_a_variable_that_was_named_and_is_not_set_is_an_error(
    serve: Any, write_job: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["run", write_job(serve(telltale))])
    assert end.value.code == 3
    assert "the variable TEACHER_KEY is not set" in capfd.readouterr().err


def test_no_key_no_header(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "not-handed-over")
    server = serve(lambda _: chat("x"))
    engine = connect(server, key=None)
    engine.prepare([ask_for("q", "d")])
    assert "authorization" not in server.calls[0].headers

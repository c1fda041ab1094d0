"""A job file is read or refused with a sentence: what, where, got against wanted, and what to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from relabel.jobs.job import load_job
from relabel.jobs.settings import JOB, job_schema
from relabel.jobs.spec_yaml import read_spec_file
from relabel.labelers.engines.registry import engine_names
from relabel.labelers.registry import labeler_names
from relabel.manifests.errors import ConfigError, UsageError

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "jobs" / "templates" / "job.yaml"

TYPOS = [
    ({"inputs": {}}, "inputs", "input"),
    ({"shard": 3}, "shard", "shards"),
    ({"input": {"limits": 3}}, "input.limits", "limit"),
    ({"input": {"columns": {"qury": "q"}}}, "input.columns.qury", "query"),
    ({"labeler": {"sample": 3}}, "sample", "samples"),
    ({"engine": {"sede": 3}}, "sede", "seed"),
    ({"engine": {"args": {"p_garbge": 0.1}}}, "p_garbge", "p_garbage"),
    ({"run": {"chunk_row": 3}}, "run.chunk_row", "chunk_rows"),
]
"""A typo at each level: the change, the key as the message names it, the key that was meant."""

WRONG = [
    ({"shards": 0}, "`shards` = 0", "greater than or equal to 1"),
    ({"name": "a b"}, "`name` = 'a b'", "match pattern"),
    ({"input": {"limit": 0}}, "`input.limit` = 0", "greater than or equal to 1"),
    ({"input": {"path": ["a.parquet", ""]}}, "`input.path`", "names no file"),
    ({"input": {"overlong": "cut"}}, "`input.overlong` = 'cut'", "'truncate' or 'quarantine'"),
    ({"run": {"max_failed_fraction": 5}}, "`run.max_failed_fraction` = 5", "less than or equal to 1"),
    *(
        ({"labeler": {"name": name, "top_p": 0.9}}, "labeler", f"top_p: `{name}` samples no token")
        for name in ("direct", "ensemble", "pointwise", "complexity")
    ),
    ({"labeler": {"name": "direct", "temperature": 0.7}}, "labeler", "temperature: `direct` samples no token"),
    ({"labeler": {"samples": 3}}, "labeler", "at temperature 0 would give one answer 3 times; set a temperature"),
    ({"labeler": {"temperature": float("nan")}}, "`temperature` = nan", "finite number"),
    ({"engine": {"seed": -1}}, "`seed` = -1", "greater than or equal to 0"),
    ({"engine": {"args": {"p_garbage": 0.8, "p_refused": 0.8}}}, "engine.args", "sum to 1 at most"),
    ({"output": None}, "", "job.yaml: `output` is missing"),
    ({"labeler": {"name": "r3"}}, f'No labeler "r3": known are {", ".join(labeler_names())}', "Did you mean r3a?"),
    ({"engine": {"name": "fale"}}, f'No engine "fale": known are {", ".join(engine_names())}', "Did you mean fake?"),
    ({"engine": "fake"}, "`engine` = 'fake'", "at least `engine: {name: fake}`"),
]


def read_job(path: str) -> dict[str, Any]:
    return read_spec_file(path, beginning=JOB.beginning, keys=JOB.fields)


def refusal_of(path: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_job(path, **{"environment": {}, **arguments})
    return str(refused.value)


@pytest.mark.parametrize(("changes", "key", "meant"), TYPOS)
def test_typo_is_an_error_that_names_the_nearest_key(
    write_job: Callable[..., str], changes: dict[str, Any], key: str, meant: str
) -> None:
    message = refusal_of(write_job(changes))
    assert message.startswith("job.yaml")
    assert f"unknown key `{key}`: did you mean `{meant}`?" in message


@pytest.mark.parametrize(("changes", "got", "wanted"), WRONG)
def test_wrong_value_is_reported_with_its_path_and_what_is_wanted(
    write_job: Callable[..., str], changes: dict[str, Any], got: str, wanted: str
) -> None:
    message = refusal_of(write_job(changes))
    assert message.startswith("job.yaml")
    assert got in message
    assert wanted in message


def test_every_fault_is_reported_at_once(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job({"shards": 0, "outptu": "x", "run": {"chunk_rows": 0}}))
    assert "`shards` = 0" in message
    assert "unknown key `outptu`: did you mean `output`?" in message
    assert "`run.chunk_rows` = 0" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: a\nshards: 2\nshards: 3\n", ("line 3, column 1", "the key `shards` is given twice")),
        (
            "name: a\nengine:\n  seed: 1\n  seed: 2\n",
            ("line 4, column 3", "the key `seed` is given twice, in lines 3 and 4"),
        ),
        ("name: a\ninput: [pairs.parquet\nshards: 2\n", ("line 3", "not YAML")),
        ("name: a\n\tshards: 2\n", ("line 2", "not YAML")),
        ("name: 'a\n", ("not YAML", "quoted scalar")),
        ("shards: !!python/object:os.system x\n", ("line 1", "could not determine a constructor")),
        (
            "- name: a\n",
            ("want a mapping with the keys name, input, labeler, engine, output, shards, run, reuse, ", "; got list"),
        ),
        ("just words\n", ("want a mapping", "got str")),
        ("", ("is empty", "relabel init")),
        ("a: 1\n---\nb: 2\n", ("line 2", "not YAML", "another document")),
        ("name: a\nshards: \x07\n", ("line 2, column 9", "U+0007", "special characters")),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}\n", ("line 2", "the key `<<` is given twice")),
    ],
)
def test_text_that_is_no_job_is_refused_with_its_place(folder: Path, text: str, parts: tuple[str, ...]) -> None:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    message = refusal_of("job.yaml")
    assert message.startswith("job.yaml")
    for part in parts:
        assert part in message


def test_a_date_is_text_so_that_a_job_may_be_named_by_one(write_job: Callable[..., str], folder: Path) -> None:
    path = write_job()
    text = (
        (folder / path)
        .read_text()
        .replace("name: ecom", "name: 2026-11-20")
        .replace("seed: 7", "seed: 7\n  chat_template_kwargs: {day: 2026-11-20}")
    )
    (folder / path).write_text(text)
    spec = load_job(path, environment={}).spec
    assert spec.name == "2026-11-20"
    assert spec.engine.chat_template_kwargs == {"day": "2026-11-20"}


def test_flag_wins_over_variable_over_file_over_default(write_job: Callable[..., str]) -> None:
    path = write_job({"engine": {"seed": 1}})
    variable = {"RELABEL_ENGINE__SEED": "2"}
    assert load_job(write_job({"engine": {"seed": None}}, path="bare.yaml"), environment={}).spec.engine.seed == 0
    assert load_job(path, environment={}).spec.engine.seed == 1
    assert load_job(path, environment=variable).spec.engine.seed == 2
    assert load_job(path, environment=variable, overrides=["engine.seed=3"]).spec.engine.seed == 3
    assert load_job(path, environment={}, overrides=["engine.seed=3", "engine.seed=4"]).spec.engine.seed == 4


def test_a_value_from_outside_the_file_is_read_as_yaml(write_job: Callable[..., str]) -> None:
    spec = load_job(
        write_job(),
        environment={"RELABEL_INPUT__COLUMNS__DOCUMENT": "[body]"},
        overrides=["input.limit=null", "engine.args={p_slow: 0.5}"],
    ).spec
    assert spec.input.columns.document == ("body",)
    assert spec.input.limit is None
    assert spec.engine.args.model_dump()["p_slow"] == 0.5


@pytest.mark.parametrize("name", ["RELABEL_SHARD_COUNT", "RELABEL_PORT_80_TCP", "RELABEL", "relabel_engine__seed"])
def test_variables_that_set_nothing_of_a_job_are_left_alone(write_job: Callable[..., str], name: str) -> None:
    path = write_job()
    assert load_job(path, environment={name: "99"}).spec == load_job(path, environment={}).spec


def test_typo_below_a_known_section_is_an_error_that_names_the_variable(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job(), environment={"RELABEL_ENGINE__SEDE": "3", "RELABEL_SHARD_COUNT": "2"})
    assert "unknown key `sede`: did you mean `seed`?" in message
    assert "(set outside the file: variable RELABEL_ENGINE__SEDE)" in message


def test_another_labelers_leftover_key_comes_with_what_to_write(write_job: Callable[..., str]) -> None:
    path = write_job({"labeler": {"name": "r3a", "max_think_tokens": 256}})
    message = refusal_of(path, overrides=["labeler.name=direct"])
    assert "unknown key `max_think_tokens`" in message
    assert message.endswith("To leave the file's labeler out: --set 'labeler={name: direct}'")
    assert load_job(path, overrides=["labeler={name: direct}"], environment={}).spec.labeler.name == "direct"


def test_wrong_value_from_outside_names_the_flag_and_variable(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job(), environment={"RELABEL_RUN": "3"}, overrides=["shards=0"])
    assert "variable RELABEL_RUN, --set shards=0" in message
    assert "`engine` = 'fake'" in refusal_of(write_job(), environment={"RELABEL_ENGINE": "fake"})


@pytest.mark.parametrize("key", ["storage_options.s3", "storage_option.s3"])
def test_a_secret_on_the_command_line_is_not_shown_even_where_its_key_has_a_slip(
    write_job: Callable[..., str], key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(write_job(), overrides=[f"{key}.secret=hunter2", "shards=0"], environment={})
    assert "hunter2" not in str(error.value)
    assert f"--set {key}.secret=…" in str(error.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("name.x=1", "`name` is 'ecom', not a mapping"),
        ("engine.seed=[", "'[' is not YAML"),
        ("engine.seed", "want KEY=VALUE, for instance --set engine.seed=3"),
    ],
)
def test_an_override_that_sets_nothing_is_reported(write_job: Callable[..., str], override: str, part: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=re.escape(f"--set {override}: {part}")):
        load_job(write_job(), environment={}, overrides=[override])


def test_the_schema_accepts_and_rejects_what_the_loader_does(write_job: Callable[..., str]) -> None:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    check.validate(read_job(str(TEMPLATE)))
    for name in labeler_names():
        path = write_job({"labeler": {"name": name}, "input": {"columns": {"document": "body"}}})
        check.validate(read_job(path))
        assert load_job(path, environment={}).spec.labeler.name == name
    wrong = [{"labeler": {"name": "r3"}}, {"engine": {"name": None}}, {"shards": 0}, {"input": None}]
    for changes in [*wrong, *(typo[0] for typo in TYPOS)]:
        assert not check.is_valid(read_job(write_job(changes))), changes


def test_schema_is_whole_json_with_a_description_for_each_field() -> None:
    schema = json.loads(json.dumps(job_schema()))
    assert set(schema["required"]) == {"name", "input", "labeler", "engine", "output"}
    for model in schema["$defs"].values():
        for name, field in model.get("properties", {}).items():
            assert "description" in field or name in {"name", "args"}, (
                f"{model.get('title')}.{name} says nothing of itself"
            )


def test_every_yaml_of_the_repository_loads() -> None:
    found = []
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [name for name in inside if not name.startswith((".venv", ".git")) or name == ".github"]
        if Path(folder) == ROOT:
            inside[:] = [name for name in inside if name not in ("out", "build", "dist")]
        found += [Path(folder, name) for name in names if name.endswith((".yaml", ".yml"))]
    assert TEMPLATE in found
    for path in found:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and {"labeler", "engine"} <= set(values):
            load_job(str(path), environment={})

"""A job file is read or refused with a sentence: what, where, got against wanted, and what to do."""

from __future__ import annotations

import json
import os
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
    ({"shards": "many"}, "`shards` = 'many'", "valid integer"),
    ({"name": "a b"}, "`name` = 'a b'", "match pattern"),
    ({"name": 2024}, "`name` = 2024", "valid string"),
    ({"output": ""}, "`output` = ''", "at least 1 character"),
    ({"input": {"limit": 0}}, "`input.limit` = 0", "greater than or equal to 1"),
    ({"input": {"path": []}}, "`input.path` = []", "names no file"),
    ({"input": {"path": ["a.parquet", ""]}}, "`input.path`", "names no file"),
    ({"input": {"overlong": "cut"}}, "`input.overlong` = 'cut'", "'truncate' or 'quarantine'"),
    ({"input": {"columns": {"document": 3}}}, "`input.columns.document` = 3", "valid tuple"),
    ({"run": {"max_failed_fraction": 5}}, "`run.max_failed_fraction` = 5", "less than or equal to 1"),
    ({"labeler": {"samples": 3}}, "labeler", "at temperature 0 would give one answer 3 times; set a temperature"),
    ({"labeler": {"temperature": float("nan")}}, "`temperature` = nan", "finite number"),
    ({"engine": {"seed": -1}}, "`seed` = -1", "greater than or equal to 0"),
    ({"engine": {"args": {"p_garbage": 0.8, "p_refused": 0.8}}}, "engine.args", "sum to 1 at most"),
    ({"engine": {"args": [1]}}, "`engine.args` = [1]", "want a mapping of options"),
    ({"engine": "fake"}, "`engine` = 'fake'", "at least `engine: {name: fake}`"),
    ({"engine": ["fake"]}, "`engine` = ['fake']", "want a mapping"),
    ({"labeler": {"name": 3}}, "`labeler.name` = 3", "want the name of a registered labeler"),
]


@pytest.fixture
def job_schema_check() -> jsonschema.Draft202012Validator:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


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


def test_key_like_no_other_lists_the_known_keys(write_job: Callable[..., str]) -> None:
    assert "unknown key `run.zzz`: known keys are chunk_rows, max_failed_fraction" in refusal_of(
        write_job({"run": {"zzz": 1}})
    )


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


@pytest.mark.parametrize("section", ["name", "input", "labeler", "engine", "output"])
def test_missing_section_is_named(write_job: Callable[..., str], section: str) -> None:
    assert f"job.yaml: `{section}` is missing" in refusal_of(write_job({section: None}))


@pytest.mark.parametrize(
    ("kind", "name", "wanted"),
    [
        ("labeler", "r3", f'No labeler "r3": known are {", ".join(labeler_names())}. Did you mean r3a?'),
        ("labeler", "graph_grpo", "Did you mean graph-grpo?"),
        ("engine", "fale", f'No engine "fale": known are {", ".join(engine_names())}'),
        ("engine", "fale", "Did you mean fake?"),
        ("engine", "zzz", 'No engine "zzz"'),
    ],
)
def test_unknown_name_lists_the_known_and_the_nearest(
    write_job: Callable[..., str], kind: str, name: str, wanted: str
) -> None:
    assert wanted in refusal_of(write_job({kind: {"name": name}}))


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
        ("{[1]: 2}\n", ("line 1, column 2", "can't be a key")),
        ("shards: !!int x\n", ("line 1, column 9", "'x' is not of type int")),
        ("shards: !!python/object:os.system x\n", ("line 1", "could not determine a constructor")),
        ("[" * 999, ("not YAML", "nested too deeply")),
        (
            "- name: a\n",
            ("want a mapping with the keys name, input, labeler, engine, output, shards, run, reuse, ", "; got list"),
        ),
        ("just words\n", ("want a mapping", "got str")),
        ("", ("is empty", "relabel init")),
        ("# only words\n", ("is empty",)),
        ("a: 1\n---\nb: 2\n", ("line 2", "not YAML", "another document")),
        ("name: a\nshards: \x07\n", ("line 2, column 9", "U+0007", "special characters")),
        ("name: a\n\0", ("line 2, column 1", "U+0000")),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}\n", ("line 2", "the key `<<` is given twice")),
        ("a: &a 1\nb: &a 2\n", ("line 2", "duplicate anchor")),
        ("a: *b\n", ("line 1", "undefined alias")),
        ("a: {<<: 3}\n", ("line 1", "mappings for merging")),
        ("shards: !!timestamp 2020-01-01\n", ("line 1", "could not determine a constructor")),
        ("shards: !!binary aGk=\n", ("line 1", "could not determine a constructor")),
        (f"shards: {'9' * 5000}\n", ("line 1", "is not of type int")),
    ],
)
def test_text_that_is_no_job_is_refused_with_its_place(folder: Path, text: str, parts: tuple[str, ...]) -> None:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    message = refusal_of("job.yaml")
    assert message.startswith("job.yaml")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "where"), [({1: 2}, "job.yaml: unknown key `1`"), ({"run": {1: 2}}, "unknown key `run.1`")]
)
def test_a_key_that_is_no_text_is_refused(write_job: Callable[..., str], changes: dict[Any, Any], where: str) -> None:
    assert where in refusal_of(write_job(changes))


def test_file_that_is_not_there_names_the_command_that_writes_one(folder: Path) -> None:
    assert "job.yaml: no such file. `relabel init` writes a job file" in refusal_of("job.yaml")


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


def test_merge_keys_and_anchors_still_work(folder: Path) -> None:
    (folder / "a.yaml").write_text("base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  b: 3\n")
    assert read_job("a.yaml")["other"] == {"a": 1, "b": 3}


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


@pytest.mark.parametrize(
    "name",
    ["RELABEL_SHARD_COUNT", "RELABEL_FAILPOINT", "RELABEL_PORT_80_TCP", "RELABEL", "relabel_engine__seed", "RELABEL_"],
)
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


@pytest.mark.parametrize(
    "key", ["storage_options.s3", "storage_option.s3", " storage_options.s3", "Storage_Options.s3"]
)
def test_a_secret_on_the_command_line_is_not_shown_even_where_its_key_has_a_slip(
    write_job: Callable[..., str], key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(write_job(), overrides=[f"{key}.secret=hunter2", "shards=0"], environment={})
    assert "hunter2" not in str(error.value)
    assert f"--set {key}.secret=…" in str(error.value)


def test_override_below_a_plain_value_is_reported(write_job: Callable[..., str]) -> None:
    assert "--set name.x=1: `name` is 'ecom', not a mapping" in refusal_of(write_job(), overrides=["name.x=1"])


@pytest.mark.parametrize("text", ["[", "!!int x", "{a: 1, a: 2}"])
def test_override_that_is_no_yaml_is_reported(write_job: Callable[..., str], text: str) -> None:
    assert f"--set engine.seed={text}: {text!r} is not YAML" in refusal_of(
        write_job(), overrides=[f"engine.seed={text}"]
    )


def test_override_without_a_value_is_a_usage_error(write_job: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"--set engine.seed: want KEY=VALUE, for instance --set engine.seed=3"):
        load_job(write_job(), environment={}, overrides=["engine.seed"])


def test_schema_accepts_the_job_the_template_and_short_forms(
    write_job: Callable[..., str], job_schema_check: jsonschema.Draft202012Validator
) -> None:
    job_schema_check.validate(read_job(write_job()))
    job_schema_check.validate(read_job(str(TEMPLATE)))
    job_schema_check.validate(
        read_job(write_job({"input": {"path": ["a.parquet", "b"], "columns": {"document": "body"}}}))
    )


@pytest.mark.parametrize("labeler", ["graph-grpo", "r3a", "direct"])
def test_schema_and_loader_accept_every_labeler(
    write_job: Callable[..., str], job_schema_check: jsonschema.Draft202012Validator, labeler: str
) -> None:
    path = write_job({"labeler": {"name": labeler}})
    job_schema_check.validate(read_job(path))
    assert load_job(path, environment={}).spec.labeler.name == labeler


@pytest.mark.parametrize("changes", [typo[0] for typo in TYPOS])
def test_schema_rejects_a_typo_at_each_level(
    write_job: Callable[..., str], job_schema_check: jsonschema.Draft202012Validator, changes: dict[str, Any]
) -> None:
    assert not job_schema_check.is_valid(read_job(write_job(changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"labeler": {"name": "r3"}},
        {"engine": {"name": "fale"}},
        {"shards": 0},
        {"input": None},
        {"engine": {"name": None}},
    ],
)
def test_schema_rejects_unknown_names_bad_values_and_missing_sections(
    write_job: Callable[..., str], job_schema_check: jsonschema.Draft202012Validator, changes: dict[str, Any]
) -> None:
    assert not job_schema_check.is_valid(read_job(write_job(changes)))


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

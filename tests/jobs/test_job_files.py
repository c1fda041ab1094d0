"""A job file is read or refused with a sentence: what, where, got against wanted, and what to do."""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from pydantic import ValidationError, create_model

from relabel.jobs.cli import relabel as table
from relabel.jobs.job import load_job
from relabel.jobs.settings import JOB_KEYS, job_schema, lay_over, parse_yaml, read_spec_file
from relabel.labelers.registry import engine_names, labeler_names
from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.specs import DisputedText, Spec, _kinds
from tests.spec_models import spec_models

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
    ({"output": None}, "", "job.yaml: `output` is missing"),
    ({"labeler": {"name": "r3"}}, f'No labeler "r3": known are {", ".join(labeler_names())}', "Did you mean r3a?"),
    ({"engine": {"name": "fale"}}, f'No engine "fale": known are {", ".join(engine_names())}', "Did you mean fake?"),
    ({"engine": "fake"}, "`engine` = 'fake'", "at least `engine: {name: fake}`"),
]


def read_job(path: str) -> dict[str, Any]:
    return read_spec_file(path, "job", JOB_KEYS)


def refusal_of(path: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_job(path, **{"environment": {}, **arguments})
    return str(refused.value)


def test_a_key_of_another_labeler_names_its_owner(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job({"labeler": {"name": "graph-grpo", "max_think_tokens": 256}}))
    assert "`max_think_tokens` is a key of " in message
    assert "not of graph-grpo. Delete the line, or set `labeler.name: " in message
    assert "max_text_tokens" not in message


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
        ('shards: !!int ""\n', ("not YAML", "not a value of that type")),
        ("shards: !!python/object:os.system x\n", ("line 1", "could not determine a constructor")),
        (
            "- name: a\n",
            ("holds a list; want a mapping with the keys name, input, labeler, engine, output, shards, run, reuse, ",),
        ),
        ("just words\n", ("holds a str; want a mapping",)),
        ("", ("is empty", "relabel init")),
        ("a: 1\n---\nb: 2\n", ("line 2", "not YAML", "another document")),
        ("name: a\nshards: \x07\n", ("#x0007", "special characters", "position 16")),
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
        ("engine.seed", "want KEY=VALUE, for instance --set output=out/b"),
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


# YAML's traps: what a plain word means for each key of each spec, bombs, loops, and files that are no text.


NUMBERS: dict[str, float | None] = {
    "8": 8,
    "+8": 8,
    "-8": -8,
    '"8"': 8,
    "0o10": 8,
    "0x10": 16,
    "1e3": 1000,
    "0.5": 0.5,
    ".5": 0.5,
    "5.": 5,
    "2e-1": 0.2,
    "010": 10,
    "08": 8,
    "1_000": 1000,
    "9" * 400: int("9" * 400),
    **dict.fromkeys(
        ["0b11", "-0x10", "1:30", "06:00", "1:30.5", ".inf", "-.INF", ".nan", "inf", "nan", "1e400", "1,000", "٣"]
    ),
    **dict.fromkeys(["yes", "No", "on", "OFF", "true", "False", "y", "=", "[8]", "{a: 8}", "2026-11-20"]),
}
"""A value as written, and the number that it is; None is none."""
TRUTHS = {"yes": True, "No": False, "on": True, "OFF": False, "true": True, "False": False, "y": True}
TEXTS = {
    "no": "no",
    "Yes": "Yes",
    "on": "on",
    "010": "010",
    "1:30": "1:30",
    "1_000": "1_000",
    "06:00": "06:00",
    "2026-11-20": "2026-11-20",
    "=": "=",
}


def fields() -> Iterator[tuple[str, type[Spec], str]]:
    for model in spec_models():
        for name in model.model_fields:
            yield f"{model.__name__}.{name}", model, name


@functools.cache
def alone(model: type[Spec], name: str) -> type[Spec]:
    """A spec of that field alone."""
    field = model.model_fields[name]
    return create_model("One", __base__=Spec, **{name: (field.annotation, field)})  # type: ignore[call-overload, no-any-return]


def read(model: type[Spec], name: str, text: str) -> Any:
    """The field's value where it is written so, in a file and after --set alike; a ValidationError's text if it is
    refused.
    """
    values = parse_yaml(f"{name}: {text}")
    assert repr(lay_over({}, [f"{name}={text}"])) == repr(values)
    try:
        return getattr(alone(model, name).model_validate(values), name)
    except ValidationError as exc:
        return exc if exc.errors()[0]["loc"][0] == name else None


def test_every_number_and_truth_of_every_spec_is_read_right_or_refused_by_its_key() -> None:
    taken = 0
    for where, model, name in fields():
        kinds = _kinds(model, name)
        if Any in kinds or not kinds & {int, float, bool}:
            continue
        for text, number in NUMBERS.items():
            got = read(model, name, text)
            if isinstance(got, ValidationError):
                continue
            if isinstance(got, dict | tuple):
                read_as = [*(got.values() if isinstance(got, dict) else got)]
                assert read_as == [8 if number is None else number], f"{where}: {text} is read as {got!r}"
                continue
            right: list[Any] = (
                [TRUTHS[text]] if bool in kinds and text in TRUTHS else [number] if number is not None else []
            )
            right += [text] if isinstance(got, str) and str in kinds else []
            right += [bool(number)] if kinds == {bool} and number in (0, 1) else []
            assert [got, isinstance(got, bool)] in [[one, isinstance(one, bool)] for one in right], (
                f"{where}: {text} is read as {got!r}"
            )
            taken += 1
    assert taken > 500


def test_every_text_of_every_spec_takes_words_that_old_yaml_has_for_something_else() -> None:
    taken = 0
    for where, model, name in fields():
        if _kinds(model, name) - {type(None)} != {str}:
            continue
        for text in TEXTS:
            got = read(model, name, text)
            if not isinstance(got, ValidationError):
                assert got == text, f"{where}: {text} is read as {got!r}"
                taken += 1
        for text in ("true", "8", "0x10", ".inf", "[x]", "{a: 1}"):
            got = read(model, name, text)
            assert isinstance(got, ValidationError) or got == ("x",), f"{where} takes {text}"
    assert taken > 100


def test_a_key_that_takes_anything_refuses_words_that_are_read_in_two_ways() -> None:
    free = [(where, model, name) for where, model, name in fields() if Any in _kinds(model, name)]
    assert {name for _, _, name in free} >= {"storage_options", "chat_template_kwargs"}
    for where, model, name in free:
        for text in ("no", "On", "010", "1_000", "1:30", "0b1", "08"):
            for shape in ("{{s3: {{anon: {}}}}}", "{{s3: {{a: [{}]}}}}"):
                got = read(model, name, shape.format(text))
                assert isinstance(got, ValidationError), f"{where} takes {text} for {got!r}"
                assert "put it in quotes" in str(got) or "valid" in str(got)
            quoted = read(model, name, f'{{s3: {{anon: "{text}"}}}}')
            assert isinstance(quoted, ValidationError) or quoted["s3"] == {"anon": text}


@pytest.mark.parametrize(
    "text", ["yes", "NO", "off", "010", "-08", "00.5", "1_000", "1_0.5", "1:30", "190:20:30.15", "0b1", "-0x10", "0x_1"]
)
def test_words_that_two_versions_read_differently_are_known(text: str) -> None:
    assert type(parse_yaml(text)) is DisputedText
    assert type(parse_yaml(f"'{text}'")) is str


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"\xff\xfen\x00a\x00", ("byte 0 is not UTF-8", "Save the file as UTF-8")),
        (b"name: caf\xe9\n", ("byte 9 is not UTF-8",)),
        (b"name: x\n" * (1 << 18), ("larger than 1 MiB",)),
        (b"PAR1" + bytes(100), ("a Parquet file, and a job file in YAML is wanted",)),
        (b"PAR1\x15\xff\x00", ("a Parquet file, and a job file in YAML is wanted",)),
        (b"\xed\xa0\x80", ("not UTF-8",)),
    ],
    ids=["utf-16", "latin-1", "huge", "parquet", "parquet-not-utf-8", "surrogate"],
)
def test_bytes_that_are_no_spec_are_refused(folder: Path, data: bytes, parts: tuple[str, ...]) -> None:
    (folder / "job.yaml").write_bytes(data)
    message = refusal_of("job.yaml")
    for part in ("job.yaml", *parts):
        assert part in message


def test_an_endless_file_and_a_name_that_is_none_are_refused() -> None:
    assert "larger than 1 MiB" in refusal_of("/dev/zero")
    assert "can't be read" in refusal_of("job\0.yaml")


def test_a_mark_of_byte_order_and_windows_line_ends_are_no_fault(write_job: Callable[..., str], folder: Path) -> None:
    path = write_job()
    text = (folder / path).read_text()
    (folder / "windows.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_job("windows.yaml", environment={}).spec == load_job(path, environment={}).spec


def test_a_disputed_secret_is_not_shown(write_job: Callable[..., str]) -> None:
    message = refusal_of(write_job(), overrides=["storage_options.s3.secret=0123_4567"])
    assert "s3.secret is a word that YAML 1.1 and 1.2 read differently" in message
    assert "0123" not in message


# NaN and infinity are no number of ours: every option and every key of a spec that takes a number refuses them, and
# names itself. Made from the table of commands and from the models of all spec files, so that a new option or key is
# held to it. Infinity means something nowhere: limits that may be left off are left out, or 0.


INFINITE_WORDS = ["nan", "-nan", "inf", "-inf", "Infinity", "1e400", "-1e400"]
INFINITE = [math.nan, math.inf, -math.inf]
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
@pytest.mark.parametrize("text", INFINITE_WORDS)
@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=lambda one: one if isinstance(one, str) else " ".join(one))
def test_an_option_refuses_it_and_is_named(
    relabel: Callable[..., Any],
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
    assert [
        (key, value) for key in model.model_fields for value in shaped(INFINITE) if accepts(model, key, value)
    ] == []
    numeric = [key for key in model.model_fields if not any(accepts(model, key, value) for value in shaped(["word"]))]
    assert [(key, value) for key in numeric for value in shaped([*INFINITE_WORDS]) if accepts(model, key, value)] == []

"""Every command × every place that a secret may be in: it is on neither stream, and in no file that was written.

Places come from the table of commands, the models of specs and the variables that the code names, so that a new one is
covered at birth. An ordinary run tries one form of a secret at each place, `RELABEL_FAULTS=full` every form, or four
where the commands themselves get it; `long` every form there too.
"""

import base64
import json
import os
import re
import shlex
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import BaseModel

from relabel.distill.students.spec import DistillSpec
from relabel.distill.teachers.spec import SftSpec
from relabel.jobs.cli import main
from relabel.jobs.cli import relabel as root
from relabel.labelers.registry import ENGINES, LABELERS
from relabel.manifests.records import unsealed
from relabel.manifests.specs import JobSpec
from tests.jobs.conftest import JOB
from tests.jobs.test_cli import SEARCH, STUDENT, TEACHER

LEVEL = os.environ.get("RELABEL_FAULTS") or "short"
CORE = "Zq7hunter2Xv9"
GIVEN = "Correct.horse/77 battery+staple%Kw"
BODY = base64.b64encode(bytes(range(100, 132))).decode()
DER = "MC4CAQAwBQYDK2VwBCIEI" + BODY[:43]
PEM = f"-----BEGIN PRIVATE KEY-----\n{DER}\n-----END PRIVATE KEY-----\n"
TELLTALES = [CORE[i : i + 6] for i in range(len(CORE) - 5)] + [
    GIVEN[8:16],
    GIVEN[20:28],
    BODY[8:16],
    BODY[20:28],
    DER[24:34],
]

FORMS = {
    "password": f"s3://AKIAPLANTED:{CORE}@bucket/models/ecom@stable",
    "slash": f"s3://AKIAPLANTED:a/{CORE}@bucket/x.parquet",
    "blank": f"https://user:{CORE} y@host.invalid/x",
    "token": f"https://{CORE}@host.invalid/models/ecom",
    "jwt": f"https://host.invalid/x.parquet?jwt={CORE}",
    "query": f"https://host.invalid/x.parquet?v={CORE}&w=1",
    "chain": f"simplecache::sftp://user:{CORE}@host.invalid/x.parquet",
    "named": f"side=ftp://user:{CORE}@host.invalid/out",
    "pem": PEM,
    "written-out": json.dumps(PEM),
    "body": f"\ufeff '{BODY}' ",
    "der": DER,
    "given": GIVEN,
    "quoted": quote(GIVEN),
    "assigned": f"x.password={CORE}",
    "connection": f"host=db;password={CORE};user=me",
}

BASES = {
    "init": "made/{n}.yaml",
    "ask": "job.yaml",
    "templates export": "r3a made/{n}",
    "plan": "job.yaml",
    "run": "job.yaml",
    "retry": "job.yaml",
    "rounds": "search.yaml",
    "status": "out/ecom",
    "verify": "out/ecom",
    "score": "student --input pairs.parquet --to made/{n} --limit 4",
    "merge": "out/ecom --to made/{n}",
    "combine": "out/ecom out/other --to made/{n}.parquet",
    "evaluate": "out/ecom --qrels pairs.parquet --resamples 100",
    "compare": "out/ecom out/other --qrels pairs.parquet --html made/{n}.html --resamples 100",
    "systems": "out/ecom out/other --labels out/ecom",
    "audit": "job.yaml --rows 2 --probe padded --to made/{n}",
    "review": "out/ecom --to made/{n}.parquet",
    "convert": "out/ecom made/{n}.qrels",
    "report": "out/ecom --to made/{n}.html",
    "distill": "student.yaml",
    "train": "teacher.yaml",
    "export": "student --to made/{n} --pairs absent.parquet --provider cpu",
    "build-engine": "bundle --to made/{n}",
    "bench": "bundle",
    "conform": "http://127.0.0.1:9 bundle",
    "pairs cited": "pairs.parquet --docs pairs.parquet --to made/{n}.parquet",
    "pairs context": "pairs.parquet --to made/{n}.parquet",
    "pairs queries": "pairs.parquet --to made/{n}.parquet --queries-in query",
    "pairs chunk": "pairs.parquet --to made/{n}.parquet",
    "pairs tree": "pairs.parquet --to made/{n}.parquet",
    "pairs unjudged": "out/ecom --labels out/other --corpus pairs.parquet --to made/{n}.parquet",
    "pairs similar": "pairs.parquet --to made/{n}.parquet --model absent",
    "publish": "bundle store",
    "pull": "store/ecom made/{n}",
    "channel set": "store/ecom stable 1.0",
    "rollback": "store/ecom stable",
    "list": "store",
    "show": "store/ecom",
    "gc": "store",
    "schema": "job",
    "doctor": "job.yaml",
    "demo": "--engine fake --to pairs.parquet",
}
"""What a command is called with in addition to the probe; a command that is not here gets the job file for
all that it wants.
"""


class Shown(NamedTuple):
    """The files of a probe."""

    code: Any
    text: str
    leaks: list[str]


class World:
    """A folder with a run, another, a student, its scores, a bundle and a store."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.calls = 0
        self._capture = capture
        self._seen = self._stamps()

    def call(self, *arguments: str) -> Shown:
        """Call a command in this process, and search for the secret in all that it said and wrote."""
        self._capture.readouterr()
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
        text = "".join(self._capture.readouterr())
        leaks = [f"said {telltale!r}: {_around(text, telltale)}" for telltale in TELLTALES if telltale in text]
        stamps = self._stamps()
        for path in [path for path, stamp in stamps.items() if self._seen.get(path) != stamp]:
            held = path.read_bytes().decode("latin-1")
            leaks += [f"{path}: {_around(held, telltale)}" for telltale in TELLTALES if telltale in held]
        self._seen = stamps
        self.calls += 1
        return Shown(code, text, leaks[:2])

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def _around(text: str, telltale: str) -> str:
    at = text.index(telltale)
    return text[max(0, at - 100) : at + 60]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made once."""
    from relabel.export.bundles import seal_bundle
    from tests.score.conftest import write_tiny_student
    from tests.teachers.models import write_tiny_decoder

    folder, before = tmp_path_factory.mktemp("world"), Path.cwd()
    os.chdir(folder)
    try:
        columns = {name: [f"{name} {row // 4}" for row in range(24)] for name in ("query_id", "query")}
        columns |= {name: [f"{name} {row}" for row in range(24)] for name in ("doc_id", "title", "body")}
        pq.write_table(pa.table({**columns, "grade": [row % 3 for row in range(24)]}), "pairs.parquet")
        Path("job.yaml").write_text(yaml.safe_dump({**JOB, "shards": 1}))
        Path("search.yaml").write_text(SEARCH)
        Path("student.yaml").write_text(STUDENT)
        Path("teacher.yaml").write_text(TEACHER)
        Path("bundle").mkdir()
        Path("bundle/model.onnx").write_text("weights")
        seal_bundle(Path("bundle"), {"name": "ecom", "lineage": {}})
        if LEVEL != "short":
            write_tiny_student(Path("student"))
            write_tiny_decoder(Path("decoder"))
        for line in (
            "run job.yaml",
            "run job.yaml --set output=out/other --set engine.seed=8",
            "publish bundle store --version 1.0 --channel stable",
            "publish bundle store --version 2.0 --channel stable",
        ):
            with pytest.raises(SystemExit) as end:
                main(line.split())
            assert end.value.code == 0, line
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def world(made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> World:
    """The folder as working directory, and variables that hold secrets."""
    monkeypatch.chdir(made)
    monkeypatch.setenv("DBPASSWORD", GIVEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return World(made, capfd)


def commands(group: click.Group = root, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that can be called, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def places() -> list[tuple[str, str]]:
    """Every argument and every option with a value of every command."""
    return [
        (words, str(param.name))
        for words, command in commands()
        for param in command.params
        if not getattr(param, "is_flag", False)
    ]


def line_with(words: str, name: str, value: str, number: int) -> list[str]:
    """A command's line with a value at one of its arguments or options, and what else it wants."""
    command = dict(commands())[words]
    base = BASES.get(words)
    if base is None:
        base = " ".join(
            "job.yaml" if isinstance(p, click.Argument) else f"{p.opts[0]} job.yaml"
            for p in command.params
            if p.required
        )
    # below its group: a command keeps the help option that its first context gave it
    above = click.Context(root, **root.context_settings)
    arguments = shlex.split(base.format(n=f"{number:04d}"))
    given = command.make_context(words, arguments, parent=above, resilient_parsing=True).params
    line, arguments = words.split(), []
    for param in command.params:
        held = given.get(str(param.name))
        is_many = isinstance(held, tuple)
        if param.name == name:  # in addition to what is there, and twice
            held = (*held, value, value) if isinstance(held, tuple) else value
        if held is None or held == param.default or (param.name in ("help", "log_format") and param.name != name):
            continue
        values = [str(one) for one in held] if is_many and isinstance(held, tuple) else [str(held)]
        if isinstance(param, click.Argument):
            arguments += values
        elif not getattr(param, "is_flag", False):
            line += [f"{param.opts[0]}={one}" for one in values]
    return [*line, *arguments]


def forms_for(index: int, *, few: int = 16) -> list[str]:
    """One form of a secret in turn, in full all of them or a few in turn, and in a long run all."""
    count = {"short": 1, "full": few}.get(LEVEL, len(FORMS))
    return [list(FORMS)[(index * 5 + number * len(FORMS) // count) % len(FORMS)] for number in range(count)]


def test_every_place_is_that_of_a_command_that_is_called_here() -> None:
    assert {words for words, _ in places()} == set(BASES)


@pytest.mark.parametrize("words", BASES)
def test_a_secret_at_any_argument_or_option_is_shown_nowhere(world: World, words: str) -> None:
    leaks = []
    for index, name, form in probes_of(words):
        shown = world.call(*line_with(words, name, FORMS[form], index))
        leaks += [f"{words} {name} as {form}: {leak}" for leak in shown.leaks]
    assert not leaks, "\n".join(leaks)
    assert world.calls


@pytest.mark.parametrize("words", BASES)
def test_the_door_holds_where_no_argument_is_refused(world: World, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """The commands themselves get the secret, so that what each of them says of it is seen; files may hold what names
    them.
    """
    monkeypatch.setattr("relabel.jobs.cli.refuse_secret_arguments", lambda _: None)
    leaks = []
    for index, name, form in probes_of(words, few=4):
        shown = world.call(*line_with(words, name, FORMS[form], index))
        leaks += [f"{words} {name} as {form}: {leak}" for leak in shown.leaks if leak.startswith("said")]
    assert not leaks, "\n".join(leaks)
    assert world.calls


def probes_of(words: str, *, few: int = 16) -> Iterator[tuple[int, str, str]]:
    """A number, a place of the command, and the form of the secret there."""
    for index, (command, name) in enumerate(places()):
        for form in forms_for(index, few=few) if command == words else ():
            yield 16 * index + list(FORMS).index(form), name, form


def keys_of(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of a spec that a text may be at, through models and mappings."""
    for name, field in model.model_fields.items():
        key = f"{before}{name}"
        inner = [one for one in _parts(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        for one in inner:
            yield from keys_of(one, f"{key}.")
        if not inner or str in _parts(field.annotation):
            yield key
        if dict in _parts(field.annotation):
            yield f"{key}.x"


def _parts(annotation: Any) -> list[Any]:
    return [
        annotation,
        typing.get_origin(annotation),
        *(part for one in typing.get_args(annotation) for part in _parts(one)),
    ]


def job_keys() -> list[str]:
    found = list(keys_of(JobSpec))
    for registry, section in ((LABELERS, "labeler"), (ENGINES, "engine.args")):
        for name in registry:
            found += [f"{section}.{key.partition('.')[2] or key}" for key in _option_keys(registry, name)]
    return sorted(set(found))


def _option_keys(registry: Any, name: str) -> list[str]:
    return list(keys_of(_options_model(registry, name)))


def _options_model(registry: Any, name: str) -> type[BaseModel]:
    from relabel.labelers.registry import engine_class, labeler_class

    return labeler_class(name).Options if registry is LABELERS else engine_class(name).Args


FILES = {"run": "job.yaml", "distill": "student.yaml", "train": "teacher.yaml"}
"""Command → the file that holds its spec."""


def spec_keys() -> Iterator[tuple[str, list[str]]]:
    """Command and the keys of its spec."""
    yield "run", job_keys()
    yield "distill", list(keys_of(DistillSpec))
    yield "train", list(keys_of(SftSpec))


def spec_probes() -> Iterator[tuple[str, str, str, Callable[[World, str, str], list[str]]]]:
    """Command, key, form, and the line that puts the secret there: by flag, or in a file."""
    index = 0
    for command, keys in spec_keys():
        for key in [*keys, "unknown", "unknown.deep", "engine.args.unknown"]:
            for form in forms_for(index):
                yield command, key, form, _by_flag if index % 2 else _in_file
            index += 1


def _by_flag(world: World, command: str, key: str, value: str) -> list[str]:
    return [command, FILES[command], "--set", f"{key}={json.dumps(value)}"]


def _in_file(world: World, command: str, key: str, value: str) -> list[str]:
    """The file lies outside of the folder: that it holds the secret is its writer's doing."""
    values = yaml.safe_load(Path(FILES[command]).read_text())
    inner = values
    *sections, last = key.split(".")
    for section in sections:
        held = inner.get(section)
        inner[section] = inner = held if isinstance(held, dict) else {}
    inner[last] = value
    path = world.folder.parent / f"{command}-planted.yaml"
    path.write_text(yaml.safe_dump(values))
    return [command, str(path)]


def test_a_secret_at_any_key_of_a_spec_is_shown_and_recorded_nowhere(world: World) -> None:
    leaks = []
    for command, key, form, line in spec_probes():
        shown = world.call(*line(world, command, key, FORMS[form]))
        assert shown.code, (command, key, form)
        leaks += [f"{command} {key} as {form}: {leak}" for leak in shown.leaks]
    assert not leaks, "\n".join(leaks)
    assert world.calls > 60


NUMBER = "10000000"


def test_a_number_next_to_the_name_of_a_secret_is_refused_by_the_key_and_not_shown(world: World) -> None:
    shown = world.call("plan", "job.yaml", "--set", f"engine.args.api_token={NUMBER}")
    assert shown.code == 3
    assert "holds the value of engine.args.api_token on the command line" in shown.text
    assert NUMBER not in shown.text


@pytest.mark.parametrize("name", ["PGPASSWORD", "DBPASSWORD", "GITHUB_PAT2", "MYSECRETS", "CONN_STRING", "SOME_NAME"])
def test_a_variable_with_a_secret_is_refused_in_a_spec_by_its_name_or_its_look(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, FORMS["der"] if name == "SOME_NAME" else CORE)
    for key in ("output", "name", "engine.model", "input.columns.query", "labeler.templates"):
        shown = world.call("run", "job.yaml", "--set", f"{key}=x${{env.{name}}}", "--set", "shards=2")
        assert (shown.code, shown.leaks) == (3, []), shown
        assert f"${{env.{name}}} looks like a secret" in shown.text
        assert not Path("x").exists()


def test_storage_options_take_such_a_variable_and_show_it_nowhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", CORE)
    shown = world.call(
        "run", "job.yaml", "--set", "storage_options.memory.password=${env.PGPASSWORD}", "--set", "output=memory://b/o"
    )
    assert "looks like a secret" not in shown.text
    assert shown.leaks == []


def variables() -> list[str]:
    """Every variable that the code names, and one for each first key of a spec."""
    folders = ("jobs", "export", "labelers", "distill", "manifests")
    code = "".join(
        path.read_text() for folder in folders for path in (Path(__file__).parents[2] / folder).rglob("*.py")
    )
    named = set(re.findall(r"\"((?:RELABEL|SLURM|AWS|RAY|JOB|CUDA|HF|VLLM)_[A-Z0-9_]*[A-Z0-9])\"", code))
    keys = (*JobSpec.model_fields, *DistillSpec.model_fields, *SftSpec.model_fields)
    return sorted(named | {f"RELABEL_{key.upper()}" for key in keys})


def test_a_secret_in_any_variable_is_shown_nowhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = []
    lines = [
        "run job.yaml --shard auto",
        "publish bundle store",
        "pull store/ecom made/by-variable",
        "distill student.yaml --done-ok",
        "train teacher.yaml --done-ok",
    ]
    for index, name in enumerate(variables()):
        for form in forms_for(index):
            line = lines[world.calls % len(lines)]
            with monkeypatch.context() as inner:
                inner.setenv(name, FORMS[form])
                leaks += [f"{line} with {name} as {form}: {leak}" for leak in world.call(*line.split()).leaks]
    assert not leaks, "\n".join(leaks)
    assert world.calls > 20


def test_secrets_in_an_output_of_others_reach_neither_page_nor_streams(world: World) -> None:
    shutil.copytree("out/ecom", "out/theirs", dirs_exist_ok=True)
    manifest = Path("out/theirs/manifest.json")
    held = unsealed(manifest.read_bytes())
    held["variables"] = {"env.DB": FORMS["password"], "env.KEY": DER}
    held["spec"]["engine"]["model"] = FORMS["jwt"]
    manifest.write_text(json.dumps(held))
    world.call("schema", "job")  # what was planted is seen from here on
    lines = (
        "status out/theirs",
        "verify out/theirs",
        "report out/theirs --to made/theirs.html --force",
        "compare out/theirs out/other --html made/theirs-{form}.html",
    )
    for line in lines:
        for form in ("text", "json"):
            shown = world.call(*line.format(form=form).split(), "--output", form)
            assert (shown.code, shown.leaks) == (0, []), (line, shown)


def test_a_crash_of_ours_and_words_of_libraries_show_no_secret(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        import logging
        import sys
        import warnings

        logging.getLogger("relabel.x").warning("seen %s", FORMS["slash"])
        with warnings.catch_warnings():  # to this suite they are errors
            warnings.simplefilter("always")
            warnings.warn(f"about {FORMS['jwt']}", stacklevel=1)
        print(f"printed {GIVEN}", file=sys.stderr)
        try:
            raise ValueError(f"{GIVEN!r} is no number")
        except ValueError as exc:
            raise RuntimeError(
                f"Authorization: Basic {base64.b64encode(b'me:' + CORE.encode()).decode()} {PEM}"
            ) from exc

    monkeypatch.setattr("relabel.jobs.commands.status.verify.callback", crash)
    for extra in ([], ["--output", "json"], ["--log-format", "json"]):
        shown = world.call("verify", "out/ecom", *extra)
        assert (shown.code, shown.leaks) == (1, [])
        assert "Traceback" in shown.text
        assert "RuntimeError" in shown.text
        assert DER not in shown.text

"""Jobs: a job file read and validated, and the output that is opened for it with its plan."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import count
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import SecretStr

from relabel.jobs.delivery import fetch_model, local_templates
from relabel.jobs.settings import Places, mark_of, placed, read_secrets, read_settings, resolved
from relabel.labelers.registry import Labeler, engine_class, labeler_class, labelers_with
from relabel.manifests.asks import Ask, Engine, EngineFacts
from relabel.manifests.chat_templates import DAY, day_of, may_show_day
from relabel.manifests.errors import ConfigError, ManifestError, MissingExtraError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset, takes_file
from relabel.manifests.label_keys import stage_digests
from relabel.manifests.labels import CASCADE_COLUMNS, Reads
from relabel.manifests.plan import (
    BY_CONTENT,
    PLAN_NAME,
    Plan,
    check_plan,
    fingerprint_parts,
    load_plan,
    shard_row_ids,
    template_name,
    write_plan,
)
from relabel.manifests.records import read_record, sealed_json
from relabel.manifests.rows import ChunkRows, make_plan, read_chunks
from relabel.manifests.run_folder import RunFolder
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.secrets import shown
from relabel.manifests.specs import (
    EngineSpec,
    JobSpec,
    KeepsModels,
    LabelerOptions,
    PaidByToken,
    nearest,
    validate_spec,
)
from relabel.manifests.store import Store, open_run_store, read_if_there

if TYPE_CHECKING:
    from relabel.labelers.engines.transformers import TokenizerFolder
    from relabel.manifests.cascade import Cascade

# ------------------------------------------------------------------------------
# A job as it was read: its spec with the labeler's and the engine's own options, and where its output is.


OUTPUT_FILES = (
    "labels/shard-00000/chunk-000000-0.parquet",
    "quarantine/shard-00000/chunk-000000-0.parquet",
    "answers/shard-00000/chunk-000000-0.parquet",
    "plan/rows-00000-0.parquet",
)
"""Names as the Parquet files of an output have them."""
ROUNDS_FILES = (
    "inputs/round-1/part-00000.parquet",
    "trajectories.parquet",
    *(f"round-1/{name}" for name in OUTPUT_FILES),
)
"""And those of a search in rounds."""


class ModelRunner(Protocol):
    """What a job starts: an `Engine`, which answers asks, or a student, which labels whole chunks. The methods are
    those of `Engine`.
    """

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> None: ...

    @staticmethod
    def model_digest(spec: EngineSpec) -> str: ...

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]: ...

    def prepare(self, asks: Sequence[Ask]) -> list[str]: ...

    def facts(self) -> EngineFacts: ...

    def costs(self) -> dict[str, Any] | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A checked spec with what it names."""

    spec: JobSpec
    labeler: Labeler
    runner_class: type[ModelRunner]
    where: str
    storage: Storage
    """How input, output, templates and models are reached."""
    secrets: Mapping[str, SecretStr] = field(default_factory=dict, repr=False, compare=False)
    """What the engine alone is given: by option, the value of the variable that the option names.
    No part of the spec.
    """
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the spec's variables were resolved to, by name as written (`date`, `env.REGION`)."""
    ledger: str | None = None
    """The output of the search whose round this is; its rounds share one budget."""

    @property
    def reads(self) -> Reads:
        """What its labeler looks at."""
        return self.labeler.reads

    def changed(self, section: str, **values: Any) -> Job:
        """The job with other values in a section of its spec, which are not checked."""
        part = getattr(self.spec, section).model_copy(update=values)
        return replace(self, spec=self.spec.model_copy(update={section: part}))

    def with_args(self, values: Mapping[str, Any]) -> Job:
        """The job with other options of its engine, which are not checked."""
        return self.changed("engine", args=self.spec.engine.args.model_copy(update=values))

    def open_dataset(self) -> Dataset:
        """Find the input and check its columns.

        Raises:
            ConfigError: the output lies inside the input, where the labels would be read as more input.
            InputError: see `open_dataset`.
        """
        for path in self.spec.input.path:
            self.refuse_output_inside(path, "input.path")
        return open_dataset(self.spec.input, self.storage, reads=self.reads)

    def refuse_output_inside(self, path: str, key: str) -> None:
        """Raise where the labels would be read as input.

        Raises:
            ConfigError: the output is inside this path.
        """
        names = OUTPUT_FILES if self.spec.rounds is None else (*OUTPUT_FILES, *ROUNDS_FILES)
        if any(takes_file(path, f"{self.spec.output.rstrip('/')}/{name}") for name in names):
            raise ConfigError(
                f"{self.where}: `output` {self.spec.output} is inside {key} {path}, where its labels would be read as "
                "input. Give an output elsewhere."
            )

    def fetch_model(self) -> None:
        """Fetch the engine's model if it lies elsewhere and the engine keeps a cache.

        Raises:
            ModelError: it can't be fetched.
        """
        engine = self.spec.engine
        if engine.model is not None and isinstance(engine.args, KeepsModels):
            cache = engine.args.cache_dir
            fetch_model(engine.model, self.storage, cache_dir=Path(cache) if cache else None)

    def model_digest(self) -> str:
        """The digest of the engine's model, which is fetched before.

        Raises:
            ModelError: there is no such model, or it can't be fetched.
        """
        self.fetch_model()
        return self.runner_class.model_digest(self.spec.engine)

    def template_folder(self) -> TokenizerFolder | None:
        """The tokenizer whose chat template makes the prompts; None where a server makes them.

        Raises:
            ModelError: the model is not here.
        """
        model = self.spec.engine.model
        args = self.spec.engine.args
        if model is None or not isinstance(args, KeepsModels) or getattr(args, "mode", "") == "chat":
            return None
        from relabel.labelers.engines.transformers import tokenizer_folder  # reading an output takes no engine

        return tokenizer_folder(model, args.cache_dir)

    def at_day_of(self, plan: Plan | None) -> Job:
        """The job with the day that its chat template says, if it says one: the plan's, or today where there is none.

        Raises:
            ModelError: the model is not here.
        """
        kwargs = self.spec.engine.chat_template_kwargs
        if plan is not None:
            kwargs = day_of(plan.parts.get("engine", {}).get("chat_template_kwargs")) | kwargs
        elif (folder := self.template_folder()) and may_show_day(folder.path, kwargs) and self._shows_day(folder):
            kwargs = {DAY: date.today().isoformat()} | kwargs
        return self.changed("engine", chat_template_kwargs=kwargs)

    def _shows_day(self, folder: TokenizerFolder) -> bool:
        """Whether the day is in the prompts: many templates say it only where there is no system turn."""
        asks = self.labeler.probe()
        from relabel.labelers.engines.transformers import prompt_encoder

        engine = self.spec.engine
        several = ({**engine.chat_template_kwargs, DAY: day} for day in ("1999-12-31", "2026-01-01"))
        specs = (engine.model_copy(update={"chat_template_kwargs": kwargs}) for kwargs in several)
        with contextlib.suppress(MissingExtraError):  # then it may be
            one, other = (list(map(prompt_encoder(spec, folder).shown, asks)) for spec in specs)
            return one != other
        return True

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of. May fetch a model, never loads one."""
        engine = self.spec.engine
        args = engine.args.model_dump(mode="json")
        args |= {
            key: BY_CONTENT
            for key, info in type(engine.args).model_fields.items()
            if mark_of(info) and args[key] is not None
        }
        return fingerprint_parts(
            dataset,
            limit=self.spec.input.limit,
            overlong=self.spec.input.overlong,
            labeler=self.spec.labeler.model_dump(mode="json", exclude={"templates"}),
            label_columns={
                column.name: column.kind
                for column in (*self.labeler.columns, *(CASCADE_COLUMNS if self.spec.cascade is not None else ()))
            },
            templates=self.labeler.template_digests,
            stages=stage_digests(self.labeler.probe()),
            engine={
                "name": engine.name,
                "seed": engine.seed,
                "max_prompt_tokens": engine.max_prompt_tokens,
                "args": {key: value for key, value in args.items() if key not in engine.args.speed_only},
                "chat_template_kwargs": engine.chat_template_kwargs,
            },
            model_digest=self.model_digest(),
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )


# ------------------------------------------------------------------------------
# A job file becomes a checked job: YAML, `RELABEL_*` variables and `--set` flags, resolved through the registries of
# labelers and engines.
#
# Precedence: flag, variable, job file, default. `RELABEL_ENGINE__SEED=3` sets `engine.seed`; a value is read as YAML.
# Then `${date}` and `${env.NAME}` are resolved in whatever string is there.


CACHE_VARIABLE = "RELABEL_CACHE"
"""Folder for fetched models; default `~/.cache/relabel`."""


def cache_dir() -> Path | None:
    """The folder that the variable names; None for the default."""
    return Path(named) if (named := os.environ.get(CACHE_VARIABLE)) else None


def load_job(
    spec: str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    day: str | None = None,
) -> Job:
    """Read and check a job file, or values as one would hold them.

    Args:
        spec: path or URL of the file, or its values; then relative paths count from the working directory.
        overrides: `key.path=value` strings from the command line.
        day: what `${date}` means, as 2026-11-19; today if nothing says.
    Raises:
        ConfigError: the file can't be read, or a key, value or variable is off; one sentence a fault.
        UsageError: an override without `=`, or an invalid day.
    """
    settings = read_settings(spec, overrides=overrides, environment=environment, day=day)
    path = settings.places.where
    cache = environment.get(CACHE_VARIABLE)
    try:
        job = build_job(settings.values, where=path, cache_dir=cache, places=settings.places)
    except ConfigError as exc:
        if not settings.overrides:
            raise
        raise ConfigError(f"{exc} (set outside the file: {', '.join(settings.overrides)})") from exc
    return replace(job, secrets=read_secrets(job.spec.engine, environment), variables=settings.variables)


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where a job is read from.

    Args:
        spec: the path or URL of its file, or what the file would hold.
        overrides: `KEY=VALUE` texts laid over it.
        day: what `${date}` means; today by default.
        ledger: see `Job`.
    """

    spec: str | Mapping[str, Any]
    overrides: Sequence[str] = ()
    day: str | None = None
    ledger: str | None = None

    def load(self) -> Job:
        """Read and check it.

        Raises:
            ConfigError: what is wrong with it.
        """
        return replace(load_job(self.spec, overrides=self.overrides, day=self.day), ledger=self.ledger)


def build_job(values: dict[str, Any], *, where: str, cache_dir: str | None = None, places: Places | None = None) -> Job:
    """Check plain values and resolve the labeler and engine that they name, and where relative paths lead.

    Args:
        where: what to call the values' source in an error.
        cache_dir: where engines keep fetched models, unless the values say.
        places: what relative paths count from; the working directory by default.
    """
    values = dict(values)
    here = str(Path.cwd())
    places = places or Places(where, here, here)
    labeler, engine = (_section(values, key, where) for key in ("labeler", "engine"))
    try:
        found_labeler = labeler_class(labeler["name"])
        found_engine = engine_class(engine["name"])
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    _refuse_keys_of_others(labeler, found_labeler.Options, where)
    values["labeler"] = validate_spec(found_labeler.Options, labeler, where=f"{where}, labeler")
    args = engine.get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"{where}: `engine.args` = {args!r}: want a mapping of options")
    if cache_dir and "cache_dir" in found_engine.Args.model_fields:
        args = {"cache_dir": placed(cache_dir, places.here), **args}
    args = validate_spec(found_engine.Args, args, where=f"{where}, engine.args")
    values["engine"] = validate_spec(EngineSpec, {**engine, "args": args}, where=f"{where}, engine")
    spec = resolved(validate_spec(JobSpec, values, where=where), places)
    names_prices = isinstance(args := spec.engine.args, PaidByToken) and None not in (
        args.price_per_million_input,
        args.price_per_million_output,
    )
    if spec.run.max_cost is not None and not names_prices:
        raise ConfigError(
            f"{where}: `run.max_cost` = {spec.run.max_cost:g}: what an ask costs is known of an engine that is paid by "
            "the token alone. Set engine.args.price_per_million_input and price_per_million_output (engine openai), or "
            "limit run.max_tokens, or the time by --for."
        )
    if spec.cascade is not None and (spec.canary or spec.rounds is not None):
        raise ConfigError(
            f"{where}: `cascade` goes with neither `canary` nor `rounds`: its cheap labels are not the teacher's, and "
            "its audit asks the teacher again anyway."
        )
    storage = Storage.of(spec.storage_options, retry_s=spec.run.store_retry_s, lease_s=spec.run.lease_s)
    with local_templates(spec.labeler, storage) as options:
        job = Job(
            spec,
            found_labeler(options),
            found_engine,
            where,
            storage,
        )
    if spec.cascade is not None and (job.reads.whole_query or not spec.labeler.grades):
        raise ConfigError(f"{where}: `cascade`: labeler {spec.labeler.name} grades no pair by itself")
    return job


def _refuse_keys_of_others(section: dict[str, Any], options: type[LabelerOptions], where: str) -> None:
    """
    Raises:
        ConfigError: a key is none of this labeler's, and is one of another's.
    """
    for key in section:
        owners = [] if key in options.model_fields else labelers_with(key)
        if owners:
            raise ConfigError(
                f"{where}, labeler: `{shown(key)}` is a key of {' and '.join(owners)}, not of {section['name']}. "
                f"Delete the line, or set `labeler.name: {owners[0]}`."
            )


def _section(values: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    section = values.get(key)
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        got = f"= {section!r}"
        if section is None:
            meant = nearest(key, [str(name) for name in values if name not in JobSpec.model_fields])
            got = f"is missing (`{shown(meant)}` is no key)" if meant else "is missing"
        example = section if isinstance(section, str) else "…"
        raise ConfigError(f"{where}: `{key}` {got}: want a mapping with a name, at least `{key}: {{name: {example}}}`")
    return section


# ------------------------------------------------------------------------------
# An output that was opened for a job.


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A job's output with a plan that fits the job."""

    job: Job
    dataset: Dataset
    store: Store
    plan: Plan
    folder: RunFolder
    was_planned_now: bool
    cascade: Cascade | None = None
    is_trial: bool = False
    """Whether the plan is kept nowhere."""

    def read(
        self, shard: int, chunks: Sequence[int], *, wanted: dict[int, set[int]] | None = None
    ) -> Iterator[ChunkRows]:
        """Rows of some chunks of a shard, see `read_chunks`."""
        planned = self.plan.shards[shard]
        row_ids = None if planned.row_ids is None or not chunks else shard_row_ids(self.store, planned)
        return read_chunks(
            self.dataset,
            planned,
            row_ids,
            chunks,
            wanted=wanted,
        )


def other_rounds(job: Job) -> Iterator[RunFolder]:
    """The other rounds of the search that this job is a round of, as far as they are planned; none for other jobs."""
    if job.ledger is None:
        return
    for name in map("round-{}".format, count(1)):
        store = open_run_store(f"{job.ledger}/{name}", job.storage, single_writer=job.spec.run.single_writer)
        plan = load_plan(store)
        if plan is None:
            return
        if PurePosixPath(job.spec.output).name != name:  # the folder before it may be written in two ways
            yield RunFolder(store, plan)


# ------------------------------------------------------------------------------
# Opening an output for a job: its plan, made if nobody has, checked against the job, and the input that it was made
# for.


def open_run(job: Job, *, may_plan: bool = True, may_write: bool = True, scratch: Store | None = None) -> OpenRun:
    """Open the output of a job, planning it if nobody has.

    Args:
        may_plan: make a plan where there is none.
        may_write: write that plan; off for a dry run.
        scratch: what is opened and planned in place of the output, whose files stay as they are.
    Raises:
        ConfigError: the job is a search in several rounds, each of which is a run of its own.
        StaleRunError: the output has a plan for another job or other inputs, or belongs to something that is not a run.
        ManifestError: there is no plan and `may_plan` is off.
    """
    if job.spec.rounds is not None:
        raise ConfigError(
            f"{job.where}: has `rounds`, so that it is no single run. Give it to `relabel rounds`; each of its rounds "
            f"is a run: {job.spec.output}/round-1 and so on."
        )
    job_as_given = job
    store = scratch or open_run_store(job.spec.output, job.storage, single_writer=job.spec.run.single_writer)
    plan = load_plan(store)
    if plan is not None:
        job = _at_planned_snapshot(job, plan)
    else:
        job.model_digest()  # which fetches the model
    job = job.at_day_of(plan)
    dataset = job.open_dataset()
    if dataset.table is not None:
        job = job.changed("input", snapshot=dataset.table.snapshot)
    parts = job.parts(dataset)
    cascade = None
    was_planned_now = False
    if job.spec.cascade is not None:
        from relabel.manifests.cascade import open_cascade  # with the metrics

        cascade = open_cascade(
            job.spec.cascade,
            job.storage,
            parts,
            rows=dataset.rows,
            where=job.where,
        )
        parts["cascade"] = asdict(cascade.certificate)
    if plan is None and not may_plan:
        raise ManifestError(
            f"{job.spec.output}: no plan there yet. Run the job first, with the --set and --date that this command "
            f"had, if any: relabel run {shlex.quote(job.where)}"
        )
    if plan is None:
        plan, was_planned_now = _planned(job, dataset, parts, store, may_write=may_write)
        if may_write and not was_planned_now and plan.parts != parts:
            # the table or the day changed between this worker's reading of it and the planner's
            return open_run(job_as_given, may_plan=may_plan, may_write=may_write, scratch=scratch)
    run_folder = RunFolder(store, plan)
    try:
        check_plan(plan, dataset, parts, output=job.spec.output)
    except StaleRunError as exc:
        if run_folder.listing():
            raise
        raise StaleRunError(
            f"{exc}\n  Nothing is labelled there yet: where no worker is at it, remove that folder, and this command "
            "plans again."
        ) from exc
    return OpenRun(
        job=job,
        dataset=dataset,
        store=store,
        plan=plan,
        folder=run_folder,
        was_planned_now=was_planned_now,
        cascade=cascade,
    )


def open_planned(job: Job) -> OpenRun | None:
    """The output as it was planned for this job, None where it is free; writes nothing, and plans nothing.

    Raises:
        StaleRunError: it has a plan for another job or other inputs, or belongs to something that is not a run.
    """
    store = open_run_store(job.spec.output, job.storage, single_writer=job.spec.run.single_writer)
    if load_plan(store) is None:
        _check_unclaimed(store, job.spec.output)
        return None
    return open_run(job, may_plan=False, may_write=False)


def _check_unclaimed(store: Store, output: str) -> None:
    """
    Raises:
        StaleRunError: an output without a plan belongs to something that is not a run.
    """
    # the plan is looked for again: another worker may have come between
    if read_if_there(store, MANIFEST_NAME) is not None and load_plan(store) is None:
        raise StaleRunError(
            f"{output}: holds a {MANIFEST_NAME} without a {PLAN_NAME}, so it belongs to something else, "
            "say to a student. Name another `output`."
        )


def _planned(job: Job, dataset: Dataset, parts: dict[str, Any], store: Store, *, may_write: bool) -> tuple[Plan, bool]:
    """The plan of an output that has none; that of another worker, where one came between.

    Returns:
        The plan, and whether it was written by this call.
    Raises:
        StaleRunError: the output belongs to something that is not a run.
    """
    _check_unclaimed(store, job.spec.output)
    if may_write:
        # a store that can't keep commits single is refused before anything is read or written
        store.check_conditional_writes()
    plan, more_files = make_plan(
        dataset,
        parts,
        name=job.spec.name,
        shards=job.spec.shards,
        chunk_rows=job.spec.run.chunk_rows,
    )
    if not may_write:
        return plan, False
    from relabel.labelers.prompts import TEMPLATES_READ  # with Jinja

    templates = {*job.labeler.template_digests.values()} & TEMPLATES_READ.keys()
    more_files |= {template_name(digest): TEMPLATES_READ[digest] for digest in sorted(templates)}
    for folder in ("", "plan"):
        store.sweep(folder)
    was_written = write_plan(store, plan, more_files)
    return load_plan(store) or plan, was_written


def _at_planned_snapshot(job: Job, plan: Plan) -> Job:
    """A job over the snapshot that its output was planned for, wherever the table is by now.

    Raises:
        StaleRunError: the job names another one.
    """
    asked = job.spec.input
    planned = plan.facts.table
    if planned is None or asked.table != planned.format:
        return job  # `check_plan` says what differs
    snapshot = planned.snapshot if asked.snapshot is None else str(asked.snapshot)
    named = replace(planned, snapshot=snapshot, since=None if asked.since is None else str(asked.since))
    if named != planned:
        raise StaleRunError(
            f"{job.spec.output}: was planned for {planned} of the table, and the job names {named}. An output keeps "
            f"its snapshot. To go on, name {planned} (or no input.snapshot); to label the other, name another `output`."
        )
    return job.changed("input", snapshot=int(planned.snapshot))


# ------------------------------------------------------------------------------
# The job's engine. A fleet's CPUs differ, and labels in bfloat16 and in float32 are those of two teachers. So the first
# worker of an output records how it resolved the engine's `auto` options before it starts its engine, and the others
# follow it.

AUTO_NAME = "engine.json"


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """How the first worker of an output resolved its engine's `auto` options, by option."""

    version: int
    resolved: dict[str, str]


def with_auto_resolved(job: Job, store: Store) -> Job:
    """The job with its engine's `auto` options as this output was begun, or as this machine is the first to choose.

    Raises:
        ManifestError: the first worker's record can't be read.
        ModelError: see `Engine.resolve_auto`.
    """
    chosen = job.runner_class.resolve_auto(job.spec.engine)
    if chosen and not store.create(AUTO_NAME, sealed_json(asdict(AutoOptions(1, chosen)))):
        chosen = {**chosen, **{name: value for name, value in read_auto(store).items() if name in chosen}}
    return job.with_args(chosen)


def options_begun_with(job: Job, store: Store) -> dict[str, str]:
    """The engine's `auto` options as this output's first worker resolved them; empty where it did not. Reads only.

    Raises:
        ManifestError: as `with_auto_resolved`.
        StoreError: the output can't be read.
    """
    return {
        name: value for name, value in read_auto(store).items() if getattr(job.spec.engine.args, name, "") == "auto"
    }


def read_auto(store: Store) -> dict[str, str]:
    """What the first worker of an output recorded; empty where it did not.

    Raises:
        ManifestError: it can't be read.
    """
    held = read_if_there(store, AUTO_NAME)
    advice = "Move it away, and set the engine's `auto` options as the labels that are there were made."
    where = f"{store.root}/{AUTO_NAME}"
    what = "not the options of an engine"
    if held is None:
        return {}
    options = read_record(
        AutoOptions,
        held,
        where,
        what,
        advice,
    )
    return options.resolved


def start_runner(job: Job) -> tuple[ModelRunner, list[str]]:
    """Start the job's engine, or its student, and show it what the labeler will ask.

    Returns:
        It, and its remarks for the user.
    Raises:
        ModelError, MissingExtraError: what is missing, and how to get it.
    """
    secrets: dict[str, Any] = {"secrets": job.secrets} if job.secrets else {}  # only engines that name some take them
    runner = job.runner_class(job.spec.engine, overlong=job.spec.input.overlong, **secrets)
    try:
        return runner, runner.prepare(job.labeler.probe())
    except BaseException:
        runner.close()
        raise


def start_engine(job: Job) -> tuple[Engine, list[str]]:
    """Likewise of a job that asks."""
    engine, remarks = start_runner(job)
    assert isinstance(engine, Engine)
    return engine, remarks

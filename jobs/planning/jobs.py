"""A job as it was read: its spec with the labeler's and the engine's own options, and where its output is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from relabel.jobs.fetching.models import fetch_model
from relabel.jobs.planning.spec_places import mark_of
from relabel.labelers.engines.api_tokenizer import TokenizerFolder, tokenizer_folder
from relabel.labelers.engines.counting import prompt_encoder
from relabel.labelers.engines.registry import EngineClass
from relabel.labelers.registry import Labeler, declared_columns, declared_reads
from relabel.manifests.engine_options import KeepsModels
from relabel.manifests.errors import ConfigError, MissingExtraError
from relabel.manifests.inputs.dataset import Dataset, Known, open_dataset
from relabel.manifests.labels import Reads
from relabel.manifests.models.chat_templates import DAY, day_of, may_say_day
from relabel.manifests.runs.fingerprints import fingerprint_parts
from relabel.manifests.runs.label_keys import stage_digests
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.recipes import BY_CONTENT
from relabel.manifests.specs import JobSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url, place_of


@dataclass(frozen=True, slots=True)
class Job:
    """A checked spec with what it names."""

    spec: JobSpec
    labeler: Labeler
    engine_class: EngineClass
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
    """Where its budget is counted, if not in its own output: rounds of a search share one."""

    @property
    def reads(self) -> Reads:
        """What its labeler looks at."""
        return declared_reads(self.labeler, name=self.spec.labeler.name)

    def open_dataset(self, known: Known | None = None) -> Dataset:
        """Find the input and check its columns.

        Args:
            known: see `open_dataset`.
        Raises:
            ConfigError: the output lies inside the input, where the labels would be read as more input.
            InputError: see `open_dataset`.
        """
        for path in self.spec.input.path:
            self.refuse_output_inside(path, "input.path")
        return open_dataset(self.spec.input, self.storage, reads=self.reads, known=known)

    def refuse_output_inside(self, path: str, key: str) -> None:
        """Raise where the labels would be read as input.

        Raises:
            ConfigError: the output is inside this path.
        """
        inside = _steps_below(path, self.spec.output)
        if inside is not None and not any(step.startswith((".", "_")) for step in inside):
            raise ConfigError(
                f"{self.where}: `output` {self.spec.output} is inside {key} {path}, where its labels would be read as "
                "input. Give an output elsewhere."
            )

    def model_digest(self) -> str:
        """The digest of the engine's model, which is fetched before if an engine that keeps a cache names one
        elsewhere.

        Raises:
            ModelError: there is no such model, or it can't be fetched.
        """
        engine = self.spec.engine
        if engine.model is not None and isinstance(engine.args, KeepsModels):
            cache = engine.args.cache_dir
            fetch_model(engine.model, self.storage, cache_dir=Path(cache) if cache else None)
        return self.engine_class.model_digest(engine)

    def template_folder(self) -> TokenizerFolder | None:
        """The tokenizer whose chat template makes the prompts; None where a server makes them.

        Raises:
            ModelError: the model is not here.
        """
        engine = self.spec.engine
        if (
            engine.model is None
            or not isinstance(engine.args, KeepsModels)
            or getattr(engine.args, "mode", "") == "chat"
        ):
            return None
        return tokenizer_folder(engine.model, engine.args.cache_dir)

    def at_day_of(self, plan: Plan | None) -> Job:
        """The job with the day that its chat template says, if it says one: the plan's, or today where there is none.

        Raises:
            ModelError: the model is not here.
        """
        engine = self.spec.engine
        kwargs = engine.chat_template_kwargs
        if plan is not None:
            kwargs = day_of(plan.parts.get("engine", {}).get("chat_template_kwargs")) | kwargs
        elif (
            (folder := self.template_folder()) is not None
            and may_say_day(folder.path, kwargs)
            and self._says_day(folder)
        ):
            kwargs = {DAY: date.today().isoformat()} | kwargs
        engine = engine.model_copy(update={"chat_template_kwargs": kwargs})
        return replace(self, spec=self.spec.model_copy(update={"engine": engine}))

    def _says_day(self, folder: TokenizerFolder) -> bool:
        """Whether the day is in the prompts: many templates say it only where there is no system turn."""
        asks, engine = self.labeler.probe(), self.spec.engine
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
                column.name: column.kind for column in declared_columns(self.labeler, name=self.spec.labeler.name)
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


def _steps_below(folder: str, path: str) -> tuple[str, ...] | None:
    """The steps from a folder down to a path, local or by URL; None if the path is not below it."""
    folder, path = place_of(folder), place_of(path)
    if is_url(folder) or is_url(path):
        outer, inner = f"{folder}/", f"{path}/"
        return tuple(inner[len(outer) :].strip("/").split("/")) if inner.startswith(outer) else None
    outer_path, inner_path = Path(folder), Path(path)
    return (
        inner_path.relative_to(outer_path).parts
        if outer_path.is_dir() and inner_path.is_relative_to(outer_path)
        else None
    )

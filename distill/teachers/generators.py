"""RES-RAG's frozen generator: any engine, asked greedily, its answers kept on disk by what was asked.

A kept answer is the engine's own text, and is read anew: a hit says what asking again would. What the engine fails at
is not kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relabel.distill.teachers.res_rag_spec import GeneratorSpec
from relabel.distill.training.disk_errors import writing
from relabel.labelers.engines.registry import engine_class
from relabel.labelers.short_answers import ShortAnswers
from relabel.manifests.asks import Answer, Ask, Engine, Request
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import EngineCrashError, RelabelError, VerdictError

MOST_CRASHES = 3
"""Times in a row that the engine may go down without an answer before the training ends."""
ANSWER_TIMEOUT_S = 1800.0
"""An engine that gives no answer for so many seconds has gone down."""

logger = logging.getLogger(__name__)


class Evidence(NamedTuple):
    """What the generator is given: a question, chosen chunks' texts, and what the pages say of themselves."""

    query: str
    texts: tuple[str, ...]
    jsonld: tuple[str, ...] = ()


class Generated(NamedTuple):
    """What it made of it.

    Args:
        answers: best first; none where the evidence does not suffice or the answer could not be read.
        fault: `""`, or why there is nothing to read: `engine` is the generator's failure, all else (`format`,
            `truncated`, `overlong`, `refused`) is an answer that can't be used.
        detail: for a person.
    """

    answers: tuple[str, ...]
    fault: str = ""
    detail: str = ""


@contextlib.contextmanager
def own_keys() -> Iterator[None]:
    """Errors within name keys of `generator`, where an engine says those of a job's `engine`."""
    try:
        yield
    except RelabelError as exc:
        said = re.sub(r"\bengine\.(?=[a-z])", "generator.", str(exc))
        if said == str(exc):
            raise
        raise type(exc)(said) from exc


class Generator:
    """A generator with its kept answers. The engine starts with `start`, or with the first question that is not kept.

    Args:
        folder: where answers are kept.
        secrets: what the engine's options name, by option.
        start: makes the engine; the spec's own by default.
    """

    def __init__(
        self,
        spec: GeneratorSpec,
        folder: Path,
        *,
        secrets: Mapping[str, Any] | None = None,
        start: Callable[[], Engine] | None = None,
    ) -> None:
        self._spec, self._folder, self._secrets = spec, folder, dict(secrets or {})
        self._start = start or self._started
        self._answers = ShortAnswers()
        self._identity = identity_of(spec, self._answers)
        self._engine: Engine | None = None
        self._crashes = 0
        self._ids = 0

    def start(self) -> list[str]:
        """Start the engine; its remarks.

        Raises:
            ModelError, MissingExtraError, ConfigError: it can't start here.
        """
        if self._engine is not None:
            return []
        with own_keys():
            engine = self._start()
            try:
                remarks = engine.prepare(self._answers.probe())
            except BaseException:
                engine.close()
                raise
        self._engine = engine
        return remarks

    def answer(self, asked: Sequence[Evidence]) -> list[Generated]:
        """What it answers to each; equal ones are asked once.

        Raises:
            EngineCrashError: the engine goes down time after time.
        """
        keys = {one: digest_of([self._identity, list(one)]) for one in asked}
        known = {one: self._kept(key) for one, key in keys.items()}
        missing = {one: key for one, key in keys.items() if known[one] is None}
        if missing:
            asks = {key: self._answers.ask(*one) for one, key in missing.items()}
            answers = self._ask(asks)
            for one, key in missing.items():
                known[one] = answers.get(key)
                self._keep(key, answers.get(key))
        return [self._read(known[one]) for one in asked]

    def close(self) -> None:
        """Free the engine's device and memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _started(self) -> Engine:
        named = {"secrets": self._secrets} if self._secrets else {}  # only engines that name some take them
        return engine_class(self._spec.name)(self._spec, overlong="quarantine", **named)

    def _ask(self, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        """Answers by key, those that came."""
        found: dict[str, Answer] = {}
        try:
            self.start()
            with own_keys():
                for key, answer in self._polled(asks):
                    found[key] = answer
        except EngineCrashError as exc:
            self._crashes = 0 if found else self._crashes + 1
            with contextlib.suppress(EngineCrashError):
                self.close()
            self._engine = None
            if self._crashes >= MOST_CRASHES:
                raise EngineCrashError(
                    f"the generator went down {MOST_CRASHES} times in a row without an answer: {exc} The last whole "
                    "checkpoint is kept: mend `generator`, and continue with --resume."
                ) from exc
            logger.warning("the generator went down; %d rollouts are dropped: %s", len(asks) - len(found), exc)
        else:
            self._crashes = 0
        return found

    def _polled(self, asks: Mapping[str, Ask]) -> Iterable[tuple[str, Answer]]:
        assert self._engine is not None
        waiting, open_keys = list(asks), dict[int, str]()
        last_s = time.monotonic()
        while waiting or open_keys:
            while waiting and self._engine.capacity:
                key = waiting.pop(0)
                self._ids += 1
                open_keys[self._ids] = key
                # of what is asked alone: the order in which rollouts come does not shift it
                self._engine.submit(Request(self._ids, asks[key], self._spec.seed ^ int(key[:15], 16)))
            for answer in self._engine.poll():
                last_s = time.monotonic()
                yield open_keys.pop(answer.request_id), answer
            if time.monotonic() - last_s > ANSWER_TIMEOUT_S:
                raise EngineCrashError(f"the generator gave no answer for {ANSWER_TIMEOUT_S:.0f} s.")

    def _read(self, answer: Answer | None) -> Generated:
        if answer is None:
            return Generated((), "engine", "the engine went down")
        try:
            return Generated(tuple(self._answers.read(answer)))
        except VerdictError as exc:
            return Generated((), exc.status, exc.reason)

    def _kept(self, key: str) -> Answer | None:
        """A kept answer; None where there is none, or its file is damaged: it is then asked again."""
        try:
            held = json.loads((self._folder / key[:2] / f"{key}.json").read_bytes())
            return Answer(0, held["text"], held["finish"], detail=held["detail"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, key: str, answer: Answer | None) -> None:
        if answer is None or answer.finish == "error":
            return
        folder = self._folder / key[:2]
        held = {"text": answer.text, "finish": answer.finish, "detail": answer.detail}
        scratch = folder / f".{key}.{secrets.token_hex(8)}"
        with writing(folder, None):
            folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(held), encoding="utf-8")
            scratch.replace(folder / f"{key}.json")


def identity_of(spec: GeneratorSpec, answers: ShortAnswers) -> str:
    """Digest of all that decides its answers beside what is asked: engine, options, model, prompt."""
    return digest_of(
        {
            "engine": spec.model_dump(
                mode="json", exclude={"model": True, "cache": True, "args": set(spec.args.speed_only)}
            ),
            "model": engine_class(spec.name).model_digest(spec),
            "templates": answers.template_digests,
        }
    )

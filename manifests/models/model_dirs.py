"""What a model's directory holds."""

from __future__ import annotations

from pathlib import Path

from relabel.manifests.errors import ModelError

BACKBONE_NAME = "backbone.json"
"""The config of an encoder student. Under transformers' own name its Auto classes would put a head of random weights on
the encoder and answer by it.
"""
WEIGHT_SUFFIXES = (".safetensors", ".bin")
"""What weights in a directory end in. `.bin` is listed so that such a directory is recognised; loading insists on
safetensors.
"""


def check_model_dir(path: Path, reference: str) -> None:
    """
    Raises:
        ModelError: the directory holds no config.json or no weights.
    """
    if not config_file(path).is_file():
        raise ModelError(
            f"model {reference!r}: {path} holds no config.json; expected a directory with config.json and weights."
        )
    if not has_weights(path):
        raise ModelError(
            f"model {reference!r}: {path} holds no weights; expected one or more .safetensors beside config.json."
        )


def config_file(path: Path) -> Path:
    """The config of the model in a directory: a student's encoder, or a model as transformers saves it."""
    own = path / BACKBONE_NAME
    return own if own.is_file() else path / "config.json"


def has_weights(folder: Path) -> bool:
    """Whether weights lie right inside a folder."""
    return any(file.suffix in WEIGHT_SUFFIXES and file.is_file() for file in folder.iterdir())

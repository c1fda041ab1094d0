"""The reference answers that a bundle carries, and the onnxruntime sessions that answer on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export import loader
from relabel.export.bundle_facts import ModelParity
from relabel.export.loader import OPENVINO, BundleError, choose_provider, open_session
from relabel.export.parity import PairSet, Run, answers
from relabel.export.specs import ParitySpec
from relabel.manifests.errors import MissingExtraError
from relabel.manifests.process import require
from relabel.manifests.records import readable_json

# ------------------------------------------------------------------------------
# Sessions on this machine: the bundle's own loader, its errors raised as relabel's.


def provider_here(wish: str, *, option: str = "--provider", purpose: str = "An export") -> str:
    """The provider that a wish means on this machine: `cpu` or `cuda` for `auto`; `openvino` only where it is named.

    Args:
        option, purpose: for messages: where the wish comes from, and what the runtime is needed for.
    Raises:
        MissingExtraError: the runtime, or the provider in it, is absent.
    """
    if wish == OPENVINO:
        require(OPENVINO, extra=OPENVINO, purpose=f"{option} {OPENVINO}")
        return wish
    require("onnxruntime", extra="cpu", purpose=purpose)
    try:
        return choose_provider(wish)
    except BundleError as exc:
        raise MissingExtraError(f"{option} {wish}: {exc}") from exc


class ModelSession:
    """One exported model on one provider, asserted.

    Args:
        heads: names of the outputs to ask for.
    Raises:
        MissingExtraError: this machine can't run it there.
    """

    def __init__(self, path: Path, provider: str, heads: list[str], *, threads: int = 0) -> None:
        self._heads = heads
        self._path = path
        try:
            self._session: Any = open_session(path, provider, threads=threads)
        except BundleError as exc:
            raise MissingExtraError(
                f"{exc} A model that can't be tried here can't be vouched for: leave its precision out, or export "
                "where it runs."
            ) from exc

    def __call__(self, batch: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Probabilities by head, [B, K] each.

        Raises:
            MissingExtraError: it loads here but does not run.
        """
        try:
            found = self._session.run(self._heads, batch)
        except Exception as exc:  # onnxruntime's errors share no other class
            raise MissingExtraError(
                f"{self._path}: this machine's onnxruntime loads it and can't run it ({str(exc)[:300]})."
            ) from exc
        return dict(zip(self._heads, found, strict=True))


# ------------------------------------------------------------------------------
# What a bundle answered where it was made, sealed into it: pairs, each model's probabilities, and how far another
# machine's may lie from them. `load.py --check` and `relabel pull --check-parity` ask them again where it serves.


LONGEST_CHARACTERS = 20_000
"""Longer pairs are not sealed: what a model reads of them is far less."""


def choose_rows(pairs: PairSet, number: int) -> list[int]:
    """Places of pairs to seal, spread evenly over those that were compared, so that many queries are among them."""
    short = [place for place, texts in enumerate(pairs.pairs) if sum(map(len, texts)) <= LONGEST_CHARACTERS]
    if len(short) <= number:
        return short
    return [short[place] for place in np.linspace(0, len(short) - 1, number).round().astype(int).tolist()]


def own_answers(
    run: Run, encoder: loader.Encoder, rows: Sequence[tuple[list[int], list[int]]], places: Sequence[int]
) -> dict[str, list[list[float]]]:
    """A model's probabilities of some rows by head, each asked alone, so that no company changes them."""
    if not places:
        return {}
    found = answers(run, encoder, [rows[place] for place in places], 1)
    return {name: values_BK.tolist() for name, values_BK in found.items()}


def tolerance(model: ModelParity, spec: ParitySpec) -> float:
    """How far another machine's answers may lie from these: fp32's bound, or where a smaller precision moved them
    further from the student's at export, as far as that.
    """
    least = spec.fp32_max_abs
    return least if model.precision == "fp32" else max(least, *(one.max_abs for one in model.figures))


def write_reference(
    folder: Path,
    pairs: PairSet,
    places: Sequence[int],
    answered: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    models: Sequence[ModelParity],
    spec: ParitySpec,
) -> None:
    """Write `reference.json`; none where no pair was chosen.

    Args:
        answered: by precision and head, see `own_answers`.
    """
    if not places:
        return
    held = {
        "format": loader.REFERENCE_FORMAT,
        "pairs": [list(pairs.pairs[place]) for place in places],
        "models": {
            model.precision: {"tolerance": tolerance(model, spec), "answers": answered[model.precision]}
            for model in models
        },
    }
    (folder / loader.REFERENCE).write_bytes(readable_json(held))

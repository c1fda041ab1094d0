"""The reference answers that a bundle carries, and the onnxruntime sessions that answer on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from relabel.export import loader
from relabel.export.bundle_facts import ModelParity
from relabel.export.loader import OPENVINO, BundleError, choose_provider, open_session
from relabel.export.parity import PairSet, Run
from relabel.export.specs import ParitySpec
from relabel.manifests.errors import MissingExtraError
from relabel.manifests.process import require
from relabel.manifests.records import readable_json


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


def model_runner(path: Path, provider: str, heads: Sequence[str]) -> Run:
    """One exported model on one provider, and on no other.

    Args:
        heads: names of the outputs to ask for.
    Raises:
        MissingExtraError: this machine can't open it there, or, of what is returned, can't run it.
    """
    try:
        session = open_session(path, provider)
    except BundleError as exc:
        raise MissingExtraError(
            f"{exc} A model that can't be tried here can't be vouched for: leave its precision out, or export where it "
            "runs."
        ) from exc

    def run(batch: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        try:
            return dict(zip(heads, session.run(heads, batch), strict=True))
        except Exception as exc:  # onnxruntime's errors share no other class
            raise MissingExtraError(
                f"{path}: this machine's onnxruntime loads it and can't run it ({str(exc)[:300]})."
            ) from exc

    return run


LONGEST_CHARACTERS = 20_000
"""Longer pairs are not sealed: what a model reads of them is far less."""


def choose_rows(pairs: PairSet, number: int) -> list[int]:
    """Places of pairs to seal, spread evenly over those that were compared, so that many queries are among them."""
    short = [place for place, texts in enumerate(pairs.pairs) if sum(map(len, texts)) <= LONGEST_CHARACTERS]
    if len(short) <= number:
        return short
    return [short[place] for place in np.linspace(0, len(short) - 1, number).round().astype(int).tolist()]


def tolerance(model: ModelParity, spec: ParitySpec) -> float:
    """How far another machine's answers may lie from these: fp32's bound, or where a smaller precision moved them
    further from the student's at export, as far as that.
    """
    least = spec.fp32_max_abs
    return least if model.precision == "fp32" else max(least, *(one.max_abs for one in model.figures))


def write_reference(
    folder: Path,
    pairs: Sequence[tuple[str, str]],
    answered: Mapping[str, Mapping[str, np.ndarray]],
    models: Sequence[ModelParity],
    spec: ParitySpec,
) -> None:
    """Write `reference.json`: pairs, each model's probabilities of them, and how far another machine's may differ.
    `load.py --check` and `relabel pull --check-parity` ask them again where the bundle serves. No file without pairs.

    Args:
        answered: by precision and head, [B, K].
    """
    if not pairs:
        return
    held = {
        "format": loader.REFERENCE_FORMAT,
        "pairs": [list(pair) for pair in pairs],
        "models": {
            model.precision: {
                "tolerance": tolerance(model, spec),
                "answers": {name: values_BK.tolist() for name, values_BK in answered[model.precision].items()},
            }
            for model in models
        },
    }
    (folder / loader.REFERENCE).write_bytes(readable_json(held))

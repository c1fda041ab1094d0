"""Sessions on this machine: the bundle's own loader, its errors raised as relabel's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.loader import OPENVINO, BundleError, choose_provider, open_session
from relabel.manifests.errors import MissingExtraError
from relabel.manifests.extras import require


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

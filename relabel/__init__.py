"""relabel turns a reasoning LLM's relevance judgments into labels, and labels into a small model that can serve.

Every command has its function here; `docs/python.md` shows them in a notebook. Nothing heavy is imported before it is
used: torch, pyarrow and the like load with the first call that needs them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from relabel.export.loader import Student as Bundle
    from relabel.jobs.api import RunResult, ask, distill, evaluate, read_labels, run, systems
    from relabel.jobs.api import TrainedStudent as Student

__all__ = ["Bundle", "RunResult", "Student", "ask", "distill", "evaluate", "read_labels", "run", "systems"]


def __getattr__(name: str) -> Any:
    if name == "Bundle":
        from relabel.export.loader import Student

        return Student
    if name == "__version__":
        from importlib.metadata import version

        return version("relabel-ir")
    if name in __all__:
        from relabel.jobs import api

        return getattr(api, "TrainedStudent" if name == "Student" else name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Distill(ModuleType):
    """The folder `distill`, which is called as the function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from relabel.jobs import api

        return api.distill(*args, **kwargs)


class _Relabel(ModuleType):
    """This package. Python puts a folder in the place of what has its name once a module of it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "distill" and isinstance(value, ModuleType):
            value.__class__ = _Distill
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Relabel


def __dir__() -> list[str]:
    return __all__

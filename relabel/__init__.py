"""relabel turns a reasoning LLM's relevance judgments into labels, and labels into a small model that can serve.

Every command has its function here; `docs/python.md` shows them in a notebook. Nothing heavy is imported before it is
used: torch, pyarrow and the like load with the first call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from relabel.export.loader import Student as Bundle
    from relabel.jobs.api import RunResult, ask, distill, evaluate, read_labels, run
    from relabel.jobs.api import TrainedStudent as Student

__all__ = ["Bundle", "RunResult", "Student", "ask", "distill", "evaluate", "read_labels", "run"]


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


def __dir__() -> list[str]:
    return __all__

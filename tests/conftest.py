"""Options and fixtures that all tests share."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from relabel.manifests.process import OBJECTS_A_COLLECTION
from relabel.manifests.secrets import forget_secrets
from tests.seaweed import s3_server

__all__ = ["s3_server"]

ROOT = Path(__file__).parent.parent

# The folder of real data was named by a variable that `relabel train` reads as its spec's key `data`.
if "RELABEL_DATA" in os.environ:
    os.environ.setdefault("RELABEL_TEST_DATA", os.environ.pop("RELABEL_DATA"))


# On a CI machine the same examples each time, so that a red run is red again; by hand new ones, which is how bugs are
# found.
# No test is held to a time: a busy machine is not a bug.
settings.register_profile("by hand", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "by hand")


FROZEN = [0]
"""Numbers of modules at the times when all objects were taken out of later collections of garbage: modules live to the
end, and walking through torch's was a fifth of each training."""
IS_FULL = os.environ.get("RELABEL_FAULTS") in ("full", "long")


def pytest_configure() -> None:
    """Started in the background, a shell has Ctrl-C ignored by all that comes of it; tests send it to commands."""
    gc.set_threshold(OBJECTS_A_COLLECTION)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu(n)` run where torch finds n CUDA devices, those marked `full` where they have the time."""
    if len(sys.modules) > FROZEN[-1] + 100:
        FROZEN.append(len(sys.modules))
        gc.collect()
        gc.freeze()
    for mark in item.iter_markers("full"):
        found = getattr(item, "callspec", None)
        if not IS_FULL and (not mark.args or (found is not None and found.params.get("where") in mark.args)):
            pytest.skip("in `make faults` or `make full`")
    for mark in item.iter_markers("gpu"):
        wanted = mark.args[0] if mark.args else 1
        torch = pytest.importorskip("torch")
        found = torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device(s), torch finds {found}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files again; review the diff")


@pytest.fixture(autouse=True)
def no_secrets_kept() -> Iterator[None]:
    """What one test gave for a secret is none of the next one's."""
    yield
    forget_secrets()


@pytest.fixture(autouse=True)
def nothing_left_in_the_clone() -> Iterator[None]:
    """A test that forgets to go to a folder of its own writes where the suite was called from. Somebody may make a demo
    or a release there meanwhile.
    """
    before = set(ROOT.iterdir())
    yield
    left = [path.name for path in set(ROOT.iterdir()) - before if not path.name.startswith((".", "out", "dist"))]
    assert not left, f"left in {ROOT}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: text equals tests/golden/<name>, which `--update-golden` writes."""

    def check(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden {name}: run pytest with --update-golden and review what it writes"
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} changed: if on purpose, run pytest with --update-golden and review the diff"
        )

    return check

"""What a bundle answered where it was made is asked again where it serves: by `load.py --check`, and by `relabel pull
--check-parity` before the switch.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.export import puller
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.exporting import export_bundle
from relabel.export.loader import NEEDS_OPENVINO, REFERENCE, Checked, Student, check_answers
from relabel.export.specs import ExportSpec
from relabel.manifests.files import Storage

Relabel = Callable[..., Any]


@pytest.fixture
def strayed(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that verifies, whose reference pairs 2 and 5 were answered otherwise where it was sealed."""

    def change(held: dict[str, Any]) -> None:
        for place, by in ((2, 0.25), (5, 0.5)):
            for model in held["models"].values():
                first = model["answers"]["relevance"][place]
                first[0] += by if first[0] < 0.5 else -by

    return resealed(bundle, tmp_path / "strayed", change)


def resealed(bundle: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(bundle, folder)
    held = json.loads((folder / REFERENCE).read_bytes())
    change(held)
    (folder / REFERENCE).write_text(json.dumps(held))
    seal_bundle(folder, open_bundle(bundle).own_facts)
    return folder


def load_main(folder: Path) -> Callable[[list[str]], int]:
    """`main` of a bundle's own load.py."""
    spec = importlib.util.spec_from_file_location(f"load_of_{folder.name}", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int8-static"])
def test_a_machine_that_answers_as_at_export_is_good(
    bundle: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_main(bundle)(["--check", "--provider", "cpu", "--precision", precision]) == 0
    out, err = capsys.readouterr()
    assert f"{precision} on cpu: 32 reference pairs are answered as at export" in out
    assert err == ""


@pytest.mark.parametrize("missing", ["numpy", "onnxruntime", "openvino"])
def test_a_library_that_is_missing_is_named_with_what_to_install(bundle: Path, tmp_path: Path, missing: str) -> None:
    """A Python without it: -S leaves out all that is installed, and what comes before it is linked back in."""
    for name in {"numpy": (), "onnxruntime": ("numpy*",), "openvino": ("numpy*", "tokenizers*")}[missing]:
        for found in Path(np.__file__).parents[1].glob(name):
            (tmp_path / found.name).symlink_to(found)
    more = ["--provider", "openvino", "--precision", "fp32"] if missing == "openvino" else []
    line = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = {['load.py', '--check', *more]!r}; "
    line += f"runpy.run_path({str(bundle / 'load.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", line], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 4, done.stderr
    needs = f"A bundle needs {missing}: pip install numpy 'onnxruntime>=1.20' tokenizers"
    assert done.stderr.startswith(NEEDS_OPENVINO if missing == "openvino" else needs)
    assert "Traceback" not in done.stderr


def test_a_library_that_is_broken_is_not_taken_for_a_damaged_bundle(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libfoo.so: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-P", str(bundle / "load.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert "libfoo.so" in done.stderr


def test_a_bundle_whose_bytes_changed_or_that_holds_no_answers_is_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundle, tmp_path / "bent")
    (tmp_path / "bent" / REFERENCE).write_bytes((bundle / REFERENCE).read_bytes() + b" ")
    assert load_main(tmp_path / "bent")(["--check", "--provider", "cpu"]) == 3
    assert f"{REFERENCE}: its bytes are not those that the manifest names" in capsys.readouterr().err
    without = resealed(bundle, tmp_path / "without", lambda held: held["models"].pop("int8"))
    assert load_main(without)(["--check", "--provider", "cpu", "--precision", "int8"]) == 3
    assert "holds answers in fp32, fp16, int8-static alone, so int8 can't be checked" in capsys.readouterr().err


def test_none_are_sealed_where_none_are_wanted(student: Path, tmp_path: Path) -> None:
    spec = ExportSpec(reference_pairs=0)
    export_bundle(student, tmp_path / "bundle", spec, Storage(), provider="cpu")
    assert not (tmp_path / "bundle" / REFERENCE).exists()
    with pytest.raises(Exception, match=r"no reference pairs, so fp32 can't be checked\. Export .*reference_pairs"):
        check_answers(Student(tmp_path / "bundle", provider="cpu"))


def test_a_decoders_pairs_are_sealed_too(decoder_bundle: Path) -> None:
    for precision in ("fp32", "int8"):
        assert check_answers(Student(decoder_bundle, provider="cpu", precision=precision)).has_passed


def test_an_answer_that_is_no_number_is_no_answer() -> None:
    assert Checked("x", 0.1, [0.05, float("inf")]).strayed == [1]
    assert Checked("x", 0.1, [float("nan"), 0.0]).strayed == [0]
    assert "2 of 3 reference pairs" in str(Checked("x", 0.1, [0.2, 0.0, 0.3]))


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`pull.py`."""
    line = [sys.executable, puller.__file__, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


def test_the_puller_of_one_file_checks_parity_as_relabel_pull_does(
    relabel: Relabel, bundle: Path, strayed: Path, folder: Path, tmp_path: Path
) -> None:
    """Same codes, same sentence, same version in place."""
    empty = resealed(bundle, tmp_path / "empty", lambda held: held.update(models={}))
    assert relabel("publish", str(bundle), "store", "--channel", "stable", "--anyway").code == 0
    for made, code, said in (
        (bundle, 0, ""),
        (strayed, 5, "2 of 32 reference pairs are answered otherwise than at export (tolerance 0.0001): pair 5 by 0.5"),
        (strayed, 5, "Do not serve it here"),  # the second finds the files here
        (empty, 3, "holds no reference pairs, so fp32 can't be checked"),
    ):
        assert relabel("publish", str(made), "store", "--channel", "stable", "--anyway").code in (0, 10)
        ours, theirs = (
            script("store/tiny", "alone", "--check-parity"),
            relabel("pull", "store/tiny", "dest", "--check-parity"),
        )
        assert (ours.returncode, theirs.code) == (code, code), (ours, theirs)
        assert said in ours.stderr
        assert said in theirs.err
        assert "Traceback" not in ours.stderr
        places = [(folder / dest / "current").resolve().name for dest in ("alone", "dest")]
        assert places == [open_bundle(bundle).version] * 2
    assert relabel("verify", "alone").code == 0
    assert script("store/tiny", "alone").returncode == 0, "it is for him to say who wants no check"

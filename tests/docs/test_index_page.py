"""The README as an index shows it: its links and its picture lead to the repository that RELABEL_URL names."""

import email
import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

from tests.docs.pages import ROOT

MAKE = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('.')"
URL = "https://forge.example/search/relabel"


def metadata(folder: Path, url: str) -> Message:
    """The metadata of a wheel that is built with RELABEL_URL set to `url`."""
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    variables = {**os.environ, "RELABEL_URL": url}
    subprocess.run([sys.executable, "-c", MAKE], cwd=folder, env=variables, check=True, capture_output=True)
    (found,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_string(found.read_text(encoding="utf-8"))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)


def test_links_and_picture_of_the_readme_are_absolute_where_the_address_is_known(tmp_path: Path) -> None:
    known = metadata(tmp_path, f"{URL}/")
    text = known.get_payload()
    assert isinstance(text, str)
    version = known["Version"]
    assert links(text)
    assert [link for link in links(text) if not link.startswith("https://")] == []
    ours = [link.removeprefix(f"{URL}/blob/v{version}/") for link in links(text) if "/blob/" in link]
    assert len(ours) > 5
    assert [path for path in ours if not (ROOT / path).exists()] == []
    assert f"{URL}/raw/v{version}/docs/images/report.png" in links(text)


def test_without_an_address_the_readme_is_as_it_is(tmp_path: Path) -> None:
    plain = metadata(tmp_path, "")
    text = plain.get_payload()
    assert isinstance(text, str)
    assert text.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert plain["Description-Content-Type"] == "text/markdown"
    assert plain["Author"] == "The relabel authors"
    assert "LLM-as-a-judge" in plain["Keywords"]

"""The README as an index shows it. Everything else is in pyproject.toml."""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
LINK = re.compile(r"(\]\()(?!https?:|#)([^)]+)")
IMAGE = re.compile(r'(src=")(?!https?:)([^"]+)')


def readme(url: str | None) -> str:
    """README.md; where `url` names the repository (https://HOST/OWNER/NAME), its links lead there, to this version."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not url:
        return text
    base = url.rstrip("/")
    text = LINK.sub(rf"\1{base}/blob/v{VERSION}/\2", text)
    return IMAGE.sub(rf"\1{base}/raw/v{VERSION}/\2", text)


setup(long_description=readme(os.environ.get("RELABEL_URL")), long_description_content_type="text/markdown")

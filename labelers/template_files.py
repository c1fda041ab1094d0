"""Where a labeler's built-in prompt templates lie, so that they can be copied and edited."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

from relabel.labelers.prompts import SHARED
from relabel.labelers.registry import labeler_class
from relabel.manifests.errors import ConfigError


def template_files(name: str) -> dict[str, Path]:
    """A labeler's own templates and those of the shared ones that it uses, by file name.

    They are in `templates/NAME` or `templates` in the folder of the labeler's module, and taken where they are what
    the labeler says it uses.

    Raises:
        ConfigError: there is no such labeler, or its templates lie elsewhere.
    """
    cls = labeler_class(name)
    templates = Path(inspect.getfile(cls)).parent / "templates"
    own = templates / name if (templates / name).is_dir() else templates
    found = {path.name: path for path in sorted(own.glob("*.j2"))}
    for file, digest in cls(cls.Options(name=name)).template_digests.items():
        path = found.setdefault(file, SHARED / file)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ConfigError(
                f"labeler {name}: its template {file} does not lie in {own}, where a labeler's templates are looked "
                "for. Copy the files from where its author keeps them."
            )
    if not found:
        raise ConfigError(f"labeler {name}: has no templates in {own}; its prompts can't be edited.")
    return dict(sorted(found.items()))

"""What there is of one kind, by name, as import paths: listing it loads nothing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from relabel.manifests.errors import ConfigError
from relabel.manifests.spec_faults import unknown_name


@dataclass(frozen=True)
class Registry:
    """Ours, and what other packages offer through a group of entry points.

    Args:
        what: the kind, as errors call it.
        group: of the entry points.
        ours: import path by name; goes before another package's of the same name.
        built_in: names that need no loading, for errors.
    """

    what: str
    group: str
    ours: dict[str, str]
    built_in: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All that can be loaded, in order."""
        return sorted({*self.ours, *(entry.name for entry in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """What a name stands for.

        Raises:
            ConfigError: no such name; names the known ones and the nearest.
        """
        if name in self.ours:
            return imported(self.ours[name])
        for entry in entry_points(group=self.group, name=name):
            return entry.load()
        raise ConfigError(unknown_name(self.what, name, [*self.built_in, *self.names()]))


def imported(path: str) -> Any:
    """What an import path (`package.module:name`) leads to."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)

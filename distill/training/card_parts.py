"""What the cards of students and teachers have in common."""

from __future__ import annotations

from typing import Any

import yaml

CARD_NAME = "README.md"


def spec_section(spec: dict[str, Any]) -> list[str]:
    """The spec that a model was trained by, as the last lines of its card."""
    written = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120).rstrip()
    return ["## Spec", "", "```yaml", written, "```", ""]

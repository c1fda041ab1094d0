"""`complexity`: whether a query takes several searches to answer. Reads the query alone; asked once a query, for every
row of it.

Source: R2RAG's query classifier (methods, section 4): yes is complex, with P(yes) from the two words'
log-probabilities. The sentences are ours.
"""

from __future__ import annotations

from typing import ClassVar

from relabel.labelers.one_ask import YesNo, YesNoOptions
from relabel.manifests.specs import LabelerOptions


class Complexity(YesNo):
    """Asks whether the query is complex; `Label.distribution.probs[1]` is P(complex). The document never reaches the
    prompt.
    """

    Options: ClassVar[type[LabelerOptions]] = YesNoOptions
    template_set = "complexity"
    reads_document = False
    data = ("query",)

    def __init__(self, options: YesNoOptions) -> None:
        super().__init__(options, stage="complex")

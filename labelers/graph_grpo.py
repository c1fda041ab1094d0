"""`graph-grpo`: e-commerce relevance as a graph of seven nodes, label first. One answer: a first grade, four short
descriptions (subject and attribute of query and product), two match scores, the final grade. With the grades come four
distributions, and whether the rule map φ(s, a) agrees with the grade.

Source: Graph-GRPO, label-first chain of thought (intuition, reasoning, decision); methods, section 2.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any, ClassVar

from pydantic import model_validator

from relabel.labelers.one_ask import OneAsk
from relabel.labelers.verdicts import is_none
from relabel.manifests.asks import Answer, Ask, Choice, Decision, Section, Text
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.phi import (
    DEFAULT_PHI,
    NODE_SCORES,
    PhiTable,
    check_phi,
    default_phi,
    phi_grade,
    unreached_grades,
)
from relabel.manifests.specs import LabelerOptions, TextOptions

_logger = logging.getLogger(__name__)

_TEXTS = ("query_subject", "query_attribute", "product_subject", "product_attribute")


class GraphGrpoOptions(TextOptions):
    """Options of `graph-grpo`."""

    phi: PhiTable = DEFAULT_PHI
    """Rule map: row = subject score 0..4, column = attribute score 0..4, cell = grade. Default, for three grades alone:
    0 counts as 4, the weaker of the two decides, 4 → 2, 3 or 2 → 1, 1 → 0. Other numbers of grades need a map of their
    own.
    """
    phi_in_prompt: bool = True
    """Say in the prompt which grade follows from each pair of scores. Without it the teacher is left to its own rule,
    and a grade that differs from φ's is not flagged.
    """

    @model_validator(mode="after")
    def _phi_fits_grades(self) -> GraphGrpoOptions:
        if "phi" not in self.model_fields_set:
            default_phi(self.grades, key="labeler.phi")
        check_phi(self.phi, grades=self.grades)
        return self


class GraphGrpo(OneAsk):
    """The Graph-GRPO labeler. Flags: `phi_disagrees` (φ(s, a), as the prompt has it, is not the grade),
    `no_distribution` (of any of the four decisions), and the answer's own.

    Every label has all of its columns; distributions are None where the engine gives none.
    """

    Options: ClassVar[type[LabelerOptions]] = GraphGrpoOptions
    columns = (
        LabelColumn("preliminary", "int8", "The first grade, by intuition."),
        LabelColumn("preliminary_probs", "list<float32>", "Its distribution over the grades."),
        LabelColumn("preliminary_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("subject", "int8", "How well the product's subject is the query's, 0 to 4."),
        LabelColumn("subject_probs", "list<float32>", "Its distribution over the five scores."),
        LabelColumn("subject_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("attribute", "int8", "How well the product's attributes are the query's, 0 to 4."),
        LabelColumn("attribute_probs", "list<float32>", "Its distribution over the five scores."),
        LabelColumn("attribute_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("query_subject", "string", "What the query asks for, in a few words; null for none."),
        LabelColumn("query_attribute", "string", "With which attributes; null for none."),
        LabelColumn("product_subject", "string", "What the product is; null for none."),
        LabelColumn("product_attribute", "string", "With which attributes; null for none."),
        LabelColumn("phi_grade", "int8", "The grade by the rule map: φ(subject, attribute)."),
        LabelColumn("phi_agrees", "bool", "Whether that is the grade."),
    )
    template_set = "graph-grpo"
    example = Pair(
        0,
        "q",
        "red running shoes size 42",
        "d",
        "Trail shoe for runners, scarlet, sizes 40 to 45.",
    )

    def __init__(self, options: GraphGrpoOptions) -> None:
        self._phi = options.phi
        self._phi_in_prompt = options.phi_in_prompt
        unreached = unreached_grades(options.phi, options.grades)
        if unreached:
            _logger.warning(
                "labeler.phi gives no pair of scores grade %s: wherever the teacher writes it, phi_agrees is false.",
                " or ".join(map(str, unreached)),
            )
        grades = tuple(map(str, range(options.grades)))
        scores = tuple(map(str, range(NODE_SCORES)))
        texts = [Text(tag, options.max_text_tokens, may_be_empty=False) for tag in _TEXTS]
        sections: tuple[Section, ...] = (
            Choice("preliminary", grades),
            *texts,
            Choice("subject_score", scores),
            Choice("attribute_score", scores),
            Choice("score", grades),
        )
        decisions = (
            Decision("preliminary", "<preliminary>", grades),
            Decision("subject", "<subject_score>", scores),
            Decision("attribute", "<attribute_score>", scores),
            Decision("score", "<score>", grades),
        )
        settings = {
            "grades": options.grades,
            "scores": NODE_SCORES,
            "phi": options.phi,
            "phi_in_prompt": options.phi_in_prompt,
        }
        super().__init__(options, sections, decisions, settings)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        subject = int(sections["subject_score"])
        attribute = int(sections["attribute_score"])
        grade = int(sections["score"])
        by_rule = phi_grade(self._phi, subject, attribute)
        columns: dict[str, Any] = {
            "preliminary": int(sections["preliminary"]),
            "subject": subject,
            "attribute": attribute,
        }
        for name in ("preliminary", "subject", "attribute"):
            distribution = answer.distributions.get(name)
            columns[f"{name}_probs"] = None if distribution is None else list(distribution.probs)
            columns[f"{name}_outside_mass"] = None if distribution is None else distribution.outside_mass
        for tag in _TEXTS:
            columns[tag] = None if is_none(sections[tag]) else sections[tag]
        columns["phi_grade"] = by_rule
        columns["phi_agrees"] = by_rule == grade
        flags = list(answer.flags)
        if by_rule != grade and self._phi_in_prompt:
            flags.append("phi_disagrees")
        if any(decision.name not in answer.distributions for decision in self._decisions):
            flags.append("no_distribution")
        return Label(grade, answer.distributions.get("score"), columns, flags=flags)

"""The bundle's model card: what it is, how to use it, how well it holds to its student; from the manifest's facts
alone.
"""

from __future__ import annotations

from relabel.distill.students.kinds import KINDS
from relabel.export.parity_records import ModelParity, Parity
from relabel.export.student_facts import BundleLineage, StudentFacts

CARD_NAME = "README.md"
REPORT_NAME = "report.html"
"""The page about the bundle, drawn on a floor above this one."""


def render_bundle_card(student: StudentFacts, parity: Parity) -> str:
    """Markdown."""
    heads = ", ".join(f"{name} (grades 0 to {grades - 1})" for name, grades in student.heads.items())
    models = ", ".join(f"`{model.path}` ({model.precision})" for model in student.models)
    lines = [
        f"# {student.name}",
        "",
        (
            f"{KINDS[student.inputs.kind].does.capitalize()}. A student ({student.inputs.kind}), by `relabel export` "
            f"{student.made_by.relabel}."
        ),
        "",
        f"- Answers: probabilities of {heads}; calibrated, in the graph.",
        f"- Reads at most {student.inputs.max_tokens} tokens of a pair; what is longer is cut.",
        f"- Models: {models}",
        f"- Licence: {student.licence.bundle or 'not stated; ask its authors before you ship it'}",
        "",
        "## Use",
        "",
        "`load.py` needs numpy, onnxruntime and tokenizers, nothing else:",
        "",
        "```python",
        "from load import Student",
        "",
        'student = Student("path/of/this/folder")   # provider="cpu" or "cuda", precision="int8"',
        'probs = student.probabilities([("red shoe", "A red running shoe, size 9")])',
        'print(probs["relevance"])                  # float32 [pairs, grades]; rows sum to 1',
        "```",
        "",
        "Or from the command line: `python load.py --score pairs.tsv` takes lines of query, tab, document, and writes",
        "the score (0 to 1, to rank by), the expected grade (0 to the highest) and the most probable grade of each.",
        "",
        "## Parity with the student",
        "",
        *_parity(parity),
        "",
        "## Made of",
        "",
        *_lineage(student.lineage),
        "",
        (
            "It answers for texts like those that it saw, and inherits its teacher's mistakes: judge it with trusted "
            "grades before it decides"
        ),
        "anything.",
        "",
    ]
    return "\n".join(lines)


def parity_rows(parity: Parity) -> list[list[str]]:
    """The parity table: a row a precision, with the worst batch size's figure in each column; the first row is the
    head.
    """
    rows = [["precision", "max abs Δp", "flips (95 %)", "tau", "F1 loss, points (95 %)", "nDCG@10 loss", "gate"]]
    for one in parity.models:
        flips = max(one.figures, key=lambda figure: figure.flip_share)
        worst_f1 = max((figure.f1_macro for figure in one.figures), key=lambda f1: f1.loss_points)
        taus = [figure.tau for figure in one.figures if figure.tau is not None]
        losses = [figure.ndcg.loss for figure in one.figures if figure.ndcg.loss is not None]
        rows.append(
            [
                one.precision,
                f"{max(figure.max_abs for figure in one.figures):.1e}",
                f"{flips.flip_share:.2%}"
                + ("" if flips.flip_low is None else f" ({flips.flip_low:.2%} to {flips.flip_high:.2%})"),
                f"{min(taus):.4f}" if taus else "–",
                f"{worst_f1.loss_points:+.2f} ({worst_f1.loss_low:+.2f} to {worst_f1.loss_high:+.2f})",
                f"{max(losses, key=abs):+.4f}" if losses else "–",
                verdict(one),
            ]
        )
    return rows


def verdict(one: ModelParity) -> str:
    """What the gate says of a model: `passed`, `undecided` with the loss that it could have, or `REFUSED`."""
    if not one.has_passed:
        return "REFUSED"
    if one.could_lose is not None:
        return f"undecided: could lose {one.could_lose:.1f}"
    return "undecided: too little evidence" if one.doubts else "passed"


def undecided_lines(parity: Parity) -> list[str]:
    """A sentence for each model that passed and could yet lose more than the gate allows."""
    return [
        f"{one.precision} is undecided: on these {one.rows:,} pairs it could be as bad as {one.could_lose:.1f} points "
        f"of macro F1 (95 %), the bound is {parity.spec.int8_max_f1_loss:g}; {one.flip_share:.1%} of the grades flip. "
        "More pairs would tell, or a bound on flips (parity.int8_max_flips)."
        for one in parity.models
        if one.has_passed and one.could_lose is not None
    ] + [f"{one.precision} is undecided: {doubt}." for one in parity.models if one.has_passed for doubt in one.doubts]


def compared_on(parity: Parity) -> str:
    """The pairs and batch sizes that the models were compared on, and who judged, as a sentence begun."""
    first = parity.models[0]
    sizes = ", ".join(map(str, parity.spec.batch_sizes))
    return (
        f"On {first.rows:,} real pairs of {first.queries:,} queries, in batches of {sizes}, on {parity.provider} "
        f"(onnxruntime {parity.onnxruntime}); macro F1 and nDCG by {first.figures[0].judged_by}."
    )


def _parity(parity: Parity) -> list[str]:
    weak = f" Fewer than {parity.spec.min_pairs:,}: a weak result." if parity.models[0].is_weak else ""
    head, *rows = parity_rows(parity)
    return [
        f"{compared_on(parity)}{weak} Worst batch size each:",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        *(line for sentence in undecided_lines(parity) for line in ("", sentence)),
    ]


def _lineage(lineage: BundleLineage) -> list[str]:
    student = lineage.student
    lines = [f"- Student `{student.name}`, digest `{student.digest[:16]}`"]
    if student.model:
        lines.append(f"- which starts from `{student.model.reference}` (digest `{student.model.digest[:16]}`)")
    lines += [f"- Labels `{source.path}`: {source.labels:,} ({source.maker})" for source in lineage.labels or ()]
    if lineage.gold:
        lines.append(f"- Trusted grades `{lineage.gold.path}`, column `{lineage.gold.grade}`")
    return lines

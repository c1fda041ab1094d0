"""A distillation from spec to student folder: check, read, train, calibrate, evaluate against gold, labels and teacher,
judge the gates, write the model card and the manifest."""

import hashlib
import importlib.metadata
import itertools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.examples import DEV, NO_GRADE, TEST, TRAIN, Examples, load_examples
from relabel.distill.students.model import (
    PROBES,
    check_tokenizer_is_kept,
    logits_of_rows,
    make_texts,
    softmax,
    student_files,
    write_student,
)
from relabel.distill.students.networks import Base, TrainingInputs, check_base, make_record
from relabel.distill.students.spec import (
    KINDS,
    STUDENT_MANIFEST_VERSION,
    DistillSpec,
    Figures,
    GateCheck,
    JudgedGates,
    SideFigures,
    SplitFacts,
    StudentFigures,
    StudentManifest,
    StudentRecord,
    rerank_notes,
)
from relabel.distill.training.mirror import mirror_of
from relabel.distill.training.output import (
    BaseModelUsed,
    Made,
    OutputFolder,
    Product,
    Start,
    check_services,
    finished_model,
    spec_section,
    train_into,
    training_record,
)
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.metrics.evaluation import (
    FEWEST_QUERIES,
    MOST_LEXICAL,
    bm25,
    evaluate,
    intervals_of,
    judge_gate,
    judge_gates,
)
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.metric import DEPTH, TINY, fit_temperature
from relabel.manifests.models import ResolvedModel, resolve_model
from relabel.manifests.process import installed_versions
from relabel.manifests.records import canonical_json, digest_of, plain

# N rows, K grades

# ------------------------------------------------------------------------------
# Figures of a student and its teacher on rows that it did not learn from: by gold, or where there is none by the
# teacher's labels. They are those of `relabel evaluate`.


def figures_of(
    probs_NK: np.ndarray,
    gold_N: np.ndarray,
    *,
    label_N: np.ndarray | None = None,
    queries: Sequence[str] = (),
    docs: Sequence[str] = (),
    texts: Sequence[tuple[str, str]] = (),
    resamples: int = 0,
) -> dict[str, Any]:
    """Figures, intervals and baselines of distributions against grades, as `SideFigures` names them.

    Args:
        probs_NK: of a row without one NaN.
        gold_N: grades 0..K-1.
        label_N: the grades given; by default the most probable ones, the lower of equals.
        queries, docs: of each row, where it is ranked; equal scores are in the order of their documents' ids.
        texts: of each row, for the lexical baseline.
        resamples: of the intervals.
    Returns:
        `student`: figures by name, None where one is not defined: those of an evaluation, `auc` (the mean over all
        cuts), `nll` (mean negative log-likelihood, nats) and `rows`; of no row their number alone.
    """
    if not len(gold_N):
        return {"student": {"rows": 0}}
    num_queries = 0
    query_N = None
    if queries:
        names, query_N = np.unique(queries, return_inverse=True)
        num_queries = len(names)
    probs_NK = probs_NK.astype(np.float64)
    has_probs = not np.isnan(probs_NK).all()
    judged = Judged(
        grades=probs_NK.shape[1],
        gold=gold_N,
        labels=probs_NK.argmax(1) if label_N is None else label_N,
        queries=query_N,
        num_queries=num_queries,
        docs=np.unique(docs, return_inverse=True)[1] if docs else np.arange(len(gold_N)),
        probs=probs_NK / probs_NK.sum(1, keepdims=True) if has_probs else None,
        num_correct=None,
        num_samples=None,
        lexical=bm25(texts) if 0 < len(texts) <= MOST_LEXICAL else None,
    )
    evaluation = evaluate(judged, resamples=resamples)
    figures: Figures = {"rows": len(gold_N)}
    figures |= {name: figure.value for name, figure in evaluation.figures.items()}
    if judged.probs is not None and judged.has_probs.all():
        aucs = [value for name, value in figures.items() if name.startswith("auc_") and value is not None]
        gold_probs_N = judged.probs[np.arange(len(gold_N)), gold_N]
        figures["auc"] = float(np.mean(aucs)) if aucs else None
        figures["nll"] = float(-np.log(np.maximum(gold_probs_N, TINY)).mean())
    return {
        "student": figures,
        "intervals": intervals_of(evaluation.figures, figures),
        "baselines": evaluation.baselines,
    }


def graded_figures(probs_NK: np.ndarray, gold_N: np.ndarray) -> Figures:
    """Figures of distributions against grades, without intervals."""
    figures: Figures = figures_of(probs_NK, gold_N)["student"]
    return figures


def teacher_figures(probs_NK: np.ndarray, teacher_NK: np.ndarray, teacher_N: np.ndarray) -> Figures:
    """How far the student lies from its teacher, over one row or more.

    Args:
        teacher_NK: the teacher's distributions, NaN where it gave none.
        teacher_N: the teacher's grades.
    Returns:
        `agreement` (share of equal grades), `f1_macro` by the teacher's grades, `kl` (mean KL(teacher ‖ student) over
        rows with a distribution, nats), `rows`.
    """
    has_N = ~np.isnan(teacher_NK).any(1)
    kl = None
    if has_N.any():
        p_NK = teacher_NK[has_N].astype(np.float64)
        p_NK /= p_NK.sum(1, keepdims=True)
        q_NK = np.maximum(probs_NK[has_N].astype(np.float64), TINY)
        log_ratio_NK = np.log(np.maximum(p_NK, TINY)) - np.log(q_NK)
        kl = float((p_NK * log_ratio_NK).sum(1).mean())
    counts = graded_figures(probs_NK, teacher_N)
    return {"rows": len(teacher_N), "agreement": counts["accuracy"], "f1_macro": counts["f1_macro"], "kl": kl}


def judge(examples: Examples) -> tuple[np.ndarray, str]:
    """The grades that a student is judged by, -1 where there is none, and what they are."""
    if (examples.gold != NO_GRADE).any():
        return examples.gold, "gold"
    return examples.teacher, "labels"


def dev_figures(work: TrainingInputs, module: Any) -> dict[str, float]:
    """Figures on dev while training: its loss, and what early stopping may use."""
    from relabel.distill.students.losses import loss_of

    rows = work.examples.rows_of(DEV)
    logits = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    judge_N, _ = judge(work.examples)
    graded = judge_N[rows] != NO_GRADE
    figures = graded_figures(softmax(logits["relevance"][graded]), judge_N[rows][graded])
    on_dev = {"loss": loss_of(work.spec.loss, work.examples, rows, logits)}
    for name in ("accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc"):
        value = figures.get(name)
        if value is not None:
            on_dev[name] = float(value)
    return on_dev


def side_figures(work: TrainingInputs, probs: dict[str, np.ndarray], trained_NK: np.ndarray, side: int) -> SideFigures:
    """All figures of one side: student and teacher by the judge, student by teacher, nodes by the labels.

    Args:
        probs: calibrated, by head [N, K].
        trained_NK: the relevance head's before calibration, which may have moved it away from its teacher and towards
            trusted grades.
    """
    examples = work.examples
    rows = examples.rows_of(side)
    judge_N, by = judge(examples)
    judged = rows[judge_N[rows] != NO_GRADE]
    taught = rows[examples.teacher[rows] != NO_GRADE]

    def figures(probs_NK: np.ndarray, rows: np.ndarray, **options: Any) -> dict[str, Any]:
        queries, docs = ([ids[row] for row in rows] for ids in (examples.queries, examples.docs))
        return figures_of(probs_NK[rows], judge_N[rows], queries=queries, docs=docs, **options)

    of_side = figures(probs["relevance"], judged, texts=[examples.texts[row] for row in judged], resamples=1000)
    both = np.intersect1d(judged, taught)
    if by == "gold" and len(both):
        of_side["teacher"] = figures(examples.teacher_probs, both, label_N=examples.teacher[both])["student"]
        if len(both) != len(judged):
            of_side["student_where_teacher"] = figures(probs["relevance"], both)["student"]
    if len(taught):
        of_side["to_teacher"] = teacher_figures(
            trained_NK[taught], examples.teacher_probs[taught], examples.teacher[taught]
        )
    for name in set(examples.heads) - {"relevance"}:
        own = rows[examples.weights[name][rows] > 0]
        of_side[name] = graded_figures(probs[name][own], examples.targets[name][own].argmax(1))
    return SideFigures(rows=len(rows), judged_by=by, **of_side)


# ------------------------------------------------------------------------------
# A spec's gates and early stopping: whether they can be judged, checked before training, and the results of the gates.


def check_judges(spec: DistillSpec, examples: Examples) -> None:
    """Every gate names a figure that there is, and there will be rows to judge by; early stopping uses a figure that
    every evaluation on dev will have.

    Raises:
        ConfigError: no such figure.
        InputError: the test split has nothing to judge by, or dev has no rows, or too few grades among them.
    """
    judge_N, by = judge(examples)
    if spec.gates:
        names = graded_figures(np.eye(examples.grades), np.arange(examples.grades)) | {f"ndcg@{DEPTH}": 1.0}
        judge_gates(spec.gates, names, names)
    rows = examples.rows_of(TEST)
    judged = rows[judge_N[rows] != NO_GRADE]
    if spec.gates and not len(judged):
        raise InputError(
            f"`require` is judged on the test split, and none of its rows has a grade ({by}). Raise split.test."
        )
    if any(gate.is_of_teacher for gate in spec.gates) and not (examples.teacher[judged] != NO_GRADE).any():
        raise InputError(
            "`require` has a gate against the teacher, and no row of the test split has both a label and a trusted "
            "grade. Raise split.test, or bring gold for labelled pairs."
        )
    stopping = spec.train.early_stopping
    if stopping is not None:
        rows = examples.rows_of(DEV)
        num_grades = len(set(judge_N[rows].tolist()) - {NO_GRADE})
        if not len(rows) or num_grades < {"loss": 0, "accuracy": 1, "macro_f1": 1}.get(stopping.metric, 2):
            raise InputError(
                f"train.early_stopping uses {stopping.metric}, and the dev split has {len(rows)} rows with "
                f"{num_grades} grades ({by}). Raise split.dev, bring more queries or {by}, or choose the metric `loss`."
            )


def judged_gates(spec: DistillSpec, test: SideFigures) -> JudgedGates:
    """The spec's gates on the figures of the test split: against the teacher over the rows that both have, else over
    all.
    """
    where_teacher = test.student if test.student_where_teacher is None else test.student_where_teacher
    verdicts = [
        judge_gate(gate, where_teacher if gate.is_of_teacher else test.student, test.teacher) for gate in spec.gates
    ]
    return JudgedGates(
        all(verdict.has_passed for verdict in verdicts),
        [GateCheck(**vars(verdict), text=str(verdict)) for verdict in verdicts],
    )


# ------------------------------------------------------------------------------
# One temperature a head, so that a student's probabilities are as sure as they are right.


def judged_logits(work: TrainingInputs, module: Any) -> dict[str, np.ndarray]:
    """Logits by head, float32 [N, K], of the rows that judge; rows that trained keep zeros, which are not used."""
    rows = np.flatnonzero(work.examples.side != TRAIN)
    logits = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    whole = {}
    for name, values in logits.items():
        whole[name] = np.zeros((len(work.tokens), values.shape[1]), dtype=np.float32)
        whole[name][rows] = values
    return whole


def fitted_temperatures(work: TrainingInputs, logits: dict[str, np.ndarray], notes: list[str]) -> dict[str, float]:
    """One temperature a head, fitted on dev against gold, or where there is none, and for nodes, against what the head
    learned from: distributions where the labels have them, for the most probable grade alone would ask for certainty
    that the teacher never had. 1 where dev has neither.

    Args:
        notes: remarks are added.
    """
    temperatures = dict.fromkeys(work.record.heads, 1.0)
    rows = work.examples.rows_of(DEV)
    if not work.spec.calibrate:
        return temperatures
    if not len(rows):
        notes.append("no dev rows, so the student is not calibrated: its temperatures are 1")
        return temperatures
    for name in temperatures:
        target_NK = work.examples.targets[name]
        judged = rows[work.examples.weights[name][rows] > 0]
        if name == "relevance" and (work.examples.gold != NO_GRADE).any():
            judged = rows[work.examples.gold[rows] != NO_GRADE]
            target_NK = np.eye(target_NK.shape[1])[work.examples.gold]
        if not len(judged):
            notes.append(f"head {name} is not calibrated, its temperature is 1: no dev row has a grade to judge it by")
            continue
        wished = fit_temperature(softmax(logits[name][judged].astype(np.float64)), target_NK[judged])
        # a few dev rows that are all right would ask for one near 0, and so for certainty
        limited = min(max(wished, 0.25), 4.0)
        if limited != wished:
            notes.append(f"head {name}: dev asks for temperature {wished:.3g}; {limited:g} is the limit")
        temperatures[name] = limited
    return temperatures


LIBRARIES = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")
STUDENT = Product(
    "student",
    "distill",
    "student.model",
    ("labels", "gold"),
    frozenset(
        {
            "name",
            "output",
            "labels",
            "gold",
            "require",
            "student.model",
            "train.device",
            "train.compile",
            "train.keep_checkpoints",
            "train.mirror",
            "train.gradient_checkpointing",
            "train.strategy",
            "train.report_to",
        }
    ),
)


def _sharing(spec: DistillSpec) -> int:
    """How many processes share the batches of a step; a student that is fitted at once has none."""
    if "train.accumulation" in KINDS[spec.student.kind].refuses:
        return 1
    from relabel.distill.training.loop import started_processes  # loads accelerate

    return started_processes()


def _data_digest(examples: Examples) -> str:
    total = hashlib.sha256()
    for text in itertools.chain.from_iterable(examples.texts):
        data = text.encode("utf-8", "surrogatepass")
        total.update(len(data).to_bytes(8, "big") + data)
    arrays = [
        *examples.targets.values(),
        *examples.weights.values(),
        examples.row_weight,
        examples.gold,
        examples.teacher,
        examples.side,
    ]
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    total.update(canonical_json({"heads": examples.heads, "phi": examples.phi}))
    return total.hexdigest()


# ------------------------------------------------------------------------------
# The model card: what a student is, what it learned from and how well, for a person who finds the folder.


CARD = """\
# {{ m.name }}

{{ kind.title }} that {{ kind.does }}, by `relabel distill` {{ m.relabel }}.

- Starts from: `{{ m.model.reference }}` (digest `{{ m.model.digest[:16] }}`)
- Heads: \
{% for name, grades in m.heads.items() %}{{ name }} ({{ grades }} grades){{ ", " if not loop.last }}{% endfor %}

- Reads at most {{ max_tokens }} tokens of a pair; what is longer is cut.
- Trained: {{ m.training.steps }} steps, {{ m.training.epochs }} epochs, on {{ m.training.device }}.
- Temperatures (logits are divided by them): \
{% for name, value in m.temperature.items() %}{{ name }} {{ "%.4f" % value }}{{ ", " if not loop.last }}{% endfor %}

{% for note in m.notes %}
- Note: {{ note }}
{% endfor %}

## Learned from

{% for source in m.labels %}
- `{{ source.path }}`: {{ "{:,}".format(source.labels) }} labels (\
{% if source.fingerprint %}
labeler {{ source.labeler }}, fingerprint `{{ source.fingerprint[:12] }}`\
{% else %}
a label file\
{% endif %}
; {{ "{:,}".format(source.rows.quarantined or 0) }} rows in quarantine; weight {{ "%g" % source.weight }})
{% endfor %}
{% if m.gold %}
- `{{ m.gold.path }}`, column `{{ m.gold.grade }}`: trusted grades of {{ "{:,}".format(m.gold.graded_rows) }} rows, \
{{ "learned from with weight %g, and judged by" % gold_weight if gold_weight else "judged by, not learned from" }}
{% endif %}

Split by {{ m.split.by }} (seed {{ m.split.seed }}):

| split | rows | queries |
|---|---|---|
{% for name, side in m.split.sides().items() %}
| {{ name }} | {{ "{:,}".format(side.rows) }} | {{ "{:,}".format(side.queries) }} |
{% endfor %}

## Figures on the test split

{% if m.metrics.test.student.rows %}
{% for row in m.metrics.test.figure_rows() %}
| {{ row | join(" | ") }} |
{{ "|---" * (row | length) + "|\n" if loop.first }}\
{% endfor %}
{% else %}
No test row has a grade to judge by.
{% endif %}

{% if m.gate.checks %}
Gate: {{ "passed" if m.gate.has_passed else "FAILED" }}

{% for check in m.gate.checks %}
- {{ check.text }}
{% endfor %}

{% endif %}
![training curve](curves.svg)

## Use

    relabel score THIS_FOLDER --input pairs.parquet --to scores

It answers for texts like those it saw: other languages, longer documents or another notion of relevance want labels of
their own. It inherits its teacher's mistakes; judge it with trusted grades (`relabel evaluate`) before it decides
anything.

{{ spec_section }}"""


def render_card(manifest: StudentManifest, spec: DistillSpec) -> str:
    """Markdown from a student's manifest, and the spec that is in it."""
    from jinja2 import Template

    text: str = Template(CARD, trim_blocks=True, lstrip_blocks=True).render(
        m=manifest,
        kind=KINDS[spec.student.kind],
        max_tokens=spec.train.max_tokens,
        gold_weight=spec.loss.gold_weight,
        spec_section="\n".join(spec_section(manifest.spec)),
    )
    return text


# ------------------------------------------------------------------------------
# A distillation from spec to student folder: check, read, train, calibrate, judge, write.
#
# What costs nothing is checked first (spec, model config, labels, split, gate names), so that no hour of training ends
# in a typo. `manifest.json` is written last: a folder without one holds no finished student.


@dataclass(frozen=True)
class Report:
    """How `distill` ended.

    Args:
        output: its folder.
        was_done: the student was there already.
        gate: the spec's gates, which may be newer than the student, applied to the manifest's figures.
    """

    manifest: StudentManifest
    output: Path
    was_done: bool
    gate: JudgedGates

    @property
    def has_passed(self) -> bool:
        """Whether no gate refused it."""
        return self.gate.has_passed


def distill(
    spec: DistillSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    is_writer: bool = True,
) -> Report:
    """Train the student of a spec.

    Args:
        storage: how labels, gold and output are reached. The model is looked up in the cache alone
            (`jobs/delivery.py` brings it there).
        report: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together: they write nothing.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that raise it.
        StaleRunError: the output holds a student or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    output = OutputFolder(STUDENT, Path(spec.output))
    check_services(spec.train.report_to)
    resolved = resolve_model(spec.student.model, cache_dir=cache_dir)
    if is_writer:  # the first of several processes may have begun to write before the others get here
        output.check(resolved)
    examples = load_examples(spec, storage)
    training = training_record(
        STUDENT,
        spec,
        resolved,
        _data_digest(examples),
        version=STUDENT_MANIFEST_VERSION,
        processes=_sharing(spec),
    )
    finished = finished_model(
        output,
        training,
        start,
        StudentManifest,
        is_writer=is_writer,
    )
    if finished is not None:
        return Report(finished, output.folder, True, judged_gates(spec, finished.metrics.test))
    base, record = _checked(spec, resolved, examples)
    texts = make_texts(record, base.tokenizer)
    for note in [*examples.documents, *examples.notes, *rerank_notes(spec.student, examples.grades)]:
        report(note)
    work = TrainingInputs(
        spec=spec,
        base=base,
        record=record,
        examples=examples,
        tokens=texts.encode(examples.texts),
        texts=texts,
        checkpoints=output.checkpoints,
        report=report,
        identity=digest_of(plain(training)),
    )
    manifest = train_into(
        output,
        training,
        start,
        lambda: _train(work, training.fingerprint),
        is_writer=is_writer,
        mirrored=mirror_of(spec.train.mirror, storage, output.checkpoints, report),
    )
    return Report(manifest, output.folder, False, judged_gates(spec, manifest.metrics.test))


def _checked(spec: DistillSpec, resolved: ResolvedModel, examples: Examples) -> tuple[Base, StudentRecord]:
    """The model to start from and what the student will be, when nothing speaks against a training.

    Raises:
        ConfigError, InputError, ModelError: something does.
    """
    base = check_base(spec, resolved)
    check_judges(spec, examples)
    record = make_record(
        spec,
        base,
        examples.heads,
        examples.phi,
        examples.columns,
    )
    some_pairs = [*PROBES, *examples.texts[:64]]
    check_tokenizer_is_kept(
        record,
        base.tokenizer,
        base.config,
        some_pairs,
        resolved.reference,
    )
    return base, record


@dataclass(frozen=True)
class StudentPlan:
    """What a distillation would do.

    Args:
        heads: number of grades by head.
        sides: rows and queries of train, dev and test, as words.
        documents: which columns make the document, a line for each source.
        notes: remarks on labels and split, and on what can serve such a student.
    """

    name: str
    heads: dict[str, int]
    sides: dict[str, str]
    max_tokens: int
    documents: list[str]
    notes: list[str]


def plan_student(spec: DistillSpec, storage: Storage, *, cache_dir: Path | None = None) -> StudentPlan:
    """Check all that is checked before a training; write nothing.

    Raises:
        ConfigError, InputError, ManifestError, ModelError: as `distill`.
    """
    resolved = resolve_model(spec.student.model, cache_dir=cache_dir)
    examples = load_examples(spec, storage)
    _, record = _checked(spec, resolved, examples)
    sides = examples.about.split.sides()
    return StudentPlan(
        name=spec.name,
        heads=record.heads,
        sides={name: f"{side.rows:,} rows of {side.queries:,} queries" for name, side in sides.items()},
        max_tokens=record.max_tokens,
        documents=examples.documents,
        notes=[*examples.notes, *few_queries_notes(examples.about.split), *rerank_notes(spec.student, examples.grades)],
    )


def few_queries_notes(split: SplitFacts) -> list[str]:
    """A warning for each side that is judged and has few queries: its figures will say little."""
    notes = []
    for name, side in (("dev", split.dev), ("test", split.test)):
        if 0 < side.queries < FEWEST_QUERIES:
            what = "chooses the step" if name == "dev" else "judges the student"
            notes.append(
                f"the {name} side, which {what}, has fewer than {FEWEST_QUERIES} queries ({side.queries}): raise "
                f"split.{name}, or label more queries"
            )
    return notes


def _train(work: TrainingInputs, fingerprint: str) -> Made[StudentManifest]:
    """Train, calibrate, judge; what is to be written of the student."""
    spec = work.spec
    base = work.base
    trainer = pkgutil.resolve_name(KINDS[spec.student.kind].trainer)
    module, outcome = trainer(work, lambda trained: dev_figures(work, trained))
    work.examples.notes += outcome.notes
    if hasattr(module, "merge"):
        module.merge()
    module.eval()
    logits = judged_logits(work, module)
    record = replace(work.record, temperature=fitted_temperatures(work, logits, work.examples.notes))
    probs = {name: softmax(values / record.temperature[name]) for name, values in logits.items()}
    trained_NK = softmax(logits["relevance"])
    metrics = StudentFigures(
        dev=side_figures(work, probs, trained_NK, DEV),
        test=side_figures(work, probs, trained_NK, TEST),
    )
    manifest = StudentManifest(
        version=STUDENT_MANIFEST_VERSION,
        relabel=importlib.metadata.version("relabel-ir"),
        name=spec.name,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        heads=record.heads,
        temperature=record.temperature,
        phi=record.phi if len(record.heads) > 1 else None,
        **vars(work.examples.about),
        training=outcome.facts,
        metrics=metrics,
        gate=judged_gates(spec, metrics.test),
        notes=work.examples.notes,
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
        student=asdict(record),
    )

    def write(folder: Path) -> dict[str, str]:
        write_student(folder, record, module, base.tokenizer)
        return student_files(folder)

    return Made(manifest, outcome.curve, write, lambda written: render_card(written, spec))

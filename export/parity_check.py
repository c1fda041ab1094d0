"""An exported student held against the one it was made of, over pairs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relabel.distill.students.student_record import StudentRecord
from relabel.distill.students.students import StudentModel
from relabel.export import loader
from relabel.export.contracts import check_tokens
from relabel.export.parity import answers, measure
from relabel.export.parity_records import ModelParity, Parity
from relabel.export.reference_answers import choose_rows, own_answers, write_reference
from relabel.export.reference_pairs import PairSet, PairsFile, draw_queries, file_pairs, lineage_pairs
from relabel.export.sessions import ModelSession
from relabel.export.specs import ExportSpec
from relabel.export.student_facts import ModelFile
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import GateError
from relabel.manifests.records import plain
from relabel.manifests.storage.context import Storage

PARITY_NAME = "parity.json"
Say = Callable[[str], None]


class AskedPairs(NamedTuple):
    """Pairs with their tokens, as the bundle's own loader makes them."""

    pairs: PairSet
    encoder: loader.Encoder
    rows: list[tuple[list[int], list[int]]]


def compare(
    student: StudentModel,
    folder: Path,
    models: Sequence[ModelFile],
    asked: AskedPairs,
    spec: ExportSpec,
    provider: str,
    say: Say,
) -> dict[str, Any]:
    """Every model of the folder against the student; `parity` in the bundle's manifest. What each answers of the
    reference pairs is written into the folder.

    Raises:
        ModelError: the loader's tokens are not the student's.
        MissingExtraError: this machine can't run one of the models.
    """
    import onnxruntime

    pairs, encoder, rows = asked
    say(f"parity: {len(pairs.pairs):,} pairs, the student in torch")
    check_tokens(student, rows, pairs)
    reference = student.probabilities(pairs.pairs)
    places = choose_rows(pairs, spec.reference_pairs)
    found, answered = [], {}
    for model in models:
        say(f"parity: {model.precision} on {provider}")
        session = ModelSession(folder / model.path, provider, list(student.record.heads))
        by_size = {size: answers(session, encoder, rows, size) for size in spec.parity.batch_sizes}
        found.append(measure(model.precision, reference, by_size, pairs, spec.parity))
        answered[model.precision] = own_answers(session, encoder, rows, places)
    write_reference(folder, pairs, places, answered, found, spec.parity)
    about = {"spec": spec.parity.model_dump(mode="json"), "pairs": pairs.about, "provider": provider}
    return {**about, "onnxruntime": onnxruntime.__version__, "models": plain(found)}


def refusal_text(refused: list[ModelParity], aside: Path) -> str:
    """What a gate refused, and the rows that differ most."""
    lines = ["parity failed, so no bundle was made:"]
    for one in refused:
        for check in one.checks:
            if not check.has_passed:
                lines.append(f"  {one.precision}: {check.check} is {check.value:.3g}, the bound {check.bound:g}")
        for row in one.worst:
            flip = ", flipped" if row.is_flip else ""
            moved = f"{_probs(row.student)} became {_probs(row.model)}"
            lines.append(f"    row {row.row} of {row.source}, batch of {row.batch_size}{flip}: {moved}")
    lines.append(
        f"All figures are in {aside / PARITY_NAME}. Leave that precision out of --precisions, or set its bound (--set "
        "parity.…)."
    )
    return "\n".join(lines)


def asked_pairs(
    record: StudentRecord, manifest: Mapping[str, Any], source: PairsFile | None, spec: ExportSpec, storage: Storage
) -> tuple[PairSet, PairSet | None]:
    """Pairs to compare on, and those to calibrate on where something is calibrated."""
    test = training = None
    if source is None or "int8-static" in spec.precisions:
        test, training = lineage_pairs(manifest, storage, grades=record.grades)
    whole = test if source is None else file_pairs(source, record.columns, storage, grades=record.grades)
    assert whole is not None
    return draw_queries(whole, spec.parity.min_pairs, seed=spec.parity.seed), training


def check_gates(folder: Path, held: dict[str, Any], parity: Parity, target: Path) -> None:
    """Lay a folder aside that a gate refuses.

    Args:
        held: the parity as it is written beside the models.
    Raises:
        GateError: a gate refuses; lists the worst rows.
    """
    refused = [one for one in parity.models if not one.has_passed]
    if refused:
        aside = target.with_name(target.name + ".refused")
        if aside.exists():
            shutil.rmtree(aside)
        (folder / PARITY_NAME).write_bytes(readable_json(held))
        folder.rename(aside)
        raise GateError(refusal_text(refused, aside))


def _probs(values: list[float | None]) -> str:
    return "[" + " ".join("none" if value is None else f"{value:.3f}" for value in values) + "]"

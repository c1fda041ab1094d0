"""Which rows are blamed for a crash: the poisonous ones, all of them, no other, after few crashes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.chunks import PIECES, TIMES_CAUGHT, Isolation
from relabel.manifests.receipts import ChunkId


def drive(chunks: dict[ChunkId, list[int]], poison: set[int], *, width: int) -> tuple[Isolation, dict[int, str], int]:
    """Ask chunk by chunk, as a worker does, with an engine that goes down whenever a poisonous row is in flight."""
    isolation, isolated_rows, crashes = Isolation(), {}, 0
    left = dict(chunks)
    while left:
        for chunk, rows in list(left.items()):
            case = isolation.cases.get(chunk)
            groups = [list(group) for group in case.groups] if case is not None else []
            crashed = False
            for group in groups:
                if poison & set(group):
                    isolation.crashed_apart(chunk, group, "died")
                    crashed = True
                    break
                isolation.cleared(chunk, group)
            set_aside = set(case.isolated_rows) if case is not None else set()
            apart = {row for group in groups for row in group}
            ordinary = [row for row in rows if row not in apart | set_aside]
            if not crashed:
                for start in range(0, len(ordinary), width):
                    window = ordinary[start : start + width]
                    if poison & set(window):
                        isolation.crashed({chunk: window})
                        crashed = True
                        break
            if crashed:
                crashes += 1
                break
            if case is not None:
                isolated_rows.update(case.isolated_rows)
            isolation.committed(chunk)
            del left[chunk]
    return isolation, isolated_rows, crashes


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[ChunkId, list[int]], set[int], int]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    chunks, row = {}, 0
    for number, size in enumerate(sizes):
        chunks[ChunkId(0, number)] = list(range(row, row + size))
        row += size
    poison = draw(st.sets(st.integers(0, row - 1), max_size=8))
    return chunks, poison, draw(st.integers(1, 64))


@given(cases())
def test_exactly_the_poisonous_rows_are_isolated_and_the_number_of_crashes_is_bounded(
    case: tuple[dict[ChunkId, list[int]], set[int], int],
) -> None:
    chunks, poison, width = case
    isolation, isolated_rows, crashes = drive(chunks, poison, width=width)
    assert set(isolated_rows) == poison
    assert isolation.num_isolated == len(poison)
    assert not isolation.cases
    levels = math.ceil(math.log(max(map(len, chunks.values())), PIECES)) + 1
    assert crashes <= len(poison) * (1 + levels + TIMES_CAUGHT)


def test_one_row_among_512_is_found_after_five_crashes() -> None:
    _, isolated_rows, crashes = drive({ChunkId(0, 0): list(range(512))}, {300}, width=512)
    assert (set(isolated_rows), crashes) == ({300}, 5)


def test_a_row_that_is_answered_alone_is_as_good_as_any_again() -> None:
    isolation, chunk = Isolation(), ChunkId(0, 0)
    isolation.crashed({chunk: [1]})
    assert isolation.crashed_apart(chunk, [1], "died") is None
    isolation.cleared(chunk, [1])
    assert isolation.cases[chunk].groups == []
    isolation.crashed({chunk: [1]})
    assert isolation.crashed_apart(chunk, [1], "died") is None, (
        "caught once, by chance; then answered; this is the first time again"
    )

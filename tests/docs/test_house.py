"""The counter behind benchmarks/house_*.md counts what it says it counts."""

from benchmarks.house import Size, size_of


def test_subscripts_with_a_written_key_are_counted_and_others_are_not() -> None:
    assert size_of('a["x"] = b["y"]["z"]').subscripts == 3
    assert size_of('a[0] = b[key]; c: dict[str, int] = {"x": 1}; d[f"{key}"]; e["x":"y"]').subscripts == 0


def test_statements_are_counted_at_any_depth_without_docstrings_and_whatever_their_layout() -> None:
    plain = '"""Doc."""\ndef f(a, b):\n    """Doc."""\n    if a: return b\n    return a\n'
    assert (
        size_of(plain) == size_of(plain.replace("(a, b)", "(\n    a,\n    b,\n)")) == Size(statements=4, subscripts=0)
    )

"""The part of a tree that a router sees: RDR2's own case (appendix D, with ids from 0 and texts of ours), and what
holds for any tree.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from relabel.labelers.route_steps import Subtree
from relabel.manifests.trees import Tree
from tests.trees import Sketch, sketches, tree_of


def section(title: str, *below: Sketch | str) -> Sketch:
    return Sketch(title, [one if isinstance(one, Sketch) else Sketch(one, []) for one in below])


def fillers(title: str, count: int) -> Iterable[str]:
    return (f"{title}: filler {number}." for number in range(1, count + 1))


def park() -> Tree:
    """Headings and content have the ids of the paper's page, one higher; gaps that it leaves are filled."""
    planning = section("Initial planning and construction", *fillers("planning", 11))
    nineties, noughties = section("1990s", "A rough decade."), section("2000s", "The tallest coaster opened.")
    tens = section("2010s", *fillers("tens", 8))
    firsts = section("Firsts and ones of a kind", *fillers("firsts", 9))
    records = section("Records", "Tallest coaster.", "Fastest coaster.", "Largest derrick.", "Tallest swing ride.")
    bests = section("Firsts, bests, and other records", firsts, records, section("Awards", *fillers("awards", 2)))
    _, tree = tree_of(
        section(
            "Six Flags Over Texas",
            section("Introduction", "A theme park.", "Who runs it."),
            section("History", planning, nineties, noughties, tens),
            bests,
            section("Events", *fillers("events", 5)),
        )
    )
    return tree


def test_the_case_of_the_paper() -> None:
    tree = park()
    named = {node.text: node.id for node in tree.nodes if not node.is_content}
    wanted = {"Introduction": 1, "History": 4, "1990s": 17, "2000s": 19, "2010s": 21, "Records": 41, "Awards": 46}
    assert wanted.items() <= named.items()
    first = Subtree(tree).light([20])
    assert first.lit == {20}
    assert {1, 30, 41} <= first.collapsed
    assert not {0, 4, 19} & first.collapsed, "20 lies below 0, 4 and 19"
    assert first.expand(30).lit == {*range(32, 41), *range(42, 46), 47, 48}, "30 has content under subheadings alone"
    everything = first.expand(30)
    assert everything.expand(41) is everything
    second = first.expand(41)
    assert second.lit == {42, 43, 44, 45}
    assert 41 not in second.collapsed
    assert second.expand(41) is second
    assert second.expand(19) is second, "20 was shown"
    assert Subtree(tree).light([18]).expand(1).lit == {2, 3}
    lines = second.render().splitlines()
    assert lines[:3] == ["0: Six Flags Over Texas", "\t1: Introduction", "\t4: History"]
    assert lines[3:-1] == [
        "\t\t5: Initial planning and construction",
        "\t\t17: 1990s",
        "\t\t19: 2000s",
        "\t\t21: 2010s",
        "\t30: Firsts, bests, and other records",
        "\t\t31: Firsts and ones of a kind",
        "\t\t41: Records",
        "\t\t\t42: Tallest coaster.",
        "\t\t\t43: Fastest coaster.",
        "\t\t\t44: Largest derrick.",
        "\t\t\t45: Tallest swing ride.",
        "\t\t46: Awards",
    ]
    assert lines[-1] == "\t49: Events"


def test_content_that_holds_what_is_new_stays_in_view() -> None:
    listed = section("A list.", section("Its item.", "Deep below."), section("Its other item.", "As deep."))
    _, tree = tree_of(section("T", section("H", listed), section("I", "Else.")))
    texts = [node.text for node in tree.nodes]
    deep = Subtree(tree).light([texts.index("Deep below.")])
    assert {texts[id] for id in deep.lit} == {"A list.", "Its item.", "Deep below."}
    again = deep.expand(texts.index("I")).expand(texts.index("H"))
    assert {texts[id] for id in again.lit} == {"A list.", "Its other item.", "As deep."}


@given(sketch=sketches(), data=st.data())
def test_headings_are_always_visible_and_content_is_expanded_once(sketch: Sketch, data: st.DataObject) -> None:
    _, tree = tree_of(sketch)
    content = [node.id for node in tree.nodes if node.is_content]
    headings = [node.id for node in tree.nodes if not node.is_content]
    subtree = Subtree(tree)
    expanded: set[int] = set()
    for _ in range(data.draw(st.integers(0, 6))):
        before = subtree
        if content and data.draw(st.booleans()):
            matched = data.draw(st.lists(st.sampled_from(content), min_size=1, max_size=3))
            subtree = subtree.light(matched)
            assert set(matched) <= subtree.lit
        else:
            heading = data.draw(st.sampled_from(headings))
            subtree = subtree.expand(heading)
            new = subtree.seen - before.seen
            assert new == subtree.own_content(heading) - before.seen
            assert not new & expanded
            assert (subtree is before) == (not new)
            expanded |= subtree.own_content(heading)
        assert before.seen | subtree.lit == subtree.seen
        visible = {node.id for node in subtree.visible}
        assert visible == {*headings, *subtree.lit}
        assert all(tree.nodes[node.id] is node for node in subtree.visible)
        assert all(above.id in visible for id in subtree.lit for above in tree.ancestors(id))
        shown = [int(line.partition(":")[0]) for line in subtree.render().split("\n")]
        assert shown == sorted(visible)
        above = {above.id for id in subtree.lit for above in tree.ancestors(id)}
        assert subtree.collapsed == {heading for heading in headings if heading not in above}
        for heading in headings:
            below = {id for id in content if heading in {one.id for one in tree.ancestors(id)}}
            own = {id for id in below if next(one.id for one in tree.ancestors(id) if not one.is_content) == heading}
            assert own <= subtree.own_content(heading) <= below
            assert bool(subtree.own_content(heading)) == bool(below)

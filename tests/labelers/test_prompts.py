"""Templates: data never passes through Jinja, a template that is off is named with its line, and the built-in prompts
are golden.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts, Turn
from relabel.labelers.registry import LABELERS, labeler_class
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Ask, OptionLines
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Pair
from relabel.manifests.specs import LabelerOptions
from tests.labelers.driving import ROSES, answer_of, fake, labeler, walk
from tests.strategies import texts


def turn(folder: Path, source: str, **more: Any) -> Turn:
    (folder / "user.j2").write_text(source, encoding="utf-8")
    return Prompts(folder).turn("user", "user.j2", **{"data": ("query", "document"), "settings": {"grades": 3}, **more})


@given(query=texts(), document=texts())
def test_data_is_inserted_verbatim(tmp_path_factory, query: str, document: str) -> None:
    folder = tmp_path_factory.mktemp("templates", numbered=True)
    message = turn(folder, "Q: {{ query }}{{ document }}\nagain {{ query }} of {{ grades }}").message(query, document)
    assert message.parts == ("Q: ", query, "", document, "\nagain ", query, " of 3")
    assert message.fields == ("query", "document", "query")


def test_context_documents_are_listed_and_counted(tmp_path: Path) -> None:
    source = (
        "{{ query }}{% if context %} {{ context | length }}:{% for c in context %} {{ loop.index }} {{ c }}{% endfor "
        "%}{% endif %}"
    )
    two = turn(tmp_path, source, data=("query", "context"), num_context=2).message("q", "a", "b")
    assert two.text == "q 2: 1 a 2 b"
    assert two.fields == ("query", "context", "context")
    assert turn(tmp_path, source, data=("query", "context")).message("q").text == "q"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ query }}\n{{ document }}\n{{ doc }}",
            r"user.j2:3: 'doc' is undefined. A template may read: document, grades, query",
        ),
        ("{{ query }}\n{% if %}\n{{ document }}", r"user.j2:2: "),
        ("{{ query }}\n\n{{ document | upper }}", r"user.j2:3: `document` can be printed and nothing else"),
        ("{{ query }}\n{{ document | trim }}", r"user.j2:2: `document` can be printed"),
        ("{{ query }}\n{{ document | e }}", r"user.j2:2: `document` can be printed"),
        ("{{ query }}\n{{ document | length }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{% if query == 'x' %}{% endif %}", r"user.j2:2: `query` can be printed"),
        ("{{ query }}{{ document }}\n{% if query %}{% endif %}", r"user.j2:2: `query` can be printed"),
        ("{{ query ~ document }}", r"user.j2:1: "),
        ("{{ '%s' % query }}{{ document }}", r"user.j2:1: `query` can be printed"),
        ("{{ query }}{{ document._sentinel }}", r"user.j2:1: "),
        (
            "{{ query }}\n{% filter upper %}{{ document }}{% endfilter %}",
            r"user.j2: a filter changed the place of a data field",
        ),
        (
            "{{ query }}{% set d %}{{ document }}{% endset %}\n{{ d | truncate(4, true, '') }}",
            r"user.j2: a filter changed",
        ),
        ("{{ query }}", r"user.j2: never prints `document` \(expected {{ document }}"),
        ("{{ query }}{{ document }}{{ '\\x00' }}", r"user.j2: a filter changed"),
        ("{{ query }}{{ document }}\n\0", r"user.j2: a filter changed"),
        (
            "{{ query }}{{ document }}\n{% include 'scal.j2' %}",
            r"user.j2:2: no template 'scal.j2': .* known are",
        ),
        (
            "{{ query }}{{ document }}\n{% include query %}",
            r"user.j2:2: no template .* by its literal name",
        ),
        ("{{ query }}{{ document }}\n{{ 1 // 0 }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{% include 'user.j2' %}", r"user.j2:\d: maximum recursion depth exceeded"),
        ("{{ query }}{{ document }}\n{{ 'x' * 10**18 }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{{ ''.__class__.__mro__ }}", r"user.j2:2: "),
    ],
)
def test_a_template_that_is_off_is_named_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        turn(tmp_path, source)


def test_context_that_is_never_shown_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"never prints `context` \(expected {% for text in context %}"):
        turn(tmp_path, "{{ query }}", data=("query", "context"), num_context=1)


def test_a_file_may_be_utf8_with_crlf_and_nothing_else(tmp_path: Path) -> None:
    assert turn(tmp_path, "é\r\n{{ query }}{{ document }}").message("q", "d").parts[0] == "é\n"
    (tmp_path / "user.j2").write_bytes(b"\xff{{ query }}")
    with pytest.raises(ConfigError, match="UTF-8 text; byte 0"):
        Prompts(tmp_path).turn("user", "user.j2", data=("query",), settings={})


@pytest.mark.parametrize("name", ["direct", "graph-grpo"])
def test_an_override_takes_one_file_and_leaves_the_others(name: str, tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / "user.j2").write_text("Mine: {{ query }} / {{ document }}")
    ask = next(labeler(name, templates=str(tmp_path)).label(ROSES))
    assert ask.messages[1].text == f"Mine: {ROSES.query} / {ROSES.document}"
    assert ask.messages[0] == next(labeler(name).label(ROSES)).messages[0]


def test_an_override_of_an_included_file_changes_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "scale.j2").write_text("Only {{ grades }} grades.")
    assert "Only 4 grades." in next(labeler("direct", templates=str(tmp_path)).label(ROSES)).messages[0].text


def test_a_folder_with_a_file_that_no_stage_uses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "verdct.j2").write_text("x")
    with pytest.raises(ConfigError, match=r"no stage uses .*verdct.j2'.*Did you mean verdict.j2\?"):
        labeler("r3a", templates=str(tmp_path))
    with pytest.raises(ConfigError, match="is not a folder; make one"):
        labeler("r3a", templates=str(tmp_path / "absent"))


@settings(deadline=None)
@given(text=texts())
def test_the_models_own_first_answer_goes_back_whole_with_all_but_its_tags_as_data(text: str) -> None:
    generator = labeler("r3a").label(ROSES)
    first = next(generator)
    answer = answer_of(fake(), first)
    answer.text = f"<think>{text.replace('<', '(')}</think><intent>x</intent>"
    turn = generator.send(answer).messages[2]
    assert turn.text == answer.text
    assert turn.parts == ("<think>", text.replace("<", "("), "</think><intent>", "x", "</intent>")


# Every labeler in every variant that its own options make: prompt, format, fake answers and reader agree. Generated
# from the registry.


Options = dict[str, Any]

COMPARED = ("direct", "ensemble", "graph-grpo", "r1", "r3a", "umbrela")
"""Labelers that papers and users compare as methods on the same pairs: what all are shown is in one file, and
nothing else may hint.
"""
YES_NO = ("complexity", "pointwise")
ABOUT_QUERIES = ("evidence-set", "query", "review", "route", "variants")
"""Labelers that answer another question."""
TAG = re.compile(r"<([a-z_-]+)>")
HINTS = re.compile(
    r"\bwords\b[^.\n]*\b(?:shares?|alike|overlap|common)|look alike|superficial|lexical|truly offers", re.IGNORECASE
)


def choices(annotation: Any) -> list[Any]:
    """The values of an option that is a switch; empty for a number or a text."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [value for part in get_args(annotation) for value in choices(part)]
    return []


def switches(name: str) -> dict[str, list[Any]]:
    """A labeler's own switches, the default first."""
    fields = labeler_class(name).Options.model_fields
    found = {key: choices(field.annotation) for key, field in fields.items() if key not in LabelerOptions.model_fields}
    return {
        key: [fields[key].default, *(value for value in values if value != fields[key].default)]
        for key, values in found.items()
        if len(values) > 1
    }


def variants() -> Iterator[tuple[str, Options]]:
    """Every combination of every labeler's switches."""
    for name in sorted(LABELERS):
        found = switches(name)
        for values in itertools.product(*found.values()):
            yield (
                name,
                {key: value for (key, known), value in zip(found.items(), values, strict=True) if value != known[0]},
            )


def one_apart() -> Iterator[tuple[str, Options]]:
    """Each labeler as it is, and with one switch thrown: the ablations."""
    return ((name, options) for name, options in variants() if len(options) < 2)


def slug(name: str, options: Options) -> str:
    return "-".join([name, *(f"{key}-{value}".lower() for key, value in options.items())])


EXTRA: dict[str, tuple[str, Options]] = {
    "pointwise-empty-think": ("pointwise", {"think": "empty", "instruction": "The page names a price."}),
    "r3a-single": ("r3a", {"stages": 1, "evidence": "constrained"}),
    "r3a-bare": ("r3a", {"intent": False, "extract": False, "context": "none", "grades": 2}),
    "r3a-five-grades": ("r3a", {"grades": 5}),
    "r3a-four-grades": ("r3a", {"grades": 4}),
}
"""Prompts that no single switch makes."""
GOLDENS = {**{slug(name, options): (name, options) for name, options in one_apart()}, **EXTRA}

each_variant = pytest.mark.parametrize(("name", "options"), [pytest.param(*one, id=slug(*one)) for one in variants()])


def template_text(ask: Ask) -> str:
    """What the labeler says, without data and without the model's own turns."""
    return "\n".join("".join(message.parts[::2]) for message in ask.messages if message.role != "assistant")


def instructions(ask: Ask) -> str:
    """What the last turn and the system say, data left out."""
    turns = [message for message in ask.messages if message.role == "system"] + [ask.messages[-1]]
    return "\n".join("".join(message.parts[::2]) for message in turns)


def tags(ask: Ask) -> list[str]:
    return [section.tag for section in ask.format.sections if section.tag] if ask.format else []


def test_the_sweep_finds_every_ablation_of_the_paper() -> None:
    assert {slug(name, options) for name, options in one_apart() if name == "r3a"} == {
        "r3a", "r3a-intent-false", "r3a-extract-false", "r3a-context-none", "r3a-stages-1", "r3a-evidence-constrained",
        "r3a-context_is-clicked",
    }  # fmt: skip
    assert len(list(variants())) >= 40


@each_variant
def test_prompt_and_format_name_the_same_tags_in_the_same_order(name: str, options: Options) -> None:
    for ask in walk(labeler(name, **options), ROSES, fake())[1]:
        if ask.format is None:
            continue
        named = list(dict.fromkeys(TAG.findall(instructions(ask))))
        assert named == tags(ask)


def shape(ask: Ask) -> tuple[Any, ...]:
    """An ask without its messages. Lines to choose from are those of the pair's own document."""
    is_free = ask.format is None or not any(isinstance(section, OptionLines) for section in ask.format.sections)
    return (ask.stage, ask.decisions, ask.prefill, *((ask.format, ask.max_tokens) if is_free else ()))


@each_variant
def test_probe_and_walk_are_of_the_same_stages_and_only_what_sees_no_document_is_shared(
    name: str, options: Options
) -> None:
    subject = labeler(name, **options)
    label, asks, _ = walk(subject, ROSES, fake())
    probes = subject.probe()
    assert [shape(ask) for ask in probes] == [shape(ask) for ask in asks]
    stages = [ask.stage for ask in asks]
    assert len(set(stages)) == len(stages)
    if name == "r3a":
        assert len(asks) == options.get("stages", 2)
        assert (label.intent is not None) == options.get("intent", True)
        assert any("context" in message.fields for message in asks[0].messages) == (
            options.get("context", "use") == "use"
        )
    for ask in asks:
        sees_document = any({"document", "nodes"} & {*message.fields} for message in ask.messages)
        assert (ask.shared_by is None) == sees_document
    if name == "ensemble":  # its asks are side by side, none goes on from another
        return
    for earlier, later in itertools.pairwise(asks):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.messages[len(earlier.messages)].fields == tuple(tags(earlier))


@each_variant
def test_what_the_fake_engine_answers_is_read_and_its_garbage_is_not(name: str, options: Options) -> None:
    subject = labeler(name, **options)
    good, bad = fake(), fake(p_garbage=1.0)
    for seed in range(12):
        _, asks, answers = walk(
            subject, ROSES._replace(document=f"Climbing roses want pruning late, {seed} years on."), good, seed
        )
        for ask, answer in zip(asks, answers, strict=True):
            if ask.format is None:
                continue
            assert list(filter(None, Reader(ask.format, ask.prefill).read(answer))) == tags(ask)
            garbage = answer_of(bad, ask, seed)
            if isinstance(ask.format.sections[0], OptionLines):  # which the labeler reads, not the format's reader
                assert refused(subject, ROSES, [], garbage.text, garbage) is (options.get("expelled") != "keep")
                continue
            with pytest.raises(VerdictError):
                Reader(ask.format, ask.prefill).read(garbage)


@each_variant
def test_one_tag_more_or_less_is_no_verdict(name: str, options: Options) -> None:
    subject = labeler(name, **options)
    _, asks, answers = walk(subject, ROSES, fake())
    for stage, ask in enumerate(asks):
        if ask.format is None:
            continue
        text = answers[stage].text
        first = next(iter(tags(ask)), "none")
        for wrong in (
            text + "<intent>x</intent>",
            re.sub(rf"(?s)<{first}>.*?</{first}>|\Z", "" if tags(ask) else "<>", text),
            text + text,
            "hm " + text,
        ):
            keeps = options.get("expelled") == "keep"  # what is no action is left out and counted
            assert refused(subject, ROSES, answers[:stage], wrong, answers[stage]) is not keeps


def refused(subject: Any, pair: Pair, earlier: list[Any], text: str, answer: Any) -> bool:
    generator = subject.label(pair)
    next(generator)
    for one in earlier:
        generator.send(one)
    was, answer.text = answer.text, text
    try:
        generator.send(answer)
    except VerdictError:
        return True
    except StopIteration:
        return False
    finally:
        answer.text = was
    return False


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_prompts_are_golden(name: str, golden: Callable[[str, str], None]) -> None:
    labeler_name, options = GOLDENS[name]
    shown = []
    for ask in labeler(labeler_name, **options).probe():
        shown.append(f"=== stage {ask.stage}, max_tokens {ask.max_tokens}, prefill {ask.prefill!r}\n")
        for message in ask.messages:
            parts = [
                part if i % 2 == 0 else f"⟦{message.fields[i // 2]}: {part}⟧" for i, part in enumerate(message.parts)
            ]
            shown.append(f"--- {message.role}\n{''.join(parts)}\n")
    golden(f"prompts/{name}.txt", "\n".join(shown))


def test_every_golden_is_of_a_variant_that_is_there() -> None:
    folder = Path(__file__).parents[1] / "golden" / "prompts"
    assert {file.stem for file in folder.iterdir()} == set(GOLDENS)


def test_every_labeler_is_compared_with_others_or_answers_another_question() -> None:
    assert {*COMPARED, *YES_NO, *ABOUT_QUERIES} == set(LABELERS)


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*one, id=slug(*one)) for one in variants() if one[0] in COMPARED]
)
@pytest.mark.parametrize("grades", [2, 3, 4, 5])
def test_labelers_that_are_compared_share_one_text_of_guidance_and_none_has_a_hint_of_its_own(
    name: str, options: Options, grades: int
) -> None:
    """Labels that differ because one prompt warned of word overlap and the others did not say nothing about methods."""
    if name == "graph-grpo":
        options = {**options, "phi": [[grade % grades for grade in range(5)]] * 5}
    subject = labeler(name, **options, grades=grades)
    guidance = (SHARED / "material.j2").read_text().strip()
    assert subject.template_digests["material.j2"] == labeler("direct").template_digests["material.j2"]
    for ask in subject.probe():
        said = template_text(ask)
        assert said.count(guidance) == 1
        assert HINTS.findall(said.replace(guidance, "")) == []


def test_no_labeler_has_a_file_of_its_own_in_place_of_a_shared_one() -> None:
    shared = {file.name for file in SHARED.iterdir()}
    own = {file.name for name in LABELERS for file in (BUILT_IN / name).iterdir()}
    assert shared
    assert not shared & own

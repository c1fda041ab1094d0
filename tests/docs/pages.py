"""The pages of docs/ and the README as data: their fenced blocks, and the calls of relabel in them.

What a block's language says about its lines:

- `console`: lines after `$ ` are run, and what follows must be what they print (see `test_pages_run`);
- `bash`: every line is run;
- `text`: a call of relabel shows a form, with words such as FILE and […] in it; it is parsed alone;
- `output` shows what `make demo` printed;
- anything else is no command line, though a call of relabel in it (a crontab, a systemd unit) is parsed.

`relabel …` between single backticks in a sentence is parsed too.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relabel.jobs.root_help import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)(?: +(.*))?$")
_NAMES = "|".join(sorted(COMMANDS, key=len, reverse=True))
CALL = re.compile(rf"(?:^|[\s/`=(])relabel (?=(?:{_NAMES})(?:\s|$))")
_EXIT = re.compile(r"#.*\bexit (\d+)")


class Block(NamedTuple):
    """A fenced block: its page, the line of its first line, language, title (a file name, where it
    has one) and lines.
    """

    page: Path
    line: int
    language: str
    title: str | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Command(NamedTuple):
    """A line to run: its page and number, the exit code that the page names (0 if none), and the output that it shows
    (None if none).
    """

    page: Path
    number: int
    line: str
    exit: int
    output: tuple[str, ...] | None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order, without their indentation."""
    opened: tuple[int, str, str, str | None] | None = None
    held: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            title = re.search(r'title="([^"]+)"', fence[3] or "")
            opened, held = (number + 1, fence[1], fence[2], title[1] if title else None), []
        elif opened is not None and line.strip() == "```":
            yield Block(page, opened[0], opened[2], opened[3], tuple(held))
            opened = None
        elif opened is not None:
            held.append(line.removeprefix(opened[1]))
    assert opened is None, f"{page}: the block at line {opened and opened[0]} never ends"


def commands(page: Path) -> list[Command]:
    """The lines of a page that are run, in order."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language == "bash":
            for offset, line in _whole(block.lines):
                if line.strip() and not line.startswith("#"):
                    found.append(_command(block, offset, line, None))
        elif block.language == "console":
            for offset, line in _whole(block.lines):
                if line.startswith("$ "):
                    found.append(_command(block, offset, line[2:], ()))
                else:
                    assert found, f"{page}:{block.line}: output before any `$ `"
                    found[-1] = found[-1]._replace(output=(*(found[-1].output or ()), line))
    return found


def calls(path: Path) -> list[tuple[str, list[str]]]:
    """Every call of relabel in a page or file, wherever it is: the place, and its arguments in a form that the CLI
    can parse.
    """
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    spans = (
        [(match.start(), match[1]) for match in re.finditer(r"(?<!`)`(relabel [^`]+)`(?!`)", text)]
        if path.suffix == ".md"
        else []
    )
    if path.suffix == ".md":
        for block in blocks(path):
            for offset, line in _whole(block.lines):
                spans += [(-(block.line + offset), line)]
    else:
        spans += [
            (-number, line) for number, line in enumerate(text.splitlines(), 1) if not line.lstrip().startswith("#")
        ]
    found = []
    for place, line in spans:
        for match in CALL.finditer(line):
            words = _plain(line[match.end() :])
            if words is not None:
                number = -place if place < 0 else text.count("\n", 0, place) + 1
                found.append((f"{path.relative_to(ROOT)}:{number}: relabel {shlex.join(words)[:70]}", words))
    return found


def _command(block: Block, offset: int, line: str, output: tuple[str, ...] | None) -> Command:
    code = _EXIT.search(line)
    return Command(block.page, block.line + offset, _without_remark(line), int(code[1]) if code else 0, output)


def _whole(lines: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Lines with those that go on after a backslash put together; the offset is the first one's."""
    start, held = 0, ""
    for offset, line in enumerate(lines):
        if not held:
            start = offset
        if line.endswith("\\"):
            held += line[:-1].rstrip() + " "
            continue
        yield start, (held + line.lstrip()) if held else line
        held = ""


def _without_remark(line: str) -> str:
    return re.sub(r"\s+#\s.*$", "", line).rstrip()


def _plain(rest: str) -> list[str] | None:
    """Arguments of a call as a shell would cut them, up to the call's end; of a form, one that fits it; None if it is
    cut short (…).
    """
    rest = _without_remark(rest.replace("\\%", "%"))
    rest = re.sub(r"\[([^\]|]*)(?:\|[^\]]*)?\]", r"\1", rest)  # [--resume | --restart]: the first of them
    rest = re.split(r"\s(?:\|\|?|&&|&)(?:\s|$)|\s\d?>+|;|`", rest)[0]
    return None if "…" in rest.split() else [word.rstrip("…") for word in shlex.split(rest)]

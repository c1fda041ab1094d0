"""The bar of a run on a terminal, and the lines below it."""

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from relabel.manifests.secrets import redacted


class BarAndLines(Progress):
    """A bar, and below it lines of text, each cut to the terminal's width."""

    lines: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and each line."""
        yield from super().get_renderables()
        yield from (Text(redacted(line), no_wrap=True, overflow="ellipsis", style="dim") for line in self.lines)


def new_bars(console: Console) -> BarAndLines:
    """A bar without a task, of which a terminal of 80 columns shows all; its one task has the field `left`."""
    return BarAndLines(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("pairs · {task.fields[left]}"),
        console=console,
        transient=True,
    )

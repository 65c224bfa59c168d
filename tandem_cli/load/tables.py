"""A table with a sentence before it, for a page or for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Tabled:
    """Rows of as many cells as there are columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""

    def markdown(self) -> str:
        """As a page has it."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cells) + " |" for cells in self.rows]
        return "\n".join([self.words, ""] * bool(self.words) + lines)

    def rich(self) -> Table:
        """As a terminal has it, without the words. The first column is text, the others figures."""
        made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, name in enumerate(self.columns):
            made.add_column(name, justify="right" if number else "left", overflow="fold")
        for cells in self.rows:
            made.add_row(*(cell.replace("**", "") for cell in cells))
        return made

    def as_dicts(self) -> list[dict[str, str]]:
        """As a script has it: one object a row."""
        return [dict(zip(self.columns, cells, strict=True)) for cells in self.rows]

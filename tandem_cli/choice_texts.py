"""The texts of several choices on one output: one after the other, though they come interleaved."""


class ChoiceTexts:
    """The first choice that says something is shown as it comes; what the others say waits until it has ended."""

    def __init__(self) -> None:
        self._shown: int | None = None
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()

    def take(self, index: int, text: str, *, ended: bool) -> str:
        """More text of a choice, and whether it is its last; what is to be shown now."""
        if ended:
            self._ended.add(index)
        if self._shown is None:
            self._shown = index
            text = f"[choice {index}]\n{text}" if index else text
        elif index != self._shown:
            self._waiting[index] = self._waiting.get(index, "") + text
            text = ""
        while self._shown in self._ended and self._waiting:
            self._shown = min(self._waiting)
            text += f"\n[choice {self._shown}]\n{self._waiting.pop(self._shown)}"
        return text

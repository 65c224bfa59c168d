"""How a stream is shown: text or JSON lines on standard output, progress and figures on standard error."""

import json
import sys

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from tandem.v1 import inference_pb2 as pb
from tandem_cli.record_view import as_dict, ending_words, rate_words, timings_table, usage_line


class Printer:
    """Writes the events of one request."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True, quiet=quiet or as_json, highlight=False)
        self._text_is_seen = sys.stdout.isatty()
        self._text_began = False
        self._live: Live | None = None

    @property
    def shows_progress(self) -> bool:
        """Whether somebody sees `progress`."""
        return self._console.is_terminal and not self._console.quiet

    def progress(self, words: str) -> None:
        """Show what is going on, until text appears on the same terminal."""
        if self._text_began and self._text_is_seen:
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        self._live.update(Spinner("dots", text=Text(words)))

    def settle(self) -> None:
        """Take the progress away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, words: str) -> None:
        """A sentence between the lines."""
        self.settle()
        self._console.print(f"\n{words}", style="yellow", markup=False, soft_wrap=True)

    def event(self, response: pb.GenerateResponse) -> None:
        """Write one event to standard output. Raises BrokenPipeError when nobody reads it any more."""
        if self._as_json:
            print(json.dumps(as_dict(response), ensure_ascii=False), flush=True)
            return
        kind = response.WhichOneof("event")
        text = response.delta.text if kind == "delta" else response.completed.text if kind == "completed" else ""
        if not text:
            return
        self._text_began = True
        if self._text_is_seen:
            self.settle()
        sys.stdout.write(text)
        sys.stdout.flush()

    def summary(self, request_id: str, completed: pb.Completed | None) -> None:
        """End the text with a line break; say how it ended and where the time went."""
        self.settle()
        if completed is None or self._as_json:
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        head = Text.assemble("\n", (ending_words(completed), "bold"), f"  {rate_words(completed)}  {request_id}")
        self._console.print(head, soft_wrap=True)
        self._console.print(usage_line(completed.usage), soft_wrap=True)
        self._console.print(timings_table(completed.timings))

"""How a stream is shown: text or JSON lines on standard output, progress and figures on standard error."""

import json
import sys

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from tandem.v1 import inference_pb2 as pb
from tandem_cli.choice_texts import ChoiceTexts
from tandem_cli.consoles import error_console
from tandem_cli.exits import Exit
from tandem_cli.log_probs_view import log_probs_table
from tandem_cli.record_view import as_dict, ending_words, rate_words, timings_table, usage_line


class Printer:
    """Writes the events of one request."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._console = error_console(quiet=quiet or as_json)
        self._text_is_seen = sys.stdout.isatty()
        self._text_began = False
        self._shown = ""
        self._log_probs: list[pb.TokenLogProbability] = []
        self._prompt_log_probs: list[pb.TokenLogProbability] = []
        self._live: Live | None = None
        self._choices = ChoiceTexts()

    @property
    def shows_progress(self) -> bool:
        """Whether somebody sees `progress`: there is a terminal, and the text does not appear on it."""
        return self._console.is_terminal and not self._console.quiet and not (self._text_began and self._text_is_seen)

    def progress(self, words: str) -> None:
        """Show what is going on."""
        if self._live is None:
            # The text goes where standard output goes, not to the terminal that the progress is on.
            self._live = Live(
                console=self._console, transient=True, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False
            )
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
        text = self._new_text(response)
        if not text:
            return
        self._text_began = True
        if self._text_is_seen:
            self.settle()
        sys.stdout.write(text)
        sys.stdout.flush()

    def _new_text(self, response: pb.GenerateResponse) -> str:
        """Text of an event that was not shown before; its log-probabilities are kept for the end."""
        kind = response.WhichOneof("event")
        if kind == "prompt":
            self._prompt_log_probs.extend(response.prompt.log_probabilities)
            return response.prompt.text
        if kind == "choice_ended":
            return self._choices.take(response.choice_ended.index, response.choice_ended.text, ended=True)
        if kind not in ("delta", "completed"):
            return ""
        event: pb.Delta | pb.Completed = response.delta if kind == "delta" else response.completed
        if kind == "delta" and response.delta.cumulative:
            self._log_probs.clear()
            before, self._shown = self._shown, event.text
        else:
            before = ""
        self._log_probs.extend(event.log_probabilities)
        text = event.text.removeprefix(before)
        return self._choices.take(response.delta.index, text, ended=False) if kind == "delta" else text

    def summary(self, request_id: str, completed: pb.Completed, code: Exit) -> None:
        """End the text with a line break; say how it ended and where the time went. When quiet, say only what went wrong."""
        self.settle()
        if self._as_json:
            return
        if self._text_began:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if self._quiet and code is not Exit.OK:
            print(f"tandem: {request_id} ended with {ending_words(completed)}", file=sys.stderr)
        head = Text.assemble("\n", (ending_words(completed), "bold"), f"  {rate_words(completed)}  {request_id}")
        self._console.print(head, soft_wrap=True)
        self._console.print(usage_line(completed.usage if completed.HasField("usage") else None), soft_wrap=True)
        self._console.print(timings_table(completed.timings))
        for title, told in (("prompt, from its second token on", self._prompt_log_probs), ("output", self._log_probs)):
            if told:
                self._console.print(f"\n{title}", style="bold")
                self._console.print(log_probs_table(told))

"""Output of several outputs of one prompt between the engine's steps and the writer of their stream. Pure.

Each has a StreamLog of its own; they are published in turn and share one row of numbers. The last of an output and its end are
one event, so that nobody ever knows its last token and not its end. What ends only here, and goes on at another member, is not
told.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decode_svc.messages import SeatEnded, SeatRefused
from decode_svc.stream_log import LogEnded, PromptPart, Published, StreamLog
from engine.log_probs import TokenLogProb
from lifecycle.finish import COMPLETE

Terminal = SeatEnded | SeatRefused


@dataclass(frozen=True, slots=True)
class ChoicesTold:
    """How the outputs are told. As in StreamLog, and: `most` of them are, the likeliest, when all have ended; 0 tells each at its
    end. ranks_only: log-probabilities are there for that and are not told. after_prompt: the prompt is told before anything else,
    unless all have ended without it."""

    final_only: bool = False
    top: int | None = None
    most: int = 0
    ranks_only: bool = False
    after_prompt: bool = False


class ChoicesLog:
    """`held`: by choice, as in StreamLog. `next_sequence_no`: number of the next event of any of them."""

    def __init__(
        self,
        next_sequence_no: int,
        high_water_bytes: int,
        held: Mapping[int, Sequence[TokenLogProb]],
        told: ChoicesTold,
    ) -> None:
        self.next_sequence_no = next_sequence_no
        self._told = told
        self._logs: dict[int, StreamLog[SeatEnded]] = {
            choice: StreamLog(next_sequence_no, high_water_bytes, told.final_only, told.top, before)
            for choice, before in held.items()
        }
        self._turns = deque(self._logs)
        self._ends: dict[int, SeatEnded] = {}
        self._closed: set[int] = set()
        self._prompt: PromptPart | None = None
        self._waits = told.after_prompt
        self._terminal: Terminal | None = None
        self._ended = False

    # taking in

    def add_to(
        self,
        choice: int,
        text: bytes,
        shown: Sequence[int],
        selected: Sequence[int],
        now: float,
        log_probs: Sequence[TokenLogProb] = (),
    ) -> None:
        """As StreamLog.add, for one of them."""
        self._logs[choice].add(text, shown, selected, now, log_probs)

    def add_prompt(self, prompt: PromptPart) -> None:
        """The prompt goes out before any output. Raises LogEnded."""
        if self._ended:
            raise LogEnded("the prompt after the terminal")
        self._prompt, self._waits = prompt, False

    def end_choice(self, choice: int, end: SeatEnded) -> None:
        """One of them has ended. Raises LogEnded when it had before."""
        self._logs[choice].end(end)
        self._ends[choice] = end
        if len(self._ends) < len(self._logs):
            return
        self._waits = False
        if self._told.most:
            self._turns = deque(self._ranked())

    def end(self, terminal: Terminal) -> None:
        """Fix the terminal of the request. Raises LogEnded when it was fixed before."""
        if self._ended:
            raise LogEnded("a second terminal")
        self._ended = True
        self._terminal = terminal

    # giving out

    def publish(self) -> Published | None:
        """The next event, of whose turn it is; None when nobody has one."""
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            self.next_sequence_no += 1
            number = self.next_sequence_no
            return Published(number - 1, number, "", (), (), 0, 0, prompt=prompt, choice=next(iter(self._logs)))
        choice = next((one for one in self._turns if self._due(one)), None)
        if choice is None:
            return None
        if not self._told.most:
            # Whoever had his turn goes behind the others.
            self._turns.remove(choice)
            self._turns.append(choice)
        log = self._logs[choice]
        log.next_sequence_no = self.next_sequence_no
        published = self._closing(choice, log) if self._tells_end(choice) else log.publish()
        assert published is not None, f"choice {choice} had something to tell and tells nothing"
        self.next_sequence_no = log.next_sequence_no
        return replace(published, choice=choice)

    def terminal(self) -> Terminal | None:
        """The terminal, once, when it is fixed and everything before it was published."""
        if self._terminal is None or not self.caught_up:
            return None
        terminal, self._terminal = self._terminal, None
        return terminal

    def whole_text(self) -> str:
        """Nothing: each output is told with its own end."""
        return ""

    def whole_tokens(self) -> tuple[Sequence[int], Sequence[TokenLogProb]]:
        """Nothing, as above."""
        return (), ()

    # reading

    @property
    def caught_up(self) -> bool:
        """Whether everything that can be published now was."""
        return self._prompt is None and not any(self._due(choice) for choice in self._logs)

    @property
    def ready(self) -> bool:
        """Whether `publish` or `terminal` has something."""
        return self._terminal is not None or not self.caught_up

    @property
    def ended(self) -> bool:
        """Whether the terminal is fixed."""
        return self._ended

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text that are held."""
        return sum(log.buffer_bytes for log in self._logs.values())

    def held_bytes_of(self, choice: int) -> int:
        """What waits of one of them, in bytes of its window."""
        return self._logs[choice].held_bytes

    @property
    def waiting_since(self) -> float | None:
        """When the oldest unpublished text came; None when there is none."""
        return min((log.waiting_since for log in self._logs.values() if log.waiting_since is not None), default=None)

    @waiting_since.setter
    def waiting_since(self, now: float) -> None:
        for log in self._logs.values():
            if log.waiting_since is not None:
                log.waiting_since = now

    # inside

    def _tells_end(self, choice: int) -> bool:
        end = self._ends.get(choice)
        return end is not None and not end.ending.goes_on

    def _due(self, choice: int) -> bool:
        if self._waits or choice in self._closed:
            return False
        if not self._tells_end(choice):
            return not self._logs[choice].caught_up
        return not self._told.most or all(self._tells_end(one) for one in self._logs)

    def _closing(self, choice: int, log: StreamLog[SeatEnded]) -> Published:
        """The last of one. Who is not among those that are told has no text, no number and nothing to bill."""
        end = self._ends[choice]
        told = not self._told.most or len(self._closed) < self._told.most
        self._closed.add(choice)
        left = log.rest(numbered=told)
        if not told:
            usage = replace(end.usage, returned_tokens=0, billed_tokens=0)
            return replace(left, text="", token_ids=(), text_bytes=0, log_probs=(), ended=end._replace(usage=usage))
        return replace(left, log_probs=() if self._told.ranks_only else left.log_probs, ended=end)

    def _ranked(self) -> list[int]:
        """In order before others, then by the mean of the log-probabilities of the returned tokens, then by index."""

        def rank(choice: int) -> tuple[bool, float, int]:
            _, log_probs = self._logs[choice].whole_tokens()
            mean = math.fsum(one.value for one in log_probs) / len(log_probs) if log_probs else -math.inf
            return self._ends[choice].ending.reason not in COMPLETE, -mean, choice

        return sorted(self._logs, key=rank)

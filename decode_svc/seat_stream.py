"""The stream of one seat on the event loop: what waits for its reader, what was sent, and who reads."""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace

from decode_svc.choices_log import ChoicesLog
from decode_svc.flow import Credit, SlowReader
from decode_svc.messages import (
    OutputMade,
    OutputTaken,
    PromptReady,
    PromptScored,
    SeatEnded,
    SeatEvent,
    SeatGranted,
    SeatPaused,
    SeatPushed,
    SeatRefused,
)
from decode_svc.replay_log import Replay, ReplayLog, Sent
from decode_svc.stream_log import PromptPart, Published, StreamLog
from decode_svc.tenure import Tenure, TenureState
from engine.log_probs import TokenLogProb
from engine.sequence import Earlier
from lifecycle.deadlines import Limits
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage

#: Answers to a router that moves a sequence which wait to be written; it asks again only after an answer.
MOVE_NEWS_MAX = 8

Terminal = SeatEnded | SeatRefused


@dataclass(frozen=True, slots=True)
class SeatOrigin:
    """What the event loop knows of a seat from its Open. `opened_at`: monotonic seconds.

    opening: the Open as it came, for a router that takes the seat over; `whole`: it has to know all that was returned. log_probs:
    as in SequenceSpec. prompt: it is to be told before any output, without its log-probabilities.
    choices: with several outputs of the prompt, what each of them came to before, by index, the one first that gets the prompt's
    KV; told_choices: so many of them are told, the likeliest, when all have ended, 0 tells each at its end; ranks_only:
    log-probabilities are there for that alone.
    """

    key: AttemptKey
    traceparent: str
    opened_at: float
    limits: Limits
    first_sequence_no: int
    sends_output: bool
    prompt_tokens: int
    earlier: Earlier
    prefill_member: str
    moved: bool = False
    slow_reader: SlowReader = SlowReader.PAUSE
    hold_s: float = 0.0
    opening: bytes = b""
    log_probs: int | None = None
    whole: bool = False
    prompt: PromptPart | None = None
    choices: tuple[tuple[int, Earlier], ...] = ()
    told_choices: int = 0
    ranks_only: bool = False

    @property
    def given_tokens(self) -> int:
        """Tokens whose KV the seat begins with: the prompt and what earlier attempts chose, for a moved output but the last. With
        several outputs what they have in common, the prompt."""
        if self.choices:
            return self.prompt_tokens
        return self.prompt_tokens + len(self.earlier.token_ids) - self.moved

    def usage(self) -> Usage:
        """What is known of the output's counts before this seat has done anything."""
        selected, returned = len(self.earlier.token_ids), self.earlier.returned_tokens
        return Usage(prompt_tokens=self.prompt_tokens, selected_tokens=selected, returned_tokens=returned, billed_tokens=returned)


@dataclass(eq=False, slots=True)
class Reader:
    """One call that reads a seat. `news` is set when there is something to write; a call that has lost the seat gets none.

    taken: set when its router does not need the end any more. keeps_end: its router has the end, and a client still reads.
    patience: the time-out around its writing; it has no end until `interrupt`.
    """

    number: int
    since: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: bool = False
    keeps_end: bool = False
    patience: asyncio.Timeout | None = None

    def interrupt(self) -> None:
        """Stop writing: to a reader that does not take the end, or because another call has the seat."""
        if self.patience is not None:
            self.patience.reschedule(0.0)


class SeatStream:
    """One seat's stream. The writer of the call that has it waits for news, then takes what there is."""

    def __init__(self, number: int, origin: SeatOrigin, window_bytes: int, tenure: Tenure, replay: ReplayLog | None) -> None:
        self.number = number
        self.origin = origin
        self.tenure = tenure
        self.replay = replay
        self.reader: Reader | None = None
        self.log: StreamLog[Terminal] | ChoicesLog = self._new_log(window_bytes)
        self.asked_to_end = False
        #: Why the call is broken off, for its router; empty while it is not.
        self.broken = ""
        self.ended_at: float | None = None
        #: The commit, once it has happened.
        self.ready: PromptReady | None = None
        self.last_token_at: float | None = None
        self._prompt_log_probs: list[TokenLogProb] = []
        self._granted: SeatGranted | None = None
        self._window_bytes = window_bytes
        self._credit = Credit(window_bytes)
        self._again: deque[bytes] = deque()
        self._before_output: deque[SeatGranted | PromptReady] = deque()
        self._move_news: deque[SeatPaused | SeatPushed] = deque(maxlen=MOVE_NEWS_MAX)
        self._paused: SeatPaused | None = None
        self._writing: Published | None = None
        self._writing_since: float | None = None
        self._terminal: Terminal | None = None

    def _new_log(self, window_bytes: int) -> StreamLog[Terminal] | ChoicesLog:
        origin = self.origin
        final_only, held = not origin.sends_output, origin.earlier.held_log_probs
        return StreamLog(origin.first_sequence_no, window_bytes, final_only, origin.log_probs, held)

    def _end(self, event: SeatEnded | SeatRefused, now: float) -> None:
        self.log.end(event)
        self.ended_at = now

    def _add(self, event: OutputMade, now: float) -> None:
        self._single.add(event.text, event.shown, event.selected, now, event.log_probs)

    @property
    def _single(self) -> StreamLog[Terminal]:
        assert isinstance(self.log, StreamLog)
        return self.log

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all seats whose output this is."""
        return (self.number,)

    @property
    def unended(self) -> tuple[int, ...]:
        """Those of `numbers` whose end was not told."""
        return self.numbers if self.ended_at is None else ()

    def origin_of(self, seat: int) -> SeatOrigin:
        """What is known of one of them."""
        return self.origin

    def deliver(self, event: SeatEvent, now: float) -> None:
        """Take one event of the engine in. Output that nobody can get any more is dropped."""
        if isinstance(event, SeatEnded | SeatRefused):
            self._end(event, now)
        elif isinstance(event, OutputMade):
            if event.selected:
                self.last_token_at = now
            if self.tenure.state is not TenureState.LEFT:
                self._add(event, now)
        elif isinstance(event, PromptScored):
            self._prompt_log_probs += event.log_probs
        elif isinstance(event, SeatPaused | SeatPushed):
            self._paused = event if isinstance(event, SeatPaused) else self._paused
            self._move_news.append(event)
        else:
            if isinstance(event, SeatGranted):
                self._granted = event
            else:
                self.ready = event
                if self.origin.prompt is not None and self.tenure.state is not TenureState.LEFT:
                    self.log.add_prompt(replace(self.origin.prompt, log_probs=tuple(self._prompt_log_probs)))
            self._before_output.append(event)
        if self.log.ready or self._before_output or self._move_news:
            self._wake()

    def break_off(self, why: str) -> None:
        """End the call with an error of its router, and the seat with it."""
        self.broken = why
        self.tenure.cancelled = True
        self._wake()

    # the writer's side

    def next_again(self) -> bytes | None:
        """The next output that comes again, as it was sent."""
        return self._again.popleft() if self._again else None

    def next_before_output(self) -> SeatGranted | PromptReady | None:
        """The next of what comes before any output."""
        return self._before_output.popleft() if self._before_output else None

    def next_after_output(self) -> SeatPaused | SeatPushed | None:
        """The next answer about a move, when all output before it was taken."""
        return self._move_news.popleft() if self._move_news and self.log.caught_up else None

    def begin_write(self, now: float) -> Published | None:
        """The next delta, numbered; None when there is none."""
        self._writing = self.log.publish()
        self._writing_since = now if self._writing is not None else None
        return self._writing

    def keep(self, published: Published, data: bytes) -> None:
        """What is being written, as it is sent, may be wanted again."""
        if self.replay is not None:
            counts = (len(published.selected_ids), len(published.token_ids), published.text_bytes)
            whole = published if self.replay.whole else None
            held, of = published.held_log_probs, (published.choice, published.ended)
            sent = Sent(published.sequence_no, data, *counts, held, whole, *of)
            self.replay.add(sent, published.selected_ids)

    def end_write(self) -> OutputTaken | None:
        """The delta was written, or its call broke; what to tell the engine, when it is worth a message."""
        if self._writing is None:
            return None
        written, self._writing, self._writing_since = self._writing, None, None
        number, credit = self._credit_of(written)
        due_bytes = credit.add(written.cost_bytes)
        return OutputTaken(number, due_bytes) if due_bytes else None

    def _credit_of(self, published: Published) -> tuple[int, Credit]:
        """The seat whose output it is, and what of that was not told to be taken."""
        return self.number, self._credit

    def terminal(self) -> Terminal | None:
        """The terminal, when it is fixed and everything before it was written; again for each call."""
        if self._terminal is None:
            self._terminal = self.log.terminal()
        return self._terminal

    def rewind(self, wanted: int, now: float) -> Replay:
        """Another call reads from the event `wanted` on, which is at most the next one."""
        assert self.replay is not None, f"seat {self.number} can not be adopted"
        replay = self.replay.replay(wanted, self.log.next_sequence_no)
        self._again = deque(replay.outputs)
        self._before_output.clear()
        if self.ready is None and self._granted is not None:
            self._before_output.append(self._granted)
        self._move_news.clear()
        if self._paused is not None:
            # A sequence that stands still goes on for nobody, also after a push: whoever takes it over must know.
            self._move_news.append(self._paused)
        if self.log.waiting_since is not None:
            self.log.waiting_since = now
        self._wake()
        return replay

    def _wake(self) -> None:
        if self.reader is not None:
            self.reader.news.set()

    # reading

    @property
    def held(self) -> bool:
        """Whether nobody reads it and somebody may come."""
        return self.tenure.state is TenureState.HELD

    @property
    def kept(self) -> bool:
        """Whether it has ended, and its end is with a router whose client still reads."""
        return self.ended_at is not None and self.reader is not None and self.reader.keeps_end and not self.held

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text that wait or are being written."""
        return self.log.buffer_bytes + (self._writing.text_bytes if self._writing is not None else 0)

    @property
    def replay_bytes(self) -> int:
        """What is kept to be sent again."""
        return self.replay.kept_bytes if self.replay is not None else 0

    @property
    def behind(self) -> bool:
        """Whether the flow window is full as the engine counts it: it has paused the sequence, or is about to."""
        writing = self._writing.cost_bytes if self._writing is not None else 0
        return self._single.held_bytes + writing + self._credit.untold_bytes >= self._window_bytes

    def not_taken_since(self) -> float | None:
        """When the oldest output came that its reader has not taken; None when there is none."""
        return self._writing_since if self._writing_since is not None else self.log.waiting_since

"""What is known of a request while it runs: counts, times, and what goes into the record at its end."""

from dataclasses import dataclass, field, replace

from lifecycle.finish import Cause, Ending
from lifecycle.record import RequestRecord
from lifecycle.states import State
from lifecycle.usage import Timings, Usage
from router.choices import ChoiceProgress, choices_now, ending_of
from router.pool_messages import Output, SeatEnd, held_after
from router.prefill_call import PrefillCall, PrefillDone, PrefillFailure
from router.seat import Committed
from rpc import clocks


@dataclass(slots=True)
class Progress:
    """Mutable; one a request. Times are monotonic seconds, 0 before the event."""

    prompt_tokens: int
    arrived_at: float
    #: From arrival until the request was found good.
    check_s: float = 0.0
    #: Prompt tokens that each side had in its cache: those of the attempt that brought the prompt's KV about.
    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    #: Every token that was told, in order: what another decode member needs to go on.
    output_token_ids: list[int] = field(default_factory=list)
    returned_tokens: int = 0
    #: Log-probabilities of the last tokens, which were not returned yet; empty when nobody asked for any.
    held_log_probs: tuple[bytes, ...] = ()
    #: Bytes of text that these tokens have brought and that the client's stream has got.
    text_bytes: int = 0
    next_sequence_no: int = 0
    queued_since: float = 0.0
    queue_s: float = 0.0
    first_token_at: float = 0.0
    decoding_since: float = 0.0
    earlier_decode_s: float = 0.0
    last_output_at: float = 0.0
    cancel_sent_at: float = 0.0
    #: The call that computes the prompt elsewhere, while it goes on; it tells how far it is.
    prefilling: PrefillCall | None = None
    committed: Committed | None = None
    prefill: PrefillDone | None = None
    prefill_failure: PrefillFailure | None = None
    seat_end: SeatEnd | None = None
    discarded_tokens: int = 0
    gap: bool = False
    lost_causes: list[Cause] = field(default_factory=list)
    #: With several outputs, each of them by index; their tokens and what is held of them is there.
    choices: list[ChoiceProgress] = field(default_factory=list)

    def new_attempt(self, *, moved: bool) -> None:
        """Forget what belonged to the attempt before. What was in caches stays true where the KV moves."""
        self.prefilling = self.committed = self.prefill = self.prefill_failure = self.seat_end = None
        if not moved:
            self.decode_cached_tokens = self.prefill_cached_tokens = 0

    def queued(self) -> None:
        """Waiting for admission from now on."""
        self.queued_since = clocks.monotonic()

    def admitted(self) -> None:
        """The wait is over."""
        if self.queued_since:
            self.queue_s += clocks.monotonic() - self.queued_since
            self.queued_since = 0.0

    def output(self, one: Output, now: float) -> None:
        """One Output was read; whether it goes to the client is another matter."""
        self.text_bytes += one.text_bytes
        self.returned_tokens += one.returned_tokens
        self.last_output_at = now
        if self.choices:
            self.choices[one.choice].take(one)
            return
        self.output_token_ids += one.selected
        self._hold(one.held_log_probs)

    def paused(self, selected: tuple[int, ...], held_log_probs: tuple[bytes, ...]) -> None:
        """The seat told, beside its outputs, what was chosen by the time that it stood still."""
        self.output_token_ids += selected
        self._hold(held_log_probs)

    def _hold(self, log_probs: tuple[bytes, ...]) -> None:
        unreturned = len(self.output_token_ids) - self.returned_tokens
        self.held_log_probs = held_after(self.held_log_probs, log_probs, unreturned)

    def discarded(self, one: Output) -> None:
        """An Output that the client will not get; nothing may follow it but the end."""
        self.gap = True
        self.returned_tokens -= one.returned_tokens
        self.text_bytes -= one.text_bytes
        self.discarded_tokens += one.returned_tokens

    @property
    def prompt_told(self) -> bool:
        """Whether the client's stream has got the event with the prompt, if there is to be one: it comes before all output."""
        return self.next_sequence_no > 1

    @property
    def selected_tokens(self) -> int:
        """Tokens chosen so far, as far as they were told."""
        return sum(len(one.output_token_ids) for one in self.choices) if self.choices else len(self.output_token_ids)

    @property
    def ending(self) -> Ending | None:
        """How several outputs ended by themselves; None while one goes on, and for a single one."""
        return ending_of(self.choices) if self.choices else None

    def decode_lost(self) -> None:
        """The decode member is gone; what it had told stays."""
        if self.decoding_since:
            self.earlier_decode_s += max(0.0, self.last_output_at - self.decoding_since)
            self.decoding_since = 0.0

    def usage(self) -> Usage:
        """Counts now: the member's own after it has ended, what its outputs told before."""
        # Both sides have the front of one prompt: the longer one holds the other, and nothing is counted twice.
        known = [self.decode_cached_tokens, self.prefill_cached_tokens]
        known += [self.prefill.cached_tokens] if self.prefill is not None else []
        known += [self.seat_end.usage.cached_prompt_tokens] if self.seat_end is not None else []
        cached = min(max(known), self.prompt_tokens)
        if self.choices:
            told = choices_now(self.choices, self.prompt_tokens, committed=self.committed is not None)
        elif self.seat_end is None:
            processed = self.prompt_tokens + max(0, self.selected_tokens - 1) if self.committed else 0
            return Usage(
                prompt_tokens=self.prompt_tokens,
                cached_prompt_tokens=cached,
                selected_tokens=self.selected_tokens,
                processed_tokens=processed,
                returned_tokens=self.returned_tokens,
                billed_tokens=self.returned_tokens,
            )
        else:
            told = self.seat_end.usage
        return replace(
            told,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=cached,
            returned_tokens=max(0, told.returned_tokens - self.discarded_tokens),
            billed_tokens=max(0, told.billed_tokens - self.discarded_tokens),
        )

    def timings(self, now: float, send_s: float) -> Timings:
        """Where the time went until `now`."""
        told = self.prefilling.done if self.prefilling is not None else None  # before the end it is in the call alone
        end, done, committed = self.seat_end, self.prefill or told, self.committed
        local = done is None and committed is not None
        waiting_s = now - self.queued_since if self.queued_since else 0.0
        decode_s = end.decode_s if end else (now - self.decoding_since if self.decoding_since else 0.0)
        return Timings(
            check_s=self.check_s,
            queue_s=self.queue_s + waiting_s,
            prefill_queue_s=done.queue_s if done else (committed.queue_s if local and committed else 0.0),
            prefill_s=done.compute_s if done else (committed.compute_s if local and committed else 0.0),
            handover_s=done.handover_s if done else (committed.handover_s if committed else 0.0),
            handover_exposed_s=done.exposed_s if done else 0.0,
            decode_s=self.earlier_decode_s + decode_s,
            stop_hold_s=end.stop_hold_s if end else 0.0,
            send_s=send_s,
            first_token_s=self.first_token_at - self.arrived_at if self.first_token_at else 0.0,
            total_s=now - self.arrived_at,
        )


def note_cancel(record: RequestRecord, progress: Progress, wall: float, now: float) -> None:
    """Fills in the cancel's three moments on a record that is about to end CANCELLED at wall time `wall`.

    The member tells how long after the cancel reached it a step border saw it; a cancel that met no sequence was seen at
    once.
    """
    requested = record.cancel_requested_at
    if requested is None:
        requested = record.cancel_requested_at = _entered(record, State.CANCEL_REQUESTED) or wall
    observed = _entered(record, State.CANCEL_REQUESTED) or wall
    if progress.seat_end is not None and progress.cancel_sent_at and progress.seat_end.cancel_observed_s is not None:
        observed = wall - (now - progress.cancel_sent_at) + progress.seat_end.cancel_observed_s
    record.cancel_observed_at = min(max(observed, requested), max(wall, requested))
    record.cancel_effective_at = max(wall, record.cancel_observed_at)


def with_cancel_times(record: RequestRecord) -> Timings:
    """The record's timings with the cancel's two durations."""
    requested, observed, effective = record.cancel_requested_at, record.cancel_observed_at, record.cancel_effective_at
    if requested is None or observed is None or effective is None:
        return record.timings
    return replace(record.timings, cancel_observed_s=observed - requested, cancel_effective_s=effective - requested)


def _entered(record: RequestRecord, state: State) -> float | None:
    return next((one.at for one in reversed(record.transitions) if one.state is state), None)

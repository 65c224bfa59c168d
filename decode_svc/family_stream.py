"""The stream of several outputs of one prompt: one call, one row of numbers, a seat for each output."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from decode_svc.choices_log import ChoicesLog, ChoicesTold
from decode_svc.flow import Credit
from decode_svc.messages import OutputMade, SeatEnded, SeatRefused
from decode_svc.replay_log import ReplayLog
from decode_svc.seat_stream import SeatOrigin, SeatStream
from decode_svc.stream_log import Published
from decode_svc.tenure import Tenure
from lifecycle.finish import of_choices
from lifecycle.usage import together


class FamilyStream(SeatStream):
    """`seats`: numbers of the seats, in the order of `origin.choices`; the first one is the stream's own."""

    def __init__(
        self, seats: Sequence[int], origin: SeatOrigin, window_bytes: int, tenure: Tenure, replay: ReplayLog | None
    ) -> None:
        self._choice_of = {seat: choice for seat, (choice, _) in zip(seats, origin.choices, strict=True)}
        self._seat_of = {choice: seat for seat, choice in self._choice_of.items()}
        self._credits = {choice: Credit(window_bytes) for choice in self._seat_of}
        self._ends: dict[int, SeatEnded] = {}
        super().__init__(seats[0], origin, window_bytes, tenure, replay)

    @property
    def numbers(self) -> tuple[int, ...]:
        """See SeatStream."""
        return tuple(self._choice_of)

    def origin_of(self, seat: int) -> SeatOrigin:
        """See SeatStream."""
        return replace(self.origin, earlier=dict(self.origin.choices)[self._choice_of[seat]])

    def seat_of(self, choice: int) -> int | None:
        """The seat of one of the outputs; None for one that is not made here."""
        return self._seat_of.get(choice)

    @property
    def unended(self) -> tuple[int, ...]:
        """Seats whose end has not been told."""
        return tuple(seat for seat, choice in self._choice_of.items() if choice not in self._ends)

    @property
    def behind(self) -> bool:
        """See SeatStream; one of them is enough."""
        log, writing = self._choices, self._writing
        return any(
            log.held_bytes_of(choice)
            + (writing.cost_bytes if writing is not None and writing.choice == choice else 0)
            + credit.untold_bytes
            >= self._window_bytes
            for choice, credit in self._credits.items()
        )

    @property
    def _choices(self) -> ChoicesLog:
        assert isinstance(self.log, ChoicesLog)
        return self.log

    def _new_log(self, window_bytes: int) -> ChoicesLog:
        origin = self.origin
        final_only, waits = not origin.sends_output, origin.prompt is not None
        told = ChoicesTold(final_only, origin.log_probs, origin.told_choices, origin.ranks_only, waits)
        held = {choice: earlier.held_log_probs for choice, earlier in origin.choices}
        return ChoicesLog(origin.first_sequence_no, window_bytes, held, told)

    def _add(self, event: OutputMade, now: float) -> None:
        choice = self._choice_of[event.seat]
        self._choices.add_to(choice, event.text, event.shown, event.selected, now, event.log_probs)

    def _end(self, event: SeatEnded | SeatRefused, now: float) -> None:
        if isinstance(event, SeatRefused):
            super()._end(event, now)
            return
        choice = self._choice_of[event.seat]
        self._choices.end_choice(choice, event)
        self._ends[choice] = event
        if len(self._ends) == len(self._choice_of):
            super()._end(combined(self.number, self._ends), now)

    def _credit_of(self, published: Published) -> tuple[int, Credit]:
        return self._seat_of[published.choice], self._credits[published.choice]


def combined(seat: int, ends: Mapping[int, SeatEnded]) -> SeatEnded:
    """The end of all, from the ends by choice. When one of them has to go on elsewhere, that is how all have ended here."""
    by_index = [ends[choice] for choice in sorted(ends)]
    elsewhere = [end.ending for end in by_index if end.ending.goes_on]
    ending = elsewhere[0] if elsewhere else of_choices([end.ending for end in by_index])
    reports = [end.report for end in by_index]
    last = max(reports, key=lambda one: one.ended_at)
    released: dict[str, int] = {}
    for report in reports:
        for name, amount in report.released.items():
            released[name] = released.get(name, 0) + amount
    report = replace(
        last,
        ready_at=min((one.ready_at for one in reports if one.ready_at is not None), default=None),
        first_token_at=min((one.first_token_at for one in reports if one.first_token_at is not None), default=None),
        last_token_at=max((one.last_token_at for one in reports if one.last_token_at is not None), default=None),
        stop_hold_s=max(one.stop_hold_s for one in reports),
        held_bytes=sum(one.held_bytes for one in reports),
        released=released,
    )
    return SeatEnded(seat, ending, together([end.usage for end in by_index]), report)

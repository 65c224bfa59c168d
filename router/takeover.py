"""What a route begins with when the request comes from another router."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from lifecycle.record import RequestRecord
from router.client_messages import started
from router.progress import Progress
from router.request import ValidatedRequest
from router.seat import Adopted, Seat
from router.store import Reservations
from router.stream_log import LogBounds, StreamLog
from router.whole_output import WholeOutput


@dataclass(frozen=True, slots=True)
class Takeover:
    """The record and what it holds; the seat, open and kept open by `stack`, and what its member told. `grace_s` is for the
    request's client to come back."""

    record: RequestRecord
    holds: Reservations | None
    seat: Seat
    stack: AsyncExitStack
    adopted: Adopted
    grace_s: float

    def log(self, request: ValidatedRequest, bounds: LogBounds) -> StreamLog:
        """The log of what will come again; with the first event when everything after it comes."""
        adopted = self.adopted
        if adopted.next_sequence_no > 1:
            return StreamLog(bounds, adopted.next_sequence_no, self._sent_text_bytes)
        log = StreamLog(bounds)
        log.put(started(request, 0))
        return log

    @property
    def whole(self) -> WholeOutput:
        """With CUMULATIVE: all that was returned before the first event that comes again."""
        whole = WholeOutput()
        for part in (self.adopted.opening.returned, self.adopted.returned):
            whole.join(part)
        for choice in self.adopted.choices:
            for part in choice.returned:
                whole.join(part, choice.index)
        return whole

    @property
    def _sent_text_bytes(self) -> int:
        return self.adopted.sent_text_bytes + sum(one.text_bytes for one in self.adopted.choices)

    def progress(self, request: ValidatedRequest, arrived_at: float) -> Progress:
        """What went before the first event that comes again."""
        adopted = self.adopted
        progress = Progress(request.prompt_tokens, arrived_at)
        progress.next_sequence_no = adopted.next_sequence_no
        progress.output_token_ids = list(adopted.output_token_ids)
        progress.choices = adopted.choices
        progress.returned_tokens = adopted.returned_tokens + sum(one.returned_tokens for one in adopted.choices)
        progress.text_bytes = self._sent_text_bytes
        progress.held_log_probs = adopted.held_log_probs
        progress.check_s = self.record.timings.check_s
        progress.queue_s = self.record.timings.queue_s
        return progress

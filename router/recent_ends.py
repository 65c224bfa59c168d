"""The last requests that have ended at this router: what people look for first. Pure."""

from collections import deque

from lifecycle.record import RequestRecord
from router.cell_view import EndedRequest

#: Ended requests that are remembered.
MAX_ENDED = 200


class RecentEnds:
    """Newest first."""

    def __init__(self, most: int = MAX_ENDED) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=most)
        self.total = 0

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.ending is None:
            return
        self.total += 1
        self._ended.appendleft(
            EndedRequest(
                request_id=record.request_id,
                tenant=record.tenant,
                adapter=record.adapter,
                state=record.state,
                ending=record.ending,
                at=record.transitions[-1].at,
                attempts=record.attempt,
                priority=record.priority,
                prefill_member=record.prefill_member,
                decode_member=record.decode_member,
                usage=record.usage if record.counted else None,
                timings=record.timings,
            )
        )

    def newest(self) -> tuple[EndedRequest, ...]:
        """All that are remembered."""
        return tuple(self._ended)

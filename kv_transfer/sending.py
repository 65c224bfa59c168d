"""The sending end of a member: a send pump, with what the owner of the source pages needs round it."""

from collections.abc import Callable

from kv_transfer.grant_writer import PushesEnded, Transfers
from kv_transfer.ports import PushResult, Sender
from kv_transfer.pump import PumpFull, PumpStopped, SendLimits, SendPump, SendStatistics
from rpc import clocks

#: Cause of a push that found no place in the pump's queue; nothing of it was written.
QUEUE_FULL = "queue_full"


class SendingEnd:
    """`deliver` gets the end of each push exactly once, on any thread; `failed` the cause of each that failed.

    on_crash: gets what ended the pump's thread, or found it ended.
    """

    def __init__(
        self,
        make_sender: Callable[[], Sender],
        deliver: Callable[[PushesEnded], None],
        failed: Callable[[str], None],
        on_crash: Callable[[BaseException], None],
        make_pump: Callable[..., SendPump] = SendPump,
    ) -> None:
        self._make_sender = make_sender
        self._deliver = deliver
        self._failed = failed
        self._on_crash = on_crash
        self._make_pump = make_pump
        self._pump: SendPump | None = None
        self._post_s = 0.0

    @property
    def started(self) -> bool:
        """Whether there is an agent."""
        return self._pump is not None

    def start(self) -> None:
        """Make the agent and start its thread; blocks. Raises what making it raises, and may then be called again."""
        pump = self._make_pump(self._make_sender, self._ended, self._on_crash, SendLimits())
        pump.start()
        self._pump = pump

    def transfer(self, transfers: Transfers) -> None:
        """Give the transfer thread its orders; never blocks. A push that it cannot take ends at once."""
        pump = self._pump
        assert pump is not None, "something is to be written and there is no sending agent"
        try:
            for endpoint in transfers.connects:
                pump.connect(endpoint)
            pump.withdraw(transfers.withdrawals)
        except PumpStopped as error:
            self._on_crash(error)
        for push in transfers.pushes:
            try:
                pump.submit(push)
            except (PumpFull, PumpStopped) as error:
                self._ended([PushResult(push.push_id, False, QUEUE_FULL, str(error))])

    def statistics(self) -> SendStatistics:
        """Counts of the pump; all 0 before `start`."""
        return self._pump.statistics() if self._pump is not None else SendStatistics()

    def close(self) -> None:
        """Let what is in flight end and give the agent back; blocks."""
        if self._pump is not None:
            self._pump.close()

    def _ended(self, results: list[PushResult]) -> None:
        spent_s = self.statistics().post_seconds
        post_s, self._post_s = max(0.0, spent_s - self._post_s), spent_s
        self._deliver(PushesEnded(tuple(results), post_s, clocks.monotonic()))
        for result in results:
            if not result.ok:
                self._failed(result.cause)

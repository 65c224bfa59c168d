"""The wire between the memories of simulated members: slow, in pieces, out of order; and the stamp on every page.

Each copy is looked at: a hand-over may write only into pages and the row of a grant that its reader still keeps for it.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.offer import Slab
from kv_transfer.plan import Notice
from kv_transfer.ports import Push

#: Notices of the last pushes, of which one may come again.
REMEMBERED = 12


class WatchedFabric(MemoryFabric):
    """`allowed` answers why a push may not write now, None when it may; what it says is kept in `trespasses`."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(seed=rng.randrange(1 << 30), step_bytes=rng.choice((8, 24, 96, 4096)))
        self.allowed: Callable[[str, Push, Notice], str | None] = lambda agent, push, notice: None
        self.trespasses: list[str] = []
        self._lingers = random.Random(rng.random())
        #: How often a notice of before comes once more, at the end of a push.
        self.repeat_chance = 0.0
        self._told: deque[Push] = deque(maxlen=REMEMBERED)
        self._receivers: list[SimulatedReceiver] = []
        self._senders: list[SimulatedSender] = []
        self._owners: dict[str, Any] = {}

    def know(self, end: "SimulatedReceiver | SimulatedSender") -> None:
        """An end was made."""
        (self._receivers if isinstance(end, SimulatedReceiver) else self._senders).append(end)  # type: ignore[arg-type]

    def died(self, host: Any) -> None:
        """A process was killed: nothing lands in its memory, nothing of it goes on."""
        for receiver in [one for one in self._receivers if one.host is host]:
            receiver.close()
        for sender in [one for one in self._senders if one.host is host]:
            sender.frozen = True
            host.cell.network.later(self._lingers.choice((0.0, 0.3, 2.0)), self._last_bytes, sender)
        self._receivers = [one for one in self._receivers if one.host is not host]
        self._senders = [one for one in self._senders if one.host is not host]

    def _last_bytes(self, sender: "SimulatedSender") -> None:
        """What the kernel of a dead process had taken over lands late; nobody sends its notices."""
        sender.frozen = False
        self._move()
        self.abandon(sender)

    def freeze_process(self, host: Any, frozen: bool) -> None:
        """A process was stopped, or goes on."""
        for sender in self._senders:
            if sender.host is host:
                sender.frozen = frozen
        for receiver in self._receivers:
            if receiver.host is host:
                for agent in receiver.agent_names():
                    self.freeze(agent, frozen)

    def host_of(self, agent: str) -> Any:
        """The process whose memory an agent stands for."""
        return self._owners.get(agent)

    def agent_names(self) -> list[str]:
        """All living agents."""
        return [name for receiver in self._receivers for name in receiver.agent_names()]

    def owned_by(self, agent: str, host: Any) -> None:
        """An agent was made."""
        self._owners[agent] = host

    def _notify(self, push: Push) -> None:
        super()._notify(push)
        self._told.append(push)
        if self.repeat_chance and self._lingers.random() < self.repeat_chance:
            again = self._lingers.choice(self._told)
            if again.agent in self._agents:
                super()._notify(again)

    def _move(self) -> None:
        before = [(one, one.done_bytes) for one in self._transfers]
        super()._move()
        for one, done in before:
            if one.done_bytes > done:
                why = self.allowed(one.push.agent, one.push, Notice.from_bytes(one.push.notice))
                if why is not None:
                    self.trespasses.append(why)


class SimulatedReceiver(MemoryReceiver):
    """A receiving end with its process."""

    def __init__(self, fabric: WatchedFabric, name: str, slabs: Sequence[Slab], host: Any) -> None:
        super().__init__(fabric, name, slabs)
        self.host = host
        self._watched = fabric
        fabric.know(self)

    def endpoint(self, writer: str) -> Any:
        """See Receiver."""
        endpoint = super().endpoint(writer)
        self._watched.owned_by(endpoint.agent, self.host)
        return endpoint

    def agent_names(self) -> list[str]:
        """Its living agents."""
        return [agent.name for agent, _ in self._agents.values()]


class SimulatedSender(MemorySender):
    """A sending end with its process."""

    def __init__(self, fabric: WatchedFabric, name: str, slabs: Sequence[Slab], host: Any) -> None:
        super().__init__(fabric, name, slabs)
        self.host = host
        fabric.know(self)

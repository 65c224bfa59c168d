"""Who reads a seat, and for how long the seat waits for somebody when nobody does. Pure."""

from dataclasses import dataclass, field
from enum import Enum


class TenureState(Enum):
    """Whether somebody reads the seat."""

    READ = "read"  # a call has it
    HELD = "held"  # no call has it; one may take it over
    LEFT = "left"  # no call has it and none can get it any more


@dataclass(slots=True)
class Tenure:
    """Calls are numbered from 1; `reader` is the one that has the seat. `hold_s` 0: the seat ends with its call.

    cancelled: a router has asked for the end, so nobody will come back for it.
    """

    hold_s: float
    state: TenureState = field(default=TenureState.LEFT, init=False)
    reader: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    held_until: float = field(default=0.0, init=False)

    def begin(self) -> int:
        """The first call. Returns its number."""
        assert self.reader == 0, "a seat begins once"
        self.state, self.reader = TenureState.READ, 1
        return 1

    @property
    def adoptable(self) -> bool:
        """Whether another call can take the seat over."""
        return self.hold_s > 0 and self.state is not TenureState.LEFT

    def adopt(self) -> int:
        """Another call takes it over, from a call that is gone or still there. Returns its number."""
        assert self.adoptable, "a seat that nobody can adopt"
        self.state = TenureState.READ
        self.reader += 1
        return self.reader

    def leave(self, reader: int, now: float) -> None:
        """A call is gone. One that does not have the seat any more changes nothing."""
        if reader != self.reader or self.state is not TenureState.READ:
            return
        if self.hold_s > 0 and not self.cancelled:
            self.state, self.held_until = TenureState.HELD, now + self.hold_s
        else:
            self.state = TenureState.LEFT

    def give_up(self) -> None:
        """Nobody is waited for any longer."""
        if self.state is TenureState.HELD:
            self.state = TenureState.LEFT

    def over(self, now: float) -> bool:
        """Whether the wait has come to its end."""
        return self.state is TenureState.HELD and now >= self.held_until

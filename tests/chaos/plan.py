"""What happens in a round: which requests, what their clients do, and which faults come when. Pure; one seed, one plan."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tests.chaos.shapes import SHAPES, SHAPES_OF_CHOICES, Shape

REQUESTS = range(4, 7)
#: So many of all requests ask for several outputs.
SHARE_OF_CHOICES = 0.2
#: A process that stands still that long is not taken for lost; one that does longer is (see LOST_AFTER_S of the cell).
SHORT_S = (0.3, 1.2)
LONG_S = (4.0, 6.0)


class Kind(Enum):
    """What is done to a process, or to the network."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    FREEZE = "SIGSTOP"
    CUT = "cut between the pools"
    UNPLUG = "unplugged"


class Phase(Enum):
    """When, in the life of the request that is watched."""

    SENT = "sent"
    PREFILLING = "prefilling"
    FIRST_TOKEN = "first token"
    LATE = "late in decoding"
    LAST_TOKEN = "last token"


class Manner(Enum):
    """What a client does."""

    READ = "reads"
    SLOW = "reads slowly"
    CRAWL = "reads one event a second, with a window of some bytes"
    LEAVE = "leaves"
    CANCEL = "cancels"
    RETURN = "leaves and comes back"
    TWICE = "asks twice"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target`: process names, one but for a cut. `seconds`: how long it lasts, or until the restart begins."""

    kind: Kind
    target: tuple[str, ...]
    phase: Phase
    watched: int
    delay_s: float
    seconds: float

    def __str__(self) -> str:
        words = f"{self.kind.value} {'+'.join(self.target)} at {self.phase.value} of #{self.watched} + {self.delay_s:.2f} s"
        return f"{words} for {self.seconds:.1f} s"

    @property
    def roles(self) -> frozenset[str]:
        """Roles that it meets."""
        return frozenset(name.partition("-")[0] for name in self.target)


@dataclass(frozen=True, slots=True)
class Order:
    """One request. `router`: the number of the one it is sent to. `events`: after so many the client acts (-1: before all)."""

    shape: Shape
    router: int
    manner: Manner
    events: int
    delay_s: float
    #: A cancel waits for its effect; one that comes back repeats Generate rather than Attach.
    variant: bool

    def __str__(self) -> str:
        act = f" after {self.events}" if self.manner in (Manner.LEAVE, Manner.CANCEL, Manner.RETURN) else ""
        return f"{self.shape.name}, router-{self.router}, {self.manner.value}{act}{' (variant)' if self.variant else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A round."""

    seed: str
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults)) or "no fault"

    def hits(self, kinds: set[Kind], role: str) -> bool:
        """Whether one of these faults meets a process of that role."""
        return any(fault.kind in kinds and role in fault.roles for fault in self.faults)


def plan_of(seed: str, manners: frozenset[Manner] = frozenset(Manner)) -> Plan:
    """The round of a seed, with clients of these manners."""
    rng = random.Random(seed)
    count = rng.choice(REQUESTS)
    orders = tuple(order_of(rng, manners) for _ in range(count))
    faults: list[Fault] = []
    for _ in range(rng.choices((0, 1, 2), (1, 6, 3))[0]):
        fault = _fault(rng, count)
        if not any(set(fault.target) & set(other.target) for other in faults):
            faults.append(fault)
    # Drawn apart, so that everything else about the round of a seed is what it was without them.
    apart = random.Random(f"choices of {seed}")
    orders = tuple(
        replace(order, shape=apart.choice(SHAPES_OF_CHOICES)) if apart.random() < SHARE_OF_CHOICES else order for order in orders
    )
    return Plan(seed, orders, tuple(faults))


def order_of(rng: random.Random, manners: frozenset[Manner], shapes: Sequence[Shape] = SHAPES) -> Order:
    """A request of one of these shapes, with a client of one of these manners."""
    weights = {
        Manner.READ: 6,
        Manner.SLOW: 2,
        Manner.CRAWL: 1,
        Manner.LEAVE: 1,
        Manner.CANCEL: 2,
        Manner.RETURN: 2,
        Manner.TWICE: 1,
    }
    manner = rng.choices(tuple(weights), tuple(weights.values()))[0]
    events = rng.choice((-1, 0, 1, 2, 8, 20)) if manner is Manner.CANCEL else rng.choice((0, 1, 2, 8, 20))
    order = Order(rng.choice(shapes), rng.randrange(2), manner, events, rng.uniform(0.0, 0.5), rng.random() < 0.5)
    return order if manner in manners else Order(order.shape, order.router, Manner.READ, 0, order.delay_s, False)


def _fault(rng: random.Random, requests: int) -> Fault:
    role = rng.choices(("prefill", "decode", "router", "store", "network"), (5, 7, 4, 3, 3))[0]
    phase, watched, delay_s = rng.choice(tuple(Phase)), rng.randrange(requests), rng.uniform(0.0, 0.3)
    short, long = rng.uniform(*SHORT_S), rng.uniform(*LONG_S)
    lasting = long if rng.random() < 0.4 else short
    if role == "network":
        if rng.random() < 0.3:
            return Fault(
                Kind.UNPLUG, (rng.choice(("prefill-0", "prefill-1", "decode-0", "decode-1")),), phase, watched, delay_s, lasting
            )
        pools = [(f"prefill-{number}",) for number in range(2)] + [("prefill-0", "prefill-1")]
        target = (*rng.choice(pools), f"decode-{rng.randrange(2)}")
        return Fault(Kind.CUT, target, phase, watched, delay_s, lasting)
    name = "store" if role == "store" else f"{role}-{rng.randrange(2)}"
    kind = rng.choices((Kind.KILL, Kind.TERM, Kind.FREEZE), (4, 2, 3))[0]
    return Fault(kind, (name,), phase, watched, delay_s, lasting if kind is Kind.FREEZE else short)

"""What happens in a round: which requests, what their clients do, and which faults come when. Pure; one seed, one plan."""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from tests.chaos.shapes import SHAPES, SHAPES_OF_CHATS, SHAPES_OF_CHOICES, Shape

REQUESTS = range(4, 7)
#: So many of all requests ask for several outputs.
SHARE_OF_CHOICES = 0.2
#: And so many come through the HTTP door; of those so many are conversations, want a stream, and have a time limit.
SHARE_OF_HTTP = 0.4
SHARE_OF_CHATS, SHARE_OF_STREAMS, SHARE_OF_LIMITS = 0.5, 0.65, 0.25
#: The time limit of a call, in seconds: some are long enough.
LIMIT_S = (0.6, 4.0)
#: Whose requests they are.
TENANTS = ("amber", "basalt", "cobalt")
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


#: What a router does not survive with its requests, or is taken not to have survived.
ROUTER_ENDS = frozenset({Kind.KILL, Kind.TERM, Kind.FREEZE, Kind.UNPLUG})


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


class Door(Enum):
    """How a client speaks with its router."""

    GRPC = "gRPC"
    STREAM = "HTTP, a stream"
    WHOLE = "HTTP, in one piece"


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
    door: Door = Door.GRPC
    #: Empty: the client says nothing of it.
    tenant: str = ""
    #: For each call, in seconds; 0: none. Through the HTTP door only.
    limit_s: float = 0.0

    def __str__(self) -> str:
        act = f" after {self.events}" if self.manner in (Manner.LEAVE, Manner.CANCEL, Manner.RETURN) else ""
        limit = f" within {self.limit_s:.1f} s" if self.limit_s else ""
        who = f"{self.tenant} by {self.door.value}{limit}" if self.tenant else self.door.value
        return f"{self.shape.name}, {who}, router-{self.router}, {self.manner.value}{act}{' (variant)' if self.variant else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A round."""

    seed: str
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults)) or "no fault"

    def hits(self, kinds: Set[Kind], role: str) -> bool:
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
    doors = random.Random(f"doors of {seed}")
    return Plan(seed, tuple(_at_a_door(doors, order) for order in orders), tuple(faults))


def _at_a_door(rng: random.Random, order: Order) -> Order:
    """The order of one of the tenants, and maybe of a client that speaks HTTP."""
    order = replace(order, tenant=rng.choice(TENANTS))
    http, chat, stream, limit = (
        rng.random() < share for share in (SHARE_OF_HTTP, SHARE_OF_CHATS, SHARE_OF_STREAMS, SHARE_OF_LIMITS)
    )
    talk, limit_s = rng.choice(SHAPES_OF_CHATS), rng.uniform(*LIMIT_S)
    if not http:
        return order
    shape = talk if chat else order.shape
    # What is told when all has ended is no stream.
    door = Door.STREAM if stream and not shape.final_only else Door.WHOLE
    return replace(order, shape=shape, door=door, limit_s=limit_s if limit and order.manner is Manner.READ else 0.0)


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

"""What happens in a world, drawn from its seed: the cell's shape, the requests with their clients, and the faults."""

import random
from dataclasses import dataclass, field, replace
from enum import Enum

from engine.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tests.simulation import tenants
from tests.simulation.cell import Shape
from tests.simulation.client_plans import OVERALL_S, Behaviour, Cancel, ClientPlan
from tests.simulation.model import CONTEXT_TOKENS
from tests.simulation.store_watch import Late
from tests.simulation.wires import Weather

#: Faults and cancels come within so many seconds, and every request comes within it.
BUSY_S = 8.0
#: A router that has not renewed its lease for so long is held to be dead: the default of `router.redis_link`.
LEASE_S = 5.0
#: What a client has for the rest of its stream after the end, in seconds: the default of `router.config`.
SEND_TIMEOUT_S = 10.0


class FaultKind(Enum):
    """What goes wrong."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    BREAK = "break"
    STORE_AWAY = "store_away"
    STORE_EMPTY = "store_empty"
    CLOCK = "clock"
    SLOW_WIRE = "slow_wire"
    WRITES_FAIL = "writes_fail"
    DRAIN = "drain"
    LATE_WRITE = "late_write"


@dataclass(frozen=True, slots=True)
class LateWrite:
    """Which write of a router to the store is late, and what about it."""

    script: str
    late: Late


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` for `lasts_s` seconds. `names`: the processes it is about."""

    kind: FaultKind
    at_s: float
    lasts_s: float
    names: tuple[str, ...] = ()
    amount: float = 0.0
    write: LateWrite | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a world that is not the code's doing."""

    seed: int
    shape: Shape
    weather: Weather
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong in it."""
        return not self.faults

    @property
    def forgets(self) -> bool:
        """Whether an id can be forgotten: routers serve without the store, it loses what a dead router knew, or its clock jumps
        past the time for which ended requests are kept."""
        kinds = {fault.kind for fault in self.faults}
        away = kinds & {FaultKind.STORE_AWAY, FaultKind.STORE_EMPTY, FaultKind.LATE_WRITE}
        away |= {fault.kind for fault in self.faults if fault.kind is FaultKind.CUT and "store" in fault.names}
        serves = self.shape.router.get("redis_outage") == "serve"
        jumped = any(f.kind is FaultKind.CLOCK and "store" in f.names and f.amount > OVERALL_S for f in self.faults)
        return jumped or bool(away and serves) or {FaultKind.STORE_EMPTY, FaultKind.KILL} <= kinds


def draw(seed: int) -> Scenario:
    """The scenario of a seed. Every fourth world is calm."""
    rng = random.Random(f"scenario {seed}")
    calm = seed % 4 == 0
    shape = _shape(rng)
    weather = Weather(
        delay_s=rng.choice((0.0003, 0.002, 0.01)),
        slow_s=rng.choice((0.02, 0.2)),
        slow_chance=rng.choice((0.0, 0.05)),
        keepalive_s=rng.choice((12.0, 35.0)),
        repeat_chance=rng.choice((0.0, 0.0, 0.1)),
    )
    clients = tuple(_client(rng, number, shape) for number in range(rng.randint(2, 14)))
    faults = () if calm else tuple(sorted((_fault(rng, shape) for _ in range(rng.randint(1, 5))), key=lambda fault: fault.at_s))
    # Drawn apart, so that what was added later leaves the rest of a seed's world as it was.
    later = random.Random(f"later {seed}")
    pressure = {
        "reservation": later.choice(("full", "expected")),
        "preemption": later.choice(("recompute", "swap", "cheaper")),
        "swap_pages": 16,
    }
    drafting = random.Random(f"drafting {seed}")
    lookup = {
        "speculation": drafting.choice(("off", "prompt_lookup")),
        "lookup_shortest": 1,
        "draft_tokens": drafting.choice((2, 8)),
    }
    drafts_right = drafting.choice((None, 0.3, 0.9))
    shape = replace(shape, decode={**shape.decode, **pressure, **lookup}, drafts_right=drafts_right)
    readers = (pb.SLOW_READER_UNSPECIFIED, pb.SLOW_READER_COALESCE, pb.SLOW_READER_FAIL)
    clients = tuple(replace(client, slow_reader=later.choices(readers, (6, 1, 1))[0]) for client in clients)
    weather = replace(weather, stuck_commands=later.random() < 0.25)
    if faults and later.random() < 0.15:
        shape, faults = _rivals(later, shape, faults)
    elif faults and later.random() < 0.15:
        script = later.choice(("advance", "admit", "finish", "assert_live", "begin"))
        name = f"router-{later.randrange(shape.routers)}"
        faults = (*faults[:3], _late_write(later, name, later.uniform(0.0, 2.0), script, Late.STRAY))
    if later.random() < 0.2:
        clients = _impatient(later, clients)
    clients = _asking_for_more(random.Random(f"log-probabilities {seed}"), clients)
    prefixes = random.Random(f"prefixes {seed}")
    if prefixes.random() < 0.6:
        clients = _relatives(prefixes, clients)
    crowd = random.Random(f"a crowd {seed}")
    if crowd.random() < 0.1:
        clients = _crowd(crowd, shape, clients)
    clients = _branching(random.Random(f"choices {seed}"), shape, clients)
    shape, clients = tenants.shared(random.Random(f"tenants {seed}"), shape, clients)
    return Scenario(seed, shape, weather, clients, faults)


def _asking_for_more(rng: random.Random, clients: tuple[ClientPlan, ...]) -> tuple[ClientPlan, ...]:
    """In a third of the worlds some requests want log-probabilities, all of their output in each event, or their prompt."""
    if rng.random() >= 1 / 3:
        return clients
    asking = []
    for client in clients:
        top, whole = rng.choice((None, 0, 2)), rng.random() < 0.3 and not client.final_only
        scores, echo = rng.random() < 0.3 and top is not None, rng.random() < 0.2
        asking.append(replace(client, log_probs=top, cumulative=whole, scores_prompt=scores, echo=echo))
    return tuple(asking)


def _branching(rng: random.Random, shape: Shape, clients: tuple[ClientPlan, ...]) -> tuple[ClientPlan, ...]:
    """In a third of the worlds some requests have two to four outputs, as many as a member holds; one may be cancelled."""
    if rng.random() >= 1 / 3:
        return clients
    branching = []
    for client in clients:
        made, asks = rng.randint(2, 4), rng.random() < 0.5
        told = rng.randint(1, made - 1) if rng.random() < 0.4 else made
        cancel = Cancel(rng.choice((0.0, 0.02, 0.1, 0.4)) + 0.05 * rng.random(), rng.randrange(shape.routers), wait=False)
        cancels = ((rng.randrange(made), cancel),) if rng.random() < 0.3 else ()
        needed = tenants.pages_of(replace(client, best_of=made), shape.page_tokens)
        if asks and needed < shape.decode_pages and made <= shape.decode["max_sequences"]:
            told = told if client.final_only else made
            client = replace(client, choices=told, best_of=made, choice_cancels=cancels)
        branching.append(client)
    return tuple(branching)


def _shape(rng: random.Random) -> Shape:
    page_tokens = rng.choice((2, 4, 8))
    # The least that holds one request of the longest kind, and some more.
    least = -(-CONTEXT_TOKENS // page_tokens) + 1
    return Shape(
        routers=rng.choice((1, 1, 2)),
        prefills=rng.choice((0, 1, 1, 2)),
        decodes=rng.choice((1, 1, 2)),
        page_tokens=page_tokens,
        decode_pages=least + rng.choice((0, 4, 40)),
        prefill_pages=least + rng.choice((0, 4, 40)),
        router={
            "exclude_s": 0.05,
            "buffer_bytes": rng.choice((1024, 65_536)),
            "seat_timeout_s": rng.choice((1.0, 5.0)),
            "cancel_grace_s": rng.choice((1.0, 5.0)),
            "lost_after_s": rng.choice((4.0, 10.0)),
            "max_attempts": rng.choice((2, 3)),
            "queue_clock_s": OVERALL_S,
            "replay_bytes": rng.choice((2 * 65_536, 1 << 20)),
            "replay_keep_s": rng.choice((2.0, 20.0)),
            "redis_outage": rng.choice(("refuse", "serve")),
            "max_overall_clock_s": 10 * OVERALL_S,
        },
        prefill={"max_step_tokens": rng.choice((5, 16, 64)), "staging_rows": rng.choice((1, 2, 4))},
        decode={
            "stream_bytes": rng.choice((256, 4096)),
            "landing_rows": rng.choice((1, 2, 4)),
            "step_sequences": rng.choice((2, 8)),
            "max_step_tokens": rng.choice((12, 40)),
            "grant_expires_s": rng.choice((2.0, 10.0)),
            "drain_call_s": rng.choice((0.5, 2.0)),
            "max_sequences": rng.choice((3, 16)),
        },
        step_s=rng.choice(((0.001, 0.004), (0.02, 0.04), (0.05, 0.1))),
    )


def _client(rng: random.Random, number: int, shape: Shape) -> ClientPlan:
    behaviour = rng.choices(list(Behaviour), (7, 2, 2))[0]
    prompt = tuple(rng.choices(range(97, 123), k=rng.choice((1, 3, 9, 20, 41))))
    cancels = ()
    if rng.random() < 0.25:
        cancels = tuple(
            Cancel(
                rng.choice((-0.05, 0.0, 0.02, 0.1, 0.4, 2.0)) + 0.05 * rng.random(),
                rng.randrange(shape.routers),
                rng.random() < 0.5,
            )
            for _ in range(rng.choice((1, 1, 2)))
        )
    return ClientPlan(
        request_id=f"request-{number}",
        at_s=0.1 + rng.choice((0.1, 1.0, BUSY_S / 4)) * rng.random(),
        router=rng.randrange(shape.routers),
        prompt=prompt,
        sampling=SamplingParams(
            temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(1 << 32), repetition_penalty=rng.choice((1.0, 1.0, 1.3))
        ),
        max_output_tokens=rng.choice((1, 2, 8, 24, 50)),
        stops=rng.choice(((), (), ("alpha b", "xyz"))),
        final_only=rng.random() < 0.15,
        priority=rng.choice((0, 0, 5, -5)),
        behaviour=behaviour,
        leave_after_events=rng.choice((0, 1, 5)),
        pause_s=rng.choice((0.05, 0.5)),
        cancels=cancels,
        overall_s=rng.choice((None, None, None, 0.3, 3.0)),
        timeout_s=rng.choice((None, None, None, None, 0.5)),
        detach=rng.random() < 0.3,
        back_after_s=rng.choice((None, 0.05, 1.0)),
        back_by_generate=rng.random() < 0.4,
        replays=rng.random() < 0.2,
    )


def _rivals(rng: random.Random, shape: Shape, faults: tuple[Fault, ...]) -> tuple[Shape, tuple[Fault, ...]]:
    """Routers that take one another for dead: one stops with a write under way for longer than a lease, perhaps while it takes
    over what a dead one has left, and goes on."""
    shape = replace(shape, routers=rng.choice((2, 2, 3)))
    names = [f"router-{number}" for number in range(shape.routers)]
    more = []
    if rng.random() < 0.5:
        at_s = rng.uniform(0.2, 2.0)
        more.append(Fault(FaultKind.KILL, at_s, rng.choice((0.3, 4.0)), (names[0],)))
        more += [_late_write(rng, name, at_s, "adopt") for name in names[1:]]
    else:
        scripts = ("advance", "admit", "finish", "assert_live", "begin", "adopt")
        more += [_late_write(rng, name, rng.uniform(0.0, 1.5), rng.choice(scripts)) for name in names[:2]]
    return shape, tuple(sorted((*faults[:2], *more), key=lambda fault: fault.at_s))


def _impatient(rng: random.Random, clients: tuple[ClientPlan, ...]) -> tuple[ClientPlan, ...]:
    """Clients that hear nothing for a while and ask another router the same; in some worlds when routers know one another long
    enough to take over what is not theirs."""
    waits_s = rng.choice((0.0, LEASE_S + 1.0))
    later = (replace(client, at_s=client.at_s + waits_s) for client in clients)
    changes = {"detach": True, "back_after_s": 0.05, "back_by_generate": True}
    return tuple(
        replace(client, gives_up_after_s=rng.choice((0.02, 0.1, 0.5)), **changes) if rng.random() < 0.5 else client
        for client in later
    )


def _relatives(rng: random.Random, clients: tuple[ClientPlan, ...]) -> tuple[ClientPlan, ...]:
    """Prompts with something in common: one beginning for several, or what an earlier one asked and got, as the next turn of a
    chat."""
    told: list[ClientPlan] = []
    for client in sorted(clients, key=lambda one: one.at_s):
        related = rng.random() < 0.7
        # An echoed prompt is told as text, which the tokens of another one's output need not be.
        if told and related and not client.echo:
            before = rng.choice(told)
            said = before.reference().tokens if rng.random() < 0.5 else ()
            # What is sent while the other runs finds the prompt only; what comes later finds what was said too.
            at_s = client.at_s + (rng.choice((0.0, 0.5, 2.0)) if said else 0.0)
            prompt = ((*before.prompt, *said)[: rng.choice((8, 16, 31, 44))] + client.prompt)[:45]
            client = replace(client, prompt=prompt, at_s=at_s)
        told.append(client)
    return tuple(sorted(told, key=lambda one: int(one.request_id.rpartition("-")[2])))


def _crowd(rng: random.Random, shape: Shape, clients: tuple[ClientPlan, ...]) -> tuple[ClientPlan, ...]:
    """Everyone at once, with much to say: most wait for room, and some are cancelled while they do."""
    begins_s = rng.uniform(0.1, 2.0)
    crowd = []
    for client in clients:
        at_s = begins_s + 0.05 * rng.random()
        cancels = client.cancels
        if rng.random() < 0.5:
            cancels = (Cancel(rng.uniform(0.05, 1.0), rng.randrange(shape.routers), rng.random() < 0.5),)
        crowd.append(replace(client, at_s=at_s, max_output_tokens=50, cancels=cancels))
    return tuple(crowd)


def _late_write(rng: random.Random, name: str, at_s: float, script: str, late: Late | None = None) -> Fault:
    write = LateWrite(script, late or rng.choice(list(Late)))
    lasts_s = rng.choice((0.8, 2.5)) if write.late is Late.STRAY else rng.uniform(6.0, 20.0)
    return Fault(FaultKind.LATE_WRITE, at_s, lasts_s, (name,), rng.uniform(0.7, 1.2), write)


#: How often each kind of fault is drawn, in the order of FaultKind. Late writes come together, see _rivals.
_WEIGHTS = (6, 3, 3, 2, 2, 1, 3, 2, 1, 2, 0)


def _fault(rng: random.Random, shape: Shape) -> Fault:
    routers = [f"router-{n}" for n in range(shape.routers)]
    prefills = [f"prefill-{n}" for n in range(shape.prefills)]
    decodes = [f"decode-{n}" for n in range(shape.decodes)]
    everyone = [*routers, *prefills, *decodes]
    kind = rng.choices(list(FaultKind), _WEIGHTS)[0]
    at_s, lasts_s = rng.uniform(0.05, rng.choice((1.0, 3.0, BUSY_S))), rng.choice((0.05, 0.5, 3.0, 15.0)) * rng.uniform(0.5, 1.5)
    if kind in (FaultKind.KILL, FaultKind.FREEZE, FaultKind.DRAIN):
        return Fault(kind, at_s, lasts_s, (rng.choice(everyone),))
    if kind in (FaultKind.CUT, FaultKind.BREAK):
        pairs = [(one, other) for one in routers for other in (*prefills, *decodes, "clients", "store")]
        pairs += [(one, other) for one in decodes for other in prefills]
        return Fault(kind, at_s, lasts_s, rng.choice(pairs))
    if kind is FaultKind.CLOCK:
        name, amount = rng.choice([*everyone, "store"]), rng.choice((-3600.0, -2.0, 2.0, 3600.0))
        # A lease of the store lasts longer when the store's clock goes back; an hour would be too long to wait for.
        return Fault(kind, at_s, 0.0, (name,), max(amount, -2.0) if name == "store" else amount)
    return Fault(kind, at_s, lasts_s)

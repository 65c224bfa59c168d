"""What a soak does, wave by wave: which requests, which faults. Pure; one seed, one soak.

router-0, prefill-0 and decode-0 are never ended, only stopped for a while: their series is as long as the soak.
"""

import random
from dataclasses import dataclass

from tests.chaos.plan import SHORT_S, Fault, Kind, Manner, Order, Phase, Plan, order_of
from tests.chaos.shapes import SHAPES, SHAPES_OF_CHOICES, Shape

#: A member without news for that long is lost; long freezes are longer.
LOST_AFTER_S = 6.0
LONG_S = (8.0, 10.0)
#: One wave of so many has no faults.
CALM_EVERY = 3
#: Of all requests: several outputs, a grammar, an adapter, a time limit, not to be served at all.
SHARES = {"choices": 0.12, "grammar": 0.12, "adapter": 0.12, "deadline": 0.08, "bad": 0.08}
ADAPTER = "worn"
SCHEMA = '{"type": "object", "properties": {"river": {"type": "string", "maxLength": 12}}, "required": ["river"]}'

SHAPES_OF_GRAMMARS = (
    Shape("a schema", 40, text="A river as JSON:", grammar=("json_schema", SCHEMA), stop={}),
    Shape(
        "an expression",
        40,
        text="Is the sky blue?",
        temperature=0.8,
        seed=31,
        grammar=("regex", "(yes|no), because [a-z ]{3,20}\\."),
        stop={},
    ),
    Shape(
        "a sum", 24, prompt_tokens=30, temperature=1.0, seed=32, grammar=("ebnf", 'root ::= [0-9]{1,3} " + " [0-9]{1,3}'), stop={}
    ),
)
SHAPES_OF_ADAPTERS = (
    Shape("adapted", 32, prompt_tokens=40, adapter=ADAPTER),
    Shape("adapted, two chunks", 32, prompt_tokens=180, temperature=0.8, seed=33, adapter=ADAPTER),
)
SHAPES_OF_DEADLINES = (
    Shape("little time", 96, text="Once upon a time", temperature=0.7, seed=34, overall_s=0.8),
    Shape("little time for a long prompt", 64, prompt_tokens=390, overall_s=1.5),
)
KINDS = {
    "choices": SHAPES_OF_CHOICES,
    "grammar": SHAPES_OF_GRAMMARS,
    "adapter": SHAPES_OF_ADAPTERS,
    "deadline": SHAPES_OF_DEADLINES,
}
EVERY_SHAPE = (*SHAPES, *SHAPES_OF_CHOICES, *SHAPES_OF_GRAMMARS, *SHAPES_OF_ADAPTERS, *SHAPES_OF_DEADLINES)
MORTAL = ("router-1", "prefill-1", "decode-1")


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that are judged, and `bad` ones, which are refused and leave no trace."""

    number: int
    plan: Plan
    bad: int

    @property
    def calm(self) -> bool:
        """Whether nothing is done to the cell."""
        return not self.plan.faults


def wave_of(seed: str, number: int, requests: int) -> Wave:
    """Wave `number`, from 0 on, of `requests` requests in all. The first is calm."""
    rng = random.Random(f"soak {seed} {number}")
    kinds = rng.choices((*SHARES, "plain"), (*SHARES.values(), 1 - sum(SHARES.values())), k=requests)
    bad = min(kinds.count("bad"), requests - 1)
    orders = tuple(_order(rng, kind) for kind in kinds if kind != "bad") or (_order(rng, "plain"),)
    faults: list[Fault] = []
    if number % CALM_EVERY:
        for _ in range(rng.choices((1, 2), (2, 1))[0]):
            fault = _fault(rng, len(orders))
            if not any(set(fault.target) & set(other.target) for other in faults):
                faults.append(fault)
    return Wave(number, Plan(f"soak-{seed}-{number}", orders, tuple(faults)), bad)


def _order(rng: random.Random, kind: str) -> Order:
    # Whoever has little time reads on until it is over.
    manners = frozenset({Manner.READ}) if kind == "deadline" else frozenset(Manner)
    return order_of(rng, manners, KINDS.get(kind, SHAPES))


def _fault(rng: random.Random, requests: int) -> Fault:
    kind = rng.choices((Kind.KILL, Kind.TERM, Kind.FREEZE), (4, 2, 3))[0]
    targets = (*MORTAL, "store") if kind is not Kind.FREEZE else (*MORTAL, "store", "router-0", "prefill-0", "decode-0")
    short, long = rng.uniform(*SHORT_S), rng.uniform(*LONG_S)
    lasting = long if kind is Kind.FREEZE and rng.random() < 0.4 else short
    return Fault(kind, (rng.choice(targets),), rng.choice(tuple(Phase)), rng.randrange(requests), rng.uniform(0.0, 0.3), lasting)

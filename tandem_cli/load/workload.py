"""Workload files: what is asked, and when. Pure: a file and a seed make the same requests everywhere.

A workload is one TOML file; some are in the folder workloads beside this file. `prompt` and `output` are lengths in tokens, or a
`trace` gives them; `load` is closed (so many clients, each sending its next request when its last has ended) or open (requests
come on a clock of their own and wait for nobody). `beside`, in some files, is open load that runs along and whose own figures
are not counted.
"""

import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("workloads")
#: Ids under this are often special: prompts are made of ids from here to the vocabulary's end.
FIRST_ID = 1000


class BadWorkload(Exception):
    """A workload file that cannot be run. The message names the file and the field."""


class Loop(Enum):
    """How requests follow one another."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, evenly spread from `least` to `most`, both inside."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return self.least if self.least == self.most else rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A request of a trace: seconds since its start, lengths, and the ids of its prompt's blocks (equal ids, equal tokens)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Lines in the order of arrival; a block has `block_tokens` tokens."""

    block_tokens: int
    lines: tuple[TraceLine, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One strength of a load: clients at once (closed) or requests a second (open)."""

    loop: Loop
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} at once" if self.loop is Loop.CLOSED else f"{self.value:g} a second"


@dataclass(frozen=True, slots=True)
class Beside:
    """Open load that runs along."""

    prompt: Lengths
    output: Lengths
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """One file. Exactly one of (`prompt`, `output`) and `trace` gives the lengths."""

    name: str
    about: str
    seed: int
    prompt: Lengths | None
    output: Lengths | None
    trace: Trace | None
    levels: tuple[Level, ...]
    #: Closed: requests of each client. Open: seconds in which requests arrive.
    requests_per_client: int
    requests_min: int
    arrive_s: float
    beside: Beside | None
    #: Of all requests, those that their client cancels, each after some of its tokens.
    cancel_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send: seconds after the start (0 in a closed loop), the prompt's ids, tokens to answer.

    cancel_after: it is cancelled when so many tokens have come; None never.
    """

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    cancel_after: int | None = None


def load_workload(path: Path) -> Workload:
    """Read a workload file. Raises BadWorkload."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadWorkload(f"{path}: {error}") from error
    fields = _Fields(values, str(path))
    load = fields.table("load")
    trace = None if "trace" not in values else load_trace(path.parent / fields.text("trace"))
    beside = fields.table("beside") if "beside" in values else None
    made = Workload(
        name=fields.text("name"),
        about=fields.text("about"),
        seed=fields.integer("seed", 0),
        prompt=None if trace else fields.lengths("prompt"),
        output=None if trace else fields.lengths("output"),
        trace=trace,
        levels=load.levels(),
        requests_per_client=load.integer("requests_per_client", 3),
        requests_min=load.integer("requests_min", 6),
        arrive_s=float(load.integer("arrive_s", 60)),
        beside=None
        if beside is None
        else Beside(beside.lengths("prompt"), beside.lengths("output"), beside.number("requests_per_s")),
    )
    fields.refuse_unread()
    return made


def load_trace(path: Path) -> Trace:
    """Read a trace: a first line with `block_tokens`, then one line a request. Raises BadWorkload."""
    try:
        head, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        lines = [
            TraceLine(float(one["at_s"]), int(one["prompt_tokens"]), int(one["output_tokens"]), tuple(one["blocks"]))
            for one in rest
        ]
        return Trace(int(head["block_tokens"]), tuple(lines))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadWorkload(f"{path}: {error!r}") from error


def find_workload(name: str) -> Path:
    """The file of a workload by its name in workloads, or by its path. Raises BadWorkload."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.toml")))
        raise BadWorkload(f"there is no workload {name}; there are {known}, or give a path that ends in .toml")
    return path


class _Fields:
    """Typed reading of a table; what nobody read is an error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()
        self._tables: list[_Fields] = []

    def text(self, name: str) -> str:
        return str(self._get(name, str))

    def integer(self, name: str, default: int) -> int:
        return default if name not in self._values else int(self._get(name, int))

    def number(self, name: str) -> float:
        return float(self._get(name, (int, float)))

    def table(self, name: str) -> "_Fields":
        found = _Fields(self._get(name, dict), f"{self._where}, {name}")
        self._tables.append(found)
        return found

    def lengths(self, name: str) -> Lengths:
        """`name = 512`, or `name = {least = 16, most = 512}`."""
        value = self._get(name, (int, dict))
        if isinstance(value, int):
            value = {"least": value, "most": value}
        try:
            made = Lengths(int(value["least"]), int(value["most"]))
        except KeyError as error:
            raise BadWorkload(f"{self._where}: {name} has no {error}") from error
        if not 0 < made.least <= made.most:
            raise BadWorkload(f"{self._where}: {name} must rise from 1 or more, not {made.least} to {made.most}")
        return made

    def levels(self) -> tuple[Level, ...]:
        """`concurrency = [1, 8]` or `requests_per_s = [0.5]`."""
        closed = "concurrency" in self._values
        values = self._get("concurrency" if closed else "requests_per_s", list)
        if not values or not all(isinstance(one, int | float) and one > 0 for one in values):
            raise BadWorkload(f"{self._where}: levels must be numbers over 0, not {values}")
        return tuple(Level(Loop.CLOSED if closed else Loop.OPEN, float(one)) for one in values)

    def refuse_unread(self) -> None:
        """A field that nothing reads is a slip of the pen."""
        for one in (self, *self._tables):
            if unread := sorted(set(one._values) - one._read):
                raise BadWorkload(f"{one._where}: unknown field {', '.join(unread)}")

    def _get(self, name: str, kind: Any) -> Any:
        if name not in self._values:
            raise BadWorkload(f"{self._where}: {name} is missing")
        value = self._values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadWorkload(f"{self._where}: {name} is {value!r}")
        self._read.add(name)
        return value


def schedule(workload: Workload, level: Level, seed: int, vocabulary_size: int) -> list[Planned]:
    """The requests of one run, in the order of their arrival. `seed` tells runs of one workload apart."""
    made = _uncancelled(workload, level, seed, vocabulary_size)
    rng = random.Random(f"{workload.name}/{workload.seed}/cancel/{level.value:g}/{seed}")
    return [
        replace(one, cancel_after=rng.randrange(one.output_tokens)) if rng.random() < workload.cancel_share else one
        for one in made
    ]


def _uncancelled(workload: Workload, level: Level, seed: int, vocabulary_size: int) -> list[Planned]:
    rng = random.Random(f"{workload.name}/{workload.seed}/{level.value:g}/{seed}")
    count = max(workload.requests_min, workload.requests_per_client * round(level.value))
    if workload.trace is not None:
        whole = _from_trace(workload, workload.trace, level, (f"{workload.seed}/{seed}", vocabulary_size))
        return whole[:count] if level.loop is Loop.CLOSED else whole
    assert workload.prompt is not None and workload.output is not None
    if level.loop is Loop.CLOSED:
        times: Sequence[float] = [0.0] * count
    else:
        times = list(poisson(rng, level.value, workload.arrive_s))
    return [
        Planned(at_s, random_ids(rng, workload.prompt.draw(rng), vocabulary_size), workload.output.draw(rng)) for at_s in times
    ]


def beside_schedule(workload: Workload, seed: int, vocabulary_size: int) -> Iterator[Planned]:
    """The requests that run along, without an end; none where the workload has none."""
    beside = workload.beside
    if beside is None:
        return
    rng = random.Random(f"{workload.name}/{workload.seed}/beside/{seed}")
    for at_s in poisson(rng, beside.requests_per_s, math.inf):
        yield Planned(at_s, random_ids(rng, beside.prompt.draw(rng), vocabulary_size), beside.output.draw(rng))


def poisson(rng: random.Random, requests_per_s: float, seconds: float) -> Iterator[float]:
    """Arrivals with exponential gaps, in seconds, from 0 on until `seconds`."""
    at_s = rng.expovariate(requests_per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(requests_per_s)


def random_ids(rng: random.Random, count: int, vocabulary_size: int) -> tuple[int, ...]:
    """A prompt that no other one resembles."""
    return tuple(rng.choices(range(min(FIRST_ID, vocabulary_size // 2), vocabulary_size), k=count))


def _from_trace(workload: Workload, trace: Trace, level: Level, ids: tuple[str, int]) -> list[Planned]:
    """Open: the trace's own arrivals, stretched to the level's mean rate. Closed: its requests in order.

    ids: seed and size of the vocabulary. Prefixes are shared inside a run, never between runs.
    """
    if level.loop is Loop.CLOSED:
        stretch = 0.0
    else:
        own_per_s = len(trace.lines) / max(trace.lines[-1].at_s, 1e-9)
        stretch = own_per_s / level.value
    made = []
    for line in trace.lines:
        if line.at_s * stretch > workload.arrive_s:
            break
        prompt = [one for block in line.blocks for one in _block_ids(ids[0], block, trace.block_tokens, ids[1])]
        made.append(Planned(line.at_s * stretch, tuple(prompt[: line.prompt_tokens]), line.output_tokens))
    return made


def _block_ids(seed: str, block: int, tokens: int, vocabulary_size: int) -> tuple[int, ...]:
    """The tokens of a block: equal for equal ids."""
    return random_ids(random.Random(f"{seed}/{block}"), tokens, vocabulary_size)

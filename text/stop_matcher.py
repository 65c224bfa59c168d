"""Finding the first stop in output that arrives in pieces. Pure.

Aho-Corasick (A. Aho, M. Corasick, "Efficient string matching", CACM 18, 1975): after each symbol the automaton's state is
the longest end of the text that begins a stop, so that end, and nothing more, has to wait.

Rule, version 1: the match that ends first; of those that end there the longest; of equal stops the one given first.

The automaton works on integers. Stops in text are bytes, stops in tokens are ids; both use the same classes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from text.errors import InvalidStops

STOP_RULE_VERSION = 1
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 256

_SYMBOL_BITS = 32  # a transition's key is (state << _SYMBOL_BITS) | symbol


class Automaton:
    """States are integers, 0 is the start. Building costs time and memory proportional to the stops' total length.

    A step follows failure links, each of which undoes one earlier step: at most two look-ups a symbol over any text.
    """

    __slots__ = ("_fail", "_goto", "hit", "hold", "lengths")

    def __init__(self, stops: Sequence[Sequence[int]]) -> None:
        self.lengths = tuple(len(stop) for stop in stops)
        self._goto: dict[int, int] = {}
        self._fail: list[int] = [0]
        self.hit: list[int | None] = [None]  # index of the stop that ends in this state, by the rule
        self.hold: list[int] = [0]  # length of the longest end that can still grow into a stop
        children: list[list[tuple[int, int]]] = [[]]
        depths = [0]
        for index, stop in enumerate(stops):
            self._insert(index, stop, children, depths)
        self._link(children, depths)

    def step(self, state: int, symbol: int) -> int:
        """The state after one more symbol."""
        while True:
            following = self._goto.get(state << _SYMBOL_BITS | symbol)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def _insert(self, index: int, stop: Sequence[int], children: list[list[tuple[int, int]]], depths: list[int]) -> None:
        state = 0
        for symbol in stop:
            key = state << _SYMBOL_BITS | symbol
            following = self._goto.get(key)
            if following is None:
                following = len(children)
                self._goto[key] = following
                children[state].append((symbol, following))
                children.append([])
                depths.append(depths[state] + 1)
                self._fail.append(0)
                self.hit.append(None)
                self.hold.append(0)
            state = following
        if self.hit[state] is None:
            self.hit[state] = index

    def _link(self, children: list[list[tuple[int, int]]], depths: list[int]) -> None:
        """Failure links in order of depth; a state's answers fall back on those of its failure state."""
        order = deque(state for _, state in children[0])
        while order:
            state = order.popleft()
            fail = self._fail[state]
            if self.hit[state] is None:  # its own stop is longer than any that the failure state knows
                self.hit[state] = self.hit[fail]
            self.hold[state] = depths[state] if children[state] else self.hold[fail]
            for symbol, child in children[state]:
                self._fail[child] = self.step(fail, symbol)
                order.append(child)


@dataclass(frozen=True, slots=True)
class Matched:
    """`safe` can be shown now; `hit` is the index of the stop that ended the output, None while there is none."""

    safe: bytes
    hit: int | None


class StopRules:
    """The stops of one request, checked and compiled once; shared by its sequences. Raises InvalidStops."""

    __slots__ = ("automaton", "include_stop", "stops")

    def __init__(self, stops: tuple[bytes, ...], include_stop: bool = False) -> None:
        _check_stops(stops)
        self.stops = stops
        self.include_stop = include_stop
        self.automaton = Automaton(stops)


def _check_stops(stops: tuple[bytes, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidStops(f"There are {len(stops)} stops; at most {MAX_STOPS} are allowed.")
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidStops(f"Stop {index} is empty; give it at least 1 byte or leave it out.")
        if len(stop) > MAX_STOP_BYTES:
            raise InvalidStops(f"Stop {index} has {len(stop)} bytes; at most {MAX_STOP_BYTES} are allowed.")
        try:
            stop.decode()
        except UnicodeDecodeError:
            # Output is cut where a stop begins; only stops made of whole characters never cut one.
            raise InvalidStops(f"Stop {index} is not valid UTF-8.") from None


class StopMatcher:
    """Watches one sequence's text. `held` bytes (fewer than the longest stop has) wait inside; the rest passes at once."""

    __slots__ = ("_held", "_hit", "_rules", "_state")

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._state = 0
        self._held = b""
        self._hit: int | None = None

    @property
    def held(self) -> int:
        """Bytes held back because they may become part of a stop."""
        return len(self._held)

    @property
    def hit(self) -> int | None:
        """The index of the stop that has ended the output."""
        return self._hit

    def push(self, data: bytes, *, armed: bool = True) -> Matched:
        """Takes the next bytes of the output.

        With `armed` False a stop that ends in `data` is ignored and its bytes are text; one that begins in it and ends in
        a later, armed push counts. After a hit every push is absorbed: it gives the same hit and no bytes.
        """
        if self._hit is not None:
            return Matched(b"", self._hit)
        automaton = self._rules.automaton
        state = self._state
        for offset, symbol in enumerate(data):
            state = automaton.step(state, symbol)
            if armed and automaton.hit[state] is not None:
                return self._ended(data, offset + 1, automaton.hit[state])
        self._state = state
        text = self._held + data
        cut = len(text) - automaton.hold[state]
        self._held = text[cut:]
        return Matched(text[:cut], None)

    def flush(self) -> bytes:
        """Gives up the held bytes, for an end that is not a stop hit."""
        held, self._held, self._state = self._held, b"", 0
        return held

    def _ended(self, data: bytes, end: int, hit: int | None) -> Matched:
        assert hit is not None
        text = self._held + data[:end]
        self._held, self._state, self._hit = b"", 0, hit
        start = len(text) - self._rules.automaton.lengths[hit]
        return Matched(text if self._rules.include_stop else text[:start], hit)


@dataclass(frozen=True, slots=True)
class MatchedTokens:
    """Like Matched, in ids."""

    safe: tuple[int, ...]
    hit: int | None


class TokenStopRules:
    """Stop sequences of token ids, checked and compiled once. Raises InvalidStops."""

    __slots__ = ("automaton", "include_stop", "stops")

    def __init__(self, stops: tuple[tuple[int, ...], ...], include_stop: bool = False) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidStops(f"There are {len(stops)} stop sequences of tokens; at most {MAX_STOPS} are allowed.")
        for index, stop in enumerate(stops):
            if not 1 <= len(stop) <= MAX_STOP_TOKENS:
                raise InvalidStops(f"Stop sequence {index} has {len(stop)} tokens; 1 to {MAX_STOP_TOKENS} are allowed.")
            if not all(0 <= token < 1 << _SYMBOL_BITS for token in stop):
                raise InvalidStops(f"Stop sequence {index} holds an id outside 0 to 2^{_SYMBOL_BITS} - 1.")
        self.stops = stops
        self.include_stop = include_stop
        self.automaton = Automaton(stops)


class TokenStopMatcher:
    """Watches one sequence's token ids; the same rule and holding as StopMatcher, one id a push."""

    __slots__ = ("_held", "_hit", "_rules", "_state")

    def __init__(self, rules: TokenStopRules) -> None:
        self._rules = rules
        self._state = 0
        self._held: tuple[int, ...] = ()
        self._hit: int | None = None

    @property
    def held(self) -> int:
        """Ids held back because they may become part of a stop sequence."""
        return len(self._held)

    def push(self, token_id: int, *, armed: bool = True) -> MatchedTokens:
        """Takes the next id; see StopMatcher.push."""
        if self._hit is not None:
            return MatchedTokens((), self._hit)
        automaton = self._rules.automaton
        self._state = automaton.step(self._state, token_id)
        tokens = (*self._held, token_id)
        hit = automaton.hit[self._state]
        if armed and hit is not None:
            self._held, self._state, self._hit = (), 0, hit
            start = len(tokens) - automaton.lengths[hit]
            return MatchedTokens(tokens if self._rules.include_stop else tokens[:start], hit)
        cut = len(tokens) - automaton.hold[self._state]
        self._held = tokens[cut:]
        return MatchedTokens(tokens[:cut], None)

    def flush(self) -> tuple[int, ...]:
        """Gives up the held ids, for an end that is not a stop hit."""
        held, self._held, self._state = self._held, (), 0
        return held

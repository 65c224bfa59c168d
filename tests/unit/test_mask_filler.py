"""Masks that are filled beside the model: in time, too late, not at all."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decode_svc.masks import GRAMMAR_FAILED, StepMasks
from engine.grammar_library import Bits, CompiledGrammar, Matcher
from engine.grammar_state import GrammarState
from engine.mask_filler import LEFT_MAX, MaskFiller
from tests.grammars import bytes_vocabulary, compiled, regex

WAIT_S = 10.0


class Mask:
    """Stands for a grammar's state. A `slow` one is filled once the test says so; a `broken` one can not be."""

    def __init__(self, *, slow: bool = False, broken: bool = False) -> None:
        self.ready = False
        self.filled_by = ""
        self.entered, self.go = threading.Event(), threading.Event()
        self._broken = broken
        if not slow:
            self.go.set()

    def prepare(self) -> None:
        self.entered.set()
        assert self.go.wait(WAIT_S)
        if self._broken:
            raise RuntimeError("no mask")
        self.filled_by = threading.current_thread().name
        self.ready = True


@contextmanager
def filler(most_s: float = WAIT_S) -> Iterator[MaskFiller]:
    made = MaskFiller(most_s, time.monotonic)
    yield made
    made.close()


def test_masks_are_filled_by_another_thread_between_begin_and_finish() -> None:
    with filler() as fill:
        masks = [Mask(slow=True), Mask(), Mask()]
        masks[2].ready = True
        fill.begin(masks)
        assert masks[0].entered.wait(WAIT_S) and not masks[0].ready, "the engine goes on meanwhile"
        masks[0].go.set()
        assert fill.finish() == [] and fill.last_s > 0
        assert {mask.filled_by for mask in masks} == {"grammar-masks", ""}, "one that was ready is left alone"
        assert all(mask.ready for mask in masks)
        fill.begin([])
        assert fill.finish() == [] and fill.last_s == 0


def test_a_mask_that_takes_too_long_costs_no_other_one() -> None:
    with filler(0.02) as fill:
        slow, before, behind = Mask(slow=True), Mask(), Mask()
        fill.begin([before, slow, behind])
        assert slow.entered.wait(WAIT_S)
        assert fill.finish() == [slow]
        assert before.ready and behind.ready and not slow.ready
        again = Mask()
        fill.begin([again])
        assert fill.finish() == [] and again.ready
        slow.go.set()


def test_threads_that_are_left_alone_are_bounded() -> None:
    others = set(threading.enumerate())
    with filler(0.01) as fill:
        slow = [Mask(slow=True) for _ in range(LEFT_MAX)]
        for mask in slow:
            fill.begin([mask])
            assert mask.entered.wait(WAIT_S)
            assert fill.finish() == [mask]
        last = Mask()
        fill.begin([last])
        assert fill.finish() == [last] and not last.entered.is_set(), "it is not waited for, and no thread more is made"
        for mask in slow:
            mask.go.set()
        for thread in set(threading.enumerate()) - others:
            thread.join(WAIT_S)
        fill.begin([last])
        assert fill.finish() == [] and last.ready


def test_a_mask_that_can_not_be_filled_is_told() -> None:
    with filler() as fill:
        broken, other = Mask(broken=True), Mask()
        fill.begin([broken, other])
        assert fill.finish() == [broken] and other.ready


class Output:
    """As much of a sequence, and of its seat, as masks look at."""

    def __init__(self, grammar: Mask | None, *, stuck: bool = False, renews: bool = False) -> None:
        self.sequence = self
        self.renews = renews
        self.grammar = grammar
        self.stuck = stuck
        self.ended: list[object] = []

    def drop_grammar(self) -> None:
        self.grammar = None

    def renew_grammar(self) -> bool:
        return self.renews

    def end_with(self, ending: object) -> None:
        self.ended.append(ending)


class Step:
    def __init__(self, *draws: Output) -> None:
        self.draws = draws


@pytest.mark.parametrize("broken", [False, True])
def test_only_the_seat_without_a_mask_ends(broken: bool) -> None:
    masks = StepMasks(time.monotonic)
    renewed = Output(Mask(broken=broken), renews=True)
    seats = [Output(None), Output(Mask(broken=broken)), Output(Mask(), stuck=True), Output(Mask()), renewed]
    step = Step(*seats)
    masks.begin(step)  # type: ignore[arg-type]
    times = masks.finish(step)  # type: ignore[arg-type]
    assert times is not None and times.wait_s >= 0
    assert [seat.ended for seat in seats] == [[], [GRAMMAR_FAILED] if broken else [], [GRAMMAR_FAILED], [], []]
    assert (seats[1].grammar is None) == broken and renewed.grammar is not None
    masks.close()
    assert StepMasks(time.monotonic).finish(Step(Output(None))) is None  # type: ignore[arg-type]


class SlowBehindDrafts:
    """A compiled grammar whose matchers fill their first mask at once and the next one when the test says so."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.vocabulary, self.in_json, self.forces = grammar.vocabulary, grammar.in_json, grammar.forces
        self.entered, self.go = threading.Event(), threading.Event()
        self._grammar = grammar

    def matcher(self) -> "SlowMatcher":
        return SlowMatcher(self._grammar.matcher(), self)


class SlowMatcher:
    def __init__(self, matcher: Matcher, of: SlowBehindDrafts) -> None:
        self.accept, self.rollback, self.may_end = matcher.accept, matcher.rollback, matcher.may_end
        self._matcher = matcher
        self._of = of
        self._filled = 0

    def fill(self, bits: Bits) -> None:
        self._filled += 1
        if self._filled == 2:
            self._of.entered.set()
            assert self._of.go.wait(WAIT_S)
        self._matcher.fill(bits)


def test_a_slow_mask_behind_a_draft_costs_the_drafts_and_not_the_output() -> None:
    grammar = compiled(regex("ab?c?d?"), bytes_vocabulary(128))
    slow, plain = SlowBehindDrafts(grammar), GrammarState(grammar)
    state = GrammarState(slow)  # type: ignore[arg-type]
    assert state.advance(97) and plain.advance(97) and state.follow((98, 99)) == 2
    with filler(0.02) as fill:
        fill.begin([state])
        assert slow.entered.wait(WAIT_S)
        assert fill.finish() == [state] and state.filled and not state.ready
        other = state.again((97,))
        slow.go.set()
        for token in (99, 100):
            assert (other.mask == plain.mask).all() and other.may_end == plain.may_end
            assert other.advance(token) and plain.advance(token)

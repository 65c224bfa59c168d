"""Pages of several KV groups at a decode member: what leaves a window goes back at once, and is there again when it is needed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_svc.admission import NO_PAGES, TOO_LONG
from decode_svc.config import DecodeSettings
from decode_svc.memory import DecodeMemory, Holding, NoPages
from decode_svc.messages import AskEndpoint
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind
from decode_svc.scheduler import Scheduler, SchedulerLimits
from engine.layout import GroupKind, GroupLayout, Layout, pages_for
from lifecycle.finish import FinishReason
from member.loading import window_pages
from tests.unit.decode_world import PAGE_TOKENS, WRITER, World
from tests.unit.pressure_world import PressureWorld

WINDOW = 6
STEP = StepLimits(tokens=10, sequences=4)
#: What a sequence holds behind the window: 6 tokens lie in 3 pages of 4 at most, a chunk of 10 and what it sees in 5.
AT_ONCE, AT_ONCE_IN_CHUNKS = 3, 5


def world() -> World:
    return World(window=WINDOW, step=STEP, stream_bytes=100_000)


def held(world: World, group: int) -> int:
    return world.memory.pools[group].counts().owned


def test_a_long_output_holds_only_the_pages_of_its_window() -> None:
    member = world()
    seat = member.open(prompt=3, max_output_tokens=60)
    most = 0
    while member.step() is not None:
        if (live := member.scheduler.seats.get(seat)) is not None:
            cached = live.sequence.cache_tokens
            # At each border: exactly the pages of the last five tokens, which the next one sees with itself.
            assert held(member, 1) == pages_for(cached, PAGE_TOKENS) - max(0, cached + 1 - WINDOW) // PAGE_TOKENS
            assert held(member, 0) == pages_for(cached, PAGE_TOKENS)
            most = max(most, held(member, 1))
    assert most <= AT_ONCE and member.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
    member.assert_empty()


def test_a_prompt_computed_here_holds_a_chunk_and_its_window() -> None:
    member = world()
    seat = member.open(prompt=40, max_output_tokens=4)
    assert member.memory.room() == [40 - pages_for(43, PAGE_TOKENS), 40 - AT_ONCE_IN_CHUNKS]
    for _ in range(4):
        member.step()
        assert held(member, 1) <= AT_ONCE_IN_CHUNKS
    # The prompt is computed: what chunks needed is promised to nobody any more.
    assert member.memory.room()[1] == 40 - AT_ONCE
    member.run()
    assert member.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
    member.assert_empty()


def test_a_grant_asks_only_for_the_pages_of_the_window() -> None:
    member = world()
    seat = member.granted_seat(prompt=30, max_output_tokens=20)
    grant = member.grant_of(seat)
    full, windowed = grant.groups
    assert all(full.page_ids) and len(full.page_ids) == len(windowed.page_ids) == 8
    assert windowed.page_ids[:6] == (0,) * 6 and all(windowed.page_ids[6:])
    assert windowed.generations[:6] == (0,) * 6
    assert member.memory.room() == [40 - pages_for(49, PAGE_TOKENS), 40 - AT_ONCE]
    member.fill(seat)
    member.run()
    assert len(member.selected(seat)) == 20
    member.assert_empty()


def test_a_grant_taken_back_frees_what_it_held() -> None:
    member = world()
    seat = member.granted_seat(prompt=30, max_output_tokens=20)
    member.cancel(seat)
    member.step()
    member.scheduler.check()
    counts = member.memory.counts()
    assert counts.granted == 8 + 2 and counts.owned == 0


def test_more_sequences_fit_behind_a_window_than_tokens() -> None:
    """The second group has pages for three sequences, however long; the first one would hold five."""
    member = World(window=WINDOW, step=STEP, total_pages=51)
    member.memory.pools[1].allocate("others", 50 - 3 * AT_ONCE_IN_CHUNKS)
    seats = [member.open(prompt=4, max_output_tokens=30) for _ in range(4)]
    assert member.refusal(seats[3]).reason == NO_PAGES
    assert member.memory.room() == [50 - 3 * 9, 0]
    # Not full by the group that requests are measured by, and yet there is no room for one more.
    assert member.scheduler.load().free_pages == 0


def test_what_never_fits_is_refused_by_the_group_that_is_too_small() -> None:
    layout = Layout("m", tuple(_group(window) for window in (None, WINDOW)))
    assert DecodeMemory(layout, [100, 6], 1, step_tokens=10).fits_ever(300)
    assert not DecodeMemory(layout, [100, 5], 1, step_tokens=10).fits_ever(300)
    assert DecodeMemory(layout, [100, 5], 1, step_tokens=10).fits_ever(16)
    memory = DecodeMemory(layout, [9, 6], 1, step_tokens=10)
    assert (memory.most_tokens, memory.fits_ever(32), memory.fits_ever(33)) == (32, True, False)
    member = World(window=WINDOW, step=STEP, total_pages=9)
    assert member.refusal(member.open(prompt=4, max_output_tokens=60)).reason == TOO_LONG


def test_requests_are_measured_by_the_group_that_keeps_all_its_pages() -> None:
    """Where none does, by the first one, of which a sequence holds only so many pages at once."""
    mixed = DecodeMemory(Layout("m", (_group(None), _group(WINDOW))), [50, 30], 1, step_tokens=10)
    assert (mixed.available(), mixed.sequence_pages) == (49, 0)
    windowed = DecodeMemory(Layout("m", (_group(WINDOW),)), 50, 1, step_tokens=10)
    assert (windowed.available(), windowed.sequence_pages) == (49, AT_ONCE_IN_CHUNKS)
    assert windowed.fits_ever(1 << 20)


def test_pages_behind_a_window_are_as_many_as_can_be_used() -> None:
    defaults = {"listen": "127.0.0.1:0", "page_tokens": PAGE_TOKENS, "max_sequences": 8, "max_step_tokens": 40}
    group = _group(WINDOW)
    # A step of 40 tokens and 5 before it touch at most 12 pages.
    assert window_pages(DecodeSettings(**defaults), group) == 1 + 8 * 12
    assert window_pages(DecodeSettings(**defaults, total_pages=50), group) == 50
    assert window_pages(DecodeSettings(**defaults, window_pages=7), group) == 7
    with pytest.raises(ValueError, match="window_pages is 1; the least is 2"):
        DecodeSettings(**defaults, window_pages=1)


def test_memory_must_know_the_steps_of_its_scheduler() -> None:
    member = world()
    with pytest.raises(ValueError, match="steps of 10 tokens; the limit of a step is 256"):
        Scheduler(SchedulerLimits(), member.memory, member.handovers, member.make_sequence)


@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_a_preempted_sequence_comes_back_with_the_pages_of_its_window(kind: PreemptionKind) -> None:
    member = PressureWorld(kind, total_pages=16, window=WINDOW, step=STEP)
    prompts = {member.open(tuple(range(start, start + 9)), 30): tuple(range(start, start + 9)) for start in (1, 50, 100)}
    for _ in range(400):
        if member.step() is None:
            break
        if kind is PreemptionKind.SWAP:
            assert all(member.memory.host.held(seat.holding.holder) <= 10 + AT_ONCE for seat in member.scheduler.seats)
    assert member.preempted
    for seat, prompt in prompts.items():
        assert len(member.selected(seat)) == 30
        member.said(seat, prompt)
    member.assert_empty()


def test_a_handed_over_prompt_can_be_preempted_before_its_first_step() -> None:
    member = PressureWorld(PreemptionKind.SWAP, total_pages=16, window=WINDOW, step=STEP)
    prompt = tuple(range(1, 30))
    seat = member.open(prompt, 12, prefill=WRITER)
    member.errands.remove(AskEndpoint(WRITER.incarnation))
    member.make_endpoint()
    member.fill(seat)
    other = member.open(tuple(range(40, 60)), 30, priority=5)
    for _ in range(200):
        if member.step() is None:
            break
    member.said(seat, prompt)
    member.said(other, tuple(range(40, 60)))
    assert len(member.selected(seat)) == 12
    member.assert_empty()


def _group(window: int | None) -> GroupLayout:
    return GroupLayout(GroupKind.FULL if window is None else GroupKind.SLIDING, 1, 1, 1, PAGE_TOKENS, "float32", window)


class MemoryMachine(RuleBasedStateMachine):
    """Seats that grow in chunks and tokens over three groups: within its promise none ever lacks a page, and books balance."""

    TOTAL = 30

    def __init__(self) -> None:
        super().__init__()
        layout = Layout("m", tuple(_group(window) for window in (None, 3, 9)))
        self.memory = DecodeMemory(layout, [self.TOTAL, 20, 16], 2, host_pages=40, step_tokens=8)
        self.seats: dict[str, tuple[Holding, int, bool]] = {}
        self.names = 0

    @rule(tokens=st.integers(1, 60), computed=st.booleans(), share=st.floats(0, 1))
    def open(self, tokens: int, computed: bool, share: float) -> None:
        self.names += 1
        try:
            holding = self.memory.promise(f"s{self.names}", tokens, computed=computed)
        except NoPages:
            return
        cached = 0
        if not computed:
            cached = max(1, int(share * tokens))
            _, granted = self.memory.grant(holding, f"g{self.names}", cached, with_row=False)
            assert [len(pages) for pages in granted] == [pages_for(cached, PAGE_TOKENS)] * 3
            self.memory.commit(holding, f"g{self.names}")
        self.seats[holding.holder] = (holding, cached, computed)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), tokens=st.integers(1, 8))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.seats)))
        holding, cached, computed = self.seats[name]
        end = cached + (tokens if computed else 1)
        try:
            self.memory.take(holding, end)
        except NoPages:
            assert end > holding.tokens, "a promise was broken"
            return
        still = computed and data.draw(st.booleans())
        self.memory.slide(holding, end, computed=still)
        for group, table in zip(self.memory.groups, holding.tables, strict=True):
            gone = group.first_page(end)
            assert table[:gone] == [0] * gone and all(table[gone:])
        self.seats[name] = (holding, end, still)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), swap=st.booleans())
    def away_and_back(self, data: st.DataObject, swap: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.seats)))
        holding, cached, computed = self.seats[name]
        copies = self.memory.swap_out(holding, cached) if swap and cached else None
        if copies is None:
            self.memory.vacate(holding)
        try:
            self.memory.refill(holding, max(holding.tokens, cached + 1), computed=copies is None or computed)
        except NoPages:
            self.memory.release(holding)
            del self.seats[name]
            return
        if copies is None:
            self.seats[name] = (holding, 0, True)
        else:
            back = self.memory.swap_back(holding, cached)
            assert [len(copy.pages) for copy in back] == [len(copy.pages) for copy in copies]

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        holding, _, _ = self.seats.pop(data.draw(st.sampled_from(sorted(self.seats))))
        self.memory.release(holding)

    @invariant()
    def books_balance(self) -> None:
        assert self.memory.check([]) == []

    def teardown(self) -> None:
        for holding, _, _ in self.seats.values():
            self.memory.release(holding)
        counts = self.memory.counts()
        assert counts.free == counts.total and self.memory.promised_pages == 0


TestMemory = pytest.mark.slow(MemoryMachine.TestCase)
TestMemory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

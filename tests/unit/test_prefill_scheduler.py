"""The prefill scheduler in virtual time: budgets, order, endings, and that everything held is given back once."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.layout import GroupKind, GroupLayout
from engine.pages import PagePool
from engine.prefixes import page_pools
from kv_transfer.grant_writer import ASKERS_MAX, PushesEnded
from kv_transfer.grants import WriterBook
from kv_transfer.offer import Endpoint, Grant, GrantPages, LayoutView, Peer, Slab
from kv_transfer.plan import SourceMemory, plan
from kv_transfer.ports import Push, PushResult
from lifecycle.record import AttemptKey
from prefill_svc import messages as m
from prefill_svc.plans import SchedulerLimits
from prefill_svc.scheduler import PrefillScheduler

PAGE_TOKENS = 4
PAGE_BYTES = 1 << 20
GROUP = GroupLayout(GroupKind.FULL, 1, 1, 1, PAGE_TOKENS, "float32")
ROW_BYTES = 64
FINGERPRINT = "ab" * 16
LIMITS = SchedulerLimits(
    step_tokens=8, step_sequences=3, max_jobs=6, max_queued_tokens=100, max_pass_over=2, staging_rows=2, context_tokens=64
)


def submit(
    number: int, tokens: int, *, priority: int = 0, remaining_s: float | None = None, window: int | None = None
) -> m.Submit:
    """`window`: of a second KV group, whose pages that it has left are not wanted."""
    groups = (GROUP,) if window is None else (GROUP, sliding(window))
    pages = -(-tokens // PAGE_TOKENS)
    gone = [group.first_page(tokens) for group in groups]
    page_slabs = [Slab((1 + index) << 40, 64 * PAGE_BYTES, PAGE_BYTES) for index in range(len(groups))]
    slabs = (*page_slabs, Slab(1 << 43, 8 * ROW_BYTES, ROW_BYTES))
    grant = Grant(
        grant_id=f"{number:032x}",
        key=AttemptKey(f"r{number}", 1),
        decode=Peer("decode-0", "d", "host:1"),
        layout_fingerprint=FINGERPRINT,
        first_position=0,
        token_count=tokens,
        groups=tuple(
            GrantPages((*[0] * left, *range(1, pages - left + 1)), (*[0] * left, *[1] * (pages - left))) for left in gone
        ),
        landing_row=0,
        endpoint=Endpoint("agent", b"metadata", zlib.crc32(b"metadata"), slabs),
        expires_after_s=30.0,
    )
    source = SourceMemory(
        LayoutView(FINGERPRINT, (PAGE_TOKENS,) * len(groups), tuple(group.window for group in groups)),
        tuple(Slab((5 + index) << 40, 64 * PAGE_BYTES, PAGE_BYTES) for index in range(len(groups))),
        Slab(1 << 44, 8 * ROW_BYTES, ROW_BYTES),
    )
    return m.Submit(grant.key, plan(grant, source), tuple(range(tokens)), priority, remaining_s)


def scheduler(
    pages: int = 17, limits: SchedulerLimits = LIMITS, window: int | None = None, window_pages: int = 17
) -> PrefillScheduler:
    if window is None:
        return PrefillScheduler(limits, [PagePool(pages)], [GROUP], WriterBook())
    groups = [GROUP, sliding(window)]
    return PrefillScheduler(limits, page_pools(groups, [pages, window_pages]), groups, WriterBook())


def sliding(window: int) -> GroupLayout:
    return replace(GROUP, kind=GroupKind.SLIDING, window=window)


def step(target: PrefillScheduler, now: float) -> list[tuple[str, int]] | None:
    """Plan and run one step; returns (request number, tokens) of each chunk."""
    planned = target.next_batch(now)
    if planned is None:
        return None
    assert planned.batch.scheduled_tokens <= target.limits.step_tokens
    assert planned.batch.scheduled_sequences <= target.limits.step_sequences
    target.commit(planned, now + 0.01)
    target.send(planned, now + 0.01)
    assert target.check() == []
    return [(int(chunk.grant_id, 16), chunk.tokens) for chunk in planned.chunks]


def pushed(target: PrefillScheduler, now: float, ok: bool = True) -> int:
    """Let every write that was given out end."""
    results = tuple(PushResult(push.push_id, ok, "" if ok else "transport_error") for push in target.take_transfers().pushes)
    if results:
        target.accept([PushesEnded(results, 0.001, now)], now)
    return len(results)


def ended(pushes: Sequence[Push], now: float, cause: str = "") -> PushesEnded:
    """The transport is done with some writes."""
    return PushesEnded(tuple(PushResult(push.push_id, not cause, cause) for push in pushes), 0.0, now)


def at_rest(target: PrefillScheduler) -> None:
    now = target.statistics()
    assert target.check() == []
    assert (now.waiting_jobs, now.computing_jobs, now.sending_jobs, now.stopping_jobs, now.pushes_in_flight) == (0, 0, 0, 0, 0)
    assert now.staging_rows_used == 0
    assert all(pool.counts().free == pool.usable_pages for pool in target._pools)


def kinds(target: PrefillScheduler) -> list[str]:
    return [type(output).__name__ for output in target.take_outputs()]


def test_a_prompt_is_computed_in_chunks_and_each_complete_page_is_sent_while_it_goes_on() -> None:
    target = scheduler()
    target.accept([submit(1, 21)], 0.0)
    assert step(target, 0.1) == [(1, 8)]
    assert target.take_transfers().pushes == ()  # a part holds four pages of 1 MiB; two are complete
    assert step(target, 0.2) == [(1, 8)]
    first = target.take_transfers().pushes
    assert [len(push.ranges) for push in first] == [4] * 3 and sum(push.size_bytes for push in first) == 4 * PAGE_BYTES
    assert step(target, 0.3) == [(1, 5)]
    rest = target.take_transfers().pushes
    assert sum(push.size_bytes for push in rest[:3]) == 2 * PAGE_BYTES and [push.size_bytes for push in rest[3:]] == [ROW_BYTES]
    assert step(target, 0.4) is None
    target.accept([PushesEnded(tuple(PushResult(push.push_id, True) for push in [*rest, *first]), 0.004, 0.45)], 0.5)
    outputs = target.take_outputs()
    assert [type(output).__name__ for output in outputs] == ["Accepted", "Progress", "Progress", "Progress", "Committed"]
    figures = outputs[-1].figures
    assert figures.queue_s == pytest.approx(0.1) and figures.compute_s == pytest.approx(0.21)
    assert figures.exposed_s == pytest.approx(0.14) and figures.handover_s == pytest.approx(0.24)
    assert figures.sent_bytes == 6 * PAGE_BYTES + ROW_BYTES and figures.post_s == pytest.approx(0.004)
    at_rest(target)


def test_prompts_are_packed_and_the_budget_is_met() -> None:
    target = scheduler()
    target.accept([submit(1, 3), submit(2, 3), submit(3, 9)], 0.0)
    assert step(target, 0.1) == [(1, 3), (2, 3), (3, 2)]
    pushed(target, 0.15)
    assert step(target, 0.2) == [(3, 7)]
    pushed(target, 0.3)
    at_rest(target)


def test_higher_priority_first_then_age_and_holders_before_all() -> None:
    target = scheduler()
    target.accept([submit(1, 20)], 0.0)
    assert step(target, 0.1) == [(1, 8)]
    target.accept([submit(2, 4), submit(3, 4, priority=5)], 0.2)
    assert step(target, 0.3) == [(1, 8)]
    assert step(target, 0.4) == [(1, 4), (3, 4)]
    assert pushed(target, 0.45)
    assert step(target, 0.5) == [(2, 4)]


def test_pages_are_taken_whole_or_not_at_all_and_a_blocked_head_is_passed_a_bounded_number_of_times() -> None:
    """B37: two half-loaded prompts never hold the pool against each other."""
    target = scheduler(pages=9, limits=replace(LIMITS, staging_rows=8))
    target.accept([submit(1, 16), submit(2, 32), submit(3, 4), submit(4, 4), submit(5, 4)], 0.0)
    assert step(target, 0.1) == [(1, 8)]
    assert step(target, 0.2) == [(1, 8)]
    assert step(target, 0.3) == [(3, 4), (4, 4)]  # two pass the prompt that does not fit, the third may not
    assert step(target, 0.4) is None
    while pushed(target, 0.5):
        pass
    assert step(target, 0.6) == [(2, 8)]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (submit(9, 65), m.TOO_LONG),
        (submit(9, 64), m.QUEUE_FULL),
    ],
)
def test_refusals_name_the_limit_and_leave_nothing(command: m.Submit, cause: str) -> None:
    target = scheduler()
    target.accept([submit(1, 40)], 0.0)
    target.take_outputs()
    target.accept([command], 0.1)
    (failed,) = target.take_outputs()
    assert isinstance(failed, m.Failed) and failed.cause == cause and failed.retryable
    assert any(character.isdigit() for character in failed.detail)
    assert target.check() == [] and target.statistics().waiting_jobs == 1


def test_a_prompt_that_has_no_time_left_is_not_computed() -> None:
    """B40."""
    target = scheduler()
    target.accept([submit(1, 8, remaining_s=1.0)], 0.0)
    assert target.next_wake(0.0) == 1.0
    assert step(target, 1.0) is None
    assert [output.cause for output in target.take_outputs() if isinstance(output, m.Failed)] == [m.DEADLINE]
    at_rest(target)


def test_abandon_stops_before_the_next_chunk_and_keeps_pages_until_writes_have_ended() -> None:
    """B02, B05: source pages are held while a write reads them."""
    target = scheduler()
    target.accept([submit(1, 30)], 0.0)
    step(target, 0.1)
    step(target, 0.2)
    pushes = target.take_transfers().pushes
    target.accept([m.Abandon(f"{1:032x}")], 0.3)
    assert step(target, 0.4) is None
    assert target._pools[0].counts().free < target._pools[0].usable_pages
    assert "Failed" not in kinds(target)
    target.accept([ended(pushes, 0.5)], 0.5)
    assert kinds(target) == ["Failed"]
    at_rest(target)


def test_drain_is_answered_when_nothing_is_in_flight_and_twice_the_same() -> None:
    target = scheduler()
    target.accept([submit(1, 30)], 0.0)
    step(target, 0.1)
    step(target, 0.2)
    pushes = target.take_transfers().pushes
    target.take_outputs()
    target.accept([m.Drain(f"{1:032x}", 7), m.Drain(f"{1:032x}", 8)], 0.3)
    assert kinds(target) == [] and step(target, 0.35) is None
    target.accept([ended(pushes[:2], 0.4), ended(pushes[2:], 0.4, "peer_gone")], 0.4)
    outputs = target.take_outputs()
    assert outputs[:2] == [m.Drained(7, False), m.Drained(8, False)]
    assert isinstance(outputs[2], m.Failed) and outputs[2].cause == m.REVOKED
    target.accept([m.Drain(f"{1:032x}", 9)], 0.5)
    assert target.take_outputs() == [m.Drained(9, False)]
    at_rest(target)


def test_drains_that_wait_for_one_grant_are_bounded() -> None:
    target = scheduler()
    target.accept([submit(1, 30)], 0.0)
    step(target, 0.1)
    step(target, 0.2)
    pushes = target.take_transfers().pushes
    target.take_outputs()
    target.accept([m.Drain(f"{1:032x}", asker) for asker in range(ASKERS_MAX + 3)], 0.3)
    assert target.books()["drains_waiting"] == ASKERS_MAX
    target.accept([ended(pushes, 0.4)], 0.4)
    answered = [output.asker for output in target.take_outputs() if isinstance(output, m.Drained)]
    assert answered == list(range(3, ASKERS_MAX + 3))
    at_rest(target)


def test_a_grant_drained_before_it_came_is_never_written() -> None:
    target = scheduler()
    target.accept([m.Drain(f"{1:032x}", 1), submit(1, 8)], 0.0)
    outputs = target.take_outputs()
    assert outputs[0] == m.Drained(1, False) and isinstance(outputs[1], m.Failed) and outputs[1].cause == m.REVOKED
    assert step(target, 0.1) is None
    at_rest(target)


def test_a_failed_write_fails_the_grant_when_all_writes_have_ended() -> None:
    """B13: whoever knows tells."""
    target = scheduler()
    target.accept([submit(1, 8)], 0.0)
    step(target, 0.1)
    first, *others = target.take_transfers().pushes
    target.take_outputs()
    target.accept([ended([first], 0.2, "peer_gone")], 0.2)
    assert kinds(target) == []
    target.accept([ended(others, 0.3)], 0.3)
    (failed,) = target.take_outputs()
    assert (
        isinstance(failed, m.Failed) and failed.cause == m.TRANSFER_FAILED and "peer_gone" in failed.detail and failed.retryable
    )
    at_rest(target)


def test_pieces_of_pages_leave_while_the_step_that_makes_them_goes_on() -> None:
    target = scheduler()
    target.accept([submit(1, 8)], 0.0)
    planned = target.next_batch(0.1)
    assert planned is not None
    seen = []
    for layers in (1, 4, 8, 12):
        target.layers_done(planned, layers, 12, 0.1 + layers / 100)
        seen.append([push.size_bytes for push in target.take_transfers().pushes])
    third = 2 * PAGE_BYTES // 3
    assert [len(sizes) for sizes in seen] == [0, 1, 1, 1] and all(abs(sizes[0] - third) <= 2 for sizes in seen[1:])
    assert target.check() == []
    target.commit(planned, 0.3)
    target.send(planned, 0.3)
    assert [push.size_bytes for push in target.take_transfers().pushes] == [ROW_BYTES]
    assert target.check() == []


def test_a_step_that_fails_after_it_sent_pieces_ends_its_job_when_their_writes_have() -> None:
    target = scheduler()
    target.accept([submit(1, 8)], 0.0)
    planned = target.next_batch(0.1)
    assert planned is not None
    target.layers_done(planned, 6, 12, 0.15)
    pushes = target.take_transfers().pushes
    target.fail_step(planned, "out of memory")
    assert len(pushes) == 1 and "Failed" not in kinds(target) and step(target, 0.2) is None
    target.accept([ended(pushes, 0.3)], 0.3)
    assert kinds(target) == ["Failed"]
    at_rest(target)


def test_a_failed_step_ends_its_jobs_only() -> None:
    target = scheduler()
    target.accept([submit(1, 8), submit(2, 4)], 0.0)
    planned = target.next_batch(0.1)
    assert planned is not None and len(planned.chunks) == 1
    target.fail_step(planned, "out of memory")
    failed = [output for output in target.take_outputs() if isinstance(output, m.Failed)]
    assert [(one.cause, one.detail) for one in failed] == [(m.MODEL_ERROR, "out of memory")]
    assert step(target, 0.3) == [(2, 4)]
    pushed(target, 0.4)
    at_rest(target)


def test_closing_refuses_new_work_and_expels_what_runs() -> None:
    target = scheduler()
    target.accept([submit(1, 8), m.Close(expel=False), submit(2, 4)], 0.0)
    assert [output.cause for output in target.take_outputs() if isinstance(output, m.Failed)] == [m.DRAINING]
    assert step(target, 0.1) == [(1, 8)]
    target.accept([m.Close(expel=True)], 0.2)
    assert kinds(target) == ["Progress"]
    pushed(target, 0.3)
    assert kinds(target) == ["Failed"]
    at_rest(target)


def test_a_member_that_slept_stops_writing_by_itself() -> None:
    target = scheduler()
    target.accept([submit(1, 30)], 0.0)
    step(target, 0.1)
    target.accept([], 60.0)
    assert [output.cause for output in target.take_outputs() if isinstance(output, m.Failed)] == [m.LEASE_EXPIRED]
    at_rest(target)


def test_no_staging_row_holds_back_the_last_token_only() -> None:
    target = scheduler()
    target.accept([submit(1, 2), submit(2, 2), submit(3, 2)], 0.0)
    assert step(target, 0.1) == [(1, 2), (2, 2), (3, 1)]
    assert step(target, 0.2) is None
    pushed(target, 0.3)
    assert step(target, 0.4) == [(3, 1)]
    pushed(target, 0.5)
    at_rest(target)


def test_a_long_prompt_goes_through_a_window_with_few_pages() -> None:
    """Five pages are what a window of 9 tokens and a step of 8 touch at most; the prompt has 16."""
    target = scheduler(limits=replace(LIMITS, max_queued_tokens=200), window=9, window_pages=6)
    target.accept([submit(1, 64, window=9), submit(2, 64, window=9)], 0.0)
    pool, done = target._pools[1], 0
    while (chunks := step(target, 0.1)) is not None:
        assert chunks == [(1, 8)], "the second prompt has no pages in the second group"
        done += 8
        assert pool.counts().owned == min(5, 16 - max(0, done - 8) // 4)
    job = target._jobs[f"{1:032x}"]
    assert [len(table) for table in job.held.tables] == [16, 16]
    assert job.held.tables[1][:14] == [0] * 14
    # Of the windowed group the two last pages are sent, in one part; the first group's were sent as they were computed.
    plan = job.submit.plan
    assert plan.page_counts == (16, 2)
    while pushed(target, 0.2):
        pass
    assert "Committed" in kinds(target)
    assert step(target, 0.3) == [(2, 8)]


def test_a_prompt_that_the_window_is_too_large_for_is_refused() -> None:
    target = scheduler(window=9, window_pages=5)
    target.accept([submit(1, 64, window=9)], 0.0)
    (failed,) = target.take_outputs()
    assert isinstance(failed, m.Failed) and (failed.cause, failed.detail[:28]) == (m.TOO_LONG, "the prompt needs 5 pages; th")


class AnyOrder(RuleBasedStateMachine):
    """Any order of submits, steps, results, drains, abandons: books balance, each job ends once, nothing is left."""

    #: Of a second KV group, in tokens.
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.target = scheduler(pages=12, window=self.window, window_pages=7)
        self.flights: list[int] = []
        self.submitted = 0
        self.ends: Counter[str] = Counter()
        self.asked: list[int] = []

    def collect(self) -> None:
        self.flights += [push.push_id for push in self.target.take_transfers().pushes]
        for output in self.target.take_outputs():
            if isinstance(output, m.Committed | m.Failed):
                self.ends[output.grant_id] += 1
                assert self.ends[output.grant_id] == 1
            elif isinstance(output, m.Drained):
                self.asked.remove(output.asker)
            else:
                assert self.ends[output.grant_id] == 0

    @rule(tokens=st.integers(1, 40), priority=st.integers(-1, 1), remaining_s=st.sampled_from([None, 0.5, 3.0]))
    def submit(self, tokens: int, priority: int, remaining_s: float | None) -> None:
        self.submitted += 1
        self.target.accept(
            [submit(self.submitted, tokens, priority=priority, remaining_s=remaining_s, window=self.window)], self.now
        )
        self.collect()

    @rule(
        layers=st.lists(st.integers(1, 5), max_size=3),
        fails=st.sampled_from([False, False, False, True]),
        meanwhile=st.none() | st.integers(0, 1000),
    )
    def turn(self, layers: list[int], fails: bool, meanwhile: int | None = None) -> None:
        """meanwhile: which grant a Drain wants back while the step runs."""
        self.now += 0.1
        self.target.accept([], self.now)
        planned = self.target.next_batch(self.now)
        if planned is not None:
            for done in sorted(layers):
                self.target.layers_done(planned, done, 5, self.now)
                self.collect()
            if fails:
                self.target.fail_step(planned, "out of memory")
            else:
                self.target.commit(planned, self.now)
                if meanwhile is not None:
                    self.drain(meanwhile, 0)
                self.target.send(planned, self.now)
        self.collect()

    @precondition(lambda self: self.flights)
    @rule(ok=st.sampled_from([True, True, True, False]), pick=st.integers(0, 1000))
    def write_ends(self, ok: bool, pick: int) -> None:
        push_id = self.flights.pop(pick % len(self.flights))
        self.target.accept([PushesEnded((PushResult(push_id, ok, "" if ok else "peer_gone"),), 0.0, self.now)], self.now)
        self.collect()

    @precondition(lambda self: self.submitted)
    @rule(pick=st.integers(0, 1000), ahead=st.integers(0, 1))
    def drain(self, pick: int, ahead: int) -> None:
        self.asked.append(len(self.asked) + 10_000 * self.submitted)
        self.target.accept([m.Drain(f"{1 + (pick % self.submitted) + ahead:032x}", self.asked[-1])], self.now)
        self.collect()

    @precondition(lambda self: self.submitted)
    @rule(pick=st.integers(0, 1000))
    def abandon(self, pick: int) -> None:
        self.target.accept([m.Abandon(f"{1 + pick % self.submitted:032x}")], self.now)
        self.collect()

    @invariant()
    def books_balance(self) -> None:
        assert self.target.check() == []

    def teardown(self) -> None:
        """Whatever happened, work goes on until all is done: no deadlock, no leak."""
        for _ in range(400):
            self.turn([], fails=False)
            while self.flights:
                self.write_ends(True, 0)
        assert len(self.ends) == self.submitted and not self.asked
        at_rest(self.target)


class BehindAWindow(AnyOrder):
    """The same with a second group that has pages for one long prompt."""

    window = 5


TestAnyOrder = AnyOrder.TestCase
TestBehindAWindow = BehindAWindow.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyOrder.pytestmark = [pytest.mark.slow]
TestBehindAWindow.settings = TestAnyOrder.settings
TestBehindAWindow.pytestmark = [pytest.mark.slow]

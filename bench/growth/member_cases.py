"""What one seat, one prompt and one step cost at a member that has n others."""

import itertools
from collections.abc import Callable
from typing import Any

from bench.cell_simulation.output import TOKEN, Output
from bench.growth.counting import Case
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import OpenSeat
from decode_svc.planning import StepLimits
from decode_svc.scheduler import Scheduler, SchedulerLimits
from engine.layout import GroupKind, GroupLayout, Layout
from engine.pages import PagePool
from engine.sampling_params import SamplingParams
from engine.sequence_spec import SequenceSpec, StopSpec
from kv_transfer.grant_writer import GrantWriter
from kv_transfer.grants import WriterBook
from kv_transfer.offer import Endpoint, Grant, GrantPages, LayoutView, Peer, Slab, endpoint_of
from kv_transfer.plan import Computed, SourceMemory, plan
from lifecycle.deadlines import Limits
from lifecycle.record import AttemptKey
from prefill_svc import messages as m
from prefill_svc.plans import SchedulerLimits as PrefillLimits
from prefill_svc.scheduler import PrefillScheduler

MANY = 1 << 20
PAGE_TOKENS = 16
LAYOUT = Layout("m", (GroupLayout(GroupKind.FULL, 1, 1, 1, PAGE_TOKENS, "bfloat16"),))
ME = Peer("decode-0", "d", "here:1")
#: Bytes of a page that is a part of its own.
BIG_PAGE = 4 << 20
STEP = StepLimits(tokens=256, sequences=32)


def decode(pages: int, make_sequence: Callable[[SequenceSpec], Any] = Output) -> Scheduler:
    """A decode member's scheduler without a bound on seats."""
    memory = DecodeMemory(LAYOUT, pages, 64)
    ids = (f"{number:032x}" for number in itertools.count())
    handovers = Handovers(memory, ME, LAYOUT.fingerprint, HandoverLimits(), lambda: next(ids))
    return Scheduler(SchedulerLimits(sequences=MANY, step=STEP), memory, handovers, make_sequence)


def opening(number: int, most: int = 1000) -> OpenSeat:
    """An Open whose prompt is computed by the decode member."""
    spec = SequenceSpec(AttemptKey(f"r{number}", 1), 0, (TOKEN,) * 8, SamplingParams(temperature=0.0), StopSpec(), most, MANY)
    return OpenSeat(number, spec, Limits(inter_token_s=30.0), 0, False, None, 0.0)


def _seats(count: int) -> Callable[[], object]:
    """One more seat among others that wait for their prompts."""
    scheduler, numbers = decode(MANY), itertools.count()

    def one() -> None:
        scheduler.accept([opening(next(numbers))], 0.0)
        scheduler.take_events()

    for _ in range(count):
        one()
    return one


def _steps(count: int, most: int) -> Callable[[], object]:
    """A step, with the commands and clocks of its turn. All seats run."""
    scheduler = decode(MANY)
    scheduler.accept([opening(number, most) for number in range(count)], 0.0)
    for _ in range(count // 4 + count // 31 + 2):
        _step(scheduler)
    return lambda: _step(scheduler)


def _step(scheduler: Scheduler) -> int:
    scheduler.accept((), 1.0)
    step = scheduler.next_batch(1.0)
    assert step is not None
    scheduler.commit(step, [TOKEN] * len(step.draws), 1.0)
    scheduler.take_events()
    scheduler.take_errands()
    scheduler.next_wake()
    return len(step.draws)


def _submit(number: int) -> m.Submit:
    slabs = (Slab(1 << 40, MANY * 4096, 4096), Slab(1 << 41, MANY * 64, 64))
    endpoint: Endpoint = endpoint_of("agent", b"metadata", slabs)
    pages = GrantPages((1, 2), (1, 1))
    grant = Grant(f"{number:032x}", AttemptKey(f"r{number}", 1), ME, "ab" * 16, 0, 32, (pages,), 0, endpoint, 30.0)
    source = SourceMemory(LayoutView("ab" * 16, (PAGE_TOKENS,)), (Slab(1 << 42, MANY * 4096, 4096),), slabs[1])
    return m.Submit(grant.key, plan(grant, source), (TOKEN,) * 32, number % 3, 60.0 + number)


def prefill(jobs: int) -> PrefillScheduler:
    """A prefill member's scheduler with so many prompts waiting; none has pages."""
    limits = PrefillLimits(max_jobs=MANY, max_queued_tokens=MANY * 32, staging_rows=MANY)
    made = PrefillScheduler(limits, [PagePool(MANY)], LAYOUT.groups, WriterBook(grants_max=MANY))
    made.accept([_submit(number) for number in range(jobs)], 0.0)
    made.take_outputs()
    return made


def _prompts(waiting: int) -> Callable[[], object]:
    """One more prompt, and when the member is to wake for a clock."""
    scheduler, numbers = prefill(waiting), itertools.count(waiting)

    def one() -> object:
        scheduler.accept([_submit(next(numbers))], 0.0)
        scheduler.take_outputs()
        return scheduler.next_wake(0.0)

    return one


def _prompt_steps(waiting: int) -> Callable[[], object]:
    """A step of eight prompts of 32 tokens, and as many that come after it."""
    scheduler, numbers = prefill(max(waiting, 8)), itertools.count(max(waiting, 8))

    def one() -> None:
        step = scheduler.next_batch(1.0)
        assert step is not None and len(step.chunks) == 8
        scheduler.commit(step, 1.0)
        scheduler.send(step, 1.0)
        scheduler.take_outputs()
        scheduler.accept([_submit(next(numbers)) for _ in step.chunks], 1.0)

    return one


def _parts(pages: int) -> Callable[[], object]:
    """One more page of a prompt is computed whose pages before it were posted."""
    slabs = (Slab(1 << 40, MANY * BIG_PAGE, BIG_PAGE), Slab(1 << 50, MANY * 64, 64))
    count = pages + 100
    offered = GrantPages(tuple(range(1, count + 1)), (1,) * count)
    grant = Grant(
        "0" * 32, AttemptKey("r", 1), ME, "ab" * 16, 0, count * PAGE_TOKENS, (offered,), 0, endpoint_of("a", b"m", slabs), 30.0
    )
    source = SourceMemory(LayoutView("ab" * 16, (PAGE_TOKENS,)), (Slab(1 << 60, MANY * BIG_PAGE, BIG_PAGE),), slabs[1])
    pool = PagePool(MANY)
    writer = GrantWriter(WriterBook(), [pool], lambda asker, committed: None)
    filling = writer.accept(plan(grant, source), 0.0)
    writer.begin(filling, (tuple(pool.allocate("h", count)),))
    computed = itertools.count(max(1, pages) * PAGE_TOKENS, PAGE_TOKENS)

    def one() -> object:
        writer.send(filling, Computed(next(computed)), 0, 0.0)
        return writer.take_transfers()

    one(), one()  # the first posts all before it, the second notes that
    return one


MEMBER_CASES = (
    Case("hand-over: parts of one more page of a prompt", "pages posted before", _parts),
    Case("decode: one more seat", "seats", _seats),
    Case(
        "decode: a step of at most 32 sequences",
        "seats",
        lambda n: _steps(n, 1_000_000 // n),
        linear="a step looks at each seat once; max_sequences bounds them, near what a step takes",
    ),
    Case("prefill: one more prompt", "prompts waiting", _prompts),
    Case("prefill: a step of 8 prompts", "prompts waiting", _prompt_steps),
)

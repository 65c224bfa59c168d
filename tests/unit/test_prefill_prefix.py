"""Prefixes that a prefill member has already: handed over all the same, not computed again, and room for others when needed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.pages import PagePool
from engine.prefixes import page_pools
from kv_transfer.grants import WriterBook
from kv_transfer.ports import Push
from lifecycle.prefix_keys import PrefixKeys, tenant_salt
from prefill_svc import messages as m
from prefill_svc.scheduler import PrefillScheduler
from tests.unit.test_prefill_scheduler import GROUP, LIMITS, PAGE_TOKENS, at_rest, ended, sliding, step, submit

B = PAGE_TOKENS
SALT, OTHER = tenant_salt("one"), tenant_salt("another")


class World:
    """A scheduler with a cache; numbers name its jobs. window: of a second KV group."""

    def __init__(self, pages: int = 17, window: int | None = None, window_pages: int = 17) -> None:
        groups = [GROUP] if window is None else [GROUP, sliding(window)]
        self.pools = page_pools(groups, [pages, window_pages][: len(groups)])
        self.pool, self.window = self.pools[0], window
        self.scheduler = PrefillScheduler(LIMITS, self.pools, groups, WriterBook(), PrefixKeys(b"identity", B))
        self.now = 0.0
        self.outputs: list[m.Output] = []
        self.flying: list[Push] = []

    def submit(self, number: int, prompt: Sequence[int], salt: bytes = SALT) -> None:
        self.tell(replace(submit(number, len(prompt), window=self.window), prompt_token_ids=tuple(prompt), salt=salt))

    def tell(self, *commands: m.Command) -> None:
        self.now += 0.1
        self.scheduler.accept(commands, self.now)
        self.collect()

    def collect(self) -> None:
        self.outputs += self.scheduler.take_outputs()
        self.flying += self.scheduler.take_transfers().pushes

    def step(self) -> list[tuple[int, int]] | None:
        self.now += 0.1
        ran = step(self.scheduler, self.now)
        self.collect()
        return ran

    def run(self) -> list[tuple[int, int]]:
        """Steps and writes until nothing is left; the chunks that ran."""
        ran: list[tuple[int, int]] = []
        while True:
            chunks = self.step()
            ran += chunks or []
            flying, self.flying = self.flying, []
            if flying:
                self.tell(ended(flying, self.now))
            elif chunks is None:
                return ran

    def figures(self, number: int) -> m.Figures:
        return next(o.figures for o in self.outputs if isinstance(o, m.Committed) and int(o.grant_id, 16) == number)

    def told(self, number: int) -> list[tuple[int, int]]:
        return [
            (o.computed_tokens, o.cached_tokens)
            for o in self.outputs
            if isinstance(o, m.Progress) and int(o.grant_id, 16) == number
        ]

    def at_rest(self) -> None:
        assert self.scheduler.check() == []
        for pool in self.pools:
            counts = pool.counts()
            assert counts.free + counts.cached == counts.total == pool.free_pages
        assert self.scheduler.statistics().jobs == 0


def test_what_was_computed_before_is_sent_at_once_and_not_computed_again() -> None:
    world = World()
    world.submit(1, range(10))
    assert world.run() == [(1, 8), (1, 2)]
    world.submit(2, range(10))
    assert world.step() == [(2, 2)]
    assert world.told(2) == [(8, 8), (10, 8)]
    world.run()
    assert (world.figures(1).cached_tokens, world.figures(2).cached_tokens) == (0, 8)
    assert world.figures(1).sent_bytes == world.figures(2).sent_bytes
    assert world.scheduler.statistics().prefixes.hit_tokens == 8
    world.at_rest()


def test_found_pages_are_written_before_the_step() -> None:
    world = World()
    """Four pages are a part; they are on their way before the step that computes the rest has begun."""
    world = World()
    world.submit(1, range(18))
    world.run()
    world.submit(2, range(18))
    assert world.scheduler.next_batch(world.now) is not None
    world.collect()
    assert len(world.flying) > 0


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1])
def test_the_last_token_is_always_computed_for_its_logits(length: int) -> None:
    world = World()
    world.submit(1, range(length))
    world.run()
    world.submit(2, range(length))
    cached = (length - 1) // B * B
    assert sum(tokens for _, tokens in world.run()) == length - cached
    assert world.figures(2).cached_tokens == cached
    world.at_rest()


def test_only_the_common_front_is_found() -> None:
    world = World()
    world.submit(1, range(12))
    world.run()
    world.submit(2, [*range(6), 99, *range(7, 12)])
    assert sum(tokens for _, tokens in world.run()) == 8
    assert world.figures(2).cached_tokens == B


def test_b48_tenants_find_only_what_is_theirs() -> None:
    world = World()
    world.submit(1, range(9))
    world.run()
    for number, salt, cached in ((2, OTHER, 0), (3, SALT, 8), (4, b"", 0)):
        world.submit(number, range(9), salt)
        world.run()
        assert world.figures(number).cached_tokens == cached


def test_full_pages_of_a_prompt_that_was_given_up_are_found() -> None:
    world = World()
    world.submit(1, range(11))
    assert world.step() == [(1, 8)]
    world.tell(m.Abandon(f"{1:032x}"))
    world.run()
    world.submit(2, range(11))
    world.run()
    assert world.figures(2).cached_tokens == 8
    world.at_rest()


def test_a_step_that_failed_leaves_only_what_was_whole_before() -> None:
    world = World()
    world.submit(1, range(16))
    assert world.step() == [(1, 8)]
    plan = world.scheduler.next_batch(world.now)
    assert plan is not None
    world.scheduler.fail_step(plan, "the model broke")
    world.run()
    world.submit(2, range(16))
    world.run()
    assert world.figures(2).cached_tokens == 8
    world.at_rest()


def test_a_prompt_without_sound_logits_is_not_found_again() -> None:
    world = World()
    world.submit(1, range(9))
    while (chunks := world.step()) != [(1, 1)]:
        assert chunks
    world.scheduler.distrust([f"{1:032x}"])
    world.run()
    assert world.scheduler.prefixes.statistics().indexed_pages == 0
    world.submit(2, range(9))
    world.run()
    assert world.figures(2).cached_tokens == 0
    world.at_rest()


def test_cached_pages_are_room() -> None:
    """A prompt that fills the member finds room though everything is cached; what it shares is not given up for it."""
    world = World(pages=9)
    world.submit(1, range(30))
    world.run()
    assert world.pool.counts().free == 1 and world.scheduler.statistics().free_pages == 8
    world.submit(2, [*range(8), *range(100, 124)])
    world.run()
    assert world.figures(2).cached_tokens == 8
    world.submit(3, range(200, 232))
    world.run()
    assert world.figures(3).cached_tokens == 0 and world.scheduler.prefixes.statistics().evicted_pages > 0
    world.at_rest()


def test_two_that_share_need_the_room_of_one() -> None:
    """Eight usable pages: the second prompt of six pages fits beside the first because five of them are the same."""
    world = World(pages=9)
    world.submit(1, range(24))
    for _ in range(3):
        world.step()
    world.submit(2, [*range(20), 99])
    assert world.step() == [(2, 1)]
    world.run()
    world.at_rest()


def test_without_keys_nothing_is_kept() -> None:
    pool = PagePool(17)
    scheduler = PrefillScheduler(LIMITS, [pool], [GROUP], WriterBook())
    scheduler.accept([replace(submit(1, 9), salt=SALT)], 0.0)
    while step(scheduler, 0.0):
        pushes = scheduler.take_transfers().pushes
        scheduler.accept([ended(pushes, 0.0)], 0.0)
    at_rest(scheduler)


@pytest.mark.parametrize("window", [1, 5, 9, 40])
@pytest.mark.parametrize("length", [1, B, B + 1, 30])
def test_behind_a_window_all_but_the_last_page_is_found(window: int, length: int) -> None:
    world = World(window=window)
    world.submit(1, range(length))
    world.run()
    world.submit(2, range(length))
    cached = (length - 1) // B * B
    assert sum(tokens for _, tokens in world.run()) == length - cached
    assert world.figures(2).cached_tokens == cached
    assert world.figures(1).sent_bytes == world.figures(2).sent_bytes
    world.at_rest()


def test_a_common_front_is_found_while_its_last_window_is_there() -> None:
    """Pages that the first prompt left behind are kept as long as there is room; without those the other group's are no use."""
    world = World(pages=33, window=9, window_pages=12)
    world.submit(1, [*range(16), *range(50, 62)])
    world.run()
    world.submit(2, [*range(16), *range(70, 82)])
    world.run()
    assert world.figures(2).cached_tokens == 16
    world.submit(3, range(200, 240))
    world.run()
    world.submit(4, [*range(16), *range(90, 99)])
    world.run()
    assert world.figures(4).cached_tokens == 0
    world.at_rest()


@pytest.mark.parametrize(("window_pages", "beside"), [(8, True), (7, False)])
def test_a_prompt_that_shares_behind_a_window_begins_when_it_can_never_lack_a_page(window_pages: int, beside: bool) -> None:
    """It holds five pages at once, beside the two of the first prompt; leaving those that both have frees none."""
    world = World(pages=60, window=9, window_pages=window_pages)
    world.submit(1, range(32))
    while world.step():
        pass
    assert world.scheduler.statistics().sending_jobs == 1 and world.pools[1].counts().owned == 2
    world.submit(2, range(64))
    chunks = []
    while chunk := world.step():
        chunks += chunk
    assert sum(tokens for _, tokens in chunks) == (32 if beside else 0)
    world.run()
    assert world.figures(2).cached_tokens == 32
    world.at_rest()

"""Both books over a network that delays, reorders, repeats and loses: no write ever lands in a page that is not the writer's.

Each rule is something the world may do next. The world writes a posted part into its pages at any moment until the part ends.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.grants import (
    AnswerLater,
    Committed,
    Drained,
    DuplicateGrant,
    Filled,
    GrantRevoked,
    ReaderBook,
    ReaderState,
    Refused,
    WriterBook,
)
from kv_transfer.offer import Peer
from kv_transfer.plan import plan
from tests.unit.handover_values import PAGE_BYTES, grant, source

PAGES = range(1, 9)
WRITER = Peer("prefill", "p-1", "prefill:1")


class Pair(RuleBasedStateMachine):
    """One reader, one writer, eight pages."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.choose = random.Random(seed)
        self.now = 0.0
        self.reader, self.writer = ReaderBook(), WriterBook()
        self.owner = dict.fromkeys(PAGES, "")  # page -> the grant that has it
        self.plans = {}
        self.offers, self.drains, self.answers, self.notices = [], [], [], []  # on their way
        self.flying = []  # (grant_id, part) posted and not ended
        self.cut = set()  # grants whose receiving agent was destroyed
        self.waiting = set()  # drains that the writer answers later
        self.posted = {}

    # The reader.

    @rule()
    def offer(self):
        free = [page for page, owner in self.owner.items() if not owner]
        if len(free) < 2:
            return
        pages = self.choose.sample(free, 2)
        one = grant(0, 32, page_bytes=(PAGE_BYTES * 12,), page_ids=(tuple(pages),))
        work = plan(one, source(page_bytes=(PAGE_BYTES * 12,)))
        self.plans[one.grant_id] = work
        self.owner |= dict.fromkeys(pages, one.grant_id)
        self.reader.offer(one, WRITER, self.now)
        self.offers.append(one)

    @rule()
    def revoke(self):
        live = self.reader.open_of("p-1")
        if live:
            order = self.reader.revoke(self.choose.choice(live))
            self.drains.append(order.grant_id)

    @rule()
    def ask_again(self):
        self.drains += [order.grant_id for order in self.reader.unsettled()]

    @rule()
    def give_up_asking(self):
        for order in self.reader.unsettled():
            self.reader.unanswered(order.grant_id)

    @rule()
    def fence(self):
        """The receiving agent is destroyed: from here on nothing posted to it lands."""
        freed = self.reader.fenced("p-1")
        self.cut |= {f.grant_id for f in freed} | {g for g, _ in self.flying}
        for one in freed:
            self.let_go(one.grant_id)

    @precondition(lambda self: self.notices)
    @rule(repeat=st.booleans())
    def notice_arrives(self, repeat):
        grant_id, part = self.take(self.notices, repeat)
        if grant_id in self.cut:
            return
        outcome = self.reader.arrived("p-1", self.plans[grant_id].notice(part), self.now)
        assert not isinstance(outcome, Refused)
        if isinstance(outcome, Committed):
            assert not [f for f in self.flying if f[0] == grant_id], "committed before the last write ended"
            self.let_go(grant_id)  # the sequence runs and ends at once

    @precondition(lambda self: self.answers)
    @rule(repeat=st.booleans())
    def answer_arrives(self, repeat):
        grant_id = self.take(self.answers, repeat)
        if self.reader.drained(grant_id):
            self.let_go(grant_id)

    # The writer.

    @precondition(lambda self: self.offers)
    @rule(repeat=st.booleans())
    def offer_arrives(self, repeat):
        one = self.take(self.offers, repeat)
        try:
            self.writer.accept(one, self.now)
        except (GrantRevoked, DuplicateGrant):
            return
        self.writer.begin(one.grant_id, len(self.plans[one.grant_id].parts))
        self.posted[one.grant_id] = 0

    @rule()
    def post(self):
        ready = [g for g in self.writer.open_ids() if self.writer.may_post(g, self.now) and self.posted[g] < 3]
        if ready:
            grant_id = self.choose.choice(ready)
            self.writer.posted(grant_id, self.posted[grant_id])
            self.flying.append((grant_id, self.posted[grant_id]))
            self.posted[grant_id] += 1

    @precondition(lambda self: self.flying)
    @rule(fails=st.booleans())
    def part_ends(self, fails):
        grant_id, part = self.take(self.flying, False)
        cause = "peer_gone" if grant_id in self.cut else "transport_error" if fails and self.choose.random() < 0.3 else None
        if cause is None:
            self.notices.append((grant_id, part))
        outcome = self.writer.finished(grant_id, part, cause)
        if isinstance(outcome, Drained | Filled) and grant_id in self.waiting:
            self.waiting.discard(grant_id)
            self.answers.append(grant_id)

    @precondition(lambda self: self.drains)
    @rule(repeat=st.booleans())
    def drain_arrives(self, repeat):
        grant_id = self.take(self.drains, repeat)
        if isinstance(self.writer.drain(grant_id), AnswerLater):
            self.waiting.add(grant_id)
        else:
            self.answers.append(grant_id)

    @rule(seconds=st.floats(0, 15))
    def the_writer_sleeps(self, seconds):
        self.now += seconds
        for outcome in self.writer.heard(self.now):
            if isinstance(outcome, Drained) and outcome.grant_id in self.waiting:
                self.waiting.discard(outcome.grant_id)
                self.answers.append(outcome.grant_id)

    # The network.

    @rule(what=st.sampled_from(["offers", "drains", "answers"]))
    def lose(self, what):
        if getattr(self, what):
            self.take(getattr(self, what), False)

    # Helpers.

    def take(self, queue, repeat):
        """Any message of a queue; with repeat it stays to arrive again."""
        index = self.choose.randrange(len(queue))
        return queue[index] if repeat else queue.pop(index)

    def let_go(self, grant_id):
        for page, owner in self.owner.items():
            if owner == grant_id:
                self.owner[page] = ""

    @invariant()
    def no_write_can_land_in_a_page_that_is_not_the_grants(self):
        if not hasattr(self, "flying"):
            return
        for grant_id, _ in self.flying:
            if grant_id not in self.cut:
                pages = self.plans[grant_id].grant.groups[0].page_ids
                assert {self.owner[page] for page in pages} == {grant_id}
        assert self.reader.check() == []
        assert self.writer.check() == []

    def teardown(self):
        """With a network that delivers, everything comes back, whatever was lost before."""
        if not hasattr(self, "flying"):
            return
        for grant_id in self.reader.open_of("p-1"):
            self.reader.revoke(grant_id)
        while self.flying:
            self.part_ends(False)
        self.ask_again()
        for queue, deliver in (("drains", self.drain_arrives), ("answers", self.answer_arrives), ("offers", self.offer_arrives)):
            while getattr(self, queue):
                deliver(False)
        assert set(self.owner.values()) == {""}
        assert self.reader.open_of("p-1") == []
        assert all(self.reader.state(g) in (None, ReaderState.COMMITTED, ReaderState.RECLAIMED) for g in self.plans)


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPair = pytest.mark.slow(TestPair)

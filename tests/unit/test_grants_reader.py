"""The reader's book: scenarios, and a state machine against a model that keeps everything in plain sets."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kv_transfer.grants import (
    READER_TABLE,
    READER_TERMINAL,
    Committed,
    Counted,
    DrainOrder,
    DuplicateGrant,
    Freed,
    GrantsFull,
    IllegalGrantEvent,
    ReaderBook,
    ReaderState,
    Refused,
    Unknown,
)
from kv_transfer.offer import Peer
from kv_transfer.plan import plan
from tests.unit.handover_values import grant, source

WRITER = Peer("prefill", "p-1", "prefill:1")
OTHER = Peer("prefill", "p-2", "prefill:1")


def offered(tokens=500, **bounds):
    """A book with one grant, and its plan."""
    book = ReaderBook(**bounds)
    work = plan(grant(0, tokens), source())
    book.offer(work.grant, WRITER, 0.0)
    return book, work


def test_the_table_has_no_way_out_of_an_end_and_a_way_to_every_state():
    assert not {state for state, _ in READER_TABLE} & READER_TERMINAL
    assert set(READER_TABLE.values()) | {ReaderState.OFFERED} == set(ReaderState)


def test_a_grant_commits_when_every_part_arrived_in_any_order_duplicates_counted_once():
    book, work = offered()
    grant_id = work.grant.grant_id
    order = (6, 0, 6, 2, 1, 5, 3, 4)
    outcomes = [book.arrived("p-1", work.notice(part).to_bytes(), 1.0 + i) for i, part in enumerate(order)]
    assert outcomes == [
        Counted(grant_id, 6, False),
        Counted(grant_id, 5, False),
        Counted(grant_id, 5, True),
        *(Counted(grant_id, missing, False) for missing in range(4, 0, -1)),
        Committed(grant_id, work.grant.key, 7.0),
    ]
    assert book.state(grant_id) is ReaderState.COMMITTED
    assert book.arrived("p-1", work.notice(0), 9.0) == Unknown(grant_id, "late")
    assert book.revoke(grant_id) is None
    assert not book.drained(grant_id)
    assert book.fenced("p-1") == []
    assert book.check() == []
    assert book.statistics().duplicate_parts == 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"token_count": 499}, "counts"),
        ({"page_counts": (31,)}, "counts"),
        ({"page_counts": (32, 0)}, "counts"),
        ({"parts": 5}, "parts"),
        ({"layout_fingerprint": "cd" * 16}, "layout_mismatch"),
    ],
)
def test_b01_a_notice_that_does_not_fit_the_offer_revokes_the_grant(change, cause):
    book, work = offered()
    notice = dataclasses.replace(work.notice(0), **change)
    order = DrainOrder(work.grant.grant_id, work.grant.key, WRITER)
    assert book.arrived("p-1", notice.to_bytes(), 1.0) == Refused(work.grant.grant_id, cause, order)
    assert book.state(work.grant.grant_id) is ReaderState.REVOKING
    assert book.statistics().refusals == {cause: 1}
    # What is right comes too late now: only Drain or a fence ends the grant.
    assert book.arrived("p-1", work.notice(0), 2.0) == Unknown(work.grant.grant_id, "revoked")


def test_notices_of_others_are_counted_and_forgotten():
    book, work = offered()
    stranger = plan(grant(), source())
    assert book.arrived("p-1", stranger.notice(0), 1.0) == Unknown(stranger.grant.grant_id, "unknown_grant")
    assert book.arrived("p-2", work.notice(0), 1.0) == Unknown(work.grant.grant_id, "wrong_writer")
    assert book.arrived("p-1", b"noise", 1.0) == Unknown("", "bad_notice")
    assert book.statistics().unknown == {"unknown_grant": 1, "wrong_writer": 1, "bad_notice": 1}
    assert book.state(work.grant.grant_id) is ReaderState.OFFERED


def test_b02_pages_come_back_only_with_the_writers_answer():
    book, work = offered()
    grant_id = work.grant.grant_id
    book.arrived("p-1", work.notice(0), 1.0)
    first, again = book.revoke(grant_id), book.revoke(grant_id)
    assert first == again == DrainOrder(grant_id, work.grant.key, WRITER)
    # All other parts arrive now. The writer has not said that it stopped, so nothing is free and nothing is decoded.
    assert {book.arrived("p-1", work.notice(p), 2.0).cause for p in (1, 2, 3)} == {"revoked"}
    assert book.expired(1e9) == []
    assert book.state(grant_id) is ReaderState.REVOKING
    assert book.drained(grant_id)
    assert not book.drained(grant_id)
    assert book.state(grant_id) is ReaderState.RECLAIMED


def test_b06_a_silent_writer_costs_a_quarantine_until_a_fence_and_late_signals_change_nothing():
    book, work = offered()
    grant_id = work.grant.grant_id
    book.revoke(grant_id)
    assert book.unanswered(grant_id)
    assert book.unanswered(grant_id)
    assert (book.statistics().quarantined, book.statistics().revoking) == (1, 0)
    assert [o.grant_id for o in book.unsettled()] == [grant_id]
    assert book.fenced("p-2") == []
    assert book.fenced("p-1") == [Freed(grant_id, work.grant.key, ReaderState.QUARANTINED)]
    assert book.arrived("p-1", work.notice(0), 9.0) == Unknown(grant_id, "late")
    assert not book.drained(grant_id)
    assert not book.unanswered(grant_id)
    assert book.statistics().fenced == 1
    assert book.check() == []


def test_quarantine_also_ends_with_a_late_answer():
    book, work = offered()
    book.revoke(work.grant.grant_id)
    book.unanswered(work.grant.grant_id)
    assert book.drained(work.grant.grant_id)
    assert book.unsettled() == []


def test_a_fence_ends_every_grant_of_that_writer_and_of_no_other():
    book = ReaderBook()
    mine, theirs = [grant() for _ in range(3)], grant()
    for one in mine:
        book.offer(one, WRITER, 0.0)
    book.offer(theirs, OTHER, 0.0)
    book.revoke(mine[1].grant_id)
    book.revoke(mine[2].grant_id)
    book.unanswered(mine[2].grant_id)
    before = {f.grant_id: f.before for f in book.fenced("p-1")}
    states = [ReaderState.OFFERED, ReaderState.REVOKING, ReaderState.QUARANTINED]
    assert before == dict(zip([g.grant_id for g in mine], states, strict=True))
    assert book.state(theirs.grant_id) is ReaderState.OFFERED
    assert book.open_of("p-2") == [theirs.grant_id]


def test_b54_every_grant_has_its_own_expiry_and_renewals_move_only_theirs():
    book = ReaderBook()
    long = dataclasses.replace(grant(), expires_after_s=300.0)
    short = dataclasses.replace(grant(), expires_after_s=10.0)
    book.offer(long, WRITER, 0.0)
    book.offer(short, WRITER, 0.0)
    assert book.renew(long.grant_id, 5.0)
    assert book.expired(9.9) == []
    assert book.expired(10.0) == [short.grant_id]
    assert book.renew(short.grant_id, 10.0)
    assert book.expired(19.9) == []
    assert book.expired(305.0) == [long.grant_id, short.grant_id]


def test_b15_a_sign_of_life_for_an_unknown_id_is_counted():
    book, work = offered()
    assert not book.renew("00" * 16, 1.0)
    book.revoke(work.grant.grant_id)
    assert not book.renew(work.grant.grant_id, 1.0)
    assert book.statistics().unknown_renewals == 2


def test_an_expired_grant_is_only_asked_back():
    book, work = offered()
    assert book.expired(1e6) == [work.grant.grant_id]
    assert book.state(work.grant.grant_id) is ReaderState.OFFERED


def test_bounds_and_ids():
    book, work = offered(grants_max=1)
    with pytest.raises(GrantsFull, match="all 1 open grants"):
        book.offer(grant(), WRITER, 0.0)
    with pytest.raises(DuplicateGrant):
        book.offer(work.grant, WRITER, 0.0)
    book.fenced("p-1")
    with pytest.raises(DuplicateGrant, match="reclaimed"):
        book.offer(work.grant, WRITER, 0.0)


@pytest.mark.parametrize("call", ["drained", "unanswered"])
def test_an_event_that_cannot_be_raises_and_changes_nothing(call):
    book, work = offered()
    before = book.statistics()
    with pytest.raises(IllegalGrantEvent):
        getattr(book, call)(work.grant.grant_id)
    assert book.state(work.grant.grant_id) is ReaderState.OFFERED
    assert book.statistics() == before


class ReaderMachine(RuleBasedStateMachine):
    """The model: for each id its state by name, the set of arrived parts, and its writer."""

    ids = Bundle("ids")

    def __init__(self):
        super().__init__()
        self.book = ReaderBook(grants_max=4)
        self.plans, self.model, self.parts, self.writer, self.heard = {}, {}, {}, {}, {}
        self.now = 0.0

    def live(self):
        return [i for i, s in self.model.items() if s in ("offered", "revoking", "quarantined")]

    @rule(target=ids, tokens=st.integers(1, 400), writer=st.sampled_from([WRITER, OTHER]))
    def offer(self, tokens, writer):
        work = plan(grant(0, tokens), source())
        grant_id = work.grant.grant_id
        self.plans[grant_id], self.parts[grant_id], self.writer[grant_id] = work, set(), writer.incarnation
        if len(self.live()) >= 4:
            with pytest.raises(GrantsFull):
                self.book.offer(work.grant, writer, self.now)
            return grant_id
        self.book.offer(work.grant, writer, self.now)
        self.model[grant_id], self.heard[grant_id] = "offered", self.now
        return grant_id

    @rule(grant_id=ids, part=st.integers(0, 4), writer=st.sampled_from(["p-1", "p-2"]), broken=st.booleans())
    def arrived(self, grant_id, part, writer, broken):
        work = self.plans[grant_id]
        part %= len(work.parts)
        notice = work.notice(part)
        if broken:
            notice = dataclasses.replace(notice, token_count=notice.token_count + 1)
        outcome = self.book.arrived(writer, notice, self.now)
        if self.model.get(grant_id) != "offered" or self.writer[grant_id] != writer:
            assert isinstance(outcome, Unknown)
        elif broken:
            assert isinstance(outcome, Refused)
            self.model[grant_id] = "revoking"
        else:
            assert getattr(outcome, "duplicate", False) == (part in self.parts[grant_id])
            self.parts[grant_id].add(part)
            self.heard[grant_id] = self.now
            if self.parts[grant_id] == set(range(len(work.parts))):
                assert isinstance(outcome, Committed)
                self.model[grant_id] = "committed"
            else:
                assert outcome.missing == len(work.parts) - len(self.parts[grant_id])

    @rule(grant_id=ids)
    def revoke(self, grant_id):
        order = self.book.revoke(grant_id)
        assert (order is not None) == (grant_id in self.live())
        if self.model.get(grant_id) == "offered":
            self.model[grant_id] = "revoking"

    @rule(grant_id=ids)
    def drained(self, grant_id):
        if self.model.get(grant_id) == "offered":
            with pytest.raises(IllegalGrantEvent):
                self.book.drained(grant_id)
            return
        assert self.book.drained(grant_id) == (grant_id in self.live())
        if grant_id in self.live():
            self.model[grant_id] = "reclaimed"

    @rule(grant_id=ids)
    def unanswered(self, grant_id):
        if self.model.get(grant_id) == "offered":
            with pytest.raises(IllegalGrantEvent):
                self.book.unanswered(grant_id)
            return
        assert self.book.unanswered(grant_id) == (grant_id in self.live())
        if grant_id in self.live():
            self.model[grant_id] = "quarantined"

    @rule(writer=st.sampled_from(["p-1", "p-2"]))
    def fenced(self, writer):
        freed = {f.grant_id: f.before.value for f in self.book.fenced(writer)}
        assert freed == {i: self.model[i] for i in self.live() if self.writer[i] == writer}
        self.model |= dict.fromkeys(freed, "reclaimed")

    @rule(seconds=st.floats(0, 40), grant_id=ids)
    def time_passes(self, seconds, grant_id):
        self.now += seconds
        if self.book.renew(grant_id, self.now):
            self.heard[grant_id] = self.now
        late = {i for i, s in self.model.items() if s == "offered" and self.now - self.heard[i] >= 30.0}
        assert set(self.book.expired(self.now)) == late

    @invariant()
    def books_agree(self):
        assert self.book.check() == []
        for grant_id in self.plans:
            state = self.book.state(grant_id)
            assert (state.value if state else None) == self.model.get(grant_id)
        count = list(self.model.values()).count
        s = self.book.statistics()
        assert (s.offered, s.revoking, s.quarantined) == (count("offered"), count("revoking"), count("quarantined"))
        assert (s.commits, s.reclaimed) == (count("committed"), count("reclaimed"))


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReaderMachine = pytest.mark.slow(TestReaderMachine)

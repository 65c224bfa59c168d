"""The writer's book: scenarios, and a state machine against a model that keeps everything in plain sets."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kv_transfer.grants import (
    STOP_LEASE,
    STOP_REVOKED,
    WRITER_TABLE,
    WRITER_TERMINAL,
    AnswerLater,
    AnswerNow,
    Drained,
    Draining,
    DuplicateGrant,
    Filled,
    GrantRevoked,
    GrantsFull,
    IllegalGrantEvent,
    WriterBook,
    WriterState,
    Writing,
)
from tests.unit.handover_values import grant


def writing(parts=3, **bounds):
    """A book with one grant that is being written."""
    book, one = WriterBook(**bounds), grant()
    book.accept(one, 0.0)
    book.begin(one.grant_id, parts)
    return book, one.grant_id


def test_the_table_has_no_way_out_of_an_end_and_a_way_to_every_state():
    assert not {state for state, _ in WRITER_TABLE} & WRITER_TERMINAL
    assert set(WRITER_TABLE.values()) | {WriterState.ACCEPTED} == set(WriterState)


def test_a_grant_is_committed_when_every_part_is_written():
    book, grant_id = writing()
    for part in (0, 1, 2):
        assert book.may_post(grant_id, 1.0)
        book.posted(grant_id, part)
    assert book.finished(grant_id, 2) == Writing(grant_id)
    assert book.finished(grant_id, 0) == Writing(grant_id)
    assert book.finished(grant_id, 1) == Filled(grant_id)
    assert not book.may_post(grant_id, 1.0)
    assert book.drain(grant_id) == AnswerNow(True, "")
    assert book.fail(grant_id, "late") is None
    assert book.check() == []


def test_b02_a_drain_waits_for_what_is_in_flight_and_every_asker_gets_the_same():
    book, grant_id = writing()
    book.posted(grant_id, 0)
    book.posted(grant_id, 1)
    assert book.drain(grant_id) == AnswerLater(2)
    assert book.drain(grant_id) == AnswerLater(2)
    assert not book.may_post(grant_id, 1.0)
    with pytest.raises(IllegalGrantEvent):
        book.posted(grant_id, 2)
    assert book.finished(grant_id, 1) == Draining(grant_id, STOP_REVOKED, 1)
    assert book.finished(grant_id, 0, "peer_gone") == Drained(grant_id, STOP_REVOKED)
    assert book.drain(grant_id) == AnswerNow(False, STOP_REVOKED)
    assert book.check() == []


def test_a_drain_with_the_last_parts_in_flight_ends_drained_even_when_all_were_written():
    book, grant_id = writing(parts=1)
    book.posted(grant_id, 0)
    book.drain(grant_id)
    assert book.finished(grant_id, 0) == Drained(grant_id, STOP_REVOKED)


def test_b04_a_grant_drained_before_it_was_seen_is_never_written():
    book, one = WriterBook(), grant()
    assert book.drain(one.grant_id) == AnswerNow(False, STOP_REVOKED)
    assert book.drain(one.grant_id) == AnswerNow(False, STOP_REVOKED)
    with pytest.raises(GrantRevoked):
        book.accept(one, 1.0)
    assert not book.may_post(one.grant_id, 1.0)
    assert book.statistics().tombstones == 1


def test_b04_a_writer_that_slept_longer_than_its_lease_stops_by_itself():
    book, grant_id = writing(lease_s=10.0)
    assert book.heard(9.0) == []
    assert book.may_post(grant_id, 19.0)
    assert not book.may_post(grant_id, 19.1)
    book.posted(grant_id, 0)
    assert book.heard(20.0) == [Draining(grant_id, STOP_LEASE, 1)]
    assert book.finished(grant_id, 0) == Drained(grant_id, STOP_LEASE)
    assert book.heard(40.0) == [], "nothing was open, so nothing was slept through"


def test_b05_source_pages_are_held_until_the_last_part_that_reads_them_has_ended():
    book, grant_id = writing()
    for part in range(3):
        book.posted(grant_id, part)
    assert book.finished(grant_id, 0, "transport_error") == Draining(grant_id, "transport_error", 2)
    assert book.finished(grant_id, 1) == Draining(grant_id, "transport_error", 1)
    assert book.statistics().parts_in_flight == 1
    assert book.finished(grant_id, 2, "peer_gone") == Drained(grant_id, "transport_error")


def test_b13_a_failure_is_remembered_for_a_reader_that_asks_later():
    book, grant_id = writing()
    assert book.fail(grant_id, "model_error") == Drained(grant_id, "model_error")
    assert book.drain(grant_id) == AnswerNow(False, "model_error")
    with pytest.raises(DuplicateGrant):
        book.accept(_same(grant_id), 0.0)
    assert book.statistics().stops == {"model_error": 1}


def _same(grant_id):
    return dataclasses.replace(grant(), grant_id=grant_id)


def test_bounds():
    book, grant_id = writing(grants_max=1, tombstones_max=3)
    with pytest.raises(GrantsFull):
        book.accept(grant(), 0.0)
    with pytest.raises(DuplicateGrant, match="writing"):
        book.accept(_same(grant_id), 0.0)
    for _ in range(10):
        book.drain(grant().grant_id)
    assert book.statistics().tombstones == 3
    assert book.check() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda b, g: b.begin(g, 3),
        lambda b, g: b.posted(g, 3),
        lambda b, g: b.posted(g, 0),
        lambda b, g: b.finished(g, 1),
        lambda b, g: b.begin("00" * 16, 1),
        lambda b, g: b.posted("00" * 16, 0),
        lambda b, g: b.finished("00" * 16, 0),
    ],
)
def test_an_event_that_cannot_be_raises_and_changes_nothing(call):
    book, grant_id = writing()
    book.posted(grant_id, 0)
    before = book.statistics()
    with pytest.raises(IllegalGrantEvent):
        call(book, grant_id)
    assert book.statistics() == before
    assert book.state(grant_id) is WriterState.WRITING


class WriterMachine(RuleBasedStateMachine):
    """The model: for each id its state by name, the parts in flight and done."""

    ids = Bundle("ids")
    PARTS = 3

    def __init__(self):
        super().__init__()
        self.book = WriterBook(grants_max=4, lease_s=10.0)
        self.grants, self.model, self.flying, self.done = {}, {}, {}, {}
        self.now = self.heard_at = 0.0

    def live(self):
        return [i for i, s in self.model.items() if s in ("accepted", "writing", "draining")]

    def stop(self, grant_id):
        if grant_id in self.live():
            self.model[grant_id] = "draining" if self.flying[grant_id] else "drained"

    @rule(target=ids)
    def seen(self):
        one = grant()
        self.grants[one.grant_id], self.flying[one.grant_id], self.done[one.grant_id] = one, set(), set()
        return one.grant_id

    @rule(grant_id=ids)
    def accept(self, grant_id):
        if grant_id in self.model:
            with pytest.raises((GrantRevoked, DuplicateGrant)):
                self.book.accept(self.grants[grant_id], self.now)
        elif len(self.live()) >= 4:
            with pytest.raises(GrantsFull):
                self.book.accept(self.grants[grant_id], self.now)
        else:
            if not self.live():
                self.heard_at = self.now
            self.book.accept(self.grants[grant_id], self.now)
            self.model[grant_id] = "accepted"

    @rule(grant_id=ids)
    def begin(self, grant_id):
        if self.model.get(grant_id) == "accepted":
            self.book.begin(grant_id, self.PARTS)
            self.model[grant_id] = "writing"
        else:
            with pytest.raises(IllegalGrantEvent):
                self.book.begin(grant_id, self.PARTS)

    @rule(grant_id=ids, part=st.integers(0, 3))
    def post(self, grant_id, part):
        fresh = part < self.PARTS and part not in self.flying[grant_id] | self.done[grant_id]
        writing = self.model.get(grant_id) == "writing"
        assert self.book.may_post(grant_id, self.now) == (writing and self.now - self.heard_at <= 10.0)
        if writing and fresh:
            self.book.posted(grant_id, part)
            self.flying[grant_id].add(part)
        else:
            with pytest.raises(IllegalGrantEvent):
                self.book.posted(grant_id, part)

    @rule(grant_id=ids, part=st.integers(0, 2), cause=st.sampled_from([None, None, "peer_gone"]))
    def finish(self, grant_id, part, cause):
        if part not in self.flying[grant_id]:
            with pytest.raises(IllegalGrantEvent):
                self.book.finished(grant_id, part, cause)
            return
        outcome = self.book.finished(grant_id, part, cause)
        self.flying[grant_id].remove(part)
        if cause is None:
            self.done[grant_id].add(part)
        if cause is not None or self.model[grant_id] == "draining":
            self.stop(grant_id)
        elif len(self.done[grant_id]) == self.PARTS:
            self.model[grant_id] = "committed"
        kinds = {"writing": Writing, "committed": Filled, "draining": Draining, "drained": Drained}
        assert isinstance(outcome, kinds[self.model[grant_id]])

    @rule(grant_id=ids)
    def drain(self, grant_id):
        answer = self.book.drain(grant_id)
        self.stop(grant_id)
        state = self.model.setdefault(grant_id, "drained")
        assert isinstance(answer, AnswerLater if state == "draining" else AnswerNow)
        if isinstance(answer, AnswerNow):
            assert not self.flying[grant_id]
            assert answer.committed == (state == "committed")

    @rule(grant_id=ids)
    def fail(self, grant_id):
        assert (self.book.fail(grant_id, "model_error") is not None) == (grant_id in self.live())
        self.stop(grant_id)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds):
        self.now += seconds
        slept = self.now - self.heard_at > 10.0
        stopped = {o.grant_id for o in self.book.heard(self.now)}
        self.heard_at = self.now
        assert stopped == ({i for i in self.live() if self.model[i] != "draining"} if slept else set())
        for grant_id in stopped:
            self.stop(grant_id)

    @invariant()
    def books_agree(self):
        assert self.book.check() == []
        for grant_id in self.grants:
            state = self.book.state(grant_id)
            assert (state.value if state else None) == self.model.get(grant_id)
        assert self.book.statistics().parts_in_flight == sum(len(f) for f in self.flying.values())
        assert set(self.book.draining()) == {i for i, s in self.model.items() if s == "draining"}


TestWriterMachine = WriterMachine.TestCase
TestWriterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWriterMachine = pytest.mark.slow(TestWriterMachine)

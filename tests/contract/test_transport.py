"""What every transport must do, in memory and over NIXL between two processes (TCP, and shared memory as an opt-in)."""

import dataclasses
import random
import secrets

import pytest

from kv_transfer.grants import AnswerLater, AnswerNow, Committed, Counted, Drained, Filled, Refused, Unknown
from kv_transfer.offer import BadGrant, Grant, GrantPages, LayoutView, Peer, endpoint_of, grant_from_proto, grant_to_proto
from kv_transfer.ports import (
    CAUSE_BAD_METADATA,
    CAUSE_CONNECT_FAILED,
    CAUSE_NOT_CONNECTED,
    CAUSE_NOT_REGISTERED,
    CAUSE_PEER_GONE,
    CAUSE_TRANSPORT,
    Push,
    Range,
)
from lifecycle.record import AttemptKey
from tests.contract.transport_node import PAGE_BYTES, ROW_BYTES
from tests.contract.transport_wire import Wire, wire_of

KINDS = ["memory", pytest.param("tcp", marks=pytest.mark.slow), pytest.param("cma", marks=pytest.mark.slow)]
FINGERPRINT = "5a" * 16


@pytest.fixture(scope="module", params=KINDS)
def shared(request):
    """One wire for all tests that leave both sides well."""
    with wire_of(request.param) as wire:
        yield wire


@pytest.fixture
def wire(shared):
    """The shared wire with random data at the writer and zeros at the reader."""
    shared.writer.do("fill", random.randrange(1 << 30))
    shared.reader.do("clear")
    return shared


def grant_for(wire: Wire, pages: list[int], *, first_position: int = 0, tokens: int | None = None, row: int = 2) -> Grant:
    endpoint = wire.connect()
    return Grant(
        secrets.token_hex(16),
        AttemptKey("request", 1),
        Peer("decode", wire.reader.name, "decode:1"),
        FINGERPRINT,
        first_position,
        first_position + 16 * len(pages) if tokens is None else tokens,
        (GrantPages(tuple(pages), (1,) * len(pages)),),
        row,
        endpoint,
        30.0,
    )


def test_pages_and_rows_land_where_they_are_addressed_and_nowhere_else(wire):
    endpoint = wire.connect()
    ours, theirs = wire.writer.do("slabs"), endpoint.slabs
    pairs = [(3, 200), (4, 201), (9, 7), (0, 255)]
    ranges = [Range(ours[0].address(a), theirs[0].address(b), PAGE_BYTES) for a, b in pairs]
    ranges.append(Range(ours[1].address(1), theirs[1].address(3), ROW_BYTES))
    assert wire.writer.do("post", Push(11, endpoint.agent, tuple(ranges), b"all of it")) == ""
    wire.writer.start("finish")
    assert wire.reader.do("wait", 1) == [(wire.writer.name, b"all of it")]
    assert [(r.push_id, r.ok, r.cause) for r in wire.writer.answer()] == [(11, True, "")]
    sent, got = wire.writer.do("page_sums"), wire.reader.do("page_sums")
    assert {b: got[b] for _, b in pairs} == {b: sent[a] for a, b in pairs}
    assert wire.reader.do("landed") == len(pairs) * PAGE_BYTES
    rows, landed = wire.writer.do("row_sums"), wire.reader.do("row_sums")
    assert landed[3] == rows[1]
    assert len(set(landed[:3])) == 1


def test_many_transfers_each_notice_once_and_never_before_its_data(wire):
    endpoint = wire.connect()
    choose = random.Random(5)
    targets = iter(choose.sample(range(256), 256) * 3)
    pushes = [(i, [(choose.randrange(256), next(targets)) for _ in range(choose.randint(1, 3))]) for i in range(60)]
    # A page is the target of one push only, as grants see to it.
    seen: set[int] = set()
    pushes = [(i, [p for p in pairs if not (p[1] in seen or seen.add(p[1]))]) for i, pairs in pushes]
    pushes = [p for p in pushes if p[1]]
    wire.writer.start("post_many", endpoint, pushes, 16)
    order = wire.reader.do("wait_checked", len(pushes))
    results = wire.writer.answer()
    assert sorted(order) == [i for i, _ in pushes]
    assert sorted(r.push_id for r in results if r.ok) == [i for i, _ in pushes]
    if wire.kind == "memory":
        assert order != sorted(order), "the twin must let transfers overtake one another"


def test_handover_commits_from_any_order_of_parts(wire):
    grant = grant_for(wire, list(range(100, 240)), tokens=16 * 140 - 5)
    wire.reader.do("offer", grant, wire.writer.name)
    table = [255 - i for i in range(140)]
    parts = 6  # 32 pages a transfer, and the row
    wire.writer.start("hand_over", grant, [table], 0)
    outcomes, faults = wire.reader.do("count", parts)
    assert not faults
    assert [type(o) for o in outcomes] == [Counted] * 5 + [Committed]
    _, written, faults = wire.writer.answer()
    assert isinstance(written[-1], Filled)
    assert not faults
    sent, got = wire.writer.do("page_sums"), wire.reader.do("page_sums")
    assert [got[100 + i] for i in range(140)] == [sent[255 - i] for i in range(140)]
    assert wire.reader.do("row_sums")[2] == wire.writer.do("row_sums")[0]
    assert wire.reader.do("landed") == 140 * PAGE_BYTES


def test_b01_only_the_missing_tail_is_sent_and_it_lands_in_tail_pages(wire):
    grant = grant_for(wire, [50, 51, 52], first_position=32, tokens=75)
    wire.reader.do("offer", grant, wire.writer.name)
    wire.writer.start("hand_over", grant, [[10, 11, 12, 13, 14, 15]], 1)
    outcomes, _ = wire.reader.do("count", 2)
    assert isinstance(outcomes[-1], Committed)
    wire.writer.answer()
    sent, got = wire.writer.do("page_sums"), wire.reader.do("page_sums")
    assert got[50:53] == sent[12:15]
    assert wire.reader.do("landed") == 3 * PAGE_BYTES


def test_full_prefix_hit_sends_the_row_and_commits(wire):
    grant = grant_for(wire, [], first_position=64, tokens=64)
    wire.reader.do("offer", grant, wire.writer.name)
    wire.writer.start("hand_over", grant, [[1, 2, 3, 4]], 3)
    outcomes, _ = wire.reader.do("count", 1)
    assert isinstance(outcomes[0], Committed)
    wire.writer.answer()
    assert wire.reader.do("landed") == 0
    assert wire.reader.do("row_sums")[2] == wire.writer.do("row_sums")[3]


def test_b02_drain_is_answered_only_when_the_last_part_has_ended(wire):
    pages = list(range(1, 201))
    grant = grant_for(wire, pages)
    wire.reader.do("offer", grant, wire.writer.name)
    answer, outcomes, faults = wire.writer.do("hand_over", grant, [pages], 0, 2)
    assert isinstance(answer, AnswerLater)
    assert isinstance(outcomes[-1], Drained)
    assert not faults
    # Parts 0 and 1 were in flight and have landed; nothing else ever was.
    assert wire.reader.do("landed") == 64 * PAGE_BYTES
    counted, _ = wire.reader.do("count", 2)
    assert [type(o) for o in counted] == [Counted, Counted]


def test_b04_a_grant_that_was_drained_first_is_never_written(wire):
    grant = grant_for(wire, [1, 2])
    answer, outcomes, _ = wire.writer.do("hand_over", grant, [[1, 2]], 0, 0)
    assert answer == AnswerNow(False, "revoked")
    assert outcomes == []
    assert wire.reader.do("landed") == 0


def test_notices_of_unknown_grants_and_foreign_bytes_change_nothing(wire):
    unknown = grant_for(wire, [5])
    wire.writer.start("hand_over", unknown, [[1]], 0)
    outcomes, faults = wire.reader.do("count", 2)
    wire.writer.answer()
    assert {(type(o), o.cause) for o in outcomes} == {(Unknown, "unknown_grant")}
    endpoint = wire.connect()
    assert wire.writer.do("post_pages", 77, endpoint, [(0, 0)]) == ""
    wire.writer.start("finish")
    foreign, more = wire.reader.do("count", 1)
    wire.writer.answer()
    assert foreign == [Unknown("", "bad_notice")]
    assert not faults + more


def test_counts_that_do_not_fit_the_offer_are_refused(wire):
    grant = grant_for(wire, [30, 31])
    wire.reader.do("offer", grant, wire.writer.name)
    shorter = dataclasses.replace(grant, token_count=16, groups=(GrantPages((30,), (1,)),))
    wire.writer.start("hand_over", shorter, [[1, 2]], 0)
    outcomes, _ = wire.reader.do("count", 2)
    wire.writer.answer()
    refused = outcomes[0]
    assert isinstance(refused, Refused)
    assert (refused.cause, refused.order.writer.incarnation) == ("counts", wire.writer.name)
    assert outcomes[1] == Unknown(grant.grant_id, "revoked")


def test_outside_the_registered_memory_nothing_is_written(wire):
    endpoint = wire.connect()
    ours, theirs = wire.writer.do("slabs")[0], endpoint.slabs[0]
    end = theirs.base_address + theirs.size_bytes
    outside = ((ours.address(0), end - PAGE_BYTES + 1), (ours.base_address + ours.size_bytes - 8, theirs.address(1)))
    for local, remote in outside:
        push = Push(1, endpoint.agent, (Range(local, remote, PAGE_BYTES),), b"never")
        assert wire.writer.do("post", push) == CAUSE_NOT_REGISTERED
    assert wire.writer.do("finish") == []
    assert wire.reader.do("landed") == 0
    assert wire.writer.do("post_pages", 2, endpoint, [(1, 1)]) == ""
    wire.writer.start("finish")
    assert wire.reader.do("wait_checked", 1) == [2]
    wire.writer.answer()


def test_an_agent_that_is_not_connected_is_not_written_to(wire):
    endpoint = wire.reader.do("endpoint", "another writer")
    assert wire.writer.do("post_pages", 1, endpoint, [(0, 0)]) == CAUSE_NOT_CONNECTED
    assert wire.reader.do("fence", "another writer") == (wire.kind != "cma")


def test_damaged_metadata_is_refused_by_its_checksum_before_the_transport_sees_it(wire):
    grant = grant_for(wire, [8])
    message = grant_to_proto(grant)
    damaged = bytearray(message.endpoint.metadata)
    damaged[len(damaged) // 2] ^= 4
    message.endpoint.metadata = bytes(damaged)
    with pytest.raises(BadGrant) as caught:
        grant_from_proto(message, LayoutView(FINGERPRINT, (16,)))
    assert caught.value.field == "endpoint.metadata_crc32"
    # The name is not poisoned: the true blob still works.
    wire.reader.do("offer", grant, wire.writer.name)
    wire.writer.start("hand_over", grant, [[1]], 0)
    outcomes, _ = wire.reader.do("count", 2)
    wire.writer.answer()
    assert isinstance(outcomes[-1], Committed)


def test_metadata_of_something_else_is_an_error_not_a_crash(wire):
    foreign = endpoint_of("no-such-agent", b"these are not the bytes of an agent", wire.reader.do("slabs"))
    assert wire.writer.do("connect", foreign) in (CAUSE_BAD_METADATA, CAUSE_CONNECT_FAILED)
    wire.connect()


def test_a_frozen_reader_delays_a_push_and_nothing_else(wire):
    endpoint = wire.connect()
    wire.reader.freeze()
    try:
        assert wire.writer.do("post_pages", 1, endpoint, [(5, 6)]) == ""
        assert wire.writer.do("poll_times", 200) == []
    finally:
        wire.reader.thaw()
    wire.writer.start("finish")
    assert wire.reader.do("wait_checked", 1) == [1]
    assert [r.ok for r in wire.writer.answer()] == [True]


def test_at_the_bound_the_writer_not_asked_about_for_longest_makes_room(wire):
    asked = ["a", "b", "a", "c", "a", "b"]
    if wire.kind == "cma":
        with pytest.raises(AssertionError, match="living writers"):
            wire.reader.do("bounded_endpoints", 2, asked)
        return
    agents, displaced = zip(*wire.reader.do("bounded_endpoints", 2, asked), strict=True)
    assert list(displaced) == [[], [], [], ["b"], [], ["c"]]
    a, b, a2, c, a3, b2 = agents
    assert a == a2 == a3
    assert len({a, b, c, b2}) == 4, "a name is never used again"


def test_a_sender_forgets_the_agent_not_connected_to_for_longest(wire):
    a, b, c = (wire.reader.do("endpoint", f"bounded sender {n}") for n in range(3))
    assert wire.writer.do("bounded_peers", 2, [a, b, a, c]) == (2, ["", CAUSE_NOT_CONNECTED, "", ""])
    assert sorted(wire.reader.do("wait_checked", 3)) == [0, 2, 3]


def test_the_transfer_threads_carry_a_handover(wire):
    endpoint = wire.reader.do("pump_endpoint", "pumped writer")
    pushes = [(i, [(i, 255 - i)]) for i in range(48)]
    wire.writer.start("pump_pages", endpoint, pushes)
    assert sorted(wire.reader.do("pump_wait_checked", 48)) == list(range(48))
    results, clean, sent_bytes = wire.writer.answer()
    assert sorted(r.push_id for r in results if r.ok) == list(range(48))
    assert clean
    assert sent_bytes == 48 * PAGE_BYTES
    assert wire.reader.do("pump_close")


def test_b13_the_death_of_a_reader_is_told_for_every_push_and_others_go_on(wire):
    with wire.another("reader") as reader:
        endpoint = reader.do("endpoint", wire.writer.name)
        assert wire.writer.do("connect", endpoint) == ""
        for push_id in range(4):
            assert wire.writer.do("post_pages", push_id, endpoint, [(1 + i, i) for i in range(64)]) == ""
        reader.kill()
    results = wire.writer.do("finish")
    assert sorted(r.push_id for r in results) == [0, 1, 2, 3]
    assert {r.cause for r in results if not r.ok} <= {CAUSE_PEER_GONE}
    late = wire.writer.do("post_pages", 4, endpoint, [(1, 1)]) or wire.writer.do("finish")[0].cause
    assert late in (CAUSE_PEER_GONE, CAUSE_NOT_CONNECTED)
    goes_on(wire)


def test_b06_a_fence_keeps_out_a_writer_that_was_frozen_in_the_middle(wire):
    with wire.another("writer") as writer:
        endpoint = wire.reader.do("endpoint", writer.name)
        assert writer.do("connect", endpoint) == ""
        ours, theirs = writer.do("slabs")[0], endpoint.slabs[0]
        # A gibibyte: every page again and again.
        ranges = (Range(ours.base_address, theirs.base_address, theirs.size_bytes),) * 64
        writer.do("fill", 3)
        writer.start("post_and_poll", Push(1, endpoint.agent, ranges, b"never"))
        wire.reader.do("landed_some")
        writer.freeze()
        if wire.kind == "cma":
            # The frozen writer's CPU may write again at any time: only its death ends that, and only death is proof.
            assert wire.reader.do("fence", writer.name) is False
            writer.kill()
            assert wire.reader.do("fence", writer.name) is True
            wire.reader.do("clear")
            return goes_on(wire)
        assert wire.reader.do("fence", writer.name) is True
        wire.reader.do("clear")
        goes_on(wire)
        before = wire.reader.do("page_sums")
        writer.thaw()
        assert writer.answer() == ""
        assert [(r.push_id, r.cause) for r in writer.do("finish")] == [(1, CAUSE_PEER_GONE)]
        # The old agent stays cut off, even for a writer that tries again from the start.
        told = writer.do("connect", endpoint) or writer.do("post_pages", 2, endpoint, [(1, 1)])
        told = told or writer.do("finish")[0].cause
        assert told in (CAUSE_CONNECT_FAILED, CAUSE_PEER_GONE, CAUSE_TRANSPORT)
        assert wire.reader.do("page_sums") == before
        # The same incarnation gets a new agent.
        again = wire.reader.do("endpoint", writer.name)
        assert again.agent != endpoint.agent
        assert writer.do("connect", again) == ""
        assert writer.do("post_pages", 3, again, [(1, 1)]) == ""
        writer.start("finish")
        assert wire.reader.do("wait_checked", 1) == [3]
        assert writer.answer()[0].ok
        writer.kill()
        assert wire.reader.do("fence", writer.name) is True
        goes_on(wire)
    return None


def test_what_is_in_flight_to_an_agent_that_was_replaced_has_ended(wire):
    """Nothing tells the writer of the old agent's end: its reader stands still. The new one says that the old one is no more."""
    if wire.kind != "tcp":
        return
    with wire.another("reader") as reader, wire.another("reader") as later:
        endpoint = reader.do("endpoint", wire.writer.name)
        assert wire.writer.do("connect", endpoint) == ""
        name, number, _ = endpoint.agent.rsplit("-", 2)
        reader.freeze()
        ours, theirs = wire.writer.do("slabs")[0], endpoint.slabs[0]
        ranges = (Range(ours.base_address, theirs.base_address, theirs.size_bytes),) * 64
        assert wire.writer.do("post_and_poll", Push(7, endpoint.agent, ranges, b"never")) == ""
        assert wire.writer.do("poll_times", 200) == []
        other = later.do("endpoint", wire.writer.name)
        assert wire.writer.do("connect", other) == "" and wire.writer.do("poll_times", 10) == []
        again = later.do("successor", name, int(number) + 1, wire.writer.name)
        assert wire.writer.do("connect", again) == ""
        assert [(one.push_id, one.cause) for one in wire.writer.do("finish")] == [(7, CAUSE_PEER_GONE)]
        assert wire.writer.do("post_pages", 8, again, [(1, 1)]) == ""
        wire.writer.start("finish")
        assert later.do("wait_checked", 1) == [8]
        assert [one.ok for one in wire.writer.answer()] == [True]
        reader.kill()
    goes_on(wire)


def goes_on(wire: Wire) -> None:
    """The first pair works as before."""
    endpoint = wire.connect()
    assert wire.writer.do("post_pages", 200, endpoint, [(200, 200)]) == ""
    wire.writer.start("finish")
    assert wire.reader.do("wait_checked", 1) == [200]
    assert [r.ok for r in wire.writer.answer()] == [True]

"""The transfer threads over the in-memory twin: order of events, bounds, failures, closing."""

import ctypes
import dataclasses
import queue
import threading

import pytest

from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.offer import Slab
from kv_transfer.ports import (
    CAUSE_BAD_METADATA,
    CAUSE_CLOSED,
    CAUSE_CONNECT_FAILED,
    CAUSE_NOT_CONNECTED,
    CAUSE_PEER_GONE,
    CAUSE_STALE,
    CAUSE_TRANSPORT,
    CAUSE_WITHDRAWN,
    Push,
    Range,
    ReceiveFailed,
)
from kv_transfer.pump import PumpFull, PumpStopped, ReceivePump, SendLimits, SendPump
from kv_transfer.pump_thread import (
    ARMED_POLL_S,
    BRISK_FOR_S,
    BRISK_POLL_S,
    CALM_AFTER_S,
    CALM_POLL_S,
    waiting_poll_s,
    writing_poll_s,
)

UNIT, UNITS, WAIT_S = 4096, 64, 10.0


class Rig:
    """A writer and a reader with their pumps; what the pumps deliver is put into queues."""

    def __init__(self, limits=None, step_bytes=UNIT):
        self.fabric = MemoryFabric(seed=3, step_bytes=step_bytes)
        self.buffers = [ctypes.create_string_buffer(UNIT * UNITS) for _ in range(2)]
        self.ours, self.theirs = (Slab(ctypes.addressof(b), UNIT * UNITS, UNIT) for b in self.buffers)
        self.results, self.notices, self.answers, self.crashes = (queue.Queue() for _ in range(4))
        self.threads = set()
        self.senders = []
        self.send = SendPump(self.make_sender, self.took, self.crashes.put, limits)
        receiver = [self.theirs, dataclasses.replace(self.theirs, size_bytes=UNIT)]
        self.receive = ReceivePump(lambda: MemoryReceiver(self.fabric, "r", receiver, 3), self.notices.put, self.crashes.put)
        self.send.start()
        self.receive.start()

    def make_sender(self):
        self.threads.add(threading.current_thread().name)
        self.senders.append(MemorySender(self.fabric, "s", [self.ours]))
        return self.senders[-1]

    def took(self, results):
        self.threads.add(threading.current_thread().name)
        for result in results:
            self.results.put(result)

    def endpoint(self, writer="w"):
        self.receive.request_endpoint(writer, self.answers.put, self.answers.put)
        return self.answers.get(timeout=WAIT_S)

    def push(self, push_id, agent, unit=0):
        ranges = (Range(self.ours.address(unit), self.theirs.address(unit), UNIT),)
        return Push(push_id, agent, ranges, b"n%d" % push_id)

    def take(self, count):
        return sorted((self.results.get(timeout=WAIT_S) for _ in range(count)), key=lambda r: r.push_id)

    def take_notices(self, count):
        found = []
        while len(found) < count:
            found += self.notices.get(timeout=WAIT_S)
        return found

    def settle(self):
        """Wait until the pump has taken in all that was asked of it before."""
        self.send.withdraw([-1])
        self.send.submit(self.push(-2, "nobody"))
        assert self.take(1)[0].push_id == -2


@pytest.fixture
def rig():
    made = []

    def make(*args, **kwargs):
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.fabric.set_speed(1 << 20)
        for sender in one.senders:
            sender.frozen = False
        one.send.close(1.0)
        one.receive.close(1.0)
        assert one.crashes.empty()


def test_pushes_arrive_and_everything_happens_on_the_pumps_thread(rig):
    r = rig()
    endpoint = r.endpoint()
    r.receive.armed(True)
    ctypes.memset(r.ours.base_address, 7, UNIT * UNITS)
    r.send.connect(endpoint)
    for i in range(40):
        r.send.submit(r.push(i, endpoint.agent, i))
    assert [(x.push_id, x.ok) for x in r.take(40)] == [(i, True) for i in range(40)]
    assert sorted(r.take_notices(40)) == sorted(("w", b"n%d" % i) for i in range(40))
    assert r.buffers[1].raw == bytes([7]) * 40 * UNIT + bytes(24 * UNIT)
    assert r.threads == {"send-pump"}
    s = r.send.statistics()
    assert (s.pushes, s.sent_bytes, s.queued, s.in_flight, s.peers, s.failures) == (40, 40 * UNIT, 0, 0, 1, {})
    assert r.receive.statistics().notices == 40
    assert r.receive.statistics().writers == 1


def test_a_pump_looks_again_soon_while_something_moves_and_rarely_while_layers_are_computed():
    for still_s, soon, rarely in (
        (0.0, BRISK_POLL_S, BRISK_POLL_S),
        (BRISK_FOR_S, ARMED_POLL_S, ARMED_POLL_S),
        (CALM_AFTER_S, ARMED_POLL_S, CALM_POLL_S),
    ):
        assert (writing_poll_s(still_s), waiting_poll_s(still_s)) == (soon, rarely)
    assert BRISK_POLL_S < ARMED_POLL_S < CALM_POLL_S


def test_a_refused_connection_is_the_cause_of_the_pushes_that_need_it(rig):
    r = rig()
    endpoint = r.endpoint()
    r.fabric.kill(endpoint.agent)
    r.send.connect(endpoint)
    r.send.connect(dataclasses.replace(endpoint, agent="someone"))
    for push_id, agent in enumerate((endpoint.agent, "someone", "never heard of")):
        r.send.submit(r.push(push_id, agent))
    assert [x.cause for x in r.take(3)] == [CAUSE_CONNECT_FAILED, CAUSE_BAD_METADATA, CAUSE_NOT_CONNECTED]
    # A later offer of the same peer is tried again.
    again = r.endpoint("w2")
    r.send.connect(again)
    r.send.submit(r.push(9, again.agent))
    assert r.take(1)[0].ok


def test_who_is_fenced_to_make_room_is_told_before_the_answer(rig):
    r = rig()
    for writer in ("a", "b", "c", "a"):
        r.endpoint(writer)
    assert r.endpoint("d") == "b", "it was not asked for for longest"
    assert r.answers.get(timeout=WAIT_S).agent
    assert r.receive.statistics().fences == 1


def test_the_bounds_hold_and_a_stuck_peer_does_not_hold_up_another(rig):
    r = rig(SendLimits(queued_pushes=4, in_flight_per_peer=2, in_flight=3))
    stuck, well = r.endpoint("a"), r.endpoint("b")
    r.fabric.freeze(stuck.agent)
    r.send.connect(stuck)
    r.send.connect(well)
    for i in range(2):
        r.send.submit(r.push(i, stuck.agent))
        r.settle()
    for i in range(2, 6):
        r.send.submit(r.push(i, stuck.agent))
    with pytest.raises(PumpFull, match="4 pushes"):
        r.send.submit(r.push(6, stuck.agent))
    assert r.send.statistics().in_flight == 2
    r.send.withdraw([5])
    assert [(x.push_id, x.cause) for x in r.take(1)] == [(5, CAUSE_WITHDRAWN)]
    r.send.submit(r.push(7, well.agent))
    assert [(x.push_id, x.ok) for x in r.take(1)] == [(7, True)]
    assert r.send.statistics().in_flight == 2
    r.fabric.freeze(stuck.agent, False)
    assert [(x.push_id, x.ok) for x in r.take(5)] == [(i, True) for i in range(5)]


def test_b02_what_is_posted_runs_on_what_is_queued_can_be_withdrawn(rig):
    r = rig(SendLimits(in_flight_per_peer=1))
    endpoint = r.endpoint()
    r.fabric.freeze(endpoint.agent)
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    r.settle()
    for i in (1, 2, 3):
        r.send.submit(r.push(i, endpoint.agent, i))
    r.send.withdraw([0, 1, 2, 3])
    assert [(x.push_id, x.cause) for x in r.take(3)] == [(i, CAUSE_WITHDRAWN) for i in (1, 2, 3)]
    ctypes.memset(r.ours.base_address, 9, UNIT * UNITS)
    r.fabric.freeze(endpoint.agent, False)
    assert [(x.push_id, x.ok) for x in r.take(1)] == [(0, True)]
    assert r.buffers[1].raw == bytes([9]) * UNIT + bytes(63 * UNIT)


def test_b04_a_push_that_waited_through_the_lease_is_dropped(rig):
    r = rig(SendLimits(in_flight_per_peer=1, queue_age_s=0.0))
    endpoint = r.endpoint()
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    assert [(x.push_id, x.cause) for x in r.take(1)] == [(0, CAUSE_STALE)]
    assert r.send.statistics().failures == {CAUSE_STALE: 1}


def test_b13_failures_of_posted_pushes_are_told(rig):
    r = rig()
    endpoint = r.endpoint()
    r.send.connect(endpoint)
    r.fabric.fail_next(endpoint.agent)
    r.send.submit(r.push(0, endpoint.agent))
    assert [x.cause for x in r.take(1)] == [CAUSE_TRANSPORT]
    r.fabric.freeze(endpoint.agent)
    r.send.submit(r.push(1, endpoint.agent))
    r.settle()
    r.fabric.kill(endpoint.agent)
    assert [x.cause for x in r.take(1)] == [CAUSE_PEER_GONE]


def test_a_notice_can_be_lost_and_then_only_the_writer_knows(rig):
    r = rig()
    endpoint = r.endpoint()
    r.fabric.lose_next_notices(endpoint.agent)
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    assert r.take(1)[0].ok
    r.send.submit(r.push(1, endpoint.agent))
    assert r.take_notices(1) == [("w", b"n1")]


def test_g1_a_fence_keeps_out_a_frozen_writer_and_notices_come_before_its_answer(rig):
    r = rig(step_bytes=UNIT // 4)
    endpoint = r.endpoint()
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    assert r.take(1)[0].ok
    r.senders[0].frozen = True
    ctypes.memset(r.ours.base_address, 9, UNIT * UNITS)
    r.send.submit(r.push(1, endpoint.agent, 1))
    r.receive.fence("w", lambda done: r.notices.put([("fenced", done)]))
    assert r.take_notices(2) == [("w", b"n0"), ("fenced", True)]
    before = r.buffers[1].raw
    r.senders[0].frozen = False
    assert r.take(1)[0].cause == CAUSE_PEER_GONE
    assert r.buffers[1].raw == before
    assert r.endpoint().agent != endpoint.agent
    assert r.receive.statistics().fences == 1


def test_closing_answers_every_push(rig):
    r = rig(SendLimits(in_flight_per_peer=1))
    endpoint = r.endpoint()
    r.fabric.freeze(endpoint.agent)
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    r.settle()
    r.send.submit(r.push(1, endpoint.agent))
    assert r.send.close(0.01) is False
    assert [(x.push_id, x.cause) for x in r.take(2)] == [(0, CAUSE_CLOSED), (1, CAUSE_CLOSED)]
    assert r.fabric.in_flight == 0
    with pytest.raises(PumpStopped):
        r.send.submit(r.push(2, endpoint.agent))


def test_closing_lets_what_is_in_flight_end(rig):
    r = rig(step_bytes=16)
    endpoint = r.endpoint()
    r.send.connect(endpoint)
    r.send.submit(r.push(0, endpoint.agent))
    r.settle()
    assert r.send.close(WAIT_S) is True
    assert r.take(1)[0].ok


def test_an_agent_that_cannot_be_made_fails_the_start():
    def make():
        raise ReceiveFailed("no such device")

    pump = ReceivePump(make, print, print)
    with pytest.raises(ReceiveFailed, match="no such device"):
        pump.start()


def test_a_crash_is_told_and_the_pump_takes_nothing_more():
    crashes = queue.Queue()
    fabric = MemoryFabric()

    def deliver(_):
        raise ZeroDivisionError

    pump = SendPump(lambda: MemorySender(fabric, "s", []), deliver, crashes.put)
    pump.start()
    pump.submit(Push(1, "nobody", (), b""))
    assert isinstance(crashes.get(timeout=WAIT_S), ZeroDivisionError)
    with pytest.raises(PumpStopped):
        pump.submit(Push(2, "nobody", (), b""))
    assert pump.close(1.0) is False

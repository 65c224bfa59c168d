import threading
import time

import pytest

from member.engine_thread import EngineThread
from member.inbox import Inbox, InboxClosed


class Engine:
    """Takes messages; a message is a function to run in the turn."""

    def __init__(self):
        self.inbox = Inbox(16)
        self.turned = threading.Semaphore(0)
        self.sleeps = threading.Semaphore(0)
        self.more = 0
        self.due_at = None
        self.crashes = []
        self.crashed = threading.Event()
        self.thread = EngineThread(self.turn, self.inbox, on_crash=self.on_crash, next_wake=self.next_wake)

    def turn(self):
        for work in self.inbox.drain():
            work()
        self.turned.release()
        self.more = max(0, self.more - 1)
        return self.more > 0

    def next_wake(self):
        self.sleeps.release()
        return self.due_at

    def on_crash(self, crash):
        self.crashes.append((crash, threading.current_thread().name))
        self.crashed.set()


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.thread.stop(10)


def test_work_is_done_in_the_engine_thread(engine):
    engine.thread.start()
    names, done = [], threading.Event()
    engine.inbox.put_nowait(lambda: (names.append(threading.current_thread().name), done.set()))
    assert done.wait(10)
    assert names == ["engine"]


def test_turns_go_on_at_once_while_there_is_more(engine):
    engine.more = 50
    engine.thread.start()
    for _ in range(50):
        assert engine.turned.acquire(timeout=10)
    assert engine.thread.statistics().turns >= 49


def test_next_wake_ends_the_sleep(engine):
    engine.thread.start()
    assert engine.turned.acquire(timeout=10)
    started = time.monotonic()
    engine.due_at = started
    engine.inbox.wake()
    for _ in range(20):
        assert engine.turned.acquire(timeout=10)
    assert time.monotonic() - started < 5  # twenty idle sleeps would take 20 s
    engine.due_at = None


def test_a_long_turn_is_a_stall_and_sleep_is_not(engine):
    engine.thread.start()
    assert engine.turned.acquire(timeout=10)
    inside, leave = threading.Event(), threading.Event()
    engine.inbox.put_nowait(lambda: (inside.set(), leave.wait(10)))
    assert inside.wait(10)
    now = time.monotonic()
    assert not engine.thread.stalled(now, 60)
    assert engine.thread.stalled(now + 61, 60)
    assert engine.sleeps.acquire(timeout=10)  # the first turn's
    leave.set()
    assert engine.sleeps.acquire(timeout=10)
    assert not engine.thread.stalled(time.monotonic() + 3600, 60)


def test_a_crash_closes_the_inbox_and_tells(engine):
    engine.thread.start()

    def fail():
        raise ZeroDivisionError("broken")

    engine.inbox.put_nowait(fail)
    assert engine.crashed.wait(10)
    crash, thread = engine.crashes[0]
    assert isinstance(crash, ZeroDivisionError) and thread == "engine"
    with pytest.raises(InboxClosed):
        engine.inbox.put_nowait(fail)
    assert engine.thread.stop(10)
    assert engine.thread.statistics().crashed
    assert engine.thread.stalled(time.monotonic(), 60)


def test_stop_says_when_a_turn_does_not_end(engine):
    engine.thread.start()
    inside, leave = threading.Event(), threading.Event()
    engine.inbox.put_nowait(lambda: (inside.set(), leave.wait(10)))
    assert inside.wait(10)
    assert engine.thread.stop(0.01) is False
    leave.set()
    assert engine.thread.stop(10) is True


def test_busy_and_idle_time_are_told_apart(engine):
    engine.thread.start()
    assert engine.turned.acquire(timeout=10)
    engine.inbox.put_nowait(lambda: None)
    assert engine.turned.acquire(timeout=10)
    engine.thread.stop(10)
    found = engine.thread.statistics()
    assert found.turns >= 2 and found.busy_s > 0 and found.idle_s >= 0
    assert 0 < found.busy_ratio <= 1

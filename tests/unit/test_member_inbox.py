import threading

import pytest

from member.inbox import Inbox, InboxClosed, InboxFull


def test_order_is_kept_across_both_ways_of_putting():
    inbox = Inbox(2)
    inbox.put_nowait("a")
    inbox.put_always("b")
    inbox.put_nowait("c")
    assert inbox.drain() == ["a", "b", "c"]
    assert inbox.drain() == []


def test_bound_refuses_and_says_the_limit():
    inbox = Inbox(1)
    inbox.put_nowait(1)
    with pytest.raises(InboxFull, match="limit of 1") as refused:
        inbox.put_nowait(2)
    assert refused.value.bound == 1
    assert inbox.statistics().refused == 1
    assert inbox.drain() == [1]
    inbox.put_nowait(3)


def test_completions_neither_fill_the_bound_nor_are_refused():
    inbox = Inbox(1)
    for number in range(5):
        inbox.put_always(number)
    inbox.put_nowait("open")
    for number in range(5, 10):
        inbox.put_always(number)
    found = inbox.statistics()
    assert (found.waiting, found.waiting_bounded, found.most_waiting) == (11, 1, 11)
    assert len(inbox.drain()) == 11


def test_closed_inbox_refuses_new_and_gives_out_old():
    inbox = Inbox(4)
    inbox.put_nowait(1)
    inbox.close()
    with pytest.raises(InboxClosed, match="closed"):
        inbox.put_nowait(2)
    inbox.put_always(3)
    assert inbox.drain() == [1]
    assert inbox.wait(None) is False


def test_a_wake_is_not_lost_when_nobody_waits_yet():
    inbox = Inbox(1)
    inbox.wake()
    assert inbox.wait(None) is False
    assert inbox.wait(0) is False


def test_wait_returns_for_a_message_from_another_thread():
    inbox = Inbox(1)
    writer = threading.Thread(target=inbox.put_nowait, args=("hello",))
    writer.start()
    assert inbox.wait(10) is True
    assert inbox.drain() == ["hello"]
    writer.join()


def test_many_writers_lose_nothing():
    inbox = Inbox(1000)
    writers = [
        threading.Thread(target=lambda first=first: [inbox.put_nowait(first + n) for n in range(100)])
        for first in range(0, 500, 100)
    ]
    for writer in writers:
        writer.start()
    seen = []
    while len(seen) < 500:
        assert inbox.wait(10)
        seen += inbox.drain()
    for writer in writers:
        writer.join()
    assert sorted(seen) == list(range(500))


def test_a_bound_under_one_is_an_error():
    with pytest.raises(ValueError, match="bound is 0"):
        Inbox(0)

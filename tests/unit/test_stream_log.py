"""The stream log and the flow window: numbered at publishing, coalesced before it, bounded, ended once, never stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.flow import PIECE_BYTES, Credit, FlowWindow, cost
from decode_svc.stream_log import HARD_BOUND_WINDOWS, LogEnded, LogOverflow, StreamLog


def log(first: int = 1, high_water_bytes: int = 1000, final_only: bool = False) -> StreamLog[str]:
    return StreamLog(first, high_water_bytes, final_only)


def test_what_waits_is_published_as_one_delta_with_one_number() -> None:
    one = log(first=5)
    one.add(b"ab", (1,), (1,), 10.0)
    one.add(b"", (), (2,), 11.0)
    one.add("ç".encode(), (2, 3), (3,), 12.0)
    assert one.waiting_since == 10.0
    published = one.publish()
    assert published is not None
    assert (published.sequence_no, published.text, published.text_bytes) == (5, "abç", 4)
    assert (published.token_ids, published.selected_ids) == ((1, 2, 3), (1, 2, 3))
    assert published.cost_bytes == 4 + 2 * PIECE_BYTES
    assert one.publish() is None
    one.add(b"d", (4,), (4,), 13.0)
    second = one.publish()
    assert second is not None and second.sequence_no == 6
    assert (one.next_sequence_no, one.sent_bytes, one.buffer_bytes) == (7, 5, 0)


def test_tokens_without_text_wait_for_some_or_for_the_end() -> None:
    one = log()
    one.add(b"", (), (1,), 0.0)
    one.add(b"", (2,), (2,), 0.0)
    assert not one.ready and one.publish() is None
    one.end("the end")
    last = one.publish()
    assert last is not None and (last.text, last.token_ids, last.selected_ids) == ("", (2,), (1, 2))
    assert one.terminal() == "the end"


def test_ids_that_are_not_shown_make_no_delta_at_the_end() -> None:
    one = log()
    one.add(b"", (), (1,), 0.0)
    one.end("the end")
    assert one.publish() is None
    assert one.terminal() == "the end"


def test_the_terminal_is_last_and_once() -> None:
    one = log()
    one.add(b"x", (1,), (1,), 0.0)
    one.end("the end")
    assert one.ended and one.ready
    assert one.terminal() is None  # text waits
    with pytest.raises(LogEnded):
        one.add(b"y", (2,), (2,), 0.0)
    with pytest.raises(LogEnded):
        one.end("another")
    published = one.publish()
    assert published is not None and published.text == "x"
    assert one.terminal() == "the end"
    assert one.terminal() is None
    assert one.next_sequence_no == 2


def test_final_only_keeps_the_text_for_the_terminal() -> None:
    one = log(first=9, high_water_bytes=10, final_only=True)
    for _ in range(100):
        one.add(b"text", (1,), (1,), 0.0)
    told = one.publish()
    assert told is not None and told.selected_ids == (1,) * 100
    assert (told.sequence_no, told.next_sequence_no, told.text, told.token_ids, told.cost_bytes) == (None, 9, "", (), 0)
    assert one.publish() is None and not one.ready
    one.end("the end")
    assert one.terminal() == "the end"
    assert one.whole_text() == "text" * 100
    assert one.next_sequence_no == 9


def test_a_log_that_flow_control_forgot_fails_loudly() -> None:
    one = log(high_water_bytes=100)
    with pytest.raises(LogOverflow, match="under 200 bytes"):
        for _ in range(100):
            one.add(b"x" * 10, (1,), (1,), 0.0)
    assert HARD_BOUND_WINDOWS == 2


def test_a_window_pauses_at_the_high_water_mark_and_resumes_at_half() -> None:
    window = FlowWindow(100)
    window.produce(99)
    assert not window.paused
    window.produce(1)
    assert window.paused
    window.take(49)
    assert window.paused
    window.take(1)
    assert not window.paused
    with pytest.raises(ValueError, match="between 0 and 50"):
        window.take(51)


@given(st.lists(st.binary(min_size=0, max_size=40), max_size=200), st.integers(1, 400), st.data())
def test_flow_control_bounds_the_log_and_never_sticks(pieces: list[bytes], high_water_bytes: int, data: st.DataObject) -> None:
    """The engine stops at a full window; a writer that takes everything always lets it go on."""
    window, credit = FlowWindow(high_water_bytes), Credit(high_water_bytes)
    one = log(high_water_bytes=10_000)
    text = b""
    waiting = list(pieces)
    while waiting:
        if window.paused:
            published = one.publish()
            assert published is not None, "paused and nothing to take"
            due = credit.add(published.cost_bytes)
            if due:
                window.take(due)
            assert not window.paused, "everything was taken and the sequence is still paused"
            continue
        piece = waiting.pop(0).decode("latin-1").encode()
        text += piece
        one.add(piece, (), (), 0.0)
        window.produce(cost(piece))
        assert window.untaken_bytes < high_water_bytes + 80 + PIECE_BYTES
        if data.draw(st.booleans()):
            published = one.publish()
            if published is not None:
                due = credit.add(published.cost_bytes)
                if due:
                    window.take(due)
    one.publish()
    assert one.sent_bytes == len(text)

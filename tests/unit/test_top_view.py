"""What `tandem top` shows, and that text of others cannot do anything to a terminal."""

import io

import pytest
from rich.console import Console

from tandem.v1 import cell_pb2 as cell
from tandem.v1 import inference_pb2 as pb
from tandem_cli.top_view import page_bar, plain, shares, whole


def shown(view: cell.CellView, rows: int | None = None, note: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=200, color_system=None, highlight=False, markup=False)
    console.print(whole(view, rows, note))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def example(requests: int = 1) -> cell.CellView:
    view = cell.CellView(router="router-0@abc", model="m", store_available=True, running_requests=requests, ended_requests=1)
    view.routers.add(name="router-0@abc", tells=True)
    view.pools.add(role="prefill").members.add(address="10.0.0.7:1", state=cell.MEMBER_STATE_UNREACHED)
    pages = cell.PageStates(free=90, owned=5, cached=4, quarantined=1)
    view.pools.add(role="decode").members.add(
        name="decode-0", state=cell.MEMBER_STATE_READY, running_sequences=3, max_sequences=8, waiting_sequences=2,
        waiting_tokens=1200, tokens_per_s=41.25, steps_per_s=20.5, pages=pages,
    )  # fmt: skip
    view.queue.requests, view.queue.tokens, view.queue.max_requests = 4, 512, 1024
    view.queue.lanes.add(priority=5, requests=4, oldest_s=1.25)
    view.budgets.add(resource="pages", scope="member", name="decode-0", used=6, limit=100)
    for number in range(requests):
        view.requests.add(
            request_id=f"r-{number}", tenant="t", state=pb.REQUEST_STATE_DECODING, stage=cell.REQUEST_STAGE_PREFILL_QUEUE,
            age_s=2.5, prompt_tokens=300, computed_prompt_tokens=128, output_tokens=7, max_output_tokens=64, choices=1,
            prefill_member="prefill-0", attempt=2,
        )  # fmt: skip
    ended = view.ended.add(
        request_id="gone", tenant="t", state=pb.REQUEST_STATE_FAILED, finish_reason=pb.FINISH_REASON_TRANSPORT_ERROR,
        cause="prefill_lost", attempts=3,
    )  # fmt: skip
    ended.timings.total_s, ended.usage.returned_tokens = 1.5, 12
    return view


def line_of(lines: list[str], word: str) -> str:
    return next(line for line in lines if line.startswith(word))


def test_everything_is_told() -> None:
    lines = shown(example())
    assert lines[0].endswith("m  told by router-0@abc  1 router")
    assert line_of(lines, "10.0.0.7:1 prefill").split()[2] == "unreached"
    decode = line_of(lines, "decode-0")
    assert decode.split()[1:7] == ["ready", "3/8", "2", "(1,200", "tokens)", "41.2"]
    assert "6/100" in decode and decode.endswith("##!~" + "." * 26)
    assert line_of(lines, "queue") == "queue 4 of 1,024 requests, 512 tokens  priority 5: 4 (oldest 1.2 s)"
    assert line_of(lines, "pages of decode-0").split() == ["pages", "of", "decode-0", "6", "100", "="]
    assert line_of(lines, "r-0").split() == [
        *("r-0", "t", "prefill", "queue", "2.5", "s", "128/300", "7/64", "prefill-0", "-", "2"),
    ]
    assert line_of(lines, "gone").split() == ["gone", "t", "transport_error", "(prefill_lost)", "12", "-", "1.50", "s", "-", "3"]


def test_a_small_terminal_shows_the_head_and_says_what_is_left_out() -> None:
    lines = shown(example(requests=40), rows=24)
    assert "40 running, 9 shown" in lines and len(lines) <= 24
    assert "40 running" in shown(example(requests=40))


def test_what_is_wrong_is_said_in_the_head() -> None:
    view = example()
    view.store_available, view.draining = False, True
    head = shown(view, note="no router answers")[0]
    assert all(words in head for words in ("draining", "the request store does not answer", "no router answers"))


def test_text_of_others_is_only_text() -> None:
    view = example()
    view.requests[0].request_id, view.requests[0].tenant = "\x1b[2Jx", "[bold]t[/bold]"
    assert line_of(shown(view), "?[2Jx").split()[:2] == ["?[2Jx", "[bold]t[/bold]"]
    assert plain("a\x9bb\n\u202e") == "a?b??"


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [([0, 0], [0, 0]), ([1, 999], [1, 9]), ([1, 1, 1], [3, 3, 4]), ([5, 0, 5], [5, 0, 5]), ([1] * 10, [1] * 10)],
)
def test_a_bar_shows_what_is_there(counts: list[int], wanted: list[int]) -> None:
    widths = shares(counts, 10)
    assert sorted(widths) == sorted(wanted) and sum(widths) in (0, 10)
    assert all(bool(count) == bool(width) for count, width in zip(counts, widths, strict=True))
    assert page_bar(cell.PageStates()).plain == ""

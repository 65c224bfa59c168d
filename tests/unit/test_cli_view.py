"""What people and scripts see: records, ends, progress, the start of a cell."""

import io
import json
import math
import sys

import pytest
from rich.console import Console

from tandem.v1 import inference_pb2 as pb
from tandem_cli.exits import Exit
from tandem_cli.generate import Seen
from tandem_cli.printer import Printer
from tandem_cli.record_view import as_dict, ending_words, rate_words, timeline, usage_line
from tandem_cli.start_view import LineView, TerminalView


def record() -> pb.RequestRecord:
    found = pb.RequestRecord(
        request_id="r-1",
        model="m",
        state=pb.REQUEST_STATE_CANCELLED,
        finish_reason=pb.FINISH_REASON_CANCELLED,
        cause="client_cancel",
        cancel_reason="[enough]",
        attempt=1,
        usage=pb.Usage(prompt_tokens=3),
        timings=pb.Timings(queue_s=0.0015, first_token_s=0.5),
        released={"pages": 4, "landing_rows": 1},
    )
    for after_ms, state, event in ((0, pb.REQUEST_STATE_CREATED, ""), (12, pb.REQUEST_STATE_QUEUED, "accepted")):
        step = found.transitions.add(state=state, event=event, attempt=1, detail="decode=d0" if event else "")
        step.at.FromMilliseconds(1_000_000 + after_ms)
    found.cancel_requested_at.FromMilliseconds(1_000_020)
    found.cancel_observed_at.FromMilliseconds(1_000_025)
    return found


def printed(thing: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(thing)
    return console.file.getvalue()


def test_a_record_is_a_timeline() -> None:
    lines = [line.strip() for line in printed(timeline(record())).splitlines()]
    assert lines[0] == "r-1  cancelled, cancelled (client_cancel)"
    assert "+0.0 ms  created" in lines and "+12.0 ms  queued   accepted  decode=d0" in lines
    assert any(line.startswith("waiting for budget") and line.endswith("1.5 ms") for line in lines)
    assert not any(line.startswith("tokens generated") for line in lines)  # a phase that did not happen
    assert "cancel requested ([enough]), observed +5.0 ms" in lines
    assert "released: landing_rows 1, pages 4" in lines


def test_a_record_for_scripts_has_every_field() -> None:
    found = as_dict(record())
    assert found["state"] == "REQUEST_STATE_CANCELLED" and found["sent_bytes"] == "0" and found["priority"] == 0


def test_words_of_an_end() -> None:
    stopped = pb.Completed(finish_reason=pb.FINISH_REASON_STOP_SEQUENCE, matched_stop="\n\n")
    assert ending_words(stopped) == "stop_sequence '\\n\\n'"
    timed = pb.Completed(usage=pb.Usage(selected_tokens=11), timings=pb.Timings(decode_s=2.0))
    assert rate_words(timed) == "5.0 tokens/s"
    assert rate_words(pb.Completed(usage=pb.Usage(selected_tokens=1), timings=pb.Timings(decode_s=2.0))) == ""
    assert "prompt 3 (cached 0), selected 0" in usage_line(record().usage)


def test_progress_follows_the_request() -> None:
    seen = Seen()
    assert seen.words(None).startswith("connecting  ")
    assert seen.words(pb.RequestRecord(state=pb.REQUEST_STATE_QUEUED)).startswith("waiting for budget  ")
    seen.take(pb.GenerateResponse(started=pb.Started(prompt_tokens=7)))
    assert seen.words(pb.RequestRecord(state=pb.REQUEST_STATE_PREFILLING)).startswith("computing the prompt, prompt of 7 tokens")
    final_only = pb.RequestRecord(state=pb.REQUEST_STATE_DECODING, usage=pb.Usage(selected_tokens=5))
    assert seen.words(final_only).startswith("generating: 5 tokens, prompt of 7 tokens")
    for _ in range(2):
        seen.take(pb.GenerateResponse(delta=pb.Delta(text="x", token_ids=[1])))
    assert seen.words(None).startswith("generating: 2 tokens, ") and "tokens/s" in seen.words(None)


def test_text_goes_to_standard_output_and_figures_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=False, quiet=False)
    assert not printer.shows_progress
    completed = pb.Completed(finish_reason=pb.FINISH_REASON_EOS, state=pb.REQUEST_STATE_FINISHED)
    for response in (pb.GenerateResponse(delta=pb.Delta(text="[a]")), pb.GenerateResponse(completed=completed)):
        printer.event(response)
    printer.summary("r-1", completed, Exit.OK)
    shown = capsys.readouterr()
    assert shown.out == "[a]\n" and "eos" in shown.err and "r-1" in shown.err


def test_quiet_tells_only_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=False, quiet=True)
    completed = pb.Completed(finish_reason=pb.FINISH_REASON_MODEL_ERROR, cause="model_failed")
    printer.summary("r-1", completed, Exit.FAILED)
    printer.summary("r-2", pb.Completed(finish_reason=pb.FINISH_REASON_EOS), Exit.OK)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "tandem: r-1 ended with model_error (model_failed)\n"


def test_json_is_one_event_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=True, quiet=False)
    printer.event(pb.GenerateResponse(sequence_no=1, delta=pb.Delta(text="é\n", token_ids=[5])))
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert json.loads(shown.out) == {
        "sequence_no": "1",
        "delta": {"text": "é\n", "token_ids": [5], "log_probabilities": [], "cumulative": False, "index": 0},
    }


def test_a_start_without_a_terminal_takes_few_lines() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LineView(console) as view:
        view.starting(["prefill-0", "decode-0"], "loading the model")
        for _ in range(100):
            view.tick()
        view.ready("decode-0", "127.0.0.1:1")
    lines = [line.rpartition("  (")[0].strip() for line in console.file.getvalue().splitlines()]
    assert lines == ["loading the model: prefill-0, decode-0", "decode-0 is ready at 127.0.0.1:1"]


def test_a_start_on_a_terminal_ends_with_a_table() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    stdout = sys.stdout
    with TerminalView(console) as view:
        assert sys.stdout is stdout  # what is printed goes where it should
        view.starting(["router-0"], "meeting the members")
        view.ready("router-0", "127.0.0.1:1")
    assert "✓ router-0 ready at 127.0.0.1:1" in " ".join(console.file.getvalue().split())


def told(token: bytes, share: float, *likeliest: tuple[bytes, float]) -> pb.TokenLogProbability:
    return pb.TokenLogProbability(
        log_probability=math.log(share),
        token=token,
        top_token_ids=range(len(likeliest)),
        top_tokens=[one for one, _ in likeliest],
        top_log_probabilities=[math.log(other) for _, other in likeliest],
    )


@pytest.mark.parametrize("cumulative", [False, True])
def test_log_probabilities_are_a_table_after_the_figures(capsys: pytest.CaptureFixture[str], cumulative: bool) -> None:
    """Of a cumulative stream only what is new is written, and each token is in the table once."""
    printer = Printer(as_json=False, quiet=False)
    one, two = told(b" a", 0.5, (b" a", 0.5), (b"\xe4", 0.25)), told(b"", 1.0)
    first = pb.Delta(text="a", token_ids=[5], log_probabilities=[one], cumulative=cumulative)
    second = pb.Delta(text="b", token_ids=[6], log_probabilities=[two], cumulative=cumulative)
    if cumulative:
        second = pb.Delta(text="ab", token_ids=[5, 6], log_probabilities=[one, two], cumulative=True)
    completed = pb.Completed(finish_reason=pb.FINISH_REASON_EOS, state=pb.REQUEST_STATE_FINISHED)
    for response in (first, second):
        printer.event(pb.GenerateResponse(delta=response))
    printer.event(pb.GenerateResponse(completed=completed))
    printer.summary("r-1", completed, Exit.OK)
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.err.splitlines() if "%" in line]
    assert shown.out == "ab\n"
    assert lines == [["'", "a'", "50.0%", "-0.693", "'", "a'", "50.0%", "'\\\\xe4'", "25.0%"], ["(special)", "100.0%", "0.000"]]


def test_choices_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=False, quiet=True)
    for index, text, ended in (
        (0, "a", False),
        (1, "x", False),
        (0, "b", False),
        (1, "y", True),
        (2, "q", False),
        (0, "c", True),
    ):
        event = {"choice_ended": pb.ChoiceEnded(index=index, text=text)} if ended else {"delta": pb.Delta(index=index, text=text)}
        printer.event(pb.GenerateResponse(**event))
    printer.event(pb.GenerateResponse(choice_ended=pb.ChoiceEnded(index=2, text="r")))
    assert capsys.readouterr().out == "abc\n[choice 1]\nxy\n[choice 2]\nqr"


def test_the_likeliest_choice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(as_json=False, quiet=True)
    for index in (3, 1):
        printer.event(pb.GenerateResponse(choice_ended=pb.ChoiceEnded(index=index, text=f"text {index}")))
    assert capsys.readouterr().out == "[choice 3]\ntext 3\n[choice 1]\ntext 1"

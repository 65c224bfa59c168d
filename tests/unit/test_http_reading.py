"""Events of requests as pieces of choices, and their log-probabilities in both shapes."""

import pytest

from router.http import chat, completion
from router.http.errors import HttpError
from router.http.log_probs import LEAST, LegacyLogProbs, content_of
from router.http.reading import Counts, Output, Piece, Reading
from tandem.v1 import inference_pb2 as pb

FINISHED, FAILED = pb.REQUEST_STATE_FINISHED, pb.REQUEST_STATE_FAILED


def event(number: int, **kind: object) -> bytes:
    return pb.GenerateResponse(sequence_no=number, **kind).SerializeToString()


def started() -> bytes:
    return event(0, started=pb.Started(prompt_tokens=5, model_snapshot="abc"))


def completed(number: int, reason: int = pb.FINISH_REASON_EOS, **fields: object) -> bytes:
    usage = pb.Usage(prompt_tokens=5, cached_prompt_tokens=4, returned_tokens=2, billed_tokens=3)
    return event(number, completed=pb.Completed(finish_reason=reason, **{"state": FINISHED, "usage": usage, **fields}))


def test_a_stream() -> None:
    reading = Reading(0, 1, ranked=False)
    assert reading.take(started()) == [] and (reading.counts, reading.snapshot) == (Counts(prompt=5), "abc")
    (piece,) = reading.take(event(1, delta=pb.Delta(text="a", token_ids=[7, 8])))
    assert (piece.index, piece.text, reading.counts) == (0, "a", Counts(5, 0, 2))
    (end,) = reading.take(completed(2))
    assert (end.text, end.finish_reason, end.stop_reason, reading.counts) == ("", "stop", None, Counts(5, 4, 3))


@pytest.mark.parametrize(
    ("reason", "fields", "told"),
    [
        (pb.FINISH_REASON_EOS, {"matched_token_id": 2}, ("stop", None)),
        (pb.FINISH_REASON_STOP_TOKEN, {"matched_token_id": 0}, ("stop", 0)),
        (pb.FINISH_REASON_STOP_SEQUENCE, {"matched_stop": "end"}, ("stop", "end")),
        (pb.FINISH_REASON_GRAMMAR_COMPLETE, {}, ("stop", None)),
        (pb.FINISH_REASON_MAX_OUTPUT_TOKENS, {}, ("length", None)),
        (pb.FINISH_REASON_CONTEXT_LIMIT, {}, ("length", None)),
        (pb.FINISH_REASON_DEADLINE_EXCEEDED, {"cause": "overall_deadline"}, ("length", "overall_deadline")),
        (pb.FINISH_REASON_CONTENT_INTERRUPTED, {}, ("content_filter", None)),
    ],
)
def test_reasons(reason: int, fields: dict[str, object], told: tuple[str, object]) -> None:
    reading = Reading(0, 1, ranked=False)
    reading.take(started())
    (end,) = reading.take(completed(1, reason, **fields))
    assert (end.finish_reason, end.stop_reason) == told


def test_a_failure_and_the_callers_own_deadline_are_left_to_the_status() -> None:
    failed, late = {"state": FAILED}, {"cause": "rpc_deadline"}
    assert Reading(0, 1, ranked=False).take(completed(1, pb.FINISH_REASON_MODEL_ERROR, **failed)) == []
    assert Reading(0, 1, ranked=False).take(completed(1, pb.FINISH_REASON_DEADLINE_EXCEEDED, **late)) == []


def test_choices_are_numbered_on_and_those_without_an_end_get_the_requests() -> None:
    reading = Reading(4, 2, ranked=False)
    reading.take(started())
    ended = pb.ChoiceEnded(index=1, finish_reason=pb.FINISH_REASON_EOS, text="x", token_ids=[1])
    (first,) = reading.take(event(1, choice_ended=ended))
    (second,) = reading.take(completed(2, pb.FINISH_REASON_DEADLINE_EXCEEDED, cause="overall_deadline"))
    assert [(one.index, one.text, one.finish_reason) for one in (first, second)] == [(5, "x", "stop"), (4, "", "length")]


def test_ranked_choices_are_numbered_as_they_are_told() -> None:
    reading = Reading(0, 2, ranked=True)
    reading.take(started())
    ends = [pb.ChoiceEnded(index=index, finish_reason=pb.FINISH_REASON_MODEL_ERROR) for index in (4, 0)]
    assert [reading.take(event(1 + number, choice_ended=one)) for number, one in enumerate(ends)] == [[], []]
    assert [(one.index, one.finish_reason) for one in reading.take(completed(3))] == [(0, "abort"), (1, "abort")]


@pytest.mark.parametrize(
    ("reason", "cause", "state"),
    [
        (pb.FINISH_REASON_CANCELLED, "client_cancel", pb.REQUEST_STATE_CANCELLED),
        (pb.FINISH_REASON_TRANSPORT_ERROR, "router_lost", FAILED),
        (pb.FINISH_REASON_DEADLINE_EXCEEDED, "rpc_deadline", FINISHED),
    ],
)
def test_no_choice_has_an_end_that_is_its_requests_failure(reason: int, cause: str, state: int) -> None:
    reading = Reading(0, 3, ranked=False)
    reading.take(started())
    (well,) = reading.take(event(1, choice_ended=pb.ChoiceEnded(index=1, finish_reason=pb.FINISH_REASON_EOS)))
    assert well.finish_reason == "stop"
    for number, index in ((2, 0), (3, 2)):
        ended = pb.ChoiceEnded(index=index, finish_reason=reason, cause=cause, text="x")
        assert reading.take(event(number, choice_ended=ended)) == []
    assert reading.take(completed(4, reason, cause=cause, state=state)) == []


def test_a_choice_that_was_cancelled_alone_has_its_end_with_the_others() -> None:
    reading = Reading(0, 2, ranked=False)
    reading.take(started())
    alone = pb.ChoiceEnded(index=0, finish_reason=pb.FINISH_REASON_CANCELLED, cause="client_cancel")
    assert reading.take(event(1, choice_ended=alone)) == []
    (other,) = reading.take(event(2, choice_ended=pb.ChoiceEnded(index=1, finish_reason=pb.FINISH_REASON_EOS, text="x")))
    (first,) = reading.take(completed(3))
    assert [(one.index, one.finish_reason, one.stop_reason) for one in (other, first)] == [
        (1, "stop", None),
        (0, "abort", "client_cancel"),
    ]


def test_an_end_whose_output_is_gone_is_an_error() -> None:
    with pytest.raises(HttpError) as gone:
        Reading(0, 1, ranked=False).take(completed(9))
    assert (gone.value.status, gone.value.code) == (410, "REPLAY_GONE")
    nothing = pb.Usage(prompt_tokens=5, billed_tokens=1)
    (end,) = Reading(0, 1, ranked=False).take(completed(1, usage=nothing))
    assert end.finish_reason == "stop"


def token(data: bytes, value: float, *top: tuple[int, float, bytes]) -> pb.TokenLogProbability:
    return pb.TokenLogProbability(
        log_probability=value,
        token=data,
        top_token_ids=[one[0] for one in top],
        top_log_probabilities=[one[1] for one in top],
        top_tokens=[one[2] for one in top],
    )


def test_the_shape_of_completions() -> None:
    tokens = [token(b"a", -1, (1, -1, b"a"), (2, -2, b"")), token(b"\xc3", -3, (9, -0.5, b"b")), token(b"\xa9", float("-inf"))]
    told = LegacyLogProbs().told(Piece(0, "aé", [1, 3, 4], tokens))
    assert told == {
        "text_offset": [0, 1, 1],
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-1.0, -3.0, LEAST],
        "top_logprobs": [{"a": -1.0, "token_id:2": -2.0}, {"b": -0.5, "bytes:\\xc3": -3.0}, {"bytes:\\xa9": LEAST}],
    }
    assert LegacyLogProbs().told(Piece(0, "")) is None


def test_an_echoed_prompt_begins_with_a_token_that_nothing_comes_before() -> None:
    prompt = Piece(0, "Hi you", [5, 6], [token(b" you", -2)], prompt=True)
    legacy = LegacyLogProbs()
    assert legacy.told(prompt) == {
        "text_offset": [0, 2],
        "tokens": ["Hi", " you"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {" you": -2.0}],
    }
    assert legacy.told(Piece(0, "!", [7], [token(b"!", -1)]))["text_offset"] == [6]
    choice = completion.whole_choice(Output(0, [prompt, Piece(0, "!", [7], [token(b"!", -1)], "stop")]), log_probs=True)
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("Hi you!", "stop", ["Hi", " you", "!"])


def test_the_shape_of_chat() -> None:
    piece = Piece(0, "é", [3], [token(b"\xc3", -3, (9, -0.5, b"b"))])
    (entry,) = content_of(piece)
    assert entry == {
        "token": "�",
        "logprob": -3.0,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}],
    }
    first = chat.choice(piece, first=True, log_probs=True)
    assert (first["delta"], first["logprobs"]["content"]) == ({"role": "assistant", "content": "é"}, [entry])
    assert chat.choice(Piece(0, finish_reason="stop"), first=False, log_probs=True)["delta"] == {}
    assert chat.choice(Piece(0, finish_reason="stop"), first=True, log_probs=False)["delta"] == {
        "role": "assistant",
        "content": "",
    }

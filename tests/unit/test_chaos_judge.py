"""What rounds of chaos take for right of several outputs, and what not."""

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.chaos.clients import Story
from tests.chaos.judge import judge
from tests.chaos.outputs import Output
from tests.chaos.plan import Manner, Order, Plan
from tests.chaos.shapes import SHAPES_OF_CHOICES
from tests.chaos.undisturbed import Expected

LIMIT = pb.FINISH_REASON_MAX_OUTPUT_TOKENS
WHOLE = {0: Output("one two", 2, "", LIMIT), 1: Output("three", 1, "", LIMIT)}
EXPECTED = Expected(WHOLE, LIMIT, 5, 3, 3)


def delta(index: int, text: str, *ids: int) -> dict[str, object]:
    return {"delta": pb.Delta(index=index, text=text, token_ids=ids)}


def ended(index: int, text: str, *ids: int, reason: int = LIMIT) -> dict[str, object]:
    return {"choice_ended": pb.ChoiceEnded(index=index, text=text, token_ids=ids, finish_reason=reason)}


def completed(state: int, reason: int, returned: int = 3) -> dict[str, object]:
    usage = pb.Usage(prompt_tokens=5, selected_tokens=returned, returned_tokens=returned)
    return {"completed": pb.Completed(state=state, finish_reason=reason, usage=usage)}


SERVED = completed(pb.REQUEST_STATE_FINISHED, LIMIT)
CANCELLED = completed(pb.REQUEST_STATE_CANCELLED, pb.FINISH_REASON_CANCELLED, 1)


def judged(*events: dict[str, object]) -> str:
    story = Story("r", several=True)
    for number, event in enumerate(({"started": pb.Started()}, *events)):
        story.take(pb.GenerateResponse(sequence_no=number, **event), number)
    record = pb.RequestRecord(state=story.completed.state, finish_reason=story.completed.finish_reason)
    order = Order(SHAPES_OF_CHOICES[0], 0, Manner.CANCEL, 1, 0.0, False)
    return judge(Plan("s", (order,), ()), order, story, EXPECTED, record)


def test_outputs_are_put_together_and_compared_one_by_one() -> None:
    assert judged(delta(0, "one ", 1), ended(1, "three", 3), ended(0, "two", 2), SERVED) == "served"
    cut = pb.FINISH_REASON_CANCELLED
    assert judged(delta(0, "one ", 1), ended(0, "", reason=cut), ended(1, "", reason=cut), CANCELLED) == "cancelled"
    assert judged(ended(1, "three", 3), ended(0, "", reason=cut), CANCELLED) == "cancelled"


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ((ended(1, "three", 3), ended(0, "other", 1, 2), SERVED), "is no beginning"),
        ((ended(0, "three", 3), ended(1, "one two", 1, 2), SERVED), "is no beginning"),
        ((ended(0, "one two", 1, 2), SERVED), "not {0:"),
        ((ended(0, "one two", 1, 2), delta(0, "", 7), ended(1, "three", 3), SERVED), "output 0 goes on after its end"),
        ((ended(0, "one two", 1, 2), ended(0, ""), ended(1, "three", 3), SERVED), "output 0 goes on after its end"),
        ((ended(0, "one ", 1), CANCELLED), "output 0 has ended"),
        ((ended(0, "one two", 1, 2), ended(1, "three", 3), ended(2, ""), SERVED), "output 2 was never to be told"),
    ],
)
def test_what_an_output_must_not_be(events: tuple[dict[str, object], ...], wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        judged(*events)

"""What a client is told that is refused for want of room."""

import math

import pytest

from router.endings import REFUSAL_LABELS, queue_full, wait_too_long
from router.http.errors import from_status
from router.queue import QueueFull, WaitTooLong
from router.refused import RETRY_AFTER_S
from telemetry.router_metrics import REFUSALS


@pytest.mark.parametrize(
    ("wait_s", "words"), [(45.4, "would be about 45 s"), (0.2, "would be about 0 s"), (math.inf, "does not move")]
)
def test_a_wait_in_vain_is_told_with_the_time_to_come_back(wait_s: float, words: str) -> None:
    refused = wait_too_long(WaitTooLong(wait_s, 30.7, 77.0))
    assert (refused.code.name, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_WAIT")
    assert words in refused.message and "the queue clock leaves 31 s" in refused.message
    assert refused.details.retry_after_s == 77.0 and refused.details.quotas[0].limit_id == "queue_clock"


def test_a_full_queue_tells_when_it_will_have_moved_where_that_is_known() -> None:
    full = QueueFull("max_requests", 10)
    assert queue_full(full, "t").details.retry_after_s == RETRY_AFTER_S
    full.after_s = 12.0
    assert queue_full(full, "t").details.retry_after_s == 12.0


@pytest.mark.parametrize(("after_s", "header"), [(0.4, "1"), (12.3, "13"), (119.0, "60")])
def test_http_clients_are_told_a_time_that_they_take_for_an_answer(after_s: float, header: str) -> None:
    refused = wait_too_long(WaitTooLong(100.0, 30.0, after_s))
    assert from_status(refused).headers["retry-after"] == header


def test_every_label_of_a_refusal_is_one_of_the_metric() -> None:
    assert set(REFUSAL_LABELS.values()) <= set(REFUSALS)

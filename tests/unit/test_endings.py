"""What a client is told that is refused for want of room."""

import math

import pytest

from router.endings import REFUSAL_LABELS, RETRY_AFTER_MAX_S, wait_too_long
from router.queue import WaitTooLong
from telemetry.router_metrics import REFUSALS


@pytest.mark.parametrize(
    ("wait_s", "after_s", "words"),
    [(45.4, 45.4, "would be about 45 s"), (0.2, 1.0, "would be about 0 s"), (math.inf, RETRY_AFTER_MAX_S, "does not move")],
)
def test_a_wait_in_vain_is_told_with_the_time_to_come_back(wait_s: float, after_s: float, words: str) -> None:
    refused = wait_too_long(WaitTooLong(wait_s, 30.7))
    assert (refused.code.name, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_WAIT")
    assert words in refused.message and "the queue clock leaves 31 s" in refused.message
    assert refused.details.retry_after_s == after_s and refused.details.quotas[0].limit_id == "queue_clock"


def test_every_label_of_a_refusal_is_one_of_the_metric() -> None:
    assert set(REFUSAL_LABELS.values()) <= set(REFUSALS)

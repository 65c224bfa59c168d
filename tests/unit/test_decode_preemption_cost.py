"""What bringing a sequence back costs, from what was timed."""

import pytest

from decode_svc.config import DecodeSettings
from decode_svc.preemption import PreemptionKind
from decode_svc.preemption_cost import ASSUMED_BYTES_PER_S, FORGETTING, PreemptionCost


def test_pages_are_kept_while_no_step_has_shown_what_a_token_costs() -> None:
    cost = PreemptionCost()
    assert cost.recompute_s(1) is None and cost.swap_is_cheaper(1, 10**12)
    assert cost.swap_s(1000) == 2 * 1000 / ASSUMED_BYTES_PER_S


def test_a_long_step_shows_what_a_token_costs_and_a_short_one_does_not() -> None:
    cost = PreemptionCost()
    cost.stepped(1, 0.02)
    cost.stepped(100, 0.2)
    cost.stepped(1, 0.02)
    assert cost.recompute_s(100) == pytest.approx(0.2 * FORGETTING)
    cost.stepped(0, 5.0)
    assert cost.recompute_s(100) == pytest.approx(0.2 * FORGETTING), "a step without rows says nothing"


def test_a_machine_that_got_slower_is_noticed() -> None:
    cost = PreemptionCost()
    cost.stepped(100, 0.1)
    for _ in range(500):
        cost.stepped(100, 1.0)
    assert cost.recompute_s(100) == pytest.approx(1.0)


def test_copies_both_ways_are_weighed_against_tokens() -> None:
    cost = PreemptionCost()
    cost.stepped(100, 0.1)
    cost.copied(1000, 1.0)
    cost.copied(0, 9.0)
    assert cost.swap_s(500) == pytest.approx(1.0)
    assert cost.swap_is_cheaper(1000, 500) and not cost.swap_is_cheaper(999, 500)


@pytest.mark.parametrize(
    ("chosen", "kind", "pages"),
    [("cheaper", None, 7), ("swap", PreemptionKind.SWAP, 7), ("recompute", PreemptionKind.RECOMPUTE, 0)],
)
def test_settings(chosen: str, kind: PreemptionKind | None, pages: int) -> None:
    settings = DecodeSettings(model="m", reservation="expected", preemption=chosen, swap_pages=7)
    assert settings.scheduler_limits().pressure.kind is kind and settings.host_pages == pages

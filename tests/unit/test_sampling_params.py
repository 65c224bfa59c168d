"""Limits of sampling parameters: each is refused with its name and its limit."""

import math

import pytest

from engine.sampling_params import MAX_LOGIT_BIASES, BadSamplingParams, SamplingParams

BAD = [
    ("temperature", -1.0, "0 to 10"),
    ("temperature", 10.5, "0 to 10"),
    ("temperature", math.nan, "0 to 10"),
    ("top_k", -1, "0 to"),
    ("top_p", 0.0, "over 0 up to 1"),
    ("top_p", 1.1, "over 0 up to 1"),
    ("top_p", math.nan, "over 0 up to 1"),
    ("min_p", -0.1, "0 to 1"),
    ("min_p", math.inf, "0 to 1"),
    ("repetition_penalty", 0.0, "over 0 up to 10"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -math.inf, "-2 to 2"),
    ("seed", -1, "0 to"),
    ("seed", 2**64, "0 to"),
    ("logit_bias", ((1, 101.0),), "-100 to 100"),
    ("logit_bias", ((1, math.nan),), "-100 to 100"),
    ("logit_bias", ((-1, 1.0),), "0 to"),
    ("logit_bias", ((1, 1.0), (1, 2.0)), "one entry"),
    ("logit_bias", tuple((n, 0.0) for n in range(MAX_LOGIT_BIASES + 1)), "at most 300"),
]


@pytest.mark.parametrize(("field", "value", "limit"), BAD, ids=[f"{field}-{n}" for n, (field, _, _) in enumerate(BAD)])
def test_a_field_out_of_its_limits_is_named(field: str, value: object, limit: str) -> None:
    with pytest.raises(BadSamplingParams, match=limit) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field.startswith(field)


def test_the_limits_themselves_are_fine() -> None:
    low = SamplingParams(0.0, 0, 1e-9, 0.0, 1e-9, -2.0, -2.0, ((0, -100.0),), 0)
    high = SamplingParams(10.0, 2**32 - 1, 1.0, 1.0, 10.0, 2.0, 2.0, ((1, 100.0),), 2**64 - 1)
    assert low.greedy and low.penalised
    assert not high.greedy and high.penalised
    assert not SamplingParams().penalised

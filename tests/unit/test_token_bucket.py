"""Buckets and the limits of tenants, with time as a number."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tenant_limits import Limit, OverLimit, TenantLimits, TenantRates
from router.token_bucket import TokenBucket


def test_a_bucket_says_how_long_to_wait_and_is_right():
    bucket = TokenBucket.full(per_s=2.0, burst=4.0, now=10.0)
    assert bucket.wait_s(4.0, 10.0) == 0.0
    bucket.take(4.0, 10.0)
    assert bucket.wait_s(1.0, 10.0) == 0.5
    assert bucket.wait_s(1.0, 10.5) == 0.0
    assert bucket.wait_s(100.0, 10.5) == 1.5, "more than it holds is there when it is full"
    bucket.take(100.0, 12.0)
    assert bucket.wait_s(1.0, 12.0) == 48.5, "what was owed is filled up first"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 20)), max_size=40))
def test_a_bucket_never_gives_more_than_its_rate_and_burst(steps):
    bucket, now, given_out = TokenBucket.full(3.0, 7.0, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        amount = min(amount, 7.0)
        wait = bucket.wait_s(amount, now)
        assert replace(bucket).wait_s(amount, now + wait) == 0.0
        if wait == 0.0:
            bucket.take(amount, now)
            given_out += amount
    assert given_out <= 7.0 + 3.0 * now + 1e-3


def limits(**rates):
    return TenantLimits(lambda tenant: TenantRates(**rates))


def test_each_tenant_has_requests_of_its_own():
    counted = limits(requests_per_s=1.0, request_burst=2.0)
    counted.knock("a", 0.0)
    counted.knock("a", 0.0)
    with pytest.raises(OverLimit) as over:
        counted.knock("a", 0.5)
    assert (over.value.limit, over.value.bound, over.value.wait_s) == (Limit.REQUEST_RATE, 1.0, 0.5)
    counted.knock("b", 0.5)
    counted.knock("a", 1.0)


def test_chosen_tokens_are_owed_when_a_request_ends():
    counted = limits(tokens_per_s=10.0, token_burst=100.0)
    counted.check("a", 60, 0.0)
    counted.began("a", 60, 0.0)
    counted.ended("a", 90, 0.0)
    with pytest.raises(OverLimit) as over:
        counted.check("a", 10, 0.0)
    assert (over.value.limit, over.value.wait_s) == (Limit.TOKEN_RATE, 6.0)
    counted.check("a", 10, 6.0)


def test_a_prompt_longer_than_the_burst_waits_for_a_full_bucket_alone():
    counted = limits(tokens_per_s=10.0, token_burst=100.0)
    counted.check("a", 1000, 0.0)
    counted.began("a", 1000, 0.0)
    with pytest.raises(OverLimit) as over:
        counted.check("a", 1000, 0.0)
    assert over.value.wait_s == 100.0


def test_requests_at_a_time():
    counted = limits(concurrent_requests=1)
    counted.check("a", 1, 0.0)
    counted.began("a", 1, 0.0)
    with pytest.raises(OverLimit) as over:
        counted.check("a", 1, 0.0)
    assert (over.value.limit, over.value.wait_s) == (Limit.CONCURRENCY, None)
    counted.ended("a", 5, 0.0)
    counted.check("a", 1, 0.0)
    assert counted.running("a") == 0


def test_tenants_that_owe_nothing_are_forgotten_and_those_that_run_never():
    counted = TenantLimits(lambda tenant: TenantRates(requests_per_s=1.0), most=3)
    for number in range(10):
        counted.knock(f"t{number}", 100.0 * number)
    assert len(counted) <= 3
    counted.began("runs", 1, 1000.0)
    for number in range(10):
        counted.knock(f"u{number}", 1000.0)
    assert len(counted) <= 3 and counted.running("runs") == counted.running_requests == 1
    counted.ended("runs", 1, 1000.0)


def test_a_limit_that_changes_counts_from_the_next_request_on():
    rates = {"a": TenantRates(concurrent_requests=2)}
    counted = TenantLimits(lambda tenant: rates[tenant])
    counted.began("a", 1, 0.0)
    rates["a"] = TenantRates(concurrent_requests=1)
    with pytest.raises(OverLimit):
        counted.check("a", 1, 0.0)

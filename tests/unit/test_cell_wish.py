"""What a watcher may ask for: anything else is refused by the name of the field."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cell_servicer import LEAST_PERIOD_S, LONGEST_PERIOD_S, Wish, wish_of
from rpc.status import StatusError
from tandem.v1 import cell_pb2 as pb

pytestmark = pytest.mark.slow

INT64, INT32, UINT32 = st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)


@given(INT64, INT32, st.none() | UINT32, st.none() | UINT32)
def test_whatever_is_asked_for_is_inside_the_bounds_or_refused(
    seconds: int, nanos: int, requests: int | None, ended: int | None
) -> None:
    asked = pb.WatchRequest(max_requests=requests, max_ended=ended)
    asked.period.seconds, asked.period.nanos = seconds, nanos
    try:
        wish = wish_of(asked.SerializeToString())
    except StatusError as refused:
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT and refused.details.violations
    else:
        assert LEAST_PERIOD_S <= wish.period_s <= LONGEST_PERIOD_S and wish.max_requests <= 1000 and wish.max_ended <= 200


@given(st.binary(max_size=64))
def test_any_bytes_are_a_wish_or_refused(raw: bytes) -> None:
    try:
        wish_of(raw)
    except StatusError as refused:
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_not_said_has_a_default_and_all_that_is_wrong_is_named() -> None:
    assert wish_of(b"") == Wish(period_s=1.0, max_requests=100, max_ended=20)
    with pytest.raises(StatusError) as refused:
        Wish(period_s=float("nan"), max_requests=1001, max_ended=-1)
    assert [one.field for one in refused.value.details.violations] == ["period", "max_requests", "max_ended"]

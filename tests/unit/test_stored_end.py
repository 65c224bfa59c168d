"""What the store's record can tell of a request whose events are gone."""

import pytest

from lifecycle.finish import Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from lifecycle.usage import Usage
from router.following import Wanted, stored_end
from router.redis_codec import fields, record_from_fields
from rpc.status import StatusError

ATTACH, AGAIN = Wanted("r1", 0, "tenant"), Wanted("r1", 0, "tenant", "body")


def ended(terminal_no: int, *, final_only: bool, returned: int = 3) -> RequestRecord:
    record = RequestRecord("r1", "tenant", "model", "snapshot", "body", 0, "router-0", "", 0.0, final_only=final_only)
    record.state, record.ending = State.FINISHED, Ending(FinishReason.EOS)
    record.terminal_sequence_no, record.usage = terminal_no, Usage(returned_tokens=returned)
    # As another router reads it.
    return record_from_fields(fields(record, 1))


@pytest.mark.parametrize("wanted", [ATTACH, AGAIN])
@pytest.mark.parametrize("terminal_no", [1, 2])
def test_an_end_that_had_the_text_is_not_told_without_it(wanted: Wanted, terminal_no: int) -> None:
    """Number 2 is its own where the prompt was told before it."""
    record = ended(terminal_no, final_only=True)
    for next_no in range(terminal_no + 1):
        with pytest.raises(StatusError, match="not kept"):
            stored_end(wanted, record, next_no)
    assert stored_end(wanted, record, terminal_no + 1) is None


@pytest.mark.parametrize("wanted", [ATTACH, AGAIN])
def test_an_end_without_text_of_its_own_is_told(wanted: Wanted) -> None:
    assert stored_end(wanted, ended(2, final_only=False), 2) == 2, "its text was in event 1"
    assert stored_end(wanted, ended(2, final_only=True, returned=0), 2) == 2, "there was no text"

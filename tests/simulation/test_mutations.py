"""Planted mistakes are found."""

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import run

#: For each mistake the first seed that showed it, as `python -m tests.simulation.search` tells them.
SHOWN_BY = {
    "pages are free before the writer has answered": 9,
    "a hand-over is committed before all parts are there": 2,
    "a step is told twice": 1,
    "a landing row is free before its logits were read": 2,
    "a silent writer is believed to be still": 41,
    "a lost notice is never missed": 28,
    "a Drain is answered while writes are in flight": 9,
    "source pages leak": 2,
    "the terminal event is sent twice": 1,
    "a cancel is forgotten in the queue": 824,
    "a ticket is not given back": 2,
    "the last token is told twice to the next member": 13,
    "a sequence number is used again": 49,
    "a byte of text is sent again": 13,
    "a tombstone is lost": 1,
    "a hand-over is committed twice": 14,
    "a hand-over is committed after it was taken back": 14,
    "output of an earlier attempt is taken for the present one": 82,
    "decode takes a prompt for any other of its length": 1,
    "prefill takes a prompt for any other of its length": 2,
    "a page is found before it is full": 111,
    "a write of a router that is not the owner is carried out": 226,
    "a write that was overtaken is carried out, of an earlier attempt too": 775,
    "a request of a living router is adopted": 57,
    "every router is held to be dead, wherever it is asked": 43,
    "a repeated ticket is counted twice": 1,
}
#: Worlds that are tried beside that one: what the code does next shifts what happens in a world.
OTHERS = range(1, 61)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert any(run(seed, MUTATIONS[name]).faults for seed in (SHOWN_BY[name], *OTHERS))

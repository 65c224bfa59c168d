"""Planted mistakes are found."""

import pytest

from tests.simulation.cell import Making
from tests.simulation.mutations import MUTATIONS, NotPlanted, lua, router, shown

#: For each mistake the first seed that showed it, as `python -m tests.simulation.search` tells them.
SHOWN_BY = {
    "pages are free before the writer has answered": 9,
    "a hand-over is committed before all parts are there": 2,
    "a step is told twice": 1,
    "a landing row is free before its logits were read": 2,
    "a silent writer is believed to be still": 41,
    "a lost notice is never missed": 32,
    "a Drain is answered while writes are in flight": 9,
    "source pages leak": 2,
    "the terminal event is sent twice": 1,
    "a cancel is forgotten in the queue": 136,
    "a ticket is not given back": 2,
    "the last token is told twice to the next member": 49,
    "a sequence number is used again": 25,
    "a byte of text is sent again": 25,
    "siblings find nothing in the pages that they do not share": 2,
    "a cancel of one choice ends them all": 140,
    "the end of a choice is forgotten": 6,
    "a tombstone is lost": 1,
    "a hand-over is committed twice": 14,
    "a hand-over is committed after it was taken back": 4,
    "output of an earlier attempt is taken for the present one": 86,
    "decode takes a prompt for any other of its length": 1,
    "prefill takes a prompt for any other of its length": 2,
    "a page is found before it is full": 111,
    "a write of a router that is not the owner is carried out": 226,
    "a write that was overtaken is carried out, of an earlier attempt too": 42,
    "a request of a living router is adopted": 57,
    "every router is held to be dead, wherever it is asked": 2,
    "a tenant's request that has ended counts on": 1,
    "the store gives tickets beyond every limit": 164,
    "a repeated ticket is counted twice": 1,
}
#: Worlds within which each mistake has to be found: what takes more is as good as missed.
MOST_SEEDS = 500
#: Worlds that are tried beside that one: what the code does next shifts what happens in a world.
OTHERS = range(1, 61)


def test_each_mistake_has_a_world_among_the_first() -> None:
    assert SHOWN_BY.keys() == MUTATIONS.keys()
    assert {name: seed for name, seed in SHOWN_BY.items() if seed > MOST_SEEDS} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert any(shown(MUTATIONS[name], seed) for seed in (SHOWN_BY[name], *OTHERS))


@pytest.mark.slow
def test_a_mistake_that_does_not_fit_the_code_is_not_found_but_told() -> None:
    with pytest.raises(NotPlanted, match="nothing_of_the_kind"):
        shown(Making(plant=router(lambda parts, host: parts.nothing_of_the_kind())), 1)
    with pytest.raises(NotPlanted, match="no script says 'nothing of the kind'"):
        lua(("nothing of the kind", ""))

"""Cores that members of one machine lend one another: only idle ones, each to one at a time, never more than there are."""

import contextlib
import ctypes
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core_share import CoreShare


@pytest.fixture
def share(tmp_path: Path) -> Iterator["Makes"]:
    with contextlib.ExitStack() as stack:
        yield Makes(tmp_path / "cores", stack)


class Makes:
    """Members of one machine of so many cores; those that are made first are known to the later ones at once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def __call__(self, name: str, threads: int = 1, cores: int = 2) -> CoreShare:
        return self._stack.enter_context(contextlib.closing(CoreShare(self.folder, name, threads, cores)))


def test_an_idle_member_lends_its_threads_and_a_busy_one_does_not(share: Makes) -> None:
    prefill = share("prefill-0")
    decode = share("decode-0")
    with decode.borrowed() as spare:
        assert spare.threads == 1
    with prefill.borrowed() as spare:
        assert spare.threads == 0, "decode has work until it says that it has none"
        with decode.borrowed() as none:
            assert none.threads == 0
    with decode.borrowed() as none:
        assert none.threads == 0, "between two steps prefill still has work"
    prefill.rest()
    with decode.borrowed() as spare:
        assert spare.threads == 1


def test_what_is_lent_is_lent_once_and_comes_back_with_the_step(share: Makes) -> None:
    idle = share("idle", threads=2, cores=8)
    first, second = share("first", cores=8), share("second", cores=8)
    with second.borrowed():
        pass  # each knows the other now
    with first.borrowed() as spare:
        assert spare.threads == 2
        with second.borrowed() as none:
            assert none.threads == 0
    with second.borrowed() as spare:
        assert spare.threads == 2
    with idle.borrowed() as none:
        assert none.threads == 0, "both have work"


def test_there_are_never_more_threads_than_cores(share: Makes) -> None:
    others = [share(f"member-{number}") for number in range(4)]
    mine = share("mine")
    with mine.borrowed() as spare:
        assert spare.threads == 1
    with others[0].borrowed():
        pass  # has work from now on: two have, of two cores
    with mine.borrowed() as spare:
        assert spare.threads == 0


def test_an_owner_does_not_wait_for_who_has_borrowed(share: Makes) -> None:
    owner = share("owner")
    borrower = share("borrower")
    with borrower.borrowed() as spare:
        assert spare.threads == 1
        with owner.borrowed():
            pass
    with borrower.borrowed() as spare:
        assert spare.threads == 0


def test_a_member_that_is_gone_has_no_work(share: Makes) -> None:
    gone = CoreShare(share.folder, "gone", 1, 2)
    with gone.borrowed():
        pass
    mine = share("mine")
    with mine.borrowed() as none:
        assert none.threads == 0
    gone.close()
    with mine.borrowed() as spare:
        assert spare.threads == 1


def test_a_step_that_fails_gives_back_what_it_borrowed(share: Makes) -> None:
    idle, first = share("idle", cores=8), share("first", cores=8)
    with pytest.raises(RuntimeError, match="failed"), first.borrowed():
        raise RuntimeError("failed")
    first.rest()
    second = share("second", cores=8)
    with second.borrowed() as spare:
        assert spare.threads == 2
    idle.rest()


def test_an_owner_that_has_work_again_recalls_what_it_lent(share: Makes) -> None:
    """Also when it can not say so by its lock, because somebody looks at that just then; and what was lent before it had work."""
    owner, borrower = share("owner"), share("borrower")
    with owner.borrowed():
        pass
    owner.rest()
    for _ in range(2):
        with borrower.borrowed() as loan:
            assert (loan.threads, loan.recalled) == (1, False)
            with owner.borrowed():
                assert loan.recalled
            owner.rest()
            assert loan.recalled, "it had work meanwhile"
    with borrower.borrowed() as first:
        pass
    with owner.borrowed(), owner.borrowed() as second:
        assert first.recalled and not second.recalled
        assert second.threads == 0


def test_a_member_that_is_gone_recalls_nothing(share: Makes) -> None:
    gone = CoreShare(share.folder, "gone", 1, 2)
    with gone.borrowed():
        pass
    gone.close()
    with share("mine").borrowed() as loan:
        assert (loan.threads, loan.recalled) == (1, False)


def test_a_step_that_began_alone_finds_threads_while_it_runs(share: Makes) -> None:
    owner, borrower = share("owner"), share("borrower")
    with borrower.borrowed():
        pass
    with owner.borrowed() as alone:
        assert alone.later is not None and alone.later.most == 1
        (watched,) = alone.later.watched
        with borrower.borrowed() as loan:
            later = loan.later
            assert later is not None and (loan.threads, loan.lent) == (0, False)
            assert not _rests(later.watched), "the owner has work"
            assert later.take().threads == 0
            owner.rest()
            assert _rests(later.watched)
            first = later.take()
            assert (first.threads, first.recalled, loan.lent, loan.recalled) == (1, False, True, False)
            with owner.borrowed():
                assert not _rests(later.watched)
                assert first.recalled and loan.recalled
            owner.rest()
            assert later.take().threads == 1, "it came back, and has no work again"
        third = share("third")
        borrower.rest()
        with third.borrowed() as free:
            assert free.threads == 1, "the step gave back what it had"
        assert watched


def test_one_that_starts_again_has_no_work_and_nobody_waits_for_it(share: Makes) -> None:
    """Whatever the one before it, which died at work, left in its file."""
    before = CoreShare(share.folder, "again", 1, 2)
    with before.borrowed():
        pass
    before.close()
    mine = share("mine")
    with mine.borrowed() as loan:
        assert loan.threads == 1
    share("again")
    late = share("late")
    with late.borrowed() as loan:
        assert loan.later is not None and _rests(loan.later.watched)


def test_who_looks_just_then_does_not_turn_the_count_round(share: Makes) -> None:
    """The count is even while there is no work, also when the lock could not be had for a step."""
    owner, borrower = share("owner"), share("borrower")
    with borrower.borrowed():
        pass
    with borrower.borrowed() as loan, (share.folder / "owner.busy").open("rb") as looks:
        assert loan.later is not None
        fcntl.flock(looks, fcntl.LOCK_SH)
        owner.working()
        assert not _rests(loan.later.watched) and loan.recalled
        fcntl.flock(looks, fcntl.LOCK_UN)
        taken = loan.later.take()
        owner.working()
        assert not _rests(loan.later.watched) and taken.threads == 1 and taken.recalled
        owner.rest()
        assert _rests(loan.later.watched)
        fcntl.flock(looks, fcntl.LOCK_SH)
        owner.working()
        owner.rest()
        assert _rests(loan.later.watched), "it never had the lock"


def _rests(watched: tuple[int, ...]) -> bool:
    return any(ctypes.c_uint32.from_address(each).value % 2 == 0 for each in watched)

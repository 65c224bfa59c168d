"""Situations in which an output ends early or goes on elsewhere: cancel, clocks, restart, hand-over, a move."""

from decode_svc.messages import EndSeat, PauseSeat, PushSeat
from decode_svc.planning import StepLimits
from kv_transfer.memory import MemoryFabric
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from tests.engine.correctness.reference import Request
from tests.engine.correctness.subject import Subject
from tests.engine.decoding import Member
from tests.engine.handing_over import PrefillMember

CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
LATE = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE)
NEVER_BEGAN = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.FIRST_TOKEN_DEADLINE)
#: A prompt of two pages and a token takes several steps.
NARROW = StepLimits(tokens=9, sequences=6, prompts=2)
#: Bytes that move at each look: a part arrives in pieces.
STEP_BYTES = 1500
#: Tokens after which an output goes on elsewhere: in the middle of a page of any size.
CUT = 11


def cancelled(subject: Subject) -> None:
    """One in the middle of its output and one in the middle of its prompt, with neighbours."""
    member, requests = subject.member(NARROW), subject.requests()
    seats = [subject.ask(member, request) for request in requests[:2]]
    member.run(lambda: len(member.tokens[seats[1]]) == 5)
    long = subject.ask(member, requests[2])
    member.turn()
    assert not member.tokens[long] and len(requests[2].prompt) > NARROW.tokens - 2
    for seat in (seats[1], long):
        member.inbox.put_nowait(EndSeat(seat, CANCEL, subject.clock.now))
    _ended(subject, member, {seats[1]: CANCEL, long: CANCEL})


def deadline(subject: Subject) -> None:
    """The overall clock of one runs out in its output, the first-token clock of another in its prompt."""
    member, requests = subject.member(NARROW), subject.requests()
    subject.ask(member, requests[0])
    late = subject.ask(member, requests[1], limits=Limits(overall_s=60.0))
    member.run(lambda: len(member.tokens[late]) == 5)
    long = subject.ask(member, requests[2], limits=Limits(first_token_s=10.0))
    member.turn()
    assert not member.ends and not member.tokens[long]
    subject.clock.now += 60.0
    _ended(subject, member, {late: LATE, long: NEVER_BEGAN})


def _ended(subject: Subject, member: Member, expected: dict[int, Ending]) -> None:
    """These end by the next turn, with what they said before; all others, one that comes now too, go on to their end."""
    requests = subject.requests()
    before = {seat: list(member.tokens[seat]) for seat in expected}
    member.turn()
    assert {seat: end.ending for seat, end in member.ends.items()} == expected
    for seat, tokens in before.items():
        assert member.tokens[seat] == tokens
        subject.judge(subject.said(member, seat), requests[seat])
    again = subject.ask(member, requests[2])
    member.run()
    subject.judge_whole(member, 0, requests[0])
    subject.judge_whole(member, again, requests[2])
    member.assert_at_rest()


def restart(subject: Subject) -> None:
    """A member is lost; another one, which loaded the weights by itself, goes on from prompts and tokens so far."""
    _restart(subject, subject.requests())


def handed_over(subject: Subject) -> None:
    """Prompts are computed in chunks by one engine and written, pages and last logits, into another, which decodes meanwhile."""
    _handed_over(subject, subject.requests()[1:])


def moved(subject: Subject) -> None:
    """A sequence stands still, its pages are written into another member, and it goes on there; its neighbour stays."""
    _moved(subject, *subject.requests()[2:4])


def adapters_elsewhere(subject: Subject) -> None:
    """Sequences of adapters are handed over, moved, and go on where the weights were loaded anew."""
    requests = subject.adapted()
    _restart(subject, requests)
    _handed_over(subject, requests[1:])
    _moved(subject, *requests[1:3])


def _restart(subject: Subject, requests: list[Request]) -> None:
    lost = subject.member()
    seats = [subject.ask(lost, request) for request in requests]
    lost.run(lambda: min(len(lost.tokens[seat]) for seat in seats) == CUT)
    fresh = subject.member(NARROW, subject.other)
    again = [subject.ask(fresh, request, earlier=lost.tokens[seat]) for seat, request in zip(seats, requests, strict=True)]
    fresh.run()
    for seat, new, request in zip(seats, again, requests, strict=True):
        subject.judge_whole(fresh, new, request, lost.tokens[seat])
    fresh.assert_at_rest()


def _handed_over(subject: Subject, requests: list[Request]) -> None:
    fabric = MemoryFabric(1, STEP_BYTES)
    prefill = PrefillMember(subject.other, fabric, step_tokens=7)
    member = subject.member(fabric=fabric)
    local = subject.ask(member, requests[0])
    seats = [subject.ask(member, request, prefill=prefill.peer) for request in requests]
    submitted: set[int] = set()

    def both() -> bool:
        for seat in member.grants.keys() - submitted:
            submitted.add(seat)
            request = requests[seats.index(seat)]
            prefill.fill(member.grants[seat], request.prompt, adapter=request.adapter)
        prefill.turn()
        return len(member.ends) == len(seats) + 1

    member.run(both)
    assert prefill.committed == len(seats)
    for seat, request in zip((local, *seats), (requests[0], *requests), strict=True):
        subject.judge_whole(member, seat, request)
    member.assert_at_rest()


def _moved(subject: Subject, request: Request, neighbour: Request) -> None:
    fabric = MemoryFabric(2, STEP_BYTES)
    source = subject.member(fabric=fabric, name="decode-0")
    target = subject.member(runner=subject.other, fabric=fabric, name="decode-1")
    leaves, stays = subject.ask(source, request, name="moving"), subject.ask(source, neighbour)
    source.run(lambda: len(source.tokens[leaves]) == CUT)
    source.inbox.put_nowait(PauseSeat(leaves))
    source.run(lambda: leaves in source.paused)
    assert source.paused[leaves].pushable
    told = source.tokens[leaves]
    comes = subject.ask(target, request, earlier=told, prefill=source.peer, moved=True, name="moving")
    target.run(lambda: comes in target.grants)
    assert source.writing is not None
    source.inbox.put_nowait(PushSeat(leaves, source.writing.plan(target.grants[comes])))
    source.run(lambda: leaves in source.pushed)
    assert source.pushed[leaves].cause == ""
    source.inbox.put_nowait(EndSeat(leaves, CANCEL, subject.clock.now))
    target.run()
    source.run()
    subject.judge_whole(target, comes, request, told)
    subject.judge_whole(source, stays, neighbour)
    source.assert_at_rest()
    target.assert_at_rest()

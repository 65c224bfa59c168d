"""Situations about pages and memory: reuse, preemption, too few pages, a step without memory."""

from collections.abc import Sequence

import torch

from decode_svc import admission
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, PressureLimits, Reservation
from engine.layout import pages_for
from lifecycle.finish import FinishReason
from tests.engine.correctness.reference import Request
from tests.engine.correctness.subject import GREEDY, OUTPUT_TOKENS, Subject
from tests.engine.tiny_models import CONTEXT, prompt

#: Steps in which not all of a batch has a place.
CROWDED = StepLimits(tokens=12, sequences=3, prompts=2)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pages_reused(subject: Subject) -> None:
    """Requests follow one another on pages for two of them, which began full of what is no number."""
    runner = subject.watched()
    units = runner.slabs[0].units
    for group, data in enumerate(runner.slab_data):
        pages = data.view(units, -1)[1:]
        pages.view(DTYPES[runner.layout.groups[group].dtype]).fill_(float("nan"))
    requests = subject.requests()
    room = sum(sorted(subject.pages(request, CROWDED.tokens) for request in requests)[-2:])
    member = subject.member(CROWDED, runner, total_pages=1 + room)
    for wave in (requests[:2], requests[2:4], requests[3:]):
        subject.serve(member, wave)
    taken = {page for batch in runner.batches for rows in batch.rows for table in rows.pages for page in table}
    assert max(taken) <= room


def preempted_by_recompute(subject: Subject) -> None:
    """What was in the pages that were taken is computed again."""
    _preempted(subject, PreemptionKind.RECOMPUTE)


def preempted_by_swap(subject: Subject) -> None:
    """What was in the pages that were taken went to the host and came back."""
    _preempted(subject, PreemptionKind.SWAP)


def adapters_preempted(subject: Subject) -> None:
    """Sequences of adapters lose their pages; they are computed again with their own."""
    _preempted(subject, PreemptionKind.RECOMPUTE, ("one", "", "two", "one", "two"))


def _preempted(subject: Subject, kind: PreemptionKind, adapters: Sequence[str] = ("",) * 5) -> None:
    samplings = (one.sampling for one in subject.requests())
    prompts = (tuple(prompt(length, seed=length)) for length in (1, 4, 9, 17, 6))
    requests = [
        Request(ids, sampling, OUTPUT_TOKENS + 6, adapter=adapter)
        for ids, sampling, adapter in zip(prompts, samplings, adapters, strict=True)
    ]
    most = max(subject.pages(request, CROWDED.tokens) for request in requests)
    begun = sum(pages_for(len(request.prompt) + 1, subject.page_tokens) for request in requests)
    pressure = PressureLimits(Reservation.EXPECTED, kind)
    host_pages = 4 * most if kind is PreemptionKind.SWAP else 0
    member = subject.member(CROWDED, total_pages=1 + max(begun, most + most // 2), pressure=pressure, host_pages=host_pages)
    for _ in range(8):
        member.scheduler.preemption.estimate.add(1)  # outputs are expected to be short
    subject.serve(member, requests)
    assert member.scheduler.preemption.counts.preempted[kind] >= 3


def out_of_pages(subject: Subject) -> None:
    """What does not fit beside others is refused and served later; what never fits is refused."""
    first, second = subject.requests()[2], subject.requests()[4]
    member = subject.member(CROWDED, total_pages=1 + subject.pages(first, CROWDED.tokens))
    running = subject.ask(member, first)
    member.run(lambda: len(member.tokens[running]) == 2)
    refused = subject.ask(member, second)
    member.turn()
    assert (member.refusals[refused].reason, member.refusals[refused].retryable) == (admission.NO_PAGES, True)
    if subject.keeps_all_pages:
        never = subject.ask(member, Request(tuple(prompt(CONTEXT - OUTPUT_TOKENS)), GREEDY, OUTPUT_TOKENS))
        member.turn()
        assert member.refusals[never].reason == admission.TOO_LONG
    member.run()
    subject.judge_whole(member, running, first)
    subject.serve(member, [second])


def out_of_memory(subject: Subject) -> None:
    """A step finds no memory: its sequences end as failed, one that was not in it goes on, and the next requests are served."""
    runner = subject.watched()
    member, requests = subject.member(StepLimits(tokens=60, sequences=2, prompts=1), runner), subject.requests()
    seats = [subject.ask(member, request) for request in requests[:3]]
    member.run(lambda: all(len(member.tokens[seat]) >= 5 for seat in seats))
    runner.out_of_memory = True
    member.turn()
    runner.out_of_memory = False
    failed = [seat for seat in seats if seat in member.ends]
    assert len(failed) == 2 and {member.ends[seat].ending.reason for seat in failed} == {FinishReason.MODEL_ERROR}
    for seat in failed:
        subject.judge(subject.said(member, seat), requests[seat])
    (left,) = set(seats) - set(failed)
    member.run()
    subject.judge_whole(member, left, requests[left])
    subject.serve(member, requests[:2])

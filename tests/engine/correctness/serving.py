"""Situations in which requests are served to their end: batches, chunks, prefixes, drafts, grammars, seeds."""

from dataclasses import replace

from decode_svc.draft_model import ModelDrafts
from decode_svc.planning import StepLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.prompt_lookup import LookupLimits
from lifecycle.finish import FinishReason
from lifecycle.prefix_keys import tenant_salt
from tests.engine.correctness.columns import Comparison
from tests.engine.correctness.reference import Request
from tests.engine.correctness.subject import EDITED, GREEDY, OUTPUT_TOKENS, SEEDED, Subject
from tests.engine.decoding import Member
from tests.engine.tiny_models import VOCABULARY, prompt

SALT, OTHER_SALT = tenant_salt("one"), tenant_salt("another")
#: Chunks of fewer tokens than a page of any column, but for the smallest pages.
NARROW = StepLimits(tokens=7, sequences=3, prompts=2)
GRAMMAR_TOKENS = 12
#: Outputs of one prompt.
CHOICES = 4


def single(subject: Subject) -> None:
    """One request at a time."""
    for request in subject.requests()[2:4]:
        subject.serve(subject.member(), [request])


def mixed_lengths(subject: Subject) -> None:
    """Five beside one another, each step one row of each."""
    runner = subject.watched()
    subject.serve(subject.member(runner=runner), subject.requests())
    assert max(batch.scheduled_sequences for batch in runner.batches) == len(subject.requests())


def prefix_miss(subject: Subject) -> None:
    """The cache has the same text of another tenant, and a text that differs in its first token."""
    member = subject.member(prefix_cache=True)
    request = subject.requests()[2]
    changed = replace(request, prompt=((request.prompt[0] + 1) % VOCABULARY, *request.prompt[1:]))
    for several in ([(request, SALT)], [(request, OTHER_SALT), (changed, SALT), (request, b"")]):
        seats = [subject.ask(member, one, salt=salt) for one, salt in several]
        member.run()
        for seat, (one, _) in zip(seats, several, strict=True):
            assert member.cached[seat] == 0
            subject.judge_whole(member, seat, one)
    member.assert_at_rest()


def prefix_hit(subject: Subject) -> None:
    """Pages that a running sequence shares, pages left by one that ended, and pages of generated tokens."""
    member, size = subject.member(prefix_cache=True), subject.page_tokens
    first = Request(tuple(prompt(3 * size + 1, seed=7)), GREEDY, OUTPUT_TOKENS)
    begun = subject.ask(member, first, salt=SALT)
    member.run(lambda: len(member.tokens[begun]) == 3)
    whole_pages = Request(first.prompt[: 2 * size], SEEDED, OUTPUT_TOKENS)
    own_end = Request((*first.prompt[: 2 * size], *prompt(size, seed=8)), EDITED, OUTPUT_TOKENS)
    _hits(subject, [(whole_pages, size), (own_end, 2 * size)], member)
    subject.judge_whole(member, begun, first)
    goes_on = Request((*first.prompt, *member.tokens[begun][:size]), SEEDED, OUTPUT_TOKENS)
    _hits(subject, [(first, 3 * size), (goes_on, 4 * size)], member)
    member.assert_at_rest()


def _hits(subject: Subject, expected: list[tuple[Request, int]], member: Member) -> None:
    """Ask for these at once; of each so many tokens are in the cache."""
    seats = [subject.ask(member, request, salt=SALT) for request, _ in expected]
    member.run()
    for seat, (request, cached_tokens) in zip(seats, expected, strict=True):
        assert member.cached[seat] == cached_tokens
        subject.judge_whole(member, seat, request)


def chunk_mixes(subject: Subject) -> None:
    """Prompts in chunks of many sizes, beside rows of sequences that decode."""
    _chunks(subject, subject.requests())


def adapters(subject: Subject) -> None:
    """Sequences of two adapters and of none: their chunks and rows are in one step, and each prompt says something else."""
    _chunks(subject, subject.adapted())
    same = [replace(subject.requests()[1], adapter=name) for name in subject.references]
    said = subject.serve(subject.member(), same)
    assert len({tuple(one.tokens) for one in said}) == len(same)


def adapters_prefixes(subject: Subject) -> None:
    """One text, asked of the base model and of two adapters: each finds its own pages, and none of the others."""
    size = subject.page_tokens
    first = Request(tuple(prompt(3 * size + 1, seed=7)), GREEDY, OUTPUT_TOKENS)
    each = [replace(first, adapter=name) for name in subject.references]
    for request in each:
        subject.alone(request)  # now: it writes into pages that the member's cache would hold
    member = subject.member(prefix_cache=True)
    _hits(subject, [(request, 0) for request in each], member)
    _hits(subject, [(request, 3 * size) for request in each], member)
    member.assert_at_rest()


def _chunks(subject: Subject, requests: list[Request]) -> None:
    runner = subject.watched()
    member = subject.member(NARROW, runner)
    seats = [subject.ask(member, requests[0])]
    member.run(lambda: len(member.tokens[0]) == 2)
    seats += [subject.ask(member, request) for request in requests[1:]]
    member.run()
    for seat, request in zip(seats, requests, strict=True):
        subject.judge_whole(member, seat, request)
    sizes = [sorted(len(rows.token_ids) for rows in batch.rows) for batch in runner.batches]
    assert any(one[0] == 1 and one[-1] > 1 for one in sizes), "no step had a decode row beside a chunk"
    assert len({one[-1] for one in sizes}) > 2, "all chunks had one size"


def branches(subject: Subject) -> None:
    """Four outputs of one prompt beside another sequence: without a whole page to share, with whole ones alone, with both."""
    requests = subject.requests()
    for request in (requests[3], requests[1], replace(requests[2], sampling=SEEDED)):
        member = subject.member(NARROW)
        neighbour = subject.ask(member, requests[0])
        first = subject.ask(member, request, indexes=range(CHOICES))
        member.run()
        for index in range(CHOICES):
            subject.judge_whole(member, first + index, replace(request, index=index))
        subject.judge_whole(member, neighbour, requests[0])
        assert len({tuple(member.tokens[first + index]) for index in range(CHOICES)}) == CHOICES
        member.assert_at_rest()


def speculation(subject: Subject) -> None:
    """Drafts by prompt lookup, of texts that repeat themselves."""
    lookup = SpeculationLimits(SpeculationKind.PROMPT_LOOKUP, 6, LookupLimits(1, 3))
    member = subject.member(speculation=lookup)
    text, favoured = tuple(prompt(9, seed=1) * 3), ((3, 6.0), (7, 6.0), (11, 6.0))
    samplings = (replace(GREEDY, logit_bias=favoured), replace(EDITED, logit_bias=favoured))
    subject.serve(member, [Request(text, sampling, 2 * OUTPUT_TOKENS) for sampling in samplings])
    counts = member.scheduler.speculation.counts
    assert 0 < counts.accepted_tokens < counts.drafted_tokens


def draft_model(subject: Subject) -> None:
    """The same weights, loaded a second time, draft for sequences with a grammar and without."""
    drafts = ModelDrafts(subject.other, VOCABULARY, step_tokens=NARROW.tokens)
    member = subject.member(speculation=SpeculationLimits(SpeculationKind.DRAFT_MODEL, 4), draft_model=drafts)
    bound = [Request(one.prompt, one.sampling, GRAMMAR_TOKENS, frozenset(b"abc")) for one in subject.requests()[2:4]]
    seats = [subject.ask(member, request) for request in bound]
    subject.serve(member, subject.requests())
    member.worker.close()
    for seat, request in zip(seats, bound, strict=True):
        said = subject.said(member, seat)
        assert said.reason is FinishReason.GRAMMAR_COMPLETE and len(said.tokens) == GRAMMAR_TOKENS
        subject.judge(said, request)
    counts = member.scheduler.speculation.counts
    assert counts.accepted_tokens > counts.drafted_tokens / 2


def structured(subject: Subject) -> None:
    """A regular expression for twelve letters, beside a sequence without one."""
    _structured(subject, subject.member(), frozenset(range(ord("a"), ord("m") + 1)))


def structured_drafts(subject: Subject) -> None:
    """The same with three letters, so that they come again, and with drafts by prompt lookup."""
    lookup = SpeculationLimits(SpeculationKind.PROMPT_LOOKUP, 6, LookupLimits(1, 3))
    runner = subject.watched()
    member = subject.member(runner=runner, speculation=lookup)
    bound = _structured(subject, member, frozenset(b"abc"))
    drafting = {rows.sequence for batch in runner.batches for rows in batch.rows if rows.draft_tokens}
    assert len(drafting) >= len(bound)


def _structured(subject: Subject, member: Member, letters: frozenset[int]) -> list[Request]:
    base = subject.requests()
    bound = [Request(one.prompt, one.sampling, GRAMMAR_TOKENS, letters) for one in (base[2], base[4])]
    seats = [subject.ask(member, request) for request in bound]
    free = subject.ask(member, base[1])
    member.run()
    member.worker.close()
    for seat, request in zip(seats, bound, strict=True):
        said = subject.said(member, seat)
        assert said.reason is FinishReason.GRAMMAR_COMPLETE and len(said.tokens) == GRAMMAR_TOKENS
        subject.judge(said, request)
    subject.judge_whole(member, free, base[1])
    member.assert_at_rest()
    return bound


def replay_alone(subject: Subject) -> None:
    """The same request twice, at different times, on two loads of the same weights: the same to the last bit on the same load."""
    request = subject.requests()[1]
    first = subject.serve(subject.member(), [request])
    subject.clock.now += 100.0
    assert subject.serve(subject.member(), [request]) == first
    subject.serve(subject.member(runner=subject.other), [request])


def replay_in_batch(subject: Subject) -> None:
    """The same request as the last of a batch that has begun, then as one of two equal ones among others."""
    requests = subject.requests()
    request = requests[4]
    member = subject.member(StepLimits(tokens=24, sequences=8))
    early = [subject.ask(member, one) for one in requests[:4]]
    member.run(lambda: len(member.tokens[early[0]]) == 5)
    late = [subject.ask(member, request), subject.ask(member, request)]
    member.run()
    for seat in late:
        subject.judge_whole(member, seat, request)
    if subject.column.engine.comparison is not Comparison.NEAR:
        assert member.tokens[late[0]] == member.tokens[late[1]] == subject.alone(request).tokens

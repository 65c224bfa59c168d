"""Drafts out of a smaller model, with KV pages of its own: decode_svc.drafts.DraftSource. On the engine thread.

For each sequence that wants drafts the model has read the text so far, all but the newest tokens: before a step it reads these,
draws a token, reads it, draws the next one, and so on, all sequences in one batch. What it draws it draws as the sequence itself
would, with the same random number and the same penalties, but without its grammar, which cuts drafts anyway.

A sequence has the pages of its whole text promised when it begins, or none. It gives them back at its end and whenever it stands
still; nothing of this is ever handed over, the next one that has the sequence reads the text again.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from decode_svc.drafts import Wish
from decode_svc.holding import Holding, NoPages
from decode_svc.memory import DecodeMemory
from engine.batch import Batch, Rows
from engine.runner import ModelError, Runner
from engine.sampler import Sampler
from engine.sequence import Sequence as TokenSequence

_LOG = logging.getLogger("decode.drafts")

#: Calls without drafts after a step of the model that failed.
FAILED_REST_CALLS = 256
#: A sequence that did not ask in so many calls gives its pages to one that asks and has none.
IDLE_CALLS = 32


@dataclass(slots=True)
class _Read:
    """How far the model is with a sequence: `tokens` of its text are in the pages, and behind them the drafts `fed`.

    asked_at: the last call in which it was asked for.
    """

    holding: Holding
    asked_at: int
    tokens: int = 0
    fed: tuple[int, ...] = ()


@dataclass(slots=True)
class _Drafting:
    """A sequence whose next draft is drawn from one of the rows of a step. most: drafts that it may get."""

    wish: Wish
    read: _Read
    most: int
    drafts: tuple[int, ...] = field(default=())


class ModelDrafts:
    """Implements DraftSource with a runner, whose slabs it owns.

    vocabulary_size: of the model that is drafted for; ids that only one of the two has are never drafted, and who has one in its
    text goes without. step_tokens: most tokens of texts, all sequences together, that are read before one step.
    """

    def __init__(self, runner: Runner, vocabulary_size: int, step_tokens: int) -> None:
        if step_tokens < 1:
            raise ValueError(f"draft_step_tokens is {step_tokens}, must be at least 1")
        self._runner = runner
        self._size = min(vocabulary_size, runner.vocabulary_size)
        self._sampler = Sampler(self._size)
        self._step_tokens = step_tokens
        self._memory = DecodeMemory(runner.layout, [slab.units for slab in runner.slabs], 0, step_tokens=step_tokens)
        self._reads: dict[int, _Read] = {}
        #: Seats that the model can say nothing to.
        self._without: set[int] = set()
        self._holders: Iterator[int] = itertools.count()
        self._calls = 0
        self._resting_until = 0

    @property
    def pages(self) -> int:
        """Pages that sequences hold."""
        return self._memory.counts().owned

    @property
    def sequences(self) -> int:
        """Sequences that hold pages or have some promised."""
        return len(self._reads)

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource. A step of the model that fails costs all sequences what it has read of them, and nothing else."""
        self._calls += 1
        if self._calls < self._resting_until:
            return {}
        try:
            return self._propose(wishes)
        except ModelError as error:
            _LOG.error("the draft model failed and rests: %s", error)
            self._resting_until = self._calls + FAILED_REST_CALLS
            for seat in list(self._reads):
                self._let_go(seat)
            return {}

    def forget(self, seat: int) -> None:
        """See DraftSource; also told of seats that stand still."""
        self._without.discard(seat)
        if seat in self._reads:
            self._let_go(seat)

    def check(self) -> list[str]:
        """Sentences about what does not add up in its own memory."""
        faults = [f"draft model: {fault}" for fault in self._memory.check(())]
        held = sum(read.holding.pages for read in self._reads.values())
        if held != self.pages:
            faults.append(f"draft model: {self.pages} pages are held, and sequences have {held}")
        for seat, read in self._reads.items():
            if not self._memory.covers(read.holding, read.tokens):
                faults.append(f"draft model: seat {seat} has {read.tokens} tokens in {read.holding.pages} pages")
        return faults

    # inside

    def _propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        at_work, rows = self._catch_up(wishes)
        found: dict[int, tuple[int, ...]] = {}
        while rows:
            logits = self._runner.run(Batch(tuple(rows)))[:, : self._size]
            for one in at_work:
                self._slide(one.read)
            at_work = self._drawn(at_work, logits, found)
            rows = [self._draft_row(one) for one in at_work]
        return found

    def _catch_up(self, wishes: Sequence[Wish]) -> tuple[list[_Drafting], list[Rows]]:
        """Rows that read the texts, those that lack least first; whose text will be read to its end drafts behind it."""
        left = self._step_tokens
        ready = [(wish, read) for wish in wishes if (read := self._read(wish)) is not None]
        at_work, rows = list[_Drafting](), list[Rows]()
        for wish, read in sorted(ready, key=lambda pair: pair[0].sequence.tokens - pair[1].tokens):
            chunk = wish.sequence.tokens_from(read.tokens, left)
            if not chunk:
                break
            if max(chunk) >= self._size:
                self._go_without(wish.seat)
                continue
            end = read.tokens + len(chunk)
            whole = end == wish.sequence.tokens
            self._memory.take(read.holding, end)
            rows.append(Rows(read.holding.holder, chunk, read.tokens, read.holding.tables, whole))
            read.tokens, left = end, left - len(chunk)
            if whole:
                at_work.append(_Drafting(wish, read, min(wish.most, self._reach(read) - end + 1)))
        return at_work, rows

    def _drawn(self, at_work: Sequence[_Drafting], logits: torch.Tensor, found: dict[int, tuple[int, ...]]) -> list[_Drafting]:
        """A step has run: what it draws is a draft. Returns those that go on."""
        if not at_work:
            return []
        chosen = self._sampler.choose(logits, [one.wish.sequence.row_after(one.drafts, None) for one in at_work])
        going_on = []
        for one, token in zip(at_work, chosen, strict=True):
            if not isinstance(token, int):
                self._go_without(one.wish.seat)
                continue
            one.drafts = found[one.wish.seat] = (*one.drafts, token)
            if len(one.drafts) < one.most:
                going_on.append(one)
        return going_on

    def _draft_row(self, one: _Drafting) -> Rows:
        read = one.read
        position = read.tokens + len(read.fed)
        self._memory.take(read.holding, position + 1)
        read.fed = one.drafts
        return Rows(read.holding.holder, one.drafts[-1:], position, read.holding.tables, True)

    def _read(self, wish: Wish) -> _Read | None:
        """What the model has read of a sequence, without drafts that were not chosen; None when there are no pages for it."""
        if wish.seat in self._without:
            return None
        read = self._reads.get(wish.seat)
        if wish.sequence.tokens >= self._runner.context_tokens:
            self._without.add(wish.seat)
            if read is not None:
                self._let_go(wish.seat)
            return None
        if read is None:
            return self._begin(wish)
        read.asked_at = self._calls
        right = _common(read.fed, wish.sequence, read.tokens)
        read.tokens, read.fed = read.tokens + right, ()
        self._memory.give_back(read.holding, read.tokens)
        self._slide(read)
        return read

    def _begin(self, wish: Wish) -> _Read | None:
        tokens = min(wish.sequence.spec.most_cache_tokens, self._runner.context_tokens)
        if not self._memory.fits_ever(tokens):
            self._without.add(wish.seat)
            return None
        while True:
            try:
                holding = self._memory.promise(f"draft-{next(self._holders)}", tokens, computed=True)
            except NoPages:
                idlest = min(self._reads, key=lambda seat: self._reads[seat].asked_at, default=None)
                if idlest is None or self._calls - self._reads[idlest].asked_at < IDLE_CALLS:
                    return None
                self._let_go(idlest)
            else:
                read = self._reads[wish.seat] = _Read(holding, self._calls)
                return read

    def _slide(self, read: _Read) -> None:
        """Give back what has left a window, as the sequence's own tokens see it: drafts may be taken back."""
        if self._memory.windowed:
            self._memory.slide(read.holding, read.tokens, computed=True)

    def _reach(self, read: _Read) -> int:
        """Tokens that its pages, with those it was promised, and the model's context hold."""
        return min(self._memory.reach(read.holding), self._runner.context_tokens)

    def _go_without(self, seat: int) -> None:
        self._let_go(seat)
        self._without.add(seat)

    def _let_go(self, seat: int) -> None:
        self._memory.release(self._reads.pop(seat).holding)


def _common(fed: Sequence[int], sequence: TokenSequence, place: int) -> int:
    """How many of the drafts that were fed from `place` on are the sequence's own now. Its last token is left to be read."""
    chosen = sequence.tokens_from(place, min(len(fed), sequence.tokens - 1 - place))
    for count, (draft, token) in enumerate(zip(fed, chosen, strict=False)):
        if draft != token:
            return count
    return len(chosen)

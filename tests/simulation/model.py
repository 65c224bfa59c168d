"""The model of a simulated member, a pure function of (prompt, seed, position, KV bytes), and what it has to say.

The KV of a token is a link of a chain: it is made from the one before it and the token's id. What the model says next is made
from all links in the pages. A page that was not handed over, was handed over wrong, or was written by somebody else gives
another text, or has a place that was never written.
"""

import random
from functools import lru_cache

import numpy as np
import torch

from engine.batch import Batch, LayerMarks, Rows
from engine.layout import GroupKind, GroupLayout, Layout
from engine.log_probs import TokenLogProb, log_probs
from engine.runner import RunnerStatistics
from engine.sampler import Sampler
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from engine.slab import SlabMemory, allocate_slab
from lifecycle.adapters import Adapter
from lifecycle.finish import Cause, Ending, FinishReason
from router.request import ServedModel
from tests.scripted import ScriptedTokenizer

CONTEXT_TOKENS = 96
SNAPSHOT = "simulated-model"
#: Pieces of text beside single bytes; some end inside a character.
WORDS = (b"alpha ", b"beta", " é".encode(), "ö".encode()[:1], "ö".encode()[1:], b"xyz")
_MASK = (1 << 62) - 1


class BrokenKv(Exception):
    """A page holds what this sequence never wrote."""


class SimulatedTokenizer(ScriptedTokenizer):
    """See ScriptedTokenizer; a router uses it too."""

    chat = None

    def __init__(self) -> None:
        super().__init__(WORDS)

    def encode_plain(self, text: str) -> list[int]:
        """As encode: there are no special tokens."""
        return self.encode(text)


TOKENIZER = SimulatedTokenizer()
VOCABULARY = TOKENIZER.vocabulary_size
MODEL = ServedModel("simulated", SNAPSHOT, CONTEXT_TOKENS, VOCABULARY)
#: Ids that the model likes: letters, spaces, words. The two halves of a character follow one another.
LIKED = [*range(97, 123), 32, *(256 + index for index in (0, 1, 2, 5))]
FIRST_HALF, SECOND_HALF = 256 + 3, 256 + 4


def link(before: int, token: int) -> int:
    """The KV entry of a token after an entry; the first one comes after 0."""
    value = (before * 6364136223846793005 + (token + 1) * 1442695040888963407 + 0x9E3779B97F4A7C15) & _MASK
    return (value ^ (value >> 29)) | 1


@lru_cache(maxsize=65_536)
def _logits_of(seen: int, token: int) -> torch.Tensor:
    row = np.full(VOCABULARY, -30.0, dtype=np.float32)
    if token == FIRST_HALF:
        row[SECOND_HALF] = 5.0
        return torch.from_numpy(row)
    rng = random.Random(seen)
    for place, liked in enumerate(rng.sample(LIKED, 4)):
        row[liked] = 5.0 - 0.5 * place
    if rng.random() < 0.05:
        row[FIRST_HALF] = 6.0
    if rng.random() < 0.03:
        row[TOKENIZER.eos_id] = 5.5
    return torch.from_numpy(row)


def layout(page_tokens: int) -> Layout:
    """Eight bytes for each token."""
    return Layout(SNAPSHOT, (GroupLayout(GroupKind.FULL, 1, 1, 1, page_tokens, "float32"),))


class SimulatedRunner:
    """engine.runner.Runner over real memory."""

    vocabulary_size = VOCABULARY
    context_tokens = CONTEXT_TOKENS
    adapters: tuple[Adapter, ...] = ()

    def __init__(self, page_tokens: int, total_pages: int) -> None:
        self.layout = layout(page_tokens)
        self.page_tokens = page_tokens
        self.total_pages = total_pages
        self._slab = allocate_slab(total_pages, self.layout.groups[0].page_bytes)
        self.kv = self._slab.data.numpy().view(np.int64).reshape(total_pages, page_tokens)
        self.slabs: tuple[SlabMemory, ...] = (self._slab.memory,)
        self.slab_data: tuple[torch.Tensor, ...] = (self._slab.data,)

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        """See Runner. Raises BrokenKv when a sequence finds in its pages what it never wrote."""
        logits = [row for rows in batch.rows for row in self._rows(rows)]
        if marks is not None and marks.layers:
            marks.told(1)
        return torch.stack(logits) if logits else torch.zeros(0, VOCABULARY)

    def rest(self) -> None:
        pass

    def statistics(self) -> RunnerStatistics:
        """See Runner; nobody asks for its counts."""
        return RunnerStatistics(0, 0, 0)

    def _rows(self, rows: Rows) -> list[torch.Tensor]:
        size, table, kv = self.page_tokens, rows.pages[0], self.kv
        position = rows.first_position
        before = 0 if position == 0 else int(kv[table[(position - 1) // size], (position - 1) % size])
        if position and not before:
            raise BrokenKv(f"position {position - 1} of {rows.sequence} was never written")
        for token in rows.token_ids:
            before = link(before, token)
            page = table[position // size]
            if not 0 < page < self.total_pages:
                raise BrokenKv(f"page {page} of {rows.sequence} is not one of 1 to {self.total_pages - 1}")
            kv[page, position % size] = before
            position += 1
        if not rows.wants_logits:
            return []
        links = kv[list(table[: -(-position // size)])].ravel()[:position]
        if not links.all():
            raise BrokenKv(f"position {int(links.argmin())} of {rows.sequence} was never written")
        seen = np.bitwise_xor.accumulate(links)[rows.first_position :]
        told = list(zip(seen.tolist(), rows.token_ids, strict=True))
        return [_logits_of(before, token) for before, token in (told if rows.all_logits or rows.draft_tokens else told[-1:])]


class Reference:
    """What a request must say when nothing disturbs it."""

    def __init__(self, spec: SequenceSpec) -> None:
        sequence = TokenSequence(spec, streams=TOKENIZER.detokeniser)
        sampler = Sampler(VOCABULARY)
        before = seen = 0
        self.prompt_log_probs: list[TokenLogProb | None] = []
        for token, following in zip(spec.prompt_token_ids, (*spec.prompt_token_ids[1:], None), strict=True):
            before = link(before, token)
            seen ^= before
            if following is not None:
                self.prompt_log_probs += log_probs(_logits_of(seen, token)[None, :].numpy(), [following], [spec.log_probs])
        last = spec.prompt_token_ids[-1]
        text = b""
        sequence.completed(len(spec.prompt_token_ids))
        self.log_probs: list[TokenLogProb | None] = []
        while True:
            logits = _logits_of(seen, last)[None, :]
            (token,) = sampler.choose(logits, [sequence.sample_row()])
            assert isinstance(token, int)
            self.log_probs += log_probs(logits.numpy(), [token], [spec.log_probs])
            step = sequence.choose(token, 0.0)
            text += step.text
            if step.ending is not None:
                break
            before, last = link(before, token), token
            seen ^= before
            sequence.completed(1)
        self._spec = spec
        self.text = text.decode()
        self.ending: Ending = step.ending
        self.tokens = sequence.output_token_ids
        self.usage = sequence.usage()

    def ended_after(self, chosen: int) -> tuple[str, int]:
        """All text, and how many tokens are returned with it, when an end from outside comes after so many of the tokens, fewer
        than there are: what was held back for a stop is shown then."""
        sequence = TokenSequence(self._spec, streams=TOKENIZER.detokeniser)
        sequence.completed(len(self._spec.prompt_token_ids))
        text = b""
        for token in self.tokens[:chosen]:
            text += sequence.choose(token, 0.0).text
            sequence.completed(1)
        text += sequence.end(Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL), 0.0).text
        return text.decode(), sequence.usage().returned_tokens

"""A model that says what a test wrote down, behind the runner's port, and a tokenizer whose tokens a test can read.

The KV of the scripted model is real memory: a token's "key and value" is its id, written into its page. Each step reads the
whole sequence back out of its pages before it answers, so a page that was not handed over, or was handed over wrong, or was
given to somebody else shows as a wrong history and fails the step.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.batch import Batch, LayerMarks, Rows
from engine.layout import GroupKind, GroupLayout, Layout
from engine.runner import ModelError, RunnerStatistics
from engine.slab import SlabMemory, allocate_slab
from lifecycle.adapters import Adapter
from text.detokeniser import Detokeniser, TextStream, TokenBytes, Utf8Policy, plain_table

#: Longest wait for a step of a test's own making, in seconds.
WAIT_S = 10.0

#: Above the bits of a token id in a stored value: the number of the adapter that computed it.
ADAPTER_SHIFT = 40


class ScriptedTokenizer:
    """Ids 0 to 255 are bytes; `words` follow them; the last id is the end token and has no bytes."""

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        entries = [bytes([value]) for value in range(256)] + list(words) + [b""]
        self.token_bytes: TokenBytes = plain_table(entries)
        self.vocabulary_size = len(entries)
        self.eos_id = len(entries) - 1
        self.eos_ids = frozenset({self.eos_id})
        self.special_ids = self.eos_ids
        self._words = {bytes(word): 256 + index for index, word in enumerate(words)}

    def detokeniser(self, policy: Utf8Policy = Utf8Policy.ERROR) -> TextStream:
        """A text stream over the table."""
        return Detokeniser(self.token_bytes, policy)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one id."""
        return self.token_bytes[token_id]

    def word(self, word: bytes) -> int:
        """The id of one of `words`."""
        return self._words[word]

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids."""
        return b"".join(self.token_bytes[token] for token in token_ids).decode()


class StepGate:
    """Lets a test stop the runner inside a step. Open until `hold`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._allowed = 0
        self._entered = 0
        self._left = 0

    def hold(self) -> None:
        """From the next step on, a step waits inside `run` until `step` or `release`."""
        with self._changed:
            self._held = True

    def step(self, count: int = 1) -> None:
        """Let some steps through."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def release(self) -> None:
        """Let everything through again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    async def entered(self, count: int) -> None:
        """Wait until `count` steps in all have begun."""
        await asyncio.to_thread(self._wait, lambda: self._entered >= count)

    async def stopped(self) -> None:
        """Wait until a step is held inside the model, with no permission to go on."""
        await asyncio.to_thread(self._wait, lambda: self._held and not self._allowed and self._entered > self._left)

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, WAIT_S):
                raise TimeoutError(f"{self._entered} steps began and {self._left} went on within {WAIT_S} s")

    def passage(self) -> None:
        """Called by the runner inside a step."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._held or self._allowed > 0, WAIT_S):
                raise TimeoutError(f"the gate was held for {WAIT_S} s")
            if self._held:
                self._allowed -= 1
            self._left += 1
            self._changed.notify_all()


class ScriptedRunner:
    """`outputs`: for each prompt the tokens to say after it; beyond them, and after other prompts, `otherwise` of the history.

    With a `window`, in tokens, there is a second KV group that holds the same: each step compares what its window shows.
    prompts are matched as the longest one that the history begins with. `gate` stops it inside a step. `fail_when` and
    `poison_when` look at the histories of a step: a failed step raises ModelError, a poisoned row is all NaN.
    """

    def __init__(
        self,
        vocabulary_size: int,
        outputs: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        *,
        otherwise: Callable[[tuple[int, ...]], int] | None = None,
        page_tokens: int = 4,
        total_pages: int = 64,
        context_tokens: int = 128,
        snapshot: str = "scripted-model",
        window: int | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        groups = [GroupLayout(GroupKind.FULL, 1, 1, 1, page_tokens, "float32")]
        if window is not None:
            groups.append(GroupLayout(GroupKind.SLIDING, 1, 1, 1, page_tokens, "float32", window))
        self.layout = Layout(snapshot, tuple(groups))
        self.window = window
        self.vocabulary_size = vocabulary_size
        self.context_tokens = context_tokens
        self.adapters = tuple(adapters)
        self.page_tokens = page_tokens
        self.total_pages = total_pages
        slabs = [allocate_slab(total_pages, group.page_bytes) for group in groups]
        self._kv, *self._windowed = (slab.data.view(torch.int64).view(total_pages, page_tokens) for slab in slabs)
        self.slabs: tuple[SlabMemory, ...] = tuple(slab.memory for slab in slabs)
        self.slab_data: tuple[torch.Tensor, ...] = tuple(slab.data for slab in slabs)
        self.outputs: dict[tuple[int, ...], Sequence[int]] = dict(outputs or {})
        self.gate = StepGate()
        self.batches: list[Batch] = []
        self.fail_when: Callable[[tuple[int, ...]], bool] = lambda history: False
        self.poison_when: Callable[[tuple[int, ...]], bool] = lambda history: False
        #: Logit of the small letters beside the next token's 100: near it, draws with a temperature go their own ways.
        self.letters = 0.0
        #: Tokens by which the front of a table may be behind a window: who drafts may have to go back so far.
        self.slack_tokens = 0
        self._otherwise = otherwise or (lambda history: 97 + (sum(history) + 7 * len(history)) % 26)

    @property
    def slab_tensors(self) -> torch.Tensor:
        """The KV itself, int64 [pages, page_tokens]: id + 1, 0 where nothing was written."""
        return self._kv

    @property
    def kv(self) -> tuple[torch.Tensor, ...]:
        """The same of each KV group."""
        return (self._kv, *self._windowed)

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        """See Runner."""
        self.batches.append(batch)
        self.gate.passage()
        logits = []
        for rows in batch.rows:
            self._write(rows)
            adapter, history = rows.adapter, self.history(rows)
            known = len(history) - rows.draft_tokens
            if self.fail_when(history[:known]):
                raise ModelError("the test wanted this step to fail")
            if rows.all_logits:
                logits += [self._logits(history[: end + 1], adapter) for end in range(rows.first_position, rows.end_position - 1)]
            if rows.wants_logits:
                logits += [self._logits(history[:end], adapter) for end in range(known, len(history) + 1)]
        if marks is not None and marks.layers:
            marks.told(1)
        return torch.stack(logits) if logits else torch.zeros(0, self.vocabulary_size)

    def rest(self) -> None:
        pass

    def statistics(self) -> RunnerStatistics:
        """See Runner."""
        return RunnerStatistics(len(self.batches), sum(batch.scheduled_tokens for batch in self.batches), 0)

    def next_token(self, history: tuple[int, ...], adapter: str = "") -> int:
        """What the script says after a history. An adapter says what comes without it, some letters on."""
        if adapter:
            return 97 + (self.next_token(history) + 1 + self._number(adapter)) % 26
        best = max((p for p in self.outputs if history[: len(p)] == p), key=len, default=None)
        if best is not None and len(history) - len(best) < len(self.outputs[best]):
            return self.outputs[best][len(history) - len(best)]
        return self._otherwise(history)

    def history(self, rows: Rows) -> tuple[int, ...]:
        """What is in the pages of a sequence up to the last of its rows."""
        count = -(-rows.end_position // self.page_tokens)
        stored = self._kv[list(rows.pages[0][:count])].flatten()[: rows.end_position].tolist()
        if 0 in stored:
            raise ValueError(f"position {stored.index(0)} of sequence {rows.sequence} was never written: its page is not its own")
        for group, table, kv in zip(self.layout.groups[1:], rows.pages[1:], self._windowed, strict=True):
            first = group.first_page(rows.first_position)
            skipped = first * self.page_tokens
            seen = kv[list(table[first:count])].flatten()[: rows.end_position - skipped].tolist()
            left = group.first_page(max(0, rows.first_position - self.slack_tokens))
            assert group.window is not None and 0 not in table[first:count] and not any(table[:left])
            hidden = max(0, rows.first_position + 1 - group.window) - skipped
            if seen[hidden:] != stored[skipped + hidden :]:
                raise ValueError(f"what the window of sequence {rows.sequence} shows from {skipped + hidden} on is not its own")
        mark = self._number(rows.adapter) << ADAPTER_SHIFT
        if any(value >> ADAPTER_SHIFT << ADAPTER_SHIFT != mark for value in stored):
            raise ValueError(f"sequence {rows.sequence} of adapter {rows.adapter!r} found pages that another adapter computed")
        return tuple(value - mark - 1 for value in stored)

    def said(self, prompt: Sequence[int], count: int, adapter: str = "") -> list[int]:
        """The first `count` greedy tokens after a prompt."""
        history = tuple(prompt)
        for _ in range(count):
            history += (self.next_token(history, adapter),)
        return list(history[len(prompt) :])

    def _logits(self, history: tuple[int, ...], adapter: str) -> torch.Tensor:
        if self.poison_when(history):
            return torch.full((self.vocabulary_size,), float("nan"))
        row = torch.zeros(self.vocabulary_size)
        row[97:123] = self.letters
        row[self.next_token(history, adapter)] = 100.0
        return row

    def _number(self, adapter: str) -> int:
        """From 1; 0 for none."""
        return 1 + [each.name for each in self.adapters].index(adapter) if adapter else 0

    def _write(self, rows: Rows) -> None:
        mark = self._number(rows.adapter) << ADAPTER_SHIFT
        for table, kv in zip(rows.pages, (self._kv, *self._windowed), strict=True):
            for position, token in enumerate(rows.token_ids, rows.first_position):
                page = table[position // self.page_tokens]
                if not 0 < page < self.total_pages:
                    raise ValueError(f"page {page} of sequence {rows.sequence} is not one of 1 to {self.total_pages - 1}")
                kv[page, position % self.page_tokens] = mark + token + 1

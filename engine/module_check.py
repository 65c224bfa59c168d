"""The proof that modules over pages say what they say by themselves: chunks, mixed steps and decode rows against whole
prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.module_attention import ModuleUnfit
from engine.module_decoder import Forward, ModuleDecoder, run_modules
from engine.step import Ints, StepLimits, build_step

#: Tokens of the two sequences that are tried, and of the first one's first chunk. The second one decodes beside the rest of it.
LONG_TOKENS, SHORT_TOKENS, FIRST_TOKENS = 19, 6, 7
#: How far the logits of half the rows may be from those of the modules by themselves, as a share of their length.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
#: Page 0 is never owned, and each sequence has a page.
LEAST_PAGES = 3


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """Rows of one sequence from its first token on, all of whose logits are wanted. See engine.module_decoder.PackedRows."""

    token_ids: Ints

    @property
    def positions(self) -> Ints:
        return np.arange(self.token_ids.size, dtype=np.int64)

    @property
    def logit_rows(self) -> Ints:
        return self.positions


def probes(limits: StepLimits) -> tuple[Ints, Ints]:
    """Token ids of the two sequences that are tried, cut to what the context and the pages hold."""
    room = (limits.total_pages - 1) // 2 * limits.page_tokens
    lengths = (min(length, limits.context_tokens, room) for length in (LONG_TOKENS, SHORT_TOKENS))
    long, short = (np.arange(3, 3 + 7 * length, 7, dtype=np.int64) % limits.vocabulary_size for length in lengths)
    return long, short


def plain_logits(forward: Forward, ids: Ints, device: torch.device) -> torch.Tensor:
    """float32 [tokens, vocabulary] of the modules with attention, positions and masks of their own.

    Raises ModuleUnfit when they count positions in another way than from 0 on.
    """
    logits: torch.Tensor = forward(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).logits[0].float()
    # The same products in the same order: whatever the type, nothing is rounded in another way.
    if _difference(run_modules(forward, WholePrompt(ids), device), logits) > TOLERANCE[torch.float32]:
        raise ModuleUnfit("it does not take the positions of its tokens from outside, counted from 0")
    return logits


def check_modules(decoder: ModuleDecoder, limits: StepLimits, expected: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Compare with what the modules say of both probes, in pages from 1 on. Raises ModuleUnfit with the difference."""
    long, short = (tuple(each.tolist()) for each in probes(limits))
    held = pages_for(len(long), limits.page_tokens)
    tables = range(1, 1 + held), range(1 + held, 1 + held + pages_for(len(short), limits.page_tokens))
    first, begun = min(FIRST_TOKENS, len(long) - 1), max(1, len(short) - 1)
    # Each part: which sequence, and from which of its tokens on.
    steps = [[(0, 0, long[:first]), (1, 0, short[:begun])], [(0, first, long[first:]), (1, begun, short[begun:])]]
    ours: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for step in steps:
        parts = [part for part in step if part[2]]
        batch = Batch(tuple(Rows(f"{sequence}", ids, start, (tables[sequence],), True, True) for sequence, start, ids in parts))
        logits, row = decoder.forward((build_step(batch, limits),)), 0
        for sequence, _, ids in parts:
            ours[sequence].append(logits[row : row + len(ids)])
            row += len(ids)
    compare(torch.cat([*ours[0], *ours[1]]), torch.cat(list(expected)), dtype)


def compare(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """float32 [rows, vocabulary] each. Raises ModuleUnfit for another shape, or where half of the rows differ by too much.

    Half of them: in bfloat16 a router of experts that is of two minds can send a single row elsewhere.
    """
    if ours.shape != expected.shape:
        raise ModuleUnfit(f"it gives logits of shape {list(ours.shape)} for {list(expected.shape)}")
    difference = _difference(ours, expected)
    if not difference <= TOLERANCE[dtype]:
        raise ModuleUnfit(
            f"in chunks over pages it says something else than in one piece: the logits differ by {difference:.1e}, and "
            f"{TOLERANCE[dtype]:.0e} is the limit"
        )


def _difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """How far half of the rows are from what is expected, at most, as a share of their length."""
    return float(((ours - expected).norm(dim=1) / expected.norm(dim=1)).median())

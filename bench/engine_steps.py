"""Steps of one runner, to be timed again and again: decode steps of some sequences, a prompt at once; and what a read reads."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.batch import Batch, Rows
from engine.model_weights import ModelWeights, PackedLinear
from engine.runner import ModelRunner

_ORDER_SEED = 1
_TOKEN = 7

#: Memory as (address, bytes).
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One step. decode: `sequences` rows, each the last of `tokens` tokens; otherwise `sequences` prompts of `tokens` tokens."""

    sequences: int
    tokens: int
    decode: bool = True

    def __str__(self) -> str:
        if self.decode:
            return f"decode, {self.sequences} x {self.tokens}"
        return f"prefill, {self.tokens} tokens"

    def pages(self, page_tokens: int) -> int:
        """Pages of each sequence."""
        return -(-self.tokens // page_tokens)


def step_of(runner: ModelRunner, shape: Shape) -> Callable[[], object]:
    """The step as a call, over pages in no order, as they come to lie in a pool that has run for a while."""
    each = shape.pages(runner.layout.groups[0].page_tokens)
    pages = list(range(1, 1 + shape.sequences * each))
    random.Random(_ORDER_SEED).shuffle(pages)
    tokens = (_TOKEN,) if shape.decode else (_TOKEN,) * shape.tokens
    first = shape.tokens - len(tokens)
    rows = [Rows(str(one), tokens, first, (pages[one * each : (one + 1) * each],), True) for one in range(shape.sequences)]
    batch = Batch(tuple(rows))
    return lambda: runner.run(batch)


def weights_read(weights: ModelWeights) -> Ranges:
    """Every weight that a step reads whole: all but the embedding, of which it reads some rows."""
    packed = [linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [_memory(linear) for linear in (*packed, weights.head)]


def kv_read(runner: ModelRunner, shape: Shape) -> Ranges:
    """The pages of a step's sequences. They are read whole, in the order of the pool."""
    slab, pages = runner.slabs[0], shape.sequences * shape.pages(runner.layout.groups[0].page_tokens)
    return [(slab.address_of(1), pages * slab.unit_bytes)]


def _memory(linear: PackedLinear) -> tuple[int, int]:
    return linear.weight.data_ptr(), linear.weight.numel() * linear.weight.element_size()

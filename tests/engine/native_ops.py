"""The native kernels as Python functions on torch tensors, for tests of single operations."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.native.instruction_sets import InstructionSet
from engine.native.library import Geometry, Library, Pool, Rows, Sequences, open_library

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Shape:
    """Geometry of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int = 16
    layers: int = 2
    rms_eps: float = 1e-5

    @property
    def qkv_columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def pool(self, pages: int) -> torch.Tensor:
        return torch.zeros((pages, self.layers, self.page_tokens, 2, self.kv_heads, self.head_dim), dtype=torch.bfloat16)

    def native(self) -> Geometry:
        return Geometry(self.heads, self.kv_heads, self.head_dim, self.page_tokens, self.layers, self.rms_eps)


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: `count` tokens from `first` on; `pages` covers the last of them."""

    first: int
    count: int
    pages: tuple[int, ...]


@dataclass
class NativeOps:
    """One compiled library. `parts` shares run one after the other."""

    instructions: InstructionSet
    library: Library = field(init=False)

    def __post_init__(self) -> None:
        self.library = open_library(self.instructions)

    def rotate_and_store(
        self,
        shape: Shape,
        pool: torch.Tensor,
        layer: int,
        spans: Sequence[Span],
        qkv: torch.Tensor,
        rope: torch.Tensor,
        head_norms: torch.Tensor | None = None,
        parts: int = 1,
    ) -> torch.Tensor:
        """The rows of `spans` one after the other; qkv [rows, qkv_columns] is not changed, its rotation is returned."""
        own = qkv.clone()
        positions = np.concatenate([np.arange(span.first, span.first + span.count, dtype=np.int32) for span in spans])
        tables = [np.array(span.pages, dtype=np.int32) for span in spans for _ in range(span.count)]
        pages = np.array([table[at // shape.page_tokens] for table, at in zip(tables, positions, strict=True)], dtype=np.int32)
        offsets = positions % shape.page_tokens
        rows = Rows(positions.size, positions.ctypes.data, pages.ctypes.data, offsets.ctypes.data)
        for part in range(parts):
            self.library.rotate_part(
                byref(shape.native()),
                byref(_native_pool(pool)),
                layer,
                byref(rows),
                own.data_ptr(),
                rope.data_ptr(),
                head_norms.data_ptr() if head_norms is not None else None,
                part,
                parts,
            )
        return own

    def attend(
        self, shape: Shape, pool: torch.Tensor, layer: int, spans: Sequence[Span], qkv: torch.Tensor, parts: int = 1
    ) -> torch.Tensor:
        """bfloat16 [rows, heads, head_dim] for rotated rows qkv [rows, qkv_columns], the rows of `spans` one after the other."""
        call = AttendCall(self.library, shape, pool, spans, qkv)
        for part in range(parts):
            call.run(layer, part, parts)
        return call.out


class AttendCall:
    """The arguments of one attention, prepared once, so that a measurement times the kernel alone."""

    def __init__(self, library: Library, shape: Shape, pool: torch.Tensor, spans: Sequence[Span], qkv: torch.Tensor) -> None:
        counts = np.array([span.count for span in spans], dtype=np.int32)
        sizes = np.array([len(span.pages) for span in spans], dtype=np.int32)
        tables = (
            np.cumsum(counts, dtype=np.int32) - counts,
            counts,
            np.array([span.first for span in spans], dtype=np.int32),
            np.cumsum(sizes, dtype=np.int32) - sizes,
            np.array([page for span in spans for page in span.pages], dtype=np.int32),
        )
        self._library = library
        self._kept = (tables, pool, qkv)
        self._geometry, self._pool = shape.native(), _native_pool(pool)
        self._sequences = Sequences(len(spans), *(table.ctypes.data for table in tables))
        self._qkv = qkv.data_ptr()
        self._scratch = torch.empty(0)
        self.out = torch.full((int(counts.sum()), shape.heads, shape.head_dim), torch.nan, dtype=torch.bfloat16)

    def run(self, layer: int, part: int, parts: int) -> None:
        """One share, in scratch memory full of NaN."""
        size = self._library.attend_scratch_bytes(byref(self._geometry), byref(self._sequences), parts)
        assert size % ALIGNMENT_BYTES == 0
        if self._scratch.nbytes < size + ALIGNMENT_BYTES:
            self._scratch = torch.full(((size + ALIGNMENT_BYTES) // 4,), torch.nan)
        aligned = -(-self._scratch.data_ptr() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        pool, sequences = byref(self._pool), byref(self._sequences)
        out = self.out.data_ptr()
        self._library.attend_part(byref(self._geometry), pool, layer, sequences, self._qkv, out, aligned, part, parts)


def _native_pool(pool: torch.Tensor) -> Pool:
    return Pool(pool.data_ptr(), *pool.stride()[:3])

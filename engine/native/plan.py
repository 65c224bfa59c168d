"""The integers of a step as the kernels read them: int32, in one array."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.native.library import Rows, Sequences, StepArguments
from engine.step import Step

_INT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """`arguments` points into `integers`, which must live as long. Its logits are still to be set."""

    arguments: StepArguments
    integers: NDArray[np.int32]


def plan(step: Step) -> Plan:
    """Decode rows are sequences of one row; of the last layer each wanted row is one."""
    decode, rows = step.decode_lengths.size, step.positions.size
    counts = np.array([1] * decode + [chunk.end - chunk.start for chunk in step.chunks], dtype=np.int64)
    ends = np.cumsum(counts)
    first_rows = ends - counts
    width = step.decode_pages.shape[1]
    tables = np.array([width] * decode + [chunk.pages.size for chunk in step.chunks], dtype=np.int64)
    starts = np.cumsum(tables) - tables
    wanted = step.logit_rows
    arrays = (
        step.token_ids,
        step.positions,
        step.write_pages,
        step.write_offsets,
        step.fresh_pages,
        first_rows,
        counts,
        step.positions[first_rows],
        starts,
        wanted,
        np.ones(wanted.size, dtype=np.int64),
        step.positions[wanted],
        starts[np.searchsorted(ends, wanted, side="right")],
        step.decode_pages.ravel(),
        *(chunk.pages for chunk in step.chunks),
    )
    integers = np.concatenate(arrays).astype(np.int32)
    places = integers.ctypes.data + _INT_BYTES * np.cumsum([0, *(array.size for array in arrays)])
    tokens, positions, pages, offsets, fresh, *rest = places.tolist()
    first, count, position, start, want, ones, want_position, want_start, table = rest[:9]
    arguments = StepArguments(
        rows=Rows(rows, positions, pages, offsets),
        token_ids=tokens,
        sequences=Sequences(counts.size, first, count, position, start, table),
        wanted=Sequences(wanted.size, want, ones, want_position, want_start, table),
        fresh_count=step.fresh_pages.size,
        fresh_pages=fresh,
    )
    return Plan(arguments, integers)

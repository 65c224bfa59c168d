"""Memory for packed weights, one behind the other in the order in which a step reads them.

What the kernels fetch ahead at the end of a weight is then the beginning of the next one. Huge pages: a step reads all weights
once, and with small pages a tenth of that time goes to looking up addresses.
"""

import math

import torch

from engine.slab import ALIGNMENT_BYTES, host_bytes

#: Memory that is taken at a time; a weight that is larger gets its own.
CHUNK_BYTES = 64 * 1024 * 1024
_LINE_BYTES = 64


class Arena:
    """Gives memory out and takes none back: the tensors in a chunk keep it alive."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that begins at a cache line. Raises MemoryError when the machine has no more."""
        size_bytes = math.prod(shape) * dtype.itemsize
        lines_bytes = -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        if lines_bytes > self._rest.shape[0]:
            self._rest = _aligned(max(self._chunk_bytes, lines_bytes))
        own, self._rest = self._rest[:size_bytes], self._rest[lines_bytes:]
        return own.view(dtype).view(shape)


def _aligned(size_bytes: int) -> torch.Tensor:
    raw = host_bytes(size_bytes + ALIGNMENT_BYTES)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]

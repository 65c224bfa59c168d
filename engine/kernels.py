"""Kernels that oneDNN and torch prepare for each shape they meet, and keep: few shapes, and a bound on how many are kept.

Measured with SmolLM2-135M in bfloat16 (AVX-512 with AMX): the four products of a layer took 2 MiB and 40 ms for each number of
rows, 530 MiB for all from 1 to 256. torch's attention keeps its kernels without any bound.
"""

import os

# Numbers of rows between one power of two and the next.
CLASSES_PER_DOUBLING = 8
# Kernels that oneDNN keeps, 0.2 to 0.7 MiB each; the one used least recently goes. Steps of all lengths need about 300.
KERNELS_MAX = 512
KERNELS_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def row_class(rows: int) -> int:
    """The number of rows that `rows` are computed as: 1 to 16, 18, 20, …, 32, 36, …; at most an eighth more."""
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * CLASSES_PER_DOUBLING))
    return -(-rows // step) * step


def bound_kernels() -> None:
    """Set KERNELS_MAX, unless the environment says another number. oneDNN reads it when it makes its first kernel."""
    os.environ.setdefault(KERNELS_VARIABLE, str(KERNELS_MAX))

"""The dtype for cells whose outputs are compared token by token."""

import os

from engine.native.build import BuildFailed
from engine.native.instruction_sets import PLAIN
from engine.native.library import chosen_set, open_library


def _exact_dtype() -> str:
    """What $DTYPE says; else bfloat16 where the native backend computes a row alike in every batch and chunk, else float32."""
    if named := os.environ.get("DTYPE"):
        return named
    try:
        open_library(chosen_set())
    except BuildFailed:
        return "float32"
    return "float32" if chosen_set() is PLAIN else "bfloat16"


EXACT_DTYPE = _exact_dtype()
EXACT_BYTES = {"float32": 4, "bfloat16": 2}[EXACT_DTYPE]

"""The instruction sets of this CPU as test parameters."""

import pytest
import torch

from engine.backend import Registration, Registry, Setup
from engine.native.backend import NativeBackend
from engine.native.build import BuildFailed, find_compiler
from engine.native.instruction_sets import PLAIN, InstructionSet, sets_here
from engine.native.library import open_library


def has_compiler() -> bool:
    try:
        find_compiler()
    except BuildFailed:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
every_set = pytest.mark.parametrize("instructions", [pytest.param(each, id=each.name) for each in sets_here()])
# Without vectors made for it the default model takes minutes for what these do in seconds.
every_fast_set = pytest.mark.parametrize(
    "instructions", [pytest.param(each, id=each.name) for each in sets_here() if each is not PLAIN]
)


def registration_of(instructions: InstructionSet, threads: int = 1) -> Registration:
    def build(setup: Setup) -> NativeBackend:
        return NativeBackend(setup, open_library(instructions), threads)

    return Registration("native", 20, lambda device, dtype: dtype == torch.bfloat16, build)


def only(instructions: InstructionSet, threads: int = 1) -> Registry:
    """A registry with the native backend of one instruction set and nothing else."""
    return Registry((registration_of(instructions, threads),))

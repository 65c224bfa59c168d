"""The instruction sets that the kernels are compiled for, and which of them this CPU has."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512")
_AVX512_NEEDS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"})


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Compiler options of one set, and the CPU flags (Linux's names) that its code needs."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_MACROS = ("AMX", "BF16", "AVX512", "AVX2")


def _defined(*names: str) -> tuple[str, ...]:
    """Every macro of src/kernels.h, 1 for the named ones."""
    return tuple(f"-DTANDEM_{macro}={int(macro in names)}" for macro in _MACROS)


AMX = InstructionSet(
    "amx",
    (*_defined("AMX", "BF16", "AVX512"), *_AVX512_FLAGS, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
    _AVX512_NEEDS | {"avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"},
)
AVX512_BF16 = InstructionSet(
    "avx512bf16", (*_defined("BF16", "AVX512"), *_AVX512_FLAGS, "-mavx512bf16"), _AVX512_NEEDS | {"avx512_bf16"}
)
AVX512 = InstructionSet("avx512", (*_defined("AVX512"), *_AVX512_FLAGS), _AVX512_NEEDS)
AVX2 = InstructionSet("avx2", (*_defined("AVX2"), "-mavx2", "-mfma"), frozenset({"avx2", "fma"}))
PLAIN = InstructionSet("plain", _defined(), frozenset())

#: Best first.
INSTRUCTION_SETS = (AMX, AVX512_BF16, AVX512, AVX2, PLAIN)


@cache
def sets_here() -> tuple[InstructionSet, ...]:
    """The sets that this CPU can run, best first; `plain` is always among them."""
    flags = _cpu_flags()
    return tuple(each for each in INSTRUCTION_SETS if each.needs <= flags)


def _cpu_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    lines = [line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")]
    # CPUs of one machine may differ: what all of them have.
    return frozenset(lines[0]).intersection(*lines[1:]) if lines else frozenset()

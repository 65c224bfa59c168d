"""`python -m engine.doctor`: which backend computes on this machine, and why no better one does, as one JSON object.

The members make the same choice when they load a model. Here each backend passes its check on the geometry of the default
model, so nothing has to be there but the packages.
"""

import sys
import time
from typing import Annotated, Literal

import msgspec
import torch

from engine.backend import AUTO, BackendUnfit, Setup
from engine.backend_check import BACKENDS, check_backend
from engine.native.build import BuildFailed, find_compiler
from engine.native.instruction_sets import sets_here
from engine.native.library import chosen_set
from rpc.settings import load_or_exit, setting

#: SmolLM2-135M's.
HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 9, 3, 64, 16
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class EngineDoctorSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is looked at."""

    dtype: Annotated[Literal["bfloat16", "float32"], setting("Type of weights and KV.")] = "bfloat16"


class EngineFindings(msgspec.Struct, frozen=True):
    """backend: the one that computes, empty when none can. refused: why each better one does not. instructions: of the native
    one.

    compiler: a path, or empty with compiler_problem. check_s: seconds of the checks, compiling included where it was needed.
    """

    torch: str
    torch_threads: int
    instruction_sets: tuple[str, ...]
    instructions: str
    compiler: str
    compiler_problem: str
    backend: str
    refused: tuple[str, ...]
    check_s: float


def look(dtype: str) -> EngineFindings:
    """Check the backends, best first, until one fits."""
    device, kind = torch.device("cpu"), _DTYPES[dtype]
    pool = torch.zeros((2, 1, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM), dtype=kind)
    setup = Setup(device, kind, HEADS, KV_HEADS, HEAD_DIM, 1e-5, pool, torch.zeros(PAGE_TOKENS, HEAD_DIM))
    began, backend, refused = time.perf_counter(), "", []
    for candidate in BACKENDS.candidates(AUTO, device, kind):
        try:
            check_backend(candidate, setup)
        except BackendUnfit as error:
            refused.append(str(error))
            continue
        backend = candidate.name
        break
    compiler, problem = _compiler()
    return EngineFindings(
        torch=str(torch.__version__),
        torch_threads=torch.get_num_threads(),
        instruction_sets=tuple(one.name for one in sets_here()),
        instructions=_instructions(),
        compiler=compiler,
        compiler_problem=problem,
        backend=backend,
        refused=tuple(refused),
        check_s=time.perf_counter() - began,
    )


def _compiler() -> tuple[str, str]:
    try:
        return find_compiler(), ""
    except BuildFailed as error:
        return "", str(error)


def _instructions() -> str:
    try:
        return chosen_set().name
    except (BuildFailed, BackendUnfit, ValueError, RuntimeError):
        return ""


def main() -> int:
    """Prints what was found; 0 also when nothing can compute."""
    settings = load_or_exit(EngineDoctorSettings, prog="python -m engine.doctor", description="Which backend computes here.")
    print(msgspec.json.encode(look(settings.dtype)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The compiled kernels as Python sees them: the structs of src/kernels.h and src/model.h, and the functions of src/abi.cpp."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from engine.native.build import BROUGHT, BuildFailed, library_for
from engine.native.instruction_sets import INSTRUCTION_SETS, InstructionSet, sets_here
from models.cache import cache_folder

#: Names the instruction set to use; without it, the best one that the CPU has.
INSTRUCTIONS_VARIABLE = "TANDEM_INSTRUCTIONS"

PANEL = 32
INPUT_BLOCK = 32
FINISH_ROUND, FINISH_ADD, FINISH_SWIGLU, FINISH_FLOAT = range(4)
#: The operations of a step in the order of src/step_times.h.
OPERATIONS = ("embed", "norm", "qkv", "rotate", "tell", "attend", "out", "gate_up", "down", "head")


class Pool(Structure):
    _fields_ = (("data", c_void_p), ("page_stride", c_int64), ("layer_stride", c_int64), ("token_stride", c_int64))


class Geometry(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_tokens", c_int32),
        ("layers", c_int32),
        ("rms_eps", c_float),
    )


class Rows(Structure):
    _fields_ = (("count", c_int32), ("positions", c_void_p), ("write_pages", c_void_p), ("write_offsets", c_void_p))


class Sequences(Structure):
    _fields_ = (
        ("count", c_int32),
        ("first_row", c_void_p),
        ("row_count", c_void_p),
        ("first_position", c_void_p),
        ("table_start", c_void_p),
        ("pages", c_void_p),
    )


class Weight(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("columns", c_int32),
    )


class Product(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int32),
        ("finish", c_int32),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("addends", c_void_p),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("head_norms", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
    )


class Update(Structure):
    _fields_ = (("down", Weight), ("up", Weight))


class AdapterLayer(Structure):
    _fields_ = (("qkv", Update), ("output", Update), ("gate_up", Update), ("down", Update))


class AdapterRun(Structure):
    _fields_ = (("layers", POINTER(AdapterLayer)), ("begin", c_int32), ("end", c_int32))


class AdapterRows(Structure):
    _fields_ = (("run_count", c_int32), ("runs", POINTER(AdapterRun)), ("count", c_int32), ("rows", c_void_p))


class Model(Structure):
    _fields_ = (
        ("geometry", Geometry),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("pool", Pool),
        ("rope", c_void_p),
        ("embedding", c_void_p),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("head", Weight),
    )


class Bytes(Structure):
    _fields_ = (("data", c_void_p), ("size", c_uint64))


class Recall(Structure):
    _fields_ = (("count", c_void_p), ("seen", c_uint32))


Told = ctypes.CFUNCTYPE(None, c_int32)
Enter = ctypes.CFUNCTYPE(c_int32)


class StepArguments(Structure):
    _fields_ = (
        ("rows", Rows),
        ("token_ids", c_void_p),
        ("sequences", Sequences),
        ("wanted", Sequences),
        ("fresh_count", c_int32),
        ("fresh_pages", c_void_p),
        ("logits", c_void_p),
        ("told", Told),
        ("mark_count", c_int32),
        ("marks", c_void_p),
        ("begin_threads", c_int32),
        ("own_threads", c_int32),
        ("recall_count", c_int32),
        ("recalls", POINTER(Recall)),
        ("watch_count", c_int32),
        ("watched", POINTER(c_void_p)),
        ("enter", Enter),
        ("adapted", AdapterRows),
        ("adapted_wanted", AdapterRows),
    )


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "tandem_native_init": (c_int32, ()),
    "tandem_engine_create": (c_void_p, (c_int32,)),
    "tandem_engine_destroy": (None, (c_void_p,)),
    "tandem_linear": (None, (c_void_p, POINTER(Weight), POINTER(Product))),
    "tandem_norm": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_float)),
    "tandem_rotate": (
        None,
        (c_void_p, POINTER(Geometry), POINTER(Pool), c_int32, POINTER(Rows), c_void_p, c_void_p, c_void_p),
    ),
    "tandem_attention": (
        c_int32,
        (c_void_p, POINTER(Geometry), POINTER(Pool), c_int32, POINTER(Sequences), c_void_p, c_void_p),
    ),
    "tandem_step": (c_int32, (c_void_p, POINTER(Model), POINTER(StepArguments))),
    "tandem_step_seconds": (None, (c_void_p, POINTER(c_double))),
    "tandem_read": (c_uint64, (c_void_p, POINTER(Bytes), c_int32)),
    "tandem_rotate_and_store": (
        None,
        (POINTER(Geometry), POINTER(Pool), c_int32, POINTER(Rows), c_void_p, c_void_p, c_void_p, c_int32, c_int32),
    ),
    "tandem_attend_scratch_bytes": (c_uint64, (POINTER(Geometry), POINTER(Sequences), c_int32)),
    "tandem_attend": (
        None,
        (POINTER(Geometry), POINTER(Pool), c_int32, POINTER(Sequences), c_void_p, c_void_p, c_void_p, c_int32, c_int32),
    ),
}


class Library:
    """The functions of one compiled library. They release the GIL; tensors must outlive the call."""

    def __init__(self, path: Path, instructions: InstructionSet) -> None:
        """Raises OSError when the file is no library of ours, or the system forbids its instructions."""
        self.instructions = instructions
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise OSError(f"{path} has no function {name}") from error
            function.restype, function.argtypes = result, arguments
        self.linear = self._library.tandem_linear
        self.norm = self._library.tandem_norm
        self.rotate = self._library.tandem_rotate
        self.attention = self._library.tandem_attention
        self.step = self._library.tandem_step
        self.attend_part = self._library.tandem_attend
        self.attend_scratch_bytes = self._library.tandem_attend_scratch_bytes
        self.rotate_part = self._library.tandem_rotate_and_store
        if self._library.tandem_native_init() != 0:
            raise OSError(f"the system does not permit the instructions of {instructions.name}")

    def engine(self, threads: int) -> "Engine":
        """Raises OSError when the system has no more threads."""
        return Engine(self._library, threads)


class Engine:
    """Threads and the memory that steps work in; freed with the object. One call at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self.address: int | None = library.tandem_engine_create(threads)
        if not self.address:
            raise OSError(f"{threads} threads could not be started")

    def operation_seconds(self) -> Mapping[str, float]:
        """Where the time of all steps so far went. May be called from any thread."""
        seconds = (c_double * len(OPERATIONS))()
        self._library.tandem_step_seconds(self.address, seconds)
        return dict(zip(OPERATIONS, seconds, strict=True))

    def read(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Read (address, bytes) of memory once; a sum of what is there."""
        described = (Bytes * len(ranges))(*(Bytes(address, size) for address, size in ranges))
        total: int = self._library.tandem_read(self.address, described, len(ranges))
        return total

    def __del__(self) -> None:
        address, self.address = self.address, None
        if address:
            self._library.tandem_engine_destroy(address)


def chosen_set() -> InstructionSet:
    """The set that $TANDEM_INSTRUCTIONS names, or the best one here. Raises BuildFailed when the CPU lacks the named one."""
    named = os.environ.get(INSTRUCTIONS_VARIABLE)
    if not named:
        return sets_here()[0]
    for instructions in sets_here():
        if instructions.name == named:
            return instructions
    known = ", ".join(each.name for each in INSTRUCTION_SETS)
    raise BuildFailed(f"{INSTRUCTIONS_VARIABLE} is {named!r}, which this CPU does not run (of {known})")


def open_library(instructions: InstructionSet, folder: Path | None = None) -> Library:
    """The library of a set, once a process; compiled when the cache folder has none. Raises BuildFailed."""
    return _open_once(instructions, cache_folder(folder))


@cache
def _open_once(instructions: InstructionSet, folder: Path) -> Library:
    """A file that does not load is made anew once."""
    path = library_for(instructions, folder)
    try:
        return Library(path, instructions)
    except OSError as error:
        if path.parent == BROUGHT:
            raise BuildFailed(f"the library that came with this installation does not load: {error}") from error
        path.unlink(missing_ok=True)
    try:
        return Library(library_for(instructions, folder), instructions)
    except OSError as error:
        raise BuildFailed(f"the compiled library does not load: {error}") from error

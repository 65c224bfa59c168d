"""The native backend: bfloat16 on the CPU, by the kernels of the best instruction set that it has.

A row's result is the same, bit for bit, whatever rows share its step and however its prompt was cut.
"""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from engine.backend import BackendUnfit, Registration, RowsUpdate, Setup, WholeStep
from engine.model_weights import LowRank, ModelWeights, PackedLinear
from engine.native import packing
from engine.native.build import BuildFailed
from engine.native.instruction_sets import PLAIN, sets_here
from engine.native.library import (
    FINISH_ADD,
    FINISH_FLOAT,
    FINISH_ROUND,
    FINISH_SWIGLU,
    INPUT_BLOCK,
    Geometry,
    Library,
    Pool,
    Product,
    chosen_set,
    open_library,
)
from engine.native.plan import Plan, plan
from engine.native.whole_step import Engines, NativeStep
from engine.step import Step
from models.config import Activation

NAME = "native"
HEAD_DIM_STEP = 32
MAX_HEAD_DIM = 256
PAGE_STEP = 16


@dataclass(frozen=True, slots=True)
class _Addends:
    """addresses: uint64 [T], of what is added to each row's sums, 0 for nothing. sums: the tensors that they lie in."""

    addresses: NDArray[np.uint64]
    sums: tuple[torch.Tensor, ...]


class NativeBackend:
    """Implements engine.backend.Backend."""

    chunks_read_as_rows = True

    def __init__(self, setup: Setup, library: Library, threads: int) -> None:
        """Raises BackendUnfit for a geometry that the kernels do not have."""
        _check_geometry(setup)
        self._setup = setup
        self._library = library
        self._threads = threads
        self._engine = library.engine(threads)
        self._geometry = _geometry(setup)
        self._pool = _pool(setup)
        self._plan: Plan | None = None
        self._packer = packing.Packer(setup.quantisation)
        self.name = f"{NAME} ({library.instructions.name})"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._packer.pack(weight, bias)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._packer.pack_gate_up(weight, bias)

    def pack_head(self, weight: torch.Tensor) -> PackedLinear:
        return self._packer.pack(weight, None)

    def pack_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return self._packer.pack_update(down.to(self._setup.dtype), up.to(self._setup.dtype))

    def pack_gate_up_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return self._packer.pack_gate_up_update(down.to(self._setup.dtype), up.to(self._setup.dtype))

    def begin(self, step: Step) -> None:
        self._plan = plan(step)
        if step.fresh_pages.size:
            self._setup.pool[torch.from_numpy(step.fresh_pages)] = 0

    def linear(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        return self._product(x, packed, FINISH_ROUND, None, updates)

    def linear_add(
        self, x: torch.Tensor, packed: PackedLinear, own_residual: torch.Tensor, updates: Sequence[RowsUpdate] = ()
    ) -> torch.Tensor:
        return self._product(x, packed, FINISH_ADD, own_residual, updates)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        rows, columns = x.shape
        self._library.norm(
            self._engine.address,
            x.data_ptr(),
            columns,
            weight.contiguous().data_ptr(),
            out.data_ptr(),
            columns,
            rows,
            columns,
            self._setup.rms_eps,
        )
        return out

    def gated(self, x: torch.Tensor, gate_up: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        return self._product(x, gate_up, FINISH_SWIGLU, None, updates)

    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        qkv = own_qkv.contiguous()
        self._library.rotate(
            self._engine.address,
            byref(self._geometry),
            byref(self._pool),
            layer,
            byref(self._current().arguments.rows),
            qkv.data_ptr(),
            self._setup.rope.data_ptr(),
            None if head_norms is None else head_norms.data_ptr(),
        )
        return qkv

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        out = torch.empty((qkv.shape[0], self._setup.query_columns), dtype=qkv.dtype)
        failed = self._library.attention(
            self._engine.address,
            byref(self._geometry),
            byref(self._pool),
            layer,
            byref(self._current().arguments.sequences),
            qkv.contiguous().data_ptr(),
            out.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {qkv.shape[0]} rows")
        return out

    def logits(self, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        return self._product(x, head, FINISH_FLOAT, None)

    def whole_step(self, weights: ModelWeights) -> WholeStep:
        engines = Engines(self._library, self._threads, self._engine)
        return NativeStep(self._library, engines, self._setup.rope, self._geometry, self._pool, weights)

    def _addends(self, x: torch.Tensor, updates: Sequence[RowsUpdate]) -> _Addends:
        """What updates add to the sums of a product of x."""
        addresses = np.zeros(x.shape[0], dtype=np.uint64)
        all_sums = []
        for each in updates:
            inner = self._product(x[torch.from_numpy(each.rows)], each.update.down, FINISH_ROUND, None)
            sums = self._product(inner, each.update.up, FINISH_FLOAT, None)
            addresses[each.rows] = sums.data_ptr() + sums.stride(0) * sums.element_size() * np.arange(each.rows.size)
            all_sums.append(sums)
        return _Addends(addresses, tuple(all_sums))

    def _current(self) -> Plan:
        assert self._plan is not None, "begin() comes before the layers"
        return self._plan

    def _product(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        finish: int,
        residual: torch.Tensor | None,
        updates: Sequence[RowsUpdate] = (),
    ) -> torch.Tensor:
        rows, inputs = x.shape
        addends = self._addends(x, updates) if updates else None
        # What pads the inputs of a row must be zero.
        x = x.contiguous() if inputs % INPUT_BLOCK == 0 else functional.pad(x, (0, -inputs % INPUT_BLOCK))
        residual = None if residual is None else residual.contiguous()
        dtype = torch.float32 if finish == FINISH_FLOAT else x.dtype
        out = torch.empty((rows, packed.out_features), dtype=dtype)
        product = Product(
            x=x.data_ptr(),
            x_stride=x.shape[1],
            rows=rows,
            finish=finish,
            residual=None if residual is None else residual.data_ptr(),
            residual_stride=packed.out_features,
            out=out.data_ptr(),
            out_stride=packed.out_features,
            addends=None if addends is None else addends.addresses.ctypes.data,
        )
        self._library.linear(self._engine.address, byref(packing.describe(packed)), byref(product))
        return out


def _check_geometry(setup: Setup) -> None:
    if setup.latent_rank is not None:
        raise BackendUnfit(f"backend {NAME}: attention over latent vectors, and its kernels have keys and values")
    if setup.window is not None:
        raise BackendUnfit(f"backend {NAME}: a window of {setup.window} tokens, and its kernels see all tokens")
    if setup.activation is not Activation.SILU or setup.scale != setup.head_dim**-0.5:
        raise BackendUnfit(
            f"backend {NAME}: activation {setup.activation.value} and scores times {setup.scale:g}; its kernels have silu and "
            f"{setup.head_dim**-0.5:g}"
        )
    if setup.head_dim % HEAD_DIM_STEP or setup.head_dim > MAX_HEAD_DIM:
        raise BackendUnfit(
            f"backend {NAME}: head_dim is {setup.head_dim}, must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    page_tokens = setup.pool.shape[2]
    if page_tokens % PAGE_STEP:
        raise BackendUnfit(f"backend {NAME}: page_tokens is {page_tokens}, must be a multiple of {PAGE_STEP}")
    if setup.heads % setup.kv_heads:
        raise BackendUnfit(f"backend {NAME}: heads is {setup.heads}, must be a multiple of kv_heads, {setup.kv_heads}")


def _geometry(setup: Setup) -> Geometry:
    layers, page_tokens = setup.pool.shape[1:3]
    return Geometry(setup.heads, setup.kv_heads, setup.head_dim, page_tokens, layers, setup.rms_eps)


def _pool(setup: Setup) -> Pool:
    page, layer, token = setup.pool.stride()[:3]
    return Pool(setup.pool.data_ptr(), page, layer, token)


def build(setup: Setup) -> NativeBackend:
    """With as many threads as torch has. Raises BackendUnfit."""
    _check_geometry(setup)
    try:
        return NativeBackend(setup, open_library(chosen_set()), torch.get_num_threads())
    except (BuildFailed, OSError) as error:
        raise BackendUnfit(f"backend {NAME}: {error}") from error


def _fits(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16


# Without vector instructions of its own torch is faster; the kernels can still be asked for by name.
RANK = 20 if sets_here()[0] is not PLAIN else 5
REGISTRATION = Registration(NAME, rank=RANK, fits=_fits, build=build)

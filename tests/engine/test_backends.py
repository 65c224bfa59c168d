"""Choosing and checking backends, and the torch backend's two ways to multiply."""

from dataclasses import replace

import pytest
import torch

from engine.backend import BackendUnfit, PackedLinear, Registration, Registry, Setup
from engine.backend_check import BACKENDS, check_backend, choose_backend
from engine.reference_backend import REGISTRATION as REFERENCE
from engine.reference_backend import ReferenceBackend
from engine.torch_backend import REGISTRATION as TORCH
from engine.torch_backend import TorchBackend
from engine.torch_linear import OneDnnLinears, PlainLinears, choose_linears

CPU = torch.device("cpu")


def setup(
    dtype: torch.dtype = torch.float32, page_tokens: int = 16, heads: int = 6, kv_heads: int = 2, head_dim: int = 12
) -> Setup:
    pool = torch.zeros(3, 2, page_tokens, 2, kv_heads, head_dim, dtype=dtype)
    return Setup(CPU, dtype, heads, kv_heads, head_dim, 1e-5, pool, torch.zeros(32, head_dim))


class WrongScale(TorchBackend):
    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        return super().attend(qkv, layer) * 1.01


class WrongPlace(TorchBackend):
    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        self._token_rows[0] += 1
        return super().rotate_and_store(own_qkv, layer, head_norms)


class RoundedLogits(TorchBackend):
    def logits(self, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        return super().logits(x, head).to(torch.bfloat16)


class NoInstruction(TorchBackend):
    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        raise RuntimeError("no such instruction")


def registered(backend: type[TorchBackend], rank: int = 20) -> Registration:
    return Registration(backend.__name__, rank, lambda device, dtype: True, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, 2, 16, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (9, 3, 64), (4, 4, 20), (8, 1, 128)])
def test_the_torch_backend_computes_what_the_reference_does(
    dtype: torch.dtype, page_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    check_backend(TORCH, setup(dtype, page_tokens, heads, kv_heads, head_dim))


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (WrongScale, "attention differs"),
        (WrongPlace, "pages written"),
        (RoundedLogits, "logits is"),
        (NoInstruction, "no such instruction"),
    ],
)
def test_a_wrong_backend_is_caught_and_the_cause_named(backend: type[TorchBackend], named: str) -> None:
    with pytest.raises(BackendUnfit, match=named):
        check_backend(registered(backend), setup())


def test_auto_takes_the_best_that_passes() -> None:
    assert choose_backend(BACKENDS, "auto", setup()).name == "torch"
    assert choose_backend(Registry((registered(WrongScale), TORCH, REFERENCE)), "auto", setup()).name == "torch"
    with pytest.raises(BackendUnfit, match=r"WrongScale.*attention"):
        choose_backend(Registry((registered(WrongScale),)), "auto", setup())


def test_a_named_backend_is_that_one_or_an_error() -> None:
    assert isinstance(choose_backend(BACKENDS, "reference", setup()), ReferenceBackend)
    with pytest.raises(BackendUnfit, match="'quick' is not known; choose auto or one of reference, torch"):
        choose_backend(BACKENDS, "quick", setup())
    host_only = replace(TORCH, fits=lambda device, dtype: False)
    with pytest.raises(BackendUnfit, match="does not run"):
        choose_backend(Registry((host_only,)), "torch", setup())
    with pytest.raises(BackendUnfit, match="none fits"):
        choose_backend(Registry((host_only,)), "auto", setup())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_packed_and_plain_products_agree(dtype: torch.dtype, rows: int) -> None:
    if not isinstance(choose_linears(CPU, dtype), OneDnnLinears):
        pytest.skip("this CPU or build has no packed product in that dtype")
    generator = torch.Generator().manual_seed(rows)
    weight, x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 48), (rows, 48), (24,)))
    packed, plain = OneDnnLinears(), PlainLinears()
    ours = packed.apply(x, packed.pack(weight, bias))
    theirs = plain.apply(x, plain.pack(weight, bias))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 8)


def test_a_device_without_packed_products_gets_the_plain_one() -> None:
    assert isinstance(choose_linears(torch.device("meta"), torch.float32), PlainLinears)

"""Choosing and checking backends, and the torch backend's two ways to multiply."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.backend import BackendUnfit, Registration, Registry, RowsUpdate, Setup
from engine.backend_check import BACKENDS, check_backend, choose_backend, choose_backends
from engine.model_weights import PackedLinear
from engine.reference_backend import REGISTRATION as REFERENCE
from engine.reference_backend import ReferenceBackend
from engine.torch_backend import REGISTRATION as TORCH
from engine.torch_backend import TorchBackend
from engine.torch_linear import OneDnnLinears, PlainLinears, choose_linears
from models.config import Activation

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
    def linear(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, 16, 33])
@pytest.mark.parametrize("window", [1, 4, 512])
def test_the_torch_backend_sees_through_a_window_what_the_reference_sees(
    dtype: torch.dtype, page_tokens: int, window: int
) -> None:
    check_backend(TORCH, replace(setup(dtype, page_tokens), window=window, score_scale=0.3, activation=Activation.GELU_TANH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_tokens", "heads", "rank", "rope_dim"), [(1, 1, 2, 2), (16, 6, 20, 8), (33, 4, 64, 16)])
def test_the_torch_backend_attends_to_latents_as_the_reference_does(
    dtype: torch.dtype, page_tokens: int, heads: int, rank: int, rope_dim: int
) -> None:
    check_backend(TORCH, latents(dtype, page_tokens, heads, rank, rope_dim))


def latents(dtype: torch.dtype, page_tokens: int = 16, heads: int = 4, rank: int = 64, rope_dim: int = 32) -> Setup:
    pool = torch.zeros(3, 2, page_tokens, 1, 1, rank + rope_dim, dtype=dtype)
    rope = torch.zeros(32, rope_dim)
    return Setup(CPU, dtype, heads, 1, rank + rope_dim, 1e-5, pool, rope, score_scale=0.2, latent_rank=rank)


class ForgetsTheNorm(TorchBackend):
    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        return super().rotate_and_store(own_qkv, layer, None)


def test_latents_that_are_not_weighed_are_caught_and_the_native_kernels_have_none() -> None:
    with pytest.raises(BackendUnfit, match="rotation differs"):
        check_backend(registered(ForgetsTheNorm), latents(torch.float32))
    assert choose_backend(BACKENDS, "auto", latents(torch.bfloat16)).name == "torch"
    with pytest.raises(BackendUnfit, match="backend native: attention over latent vectors"):
        choose_backend(BACKENDS, "native", latents(torch.bfloat16))


class SeesAll(TorchBackend):
    """Forgets the window."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, window=None))


def test_a_window_that_is_not_kept_is_caught() -> None:
    with pytest.raises(BackendUnfit, match="attention differs"):
        check_backend(registered(SeesAll), replace(setup(), window=512))


def test_groups_get_backends_of_one_kind() -> None:
    """The native kernels could serve the group without a window; then all groups are computed by torch."""
    full = replace(setup(torch.bfloat16, heads=2, kv_heads=1, head_dim=32))
    chosen = choose_backends(BACKENDS, "auto", (full, replace(full, window=9)))
    assert [backend.name for backend in chosen] == ["torch", "torch"]
    with pytest.raises(BackendUnfit, match="backend native: a window of 9 tokens"):
        choose_backends(BACKENDS, "native", (full, replace(full, window=9)))
    with pytest.raises(BackendUnfit, match="activation gelu_tanh"):
        choose_backends(BACKENDS, "native", (replace(full, activation=Activation.GELU_TANH),))


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
    with pytest.raises(BackendUnfit, match="'quick' is not known; choose auto or one of native, reference, torch"):
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

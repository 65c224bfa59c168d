"""Choosing a backend at load, and the proof that it computes what the reference computes on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.backend import Backend, BackendUnfit, Registration, Registry, Setup
from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.native.backend import REGISTRATION as NATIVE
from engine.reference_backend import REGISTRATION as REFERENCE
from engine.reference_backend import ReferenceBackend
from engine.step import Step, StepLimits, build_step
from engine.torch_backend import REGISTRATION as TORCH

# A backend becomes available by its registration here.
BACKENDS = Registry((NATIVE, TORCH, REFERENCE))

# Largest difference to the reference, relative to the largest value: rounding of the dtype and another order of sums, no more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
TEST_ROWS = 6
TEST_LAYERS = 2
# A window narrower than the check's longest sequences, so that it hides something; no round number of tokens.
TEST_WINDOW_TOKENS = 37

_log = logging.getLogger(__name__)


def choose_backend(registry: Registry, name: str, setup: Setup) -> Backend:
    """The best backend that passes its check; with a name, that one. Raises BackendUnfit saying what each one failed at."""
    return choose_backends(registry, name, (setup,))[0]


def choose_backends(registry: Registry, name: str, setups: Sequence[Setup]) -> tuple[Backend, ...]:
    """One backend for each KV group, all of the best kind that passes its check for every one of them. Raises BackendUnfit."""
    causes: list[str] = []
    for registration in registry.candidates(name, setups[0].device, setups[0].dtype):
        try:
            for setup in setups:
                check_backend(registration, setup)
            backends = tuple(registration.build(setup) for setup in setups)
        except BackendUnfit as error:
            causes.append(str(error))
            continue
        _tell(backends[0], causes)
        return backends
    raise BackendUnfit("no backend can run here: " + "; ".join(causes or ["none fits the device and dtype"]))


def _tell(backend: Backend, causes: list[str]) -> None:
    """One line: what computes, and why nothing better does."""
    if causes:
        _log.warning("backend %s computes, as a better one cannot: %s", backend.name, "; ".join(causes))
    else:
        _log.info("backend %s computes", backend.name)


@torch.inference_mode()
def check_backend(registration: Registration, setup: Setup) -> None:
    """Compare every operation with the reference on random data of the setup's heads, page size, dtype and device.

    Raises BackendUnfit naming the operation and the difference, or the error that the backend raised.
    """
    generator = torch.Generator().manual_seed(0)
    page_tokens = setup.pool.shape[2]
    batch, pages = _mixed_batch(page_tokens)
    positions = max(rows.end_position for rows in batch.rows)
    window = None if setup.window is None else min(setup.window, TEST_WINDOW_TOKENS)
    step = build_step(batch, StepLimits(1, positions, page_tokens, pages, window))
    shape = (pages, TEST_LAYERS, page_tokens, setup.vectors, setup.kv_heads, setup.head_dim)
    pool = torch.randn(shape, generator=generator).to(setup.dtype).to(setup.device)
    rope = torch.randn((positions, setup.rope.shape[1]), generator=generator).to(setup.device)
    ours = replace(setup, pool=pool.clone(), rope=rope, window=window)
    theirs = replace(setup, pool=pool.clone(), rope=rope, window=window)
    try:
        candidate = registration.build(ours)
        check = _Check(registration.name, setup, generator)
        check.products(candidate, ReferenceBackend(theirs))
        check.attention(candidate, ReferenceBackend(theirs), step)
    except (RuntimeError, AttributeError, OSError) as error:
        if isinstance(error, BackendUnfit):
            raise
        raise BackendUnfit(f"backend {registration.name} failed its check: {error}") from error
    check.same("the pages written", ours.pool, theirs.pool)


class _Check:
    def __init__(self, name: str, setup: Setup, generator: torch.Generator) -> None:
        self._name = name
        self._setup = setup
        self._generator = generator

    def same(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise BackendUnfit(
                f"backend {self._name}: {what} is {ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
            )
        difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        limit = TOLERANCE[self._setup.dtype]
        if not difference <= limit:
            raise BackendUnfit(
                f"backend {self._name}: {what} differs from the reference by {difference:.1e}; the limit is {limit:.0e}"
            )

    def products(self, ours: Backend, theirs: Backend) -> None:
        width, outputs = self._setup.query_columns, 96
        x, residual = self._random(TEST_ROWS, width), self._random(TEST_ROWS, outputs)
        weight, bias = self._random(outputs, width), self._random(outputs)
        for label, used_bias in (("linear", None), ("linear with bias", bias)):
            mine, reference = ours.pack(weight, used_bias), theirs.pack(weight, used_bias)
            self.same(label, ours.linear(x, mine), theirs.linear(x, reference))
            expected = theirs.linear_add(x, reference, residual.clone())
            self.same(label + " and residual", ours.linear_add(x, mine, residual.clone()), expected)
        self.same("logits", ours.logits(x, ours.pack_head(weight)), theirs.logits(x, theirs.pack_head(weight)))
        self.same("norm", ours.norm(x, weight[0]), theirs.norm(x, weight[0]))
        self.same(
            "gated product", ours.gated(x, ours.pack_gate_up(weight, bias)), theirs.gated(x, theirs.pack_gate_up(weight, bias))
        )

    def attention(self, ours: Backend, theirs: Backend, step: Step) -> None:
        ours.begin(step)
        theirs.begin(step)
        setup = self._setup
        norms = self._random(setup.heads + setup.kv_heads, setup.head_dim).to(torch.float32)
        kinds = (None, norms) if setup.latent_rank is None else (norms[0, : setup.latent_rank], norms[1, : setup.latent_rank])
        for layer, head_norms in enumerate(kinds):
            qkv = self._random(step.positions.size, self._setup.qkv_columns)
            mine = ours.rotate_and_store(qkv.clone(), layer, head_norms)
            reference = theirs.rotate_and_store(qkv.clone(), layer, head_norms)
            self.same("rotation", mine, reference)
            self.same("attention", ours.attend(mine, layer), theirs.attend(reference, layer))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._setup.dtype).to(self._setup.device)


def _mixed_batch(page_tokens: int) -> tuple[Batch, int]:
    """Decode rows of unlike lengths and chunks, from position 0 and behind a page and a half; pages they need.

    Some chunks are long enough for what a backend does with long ones only, with a round number of tokens and another one.
    """
    past = page_tokens + page_tokens // 2
    spans = [
        (0, 1),
        (page_tokens - 1, 1),
        (2 * page_tokens, 1),
        (0, 3),
        (past, 3),
        (0, 128),
        (past, 150),
    ]
    rows, next_page = [], 1
    for number, (first, count) in enumerate(spans):
        needed = pages_for(first + count, page_tokens)
        table = range(next_page, next_page + needed)
        next_page += needed
        rows.append(Rows(f"{number}", (0,) * count, first, (table,), True))
    return Batch(tuple(rows)), next_page

"""Attention with all scores at hand, and linear layers that a backend computes, by themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.backend import Setup
from engine.batch import Batch, Rows
from engine.module_attention import LayerView
from engine.module_products import PackedHead, PackedProduct, WatchedLinear, pack_products, watch
from engine.reference_backend import ReferenceBackend
from engine.scored_attention import ScoredAttention
from engine.step import Step, StepLimits, build_step
from engine.torch_backend import TorchBackend

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 4
PAGES = 20


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _setup(window: int | None = None) -> Setup:
    rope = torch.cat([torch.ones(64, HEAD_DIM // 2), torch.zeros(64, HEAD_DIM // 2)], dim=1)
    pool = _random(PAGES, 2, PAGE, 2, KV_HEADS, HEAD_DIM)
    return Setup(torch.device("cpu"), torch.float32, HEADS, KV_HEADS, HEAD_DIM, 1e-6, pool, rope, window, 0.3)


def _step() -> Step:
    """Two decode rows, a first chunk, and a chunk behind others."""
    spans = [(0, 1), (9, 1), (0, 7), (6, 12)]
    rows, page = [], 1
    for number, (first, count) in enumerate(spans):
        held = -(-(first + count) // PAGE)
        rows.append(Rows(f"{number}", (0,) * count, first, (tuple(range(page, page + held)),), True))
        page += held
    return build_step(Batch(tuple(rows)), StepLimits(1, 64, PAGE, PAGES))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("most_scores", [1, 40, 1 << 20])
def test_without_caps_and_sinks_it_is_the_reference(window: int | None, most_scores: int) -> None:
    setup, step = _setup(window), _step()
    backend = ReferenceBackend(setup)
    backend.begin(step)
    qkv = _random(step.positions.size, setup.qkv_columns, seed=1)
    stored = backend.rotate_and_store(qkv, 1, None)
    query = qkv[:, : setup.query_columns].view(-1, HEADS, HEAD_DIM)
    ours = ScoredAttention(setup.pool, most_scores).attend(step, 1, LayerView(window, 0.3, None), query, None)
    torch.testing.assert_close(ours.flatten(1), backend.attend(stored, 1))


def test_caps_and_sinks_by_their_formulas() -> None:
    """One query over three tokens: capped scores, and a sink that takes its share."""
    pool = _random(2, 1, PAGE, 2, 1, HEAD_DIM)
    step = build_step(Batch((Rows("a", (0,), 2, ((1,),), True),)), StepLimits(1, 64, PAGE, 2))
    query, sinks = _random(1, 2, HEAD_DIM, seed=2), torch.tensor([0.5, -1.0])
    ours = ScoredAttention(pool).attend(step, 0, LayerView(None, 0.7, 1.5), query, sinks)
    for head in range(2):
        scores = 1.5 * torch.tanh(pool[1, 0, :3, 0, 0] @ query[0, head] * 0.7 / 1.5)
        shares = scores.exp() / (scores.exp().sum() + sinks[head].exp())
        torch.testing.assert_close(ours[0, head], shares @ pool[1, 0, :3, 1, 0])


class Parts(nn.Module):
    """Linear layers in every place: used twice, in a list, with a weight that is read from outside, of another type, the head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.again = self.one
        self.experts = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        self.read = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 16, dtype=torch.float64)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.experts[0](self.one(x)))
        x = functional.linear(x, self.read.weight, self.read.bias)
        return self.head(self.wide(x.double()).to(x.dtype))


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend])
@torch.inference_mode()
def test_a_backend_computes_the_linear_layers_whose_weight_nobody_else_reads(backend: type) -> None:
    torch.manual_seed(0)
    model, x = Parts(), _random(2, 3, 16)
    expected = model(x)
    watch(model)
    torch.testing.assert_close(model(x), expected)
    pack_products(model, model.head, backend(_setup()), torch.float32)
    assert [type(each) for each in (model.one, model.experts[0], model.read, model.wide, model.head)] == [
        *(PackedProduct, PackedProduct, WatchedLinear, WatchedLinear, PackedHead)
    ]
    assert model.again is model.one
    torch.testing.assert_close(model(x), expected)
    assert model.one(x[:, :0]).shape == (2, 0, 16)
    assert model.head(x[:, :0]).shape == (2, 0, 5)


@torch.inference_mode()
def test_logits_of_a_packed_head_are_not_rounded() -> None:
    weight, bias, x = _random(5, 16).bfloat16(), _random(5, seed=1).bfloat16(), _random(3, 16, seed=2).bfloat16()
    head = PackedHead(TorchBackend(_setup()), weight, bias)
    logits = head(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, functional.linear(x.float(), weight.float(), bias.float()))

"""Small random models of every supported architecture, saved as transformers saves them, and a driver for the runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.runner import ModelRunner
from models import ModelRef

VOCABULARY = 131
CONTEXT = 160
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=40)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=40)
YARN_MSCALE = _rope("yarn", factor=4.0, original_max_position_embeddings=40, mscale=1.2, mscale_all_dim=0.7, truncate=False)

GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 12,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
    "rms_norm_eps": 1e-6,
}

# name -> (configuration class, model class, what differs from SHAPE)
VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama-all-kv-heads": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-head-dim-20": (LlamaConfig, LlamaForCausalLM, {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama-head-dim-apart": (LlamaConfig, LlamaForCausalLM, {"head_dim": 14}),
    "llama-rope-linear": (LlamaConfig, LlamaForCausalLM, _rope("linear", factor=4.0)),
    "llama-rope-llama3": (LlamaConfig, LlamaForCausalLM, LLAMA3),
    "llama-rope-yarn": (LlamaConfig, LlamaForCausalLM, YARN),
    "llama-rope-yarn-mscale": (LlamaConfig, LlamaForCausalLM, YARN_MSCALE),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-wide-window": (MistralConfig, MistralForCausalLM, {"sliding_window": CONTEXT}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
    "qwen3-biases": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 13}),
    "qwen2-window-in-some-layers": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA3),
    "gemma3-rope-linear": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENT, "q_lora_rank": 24}),
    "deepseek-v3-halves": (DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENT, "rope_interleave": False}),
    "gemma3-one-page-window": (Gemma3TextConfig, Gemma3ForCausalLM, {**GEMMA3, "sliding_window": 1}),
}


def build(variant: str, **changes: object) -> PreTrainedModel:
    """A model with random weights, norms and biases included, the same at each call."""
    config_class, model_class, differences = VARIANTS[variant]
    config = config_class(**{**SHAPE, **differences, **changes})
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(len(variant))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * noise if "norm" in name else noise * (0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[1] ** -0.5)
            )
    return model


def save(model: PreTrainedModel, folder: Path, **how: Any) -> ModelRef:
    model.save_pretrained(folder, **how)
    return ModelRef("tiny", folder, "safetensors", "0" * 64)


def load(ref: ModelRef, page_tokens: int = 16, total_pages: int = 64, dtype: str = "float32", **settings: Any) -> ModelRunner:
    return ModelRunner.load(ref, dtype=dtype, page_tokens=page_tokens, total_pages=total_pages, threads=1, **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


@dataclass
class Pages:
    """Hands out page ids in an order that is neither rising nor falling."""

    total: int
    _next: int = 0

    def take(self, count: int) -> list[int]:
        usable = self.total - 1
        stride = next(step for step in (17, 19, 23) if usable % step)
        taken = [1 + (self._next + index) * stride % usable for index in range(count)]
        self._next += count
        assert self._next <= usable, "the test needs more pages"
        return taken


@dataclass
class Driver:
    """Feeds token lists to a runner; each sequence knows its pages and how far it is.

    adapters: by sequence, for those that have one.
    Pages that left a window are null in its tables: a step that still read them would be refused.
    """

    runner: ModelRunner
    pages: tuple[Pages, ...] = field(init=False)
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pages = tuple(Pages(slab.units) for slab in self.runner.slabs)

    def rows(self, name: str, ids: Sequence[int], wants_logits: bool = True) -> Rows:
        groups = self.runner.layout.groups
        tables = self.tables.setdefault(name, tuple([] for _ in groups))
        first = self.done.get(name, 0)
        for group, table, pages in zip(groups, tables, self.pages, strict=True):
            table += pages.take(pages_for(first + len(ids), group.page_tokens) - len(table))
            gone = group.first_page(first)
            table[:gone] = [0] * gone
        self.done[name] = first + len(ids)
        kept = tuple(tuple(table) for table in tables)
        return Rows(name, tuple(ids), first, kept, wants_logits, adapter=self.adapters.get(name, ""))

    def step(self, *rows: Rows) -> torch.Tensor:
        return self.runner.run(Batch(rows))

    def feed(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """Logits after the last of ids, [vocabulary]."""
        return self.step(self.rows(name, ids))[0]


def greedy_with(next_logits: Callable[[Sequence[int]], torch.Tensor], ids: Sequence[int], n: int) -> list[int]:
    chosen: list[int] = []
    logits = next_logits(ids)
    for _ in range(n):
        chosen.append(int(logits.argmax()))
        logits = next_logits(chosen[-1:])
    return chosen

"""Small random models of architectures that only transformers computes."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engine.tiny_models import CONTEXT, VOCABULARY

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, **GROUPED}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

# model_type -> what differs from SHAPE
FAMILIES: dict[str, dict[str, Any]] = {
    "phi": {},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "stablelm": GROUPED,
    "mixtral": {**EXPERTS, "sliding_window": 9},
    "gemma2": {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 20},
    "gpt_oss": {**EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 9},
    "minicpm3": LATENT,
}


def build(model_type: str, **changes: object) -> PreTrainedModel:
    """A model with random weights, norms and biases included, the same at each call, with attention of its own."""
    differences = FAMILIES.get(model_type, {})
    config = AutoConfig.for_model(model_type, **{**SHAPE, **differences, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(len(model_type))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise * (0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else scaled)
    return model

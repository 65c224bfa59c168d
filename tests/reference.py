"""A second opinion on the default model: transformers with the very same weights.

The weights are read with the gguf library alone, and query and key rows are put back in order by explicit indices, so that
nothing here shares code with the engine. Loading takes seconds: results are kept for the whole test session.
"""

from collections.abc import Sequence
from functools import cache
from inspect import signature

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import models
from models import ModelRef

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@cache
def default_model() -> ModelRef:
    """The default model, fetched once into the cache folder."""
    return models.pull(models.DEFAULT_MODEL)


@cache
def load_reference(ref: ModelRef, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """transformers' Llama with the dequantised weights of a GGUF file of architecture llama, in evaluation mode."""
    reader = GGUFReader(ref.path)
    config = _config(reader)
    model = LlamaForCausalLM(config).eval()
    state = {_name(tensor.name): _tensor(tensor, config) for tensor in reader.tensors}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.to(dtype)


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, ids: Sequence[int], n: int) -> list[int]:
    """The n most likely next tokens, one after the other, end tokens included; the lowest id wins a tie."""
    # The argument was renamed within transformers 5.
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    filled = {argument: DynamicCache(config=model.config)}
    chosen: list[int] = []
    fed = torch.tensor([list(ids)])
    for _ in range(n):
        out = model(input_ids=fed, use_cache=True, logits_to_keep=1, **filled)
        chosen.append(int(out.logits[0, -1].float().argmax()))
        fed = torch.tensor([[chosen[-1]]])
    return chosen


@torch.inference_mode()
def all_logits(model: LlamaForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocabulary]: logits after each token."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0].float()


def _config(reader: GGUFReader) -> LlamaConfig:
    def field(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    names = {tensor.name for tensor in reader.tensors}
    return LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=int(field("attention.head_count")),
        num_key_value_heads=int(field("attention.head_count_kv")),
        max_position_embeddings=int(field("context_length")),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        attn_implementation="sdpa",
    )


def _name(gguf_name: str) -> str:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if gguf_name in whole:
        return whole[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _tensor(tensor: object, config: LlamaConfig) -> torch.Tensor:
    values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads is None:
        return torch.from_numpy(values)
    head_dim = values.shape[0] // heads
    order = [head * head_dim + 2 * pair + half for head in range(heads) for half in (0, 1) for pair in range(head_dim // 2)]
    return torch.from_numpy(values[order])

"""Weights from a GGUF file, dequantised by the gguf library in slices of rows."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.weights import WeightsError
from models.config import ModelConfig
from models.gguf_header import TensorInfo, read_header

# Most float32 bytes that dequantising holds at once beside the result.
SLICE_BYTES = 32 * 1024 * 1024
# Part of the configuration (RopeKind.DIVISORS), read with it.
ROPE_FACTORS = "rope_freqs.weight"

WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where attention and MLP are normalised before and after.
PER_LAYER_POST_NORMS = PER_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Implements engine.weights.WeightSource over one file, which stays mapped as long as this lives.

    The header comes from models: the library's own reader takes seconds for the strings of a vocabulary.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        tensors = read_header(path).tensors
        in_layer = PER_LAYER_POST_NORMS if config.post_norms else PER_LAYER
        named = ((_hugging_face_name(name, in_layer), name) for name in tensors if name != ROPE_FACTORS)
        self._by_name = {ours: (name, tensors[name]) for ours, name in named}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._heads_of = {"q_proj": config.heads, "k_proj": config.kv_heads} if config.rope_interleaved else {}

    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._by_name[name][1].shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._dequantise(*self._by_name[name], dtype)
        heads = self._heads_of.get(name.split(".")[-2])
        return tensor if heads is None else _split_pairs(tensor, heads)

    def _dequantise(self, name: str, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        kind = _kind(name, info)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        width = info.shape[-1]
        row_bytes = width // block_elements * block_bytes
        count = prod(info.shape) // width
        end = info.offset_bytes + count * row_bytes
        if width % block_elements or end > self._bytes.size:
            raise WeightsError(f"tensor {name} does not fit its file; fetch the model again")
        rows = self._bytes[info.offset_bytes : end].reshape(count, row_bytes)
        out = torch.empty((count, width), dtype=dtype)
        step = max(1, SLICE_BYTES // (width * 4))
        for start in range(0, count, step):
            part = dequantize(rows[start : start + step], kind)
            # The library may hand out a view of the mapped file, which torch would call writable.
            out[start : start + step] = torch.from_numpy(part if part.flags.writeable else part.copy())
        return out.reshape(info.shape)


def _kind(name: str, info: TensorInfo) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(info.kind)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise WeightsError(f"tensor {name} has type {info.kind} of ggml, which the gguf library cannot dequantise") from error
    return kind


def _hugging_face_name(name: str, per_layer: Mapping[str, str]) -> str:
    """Names without a counterpart are kept as they are, so that the loader can name what it has no place for."""
    in_layer = LAYER_TENSOR.fullmatch(name)
    if in_layer and in_layer[2] in per_layer:
        return f"model.layers.{in_layer[1]}.{per_layer[in_layer[2]]}.{in_layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{WHOLE_MODEL[stem]}.{kind}" if stem in WHOLE_MODEL else name


def _split_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head from [pair 0 first, pair 0 second, pair 1 first, ...] to all firsts, then all seconds."""
    paired = tensor.view(heads, tensor.shape[0] // heads // 2, 2, -1)
    return paired.transpose(1, 2).reshape(tensor.shape)

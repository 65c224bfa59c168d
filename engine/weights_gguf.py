"""Weights from a GGUF file, dequantised by the gguf library in slices of rows."""

import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from engine.weights import WeightsError
from models.config import ModelConfig

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
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Implements engine.weights.WeightSource over one file, which stays mapped as long as this lives."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {path.name}: {error}; fetch the model again") from error
        self._by_name = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS}
        self._heads_of = {"q_proj": config.heads, "k_proj": config.kv_heads} if config.rope_interleaved else {}

    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._by_name[name].shape))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = _dequantise(self._by_name[name], self.shape(name), dtype)
        heads = self._heads_of.get(name.split(".")[-2])
        return tensor if heads is None else _split_pairs(tensor, heads)


def _hugging_face_name(name: str) -> str:
    """Names without a counterpart are kept as they are, so that the loader can name what it has no place for."""
    in_layer = LAYER_TENSOR.fullmatch(name)
    if in_layer and in_layer[2] in PER_LAYER:
        return f"model.layers.{in_layer[1]}.{PER_LAYER[in_layer[2]]}.{in_layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{WHOLE_MODEL[stem]}.{kind}" if stem in WHOLE_MODEL else name


def _dequantise(tensor: ReaderTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    rows = tensor.data.reshape(shape[0], -1) if len(shape) > 1 else tensor.data.reshape(1, -1)
    width = shape[-1]
    out = torch.empty((rows.shape[0], width), dtype=dtype)
    step = max(1, SLICE_BYTES // (width * 4))
    for start in range(0, rows.shape[0], step):
        try:
            part = dequantize(rows[start : start + step], tensor.tensor_type)
        except NotImplementedError as error:
            raise WeightsError(f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read") from error
        out[start : start + step] = torch.from_numpy(np.array(part, dtype=np.float32))
    return out.reshape(shape)


def _split_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head from [pair 0 first, pair 0 second, pair 1 first, ...] to all firsts, then all seconds."""
    paired = tensor.view(heads, tensor.shape[0] // heads // 2, 2, -1)
    return paired.transpose(1, 2).reshape(tensor.shape)

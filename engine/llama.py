"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only in what their weights contain."""

import torch

from engine.backend import Backend
from engine.step import Step
from engine.weights import ModelWeights


class Decoder:
    """Pre-norm blocks of grouped-query attention and SwiGLU over a backend that owns the KV pool."""

    def __init__(self, weights: ModelWeights, backend: Backend) -> None:
        self._weights = weights
        self._backend = backend

    def forward(self, step: Step) -> torch.Tensor:
        """Write the KV of all T rows and return float32 logits [R, vocabulary] of step.logit_rows.

        Past the last layer's KV only the wanted rows are computed: nothing reads the others.
        """
        weights, backend = self._weights, self._backend
        device = weights.embedding.device
        backend.begin(step)
        wanted = torch.from_numpy(step.logit_rows).to(device)
        residual = weights.embedding.index_select(0, torch.from_numpy(step.token_ids).to(device))
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            qkv = backend.linear(backend.norm(residual, layer.attention_norm), layer.qkv)
            qkv = backend.rotate_and_store(qkv, index, layer.head_norms)
            if index == last and wanted.shape[0] == 0:
                break
            attended = backend.attend(qkv, index)
            if index == last:
                attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
            residual = backend.linear_add(attended, layer.output, residual)
            gate_up = backend.linear(backend.norm(residual, layer.mlp_norm), layer.gate_up)
            residual = backend.linear_add(backend.swiglu(gate_up), layer.down, residual)
        if wanted.shape[0] == 0:
            return torch.empty((0, weights.embedding.shape[0]), dtype=torch.float32, device=device)
        return backend.logits(backend.norm(residual, weights.final_norm), weights.head)

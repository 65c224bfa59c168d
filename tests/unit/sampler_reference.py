"""A deliberately dumb sampler for one row: sorted lists and loops, straight from the definition of order version 1."""

import math
from collections.abc import Sequence

import numpy as np

from engine.philox import uniforms
from engine.sampling_params import GREEDY_BELOW, SamplingParams


def edit(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int]):
    values = np.array(logits, dtype=np.float32)
    for token, bias in params.logit_bias:
        values[token] += np.float32(bias)
    for token in banned:
        values[token] = -np.inf
    for token in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= np.float32(params.presence_penalty + params.frequency_penalty * list(output).count(token))
    return values


def kept_ids(values: np.ndarray, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """Ids that the filters keep, likeliest first, and the weights of all ids."""
    weights = np.exp((values - values.max()) / np.float32(params.temperature))
    scaled = (values - values.max()) / np.float32(params.temperature)
    order = sorted(range(len(values)), key=lambda token: (-scaled[token], token))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = math.fsum(float(weights[token]) for token in order)
        front: list[int] = []
        so_far = 0.0
        for token in order:
            if so_far >= params.top_p * mass:
                break
            front.append(token)
            so_far += float(weights[token])
        order = front
    return [token for token in order if weights[token] >= np.float32(params.min_p)], weights


def choose(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    *,
    sequence_index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> int:
    values = edit(logits, params, prompt, output, banned)
    if params.temperature < GREEDY_BELOW:
        return max(range(len(values)), key=lambda token: (values[token], -token))
    kept, weights = kept_ids(values, params)
    target = float(uniforms([params.seed], [position], [sequence_index])[0]) * math.fsum(float(weights[token]) for token in kept)
    so_far = 0.0
    for token in sorted(kept):
        so_far += float(weights[token])
        if so_far > target:
            return token
    return max(token for token in kept if weights[token] > 0)

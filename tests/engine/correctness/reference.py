"""What a model says, by transformers in float32 over the whole text and the sampler that is written out in loops."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.philox import uniforms
from engine.sampling_params import SamplingParams
from tests.engine.tiny_models import VOCABULARY
from tests.reference import all_logits
from tests.unit.sampler_reference import choose, edit, kept_ids


@dataclass(frozen=True, slots=True)
class Request:
    """What one output is a function of. `allowed`: ids that a grammar leaves at each place; None: all of them. `index`: which
    of several outputs of the prompt. `adapter`: name of the one that computes it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    output_tokens: int
    allowed: frozenset[int] | None = None
    index: int = 0
    adapter: str = ""

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that can not be chosen."""
        return () if self.allowed is None else tuple(sorted(set(range(VOCABULARY)) - self.allowed))


class Reference:
    """One model. Each question is answered once.

    A text is judged by its own tokens: when each of them is what the reference chooses behind those before it, then the whole is
    what the reference would have said.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._chosen: dict[tuple[Request, tuple[int, ...]], list[int]] = {}
        self._misses: dict[tuple[Request, tuple[int, ...]], list[float]] = {}

    def rows(self, request: Request, tokens: tuple[int, ...]) -> torch.Tensor:
        """float32 [len(tokens), vocabulary]: the logits that each of these tokens of a request's output was chosen from."""
        text = (*request.prompt, *tokens)
        if text not in self._logits:
            self._logits[text] = all_logits(self.model, text)[len(request.prompt) - 1 : -1]
        return self._logits[text]

    def chosen(self, request: Request, tokens: tuple[int, ...]) -> list[int]:
        """At each place the token that the reference chooses behind the tokens before it."""
        if (request, tokens) not in self._chosen:
            self._chosen[request, tokens] = [
                self._choice(request, row, at, tokens) for at, row in enumerate(self.rows(request, tokens).numpy())
            ]
        return self._chosen[request, tokens]

    @staticmethod
    def _choice(request: Request, row: np.ndarray, at: int, tokens: tuple[int, ...]) -> int:
        said = {"sequence_index": request.index, "prompt": request.prompt, "output": tokens[:at], "banned": request.banned}
        return choose(row, request.sampling, at, **said)

    def misses(self, request: Request, tokens: tuple[int, ...]) -> list[float]:
        """How far each token is from what the reference would choose at its place.

        Greedy: by how much another token's logit is larger. Drawn: how far the drawn number is outside the token's share of the
        cumulative probability. 0 where the reference chooses the same.
        """
        if (request, tokens) not in self._misses:
            self._misses[request, tokens] = [
                _miss(row, request, at, tokens) for at, row in enumerate(self.rows(request, tokens).numpy())
            ]
        return self._misses[request, tokens]


def _miss(row: np.ndarray, request: Request, position: int, tokens: Sequence[int]) -> float:
    token = tokens[position]
    values = edit(row, request.sampling, request.prompt, tokens[:position], request.banned)
    if request.sampling.greedy:
        return float(values.max() - values[token])
    return _outside(values, request, position, token)


def _outside(values: np.ndarray, request: Request, position: int, token: int) -> float:
    kept, weights = kept_ids(values, request.sampling)
    mass = math.fsum(float(weights[one]) for one in kept)
    begin = math.fsum(float(weights[one]) for one in kept if one < token) / mass
    end = begin + (float(weights[token]) / mass if token in kept else 0.0)
    drawn = float(uniforms([request.sampling.seed], [position], [request.index])[0])
    return max(0.0, begin - drawn, drawn - end)

"""How a request wants its tokens chosen, as checked values. Pure: no torch."""

import math
from dataclasses import dataclass

#: Most entries of `logit_bias`.
MAX_LOGIT_BIASES = 300

#: Temperatures below this are greedy: dividing by them leaves nothing but the largest logit.
GREEDY_BELOW = 1e-5


class BadSamplingParams(ValueError):
    """A field is out of its limits."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {value}, must be {limit}")
        self.field = field
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampler order version 1. Raises BadSamplingParams, naming the field and its limit.

    temperature: 0 (greedy) to 10. top_k: keep the k most likely, 0 keeps all. top_p: keep the smallest set with at
    least this mass, over 0 to 1. min_p: drop what is less likely than this share of the most likely, 0 to 1.
    repetition_penalty: divides positive and multiplies negative logits of ids in prompt or output, over 0 to 10.
    presence_penalty, frequency_penalty: subtracted from logits of ids in the output, once and for each time, -2 to 2.
    logit_bias: (id, added value -100 to 100), each id once. seed: 64 bits.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 10.0)
        _within("top_k", self.top_k, 0, 2**32 - 1)
        _above_zero("top_p", self.top_p, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _above_zero("repetition_penalty", self.repetition_penalty, 10.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, 0, 2**64 - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise BadSamplingParams("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIASES}")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise BadSamplingParams("logit_bias", "an id twice", "one entry for an id")
        for token, bias in self.logit_bias:
            _within("logit_bias id", token, 0, 2**31 - 1)
            _within(f"logit_bias of {token}", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise BadSamplingParams(field, value, f"{low:g} to {high}" if isinstance(low, float) else f"{low} to {high}")


def _above_zero(field: str, value: float, high: float) -> None:
    if math.isnan(value) or not 0.0 < value <= high:
        raise BadSamplingParams(field, value, f"over 0 up to {high:g}")

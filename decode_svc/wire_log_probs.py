"""Log-probabilities between the values inside and the messages of the ports."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from engine.log_probs import TokenLogProb
from tandem.v1 import inference_pb2 as v1

#: The bytes that a token stands for in the middle of a text.
Pieces = Callable[[int], bytes]


def for_client(token_ids: Iterable[int], log_probs: Sequence[TokenLogProb], pieces: Pieces) -> list[Any]:
    """One message for each of the tokens; none when nobody asked for them."""
    if not log_probs:
        return []
    return [
        v1.TokenLogProbability(
            log_probability=one.value,
            token=pieces(token),
            top_token_ids=one.top_ids,
            top_log_probabilities=one.top_values,
            top_tokens=[pieces(top) for top in one.top_ids],
        )
        for token, one in zip(token_ids, log_probs, strict=True)
    ]


def for_router(log_probs: Iterable[TokenLogProb]) -> list[bytes]:
    """What a router keeps of tokens that are not returned yet, each serialised."""
    return [
        v1.TokenLogProbability(
            log_probability=one.value, top_token_ids=one.top_ids, top_log_probabilities=one.top_values
        ).SerializeToString()
        for one in log_probs
    ]


def from_router(told: Iterable[bytes]) -> tuple[TokenLogProb, ...]:
    """What `for_router` made. Raises ValueError for what it can not have made."""
    found = []
    for data in told:
        try:
            one = v1.TokenLogProbability.FromString(data)
        except DecodeError as bad:
            raise ValueError("no TokenLogProbability") from bad
        if len(one.top_token_ids) != len(one.top_log_probabilities):
            raise ValueError(f"{len(one.top_token_ids)} ids with {len(one.top_log_probabilities)} values")
        found.append(TokenLogProb(one.log_probability, tuple(one.top_token_ids), tuple(one.top_log_probabilities)))
    return tuple(found)

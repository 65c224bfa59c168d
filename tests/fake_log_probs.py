"""Log-probabilities of a fake decode member: token number i has -(i + 1), so that a test sees whose each one is."""

from collections.abc import Iterable

from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as pb


def of(opening: decode_pb2.Open, tokens: Iterable[int]) -> list[pb.TokenLogProbability]:
    """Those of some tokens; none when nobody asked for them."""
    if not opening.HasField("log_probabilities"):
        return []
    return [pb.TokenLogProbability(log_probability=-(token + 1.0)) for token in tokens]


def held(opening: decode_pb2.Open, tokens: Iterable[int]) -> list[bytes]:
    """The same for tokens that are not returned yet."""
    return [one.SerializeToString() for one in of(opening, tokens)]


def check(opening: decode_pb2.Open) -> None:
    """What an Open tells of the tokens that were not returned is what was told."""
    unreturned = list(opening.output_token_ids)[opening.returned_tokens :]
    assert list(opening.held_log_probabilities) == held(opening, unreturned), (
        "log-probabilities of earlier attempts are not theirs"
    )


def returned(opening: decode_pb2.Open, first: int, last: int, text: str) -> bytes:
    """What a seat returned before the event that comes again, when its router is to know it whole."""
    if opening.output_mode != pb.OUTPUT_MODE_CUMULATIVE:
        return b""
    ids = range(first, last)
    return pb.Delta(text=text, token_ids=ids, log_probabilities=of(opening, ids)).SerializeToString()


def whole(opening: decode_pb2.Open, count: int) -> bytes:
    """Ids and log-probabilities of an output that is told at its end."""
    return pb.Completed(token_ids=range(count), log_probabilities=of(opening, range(count))).SerializeToString()

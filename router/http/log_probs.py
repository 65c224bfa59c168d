"""Log-probabilities in the two shapes of the OpenAI API: an entry for each token (chat), and lists (completions). Pure."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from router.http.reading import Piece
from tandem.v1 import inference_pb2 as pb

#: What is told of a token that the model holds to be impossible: JSON has no infinity.
LEAST = -9999.0


def content_of(piece: Piece) -> list[dict[str, Any]]:
    """An entry for each token of a piece, as chat answers have them."""
    return [_entry(token_id, one) for token_id, one in zip(piece.token_ids, piece.log_probs, strict=False)]


class LegacyLogProbs:
    """What was told of one choice so far: `text_offset` counts on."""

    def __init__(self) -> None:
        self._text = _Counter()

    def told(self, piece: Piece) -> dict[str, Any] | None:
        """The lists of one piece; None when it tells no tokens."""
        if not piece.token_ids or not piece.log_probs:
            return None
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, one in _aligned(piece):
            found["text_offset"].append(self._text.characters)
            if one is None:
                text = _first_of(piece, token_id)
                found["tokens"].append(text)
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                self._text.add(text.encode())
                continue
            found["tokens"].append(_legacy_text(token_id, one.token))
            found["token_logprobs"].append(_finite(one.log_probability))
            found["top_logprobs"].append(_top(token_id, one))
            self._text.add(one.token)
        return found

    def joined(self, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        """The lists of all pieces of one choice."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for piece in pieces:
            for name, values in (self.told(piece) or {}).items():
                found[name].extend(values)
        return found


class _Counter:
    """Whole characters of the bytes so far."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.characters = 0

    def add(self, data: bytes) -> None:
        self.characters += len(self._decoder.decode(data))


def _aligned(piece: Piece) -> list[tuple[int, pb.TokenLogProbability | None]]:
    """Ids with their log-probabilities; nothing comes before the first token of a prompt, so it has none."""
    missing = len(piece.token_ids) - len(piece.log_probs) if piece.prompt else 0
    return list(zip(piece.token_ids, [*[None] * missing, *piece.log_probs], strict=False))


def _first_of(piece: Piece, token_id: int) -> str:
    """The text of a prompt's first token: what the others leave of the prompt's."""
    rest = b"".join(one.token for one in piece.log_probs)
    whole = piece.text.encode()
    if not whole.endswith(rest):
        return f"token_id:{token_id}"
    return _legacy_text(token_id, whole[: len(whole) - len(rest)])


def _top(token_id: int, one: pb.TokenLogProbability) -> dict[str, float]:
    """The likeliest tokens and the chosen one, by their texts; of two with one text the likelier."""
    found: dict[str, float] = {}
    for other, value, data in zip(one.top_token_ids, one.top_log_probabilities, one.top_tokens, strict=True):
        found.setdefault(_legacy_text(other, data), _finite(value))
    found.setdefault(_legacy_text(token_id, one.token), _finite(one.log_probability))
    return found


def _legacy_text(token_id: int, data: bytes) -> str:
    """A token's text; bytes that are no whole characters as the API writes them, special tokens by their ids."""
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(token_id: int, one: pb.TokenLogProbability) -> dict[str, Any]:
    top = zip(one.top_token_ids, one.top_log_probabilities, one.top_tokens, strict=True)
    return {
        **_named(token_id, one.log_probability, one.token),
        "top_logprobs": [_named(other, value, data) for other, value, data in top],
    }


def _named(token_id: int, log_probability: float, data: bytes) -> dict[str, Any]:
    text = data.decode(errors="replace") if data else f"token_id:{token_id}"
    return {"token": text, "logprob": _finite(log_probability), "bytes": list(data)}


def _finite(log_probability: float) -> float:
    return log_probability if math.isfinite(log_probability) else LEAST

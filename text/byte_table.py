"""The table id -> bytes, read off a tokenizer's own decoder.

A decoder of the `tokenizers` library is a chain of steps. Chains that treat each token alone (apart from the start of the
output) are a table; the usual ones are:

* `ByteLevel`: each character of a token stands for one byte (GPT-2's alphabet); a token with any other character is its own
  UTF-8, as in the library;
* SentencePiece: `Replace` of the word mark U+2581 by a space, `ByteFallback` of `<0xNN>` tokens, `Fuse`, and sometimes
  `Strip` of one space at the start; or `Metaspace`.
"""

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer as Backend

from text.detokeniser import LeadingSpace, TokenBytes, plain_table

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# One step of a chain, as the library serialises it.
Step = dict[str, object]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def special_ids(backend: Backend) -> frozenset[int]:
    """Ids that the library's decode leaves out with skip_special_tokens."""
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def token_bytes(backend: Backend, size: int) -> TokenBytes | None:
    """The table for ids 0 to size - 1; None when the decoder is no table."""
    steps = _steps(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        alphabet = byte_alphabet()
        return plain_table(_entries(backend, size, lambda token: _byte_level(token, alphabet)))
    if steps and steps[0]["type"] == "Metaspace":
        return _metaspace(backend, size, steps)
    return _sentencepiece(backend, size, steps)


def _steps(backend: Backend) -> list[Step]:
    """The decoder as a flat list; empty when there is none."""
    if backend.decoder is None:
        return []
    return _flatten(json.loads(backend.decoder.__getstate__()))


def _flatten(step: Step) -> list[Step]:
    if step["type"] != "Sequence":
        return [step]
    inner = step["decoders"]
    assert isinstance(inner, list)
    return [flat for each in inner for flat in _flatten(each)]


def _entries(backend: Backend, size: int, convert: Callable[[str], bytes]) -> tuple[bytes, ...]:
    hidden = special_ids(backend)
    tokens = (None if token_id in hidden else backend.id_to_token(token_id) for token_id in range(size))
    return tuple(b"" if token is None else convert(token) for token in tokens)


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _metaspace(backend: Backend, size: int, steps: list[Step]) -> TokenBytes | None:
    """Metaspace drops every mark of the first token, unless it never put one there."""
    if any(step["type"] not in ("ByteFallback", "Fuse") for step in steps[1:]):
        return None
    mark = steps[0]["replacement"]
    assert isinstance(mark, str)
    fallback = any(step["type"] == "ByteFallback" for step in steps)
    entries = _entries(backend, size, lambda token: _spelled(token.replace(mark, " "), fallback))
    if steps[0].get("prepend_scheme", "always") == "never":
        return plain_table(entries)
    return TokenBytes(
        entries, LeadingSpace.FIRST_TOKEN, _entries(backend, size, lambda token: _spelled(token.replace(mark, ""), fallback))
    )


def _sentencepiece(backend: Backend, size: int, steps: list[Step]) -> TokenBytes | None:
    """[Replace ...] [ByteFallback] Fuse [Strip of one leading space]: any other order or setting is no table."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace":
        step = rest.pop(0)
        pattern = step["pattern"]
        if not isinstance(pattern, dict) or "String" not in pattern:
            return None
        replacements.append((pattern["String"], str(step["content"])))
    fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    if fallback:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    leading = LeadingSpace.KEEP
    if rest:
        strip = rest.pop(0)
        if rest or strip != {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return None
        leading = LeadingSpace.FIRST_BYTE

    def convert(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        return _spelled(token, fallback)

    return plain_table(_entries(backend, size, convert), leading)


def _spelled(token: str, fallback: bool) -> bytes:
    found = _BYTE_TOKEN.fullmatch(token) if fallback else None
    return bytes([int(found[1], 16)]) if found else token.encode()

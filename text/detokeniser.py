"""From token ids to text, one id at a time. Pure.

`TokenBytes` says which bytes an id stands for; `Detokeniser` joins them and lets out complete characters only. A push is
one table look-up and one incremental UTF-8 decode over at most three older bytes, so its cost does not grow with the output.

Bytes that do not continue a character end it. What is left out then is what the Unicode standard (chapter 3, "Constraints
on Conversion Processes") calls a maximal subpart: the bad bytes, and no byte of the character after them. So for any ids
the output under `DROP` equals `b"".join(bytes of ids).decode("utf-8", "ignore")`, and where those bytes are valid UTF-8
both policies equal the tokenizer library's own decode. The library would write U+FFFD; we never do.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from text.errors import BadUtf8

SPACE = b" "
SURROGATE_LEAD, SURROGATE_SECOND = b"\xed", b"\xa0"  # U+D800 and up


class Utf8Policy(Enum):
    """What to do with bytes that can never become a character."""

    ERROR = "error"
    DROP = "drop"


class LeadingSpace(Enum):
    """What the tokenizer's own decoder takes away at the start of an output."""

    KEEP = "keep"
    FIRST_BYTE = "first_byte"  # one space at the start of the whole output (a Strip step behind Fuse)
    FIRST_TOKEN = "first_token"  # every word mark of the first token (a Metaspace step)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes by id. An id with b"" shows nothing (special and unused ids).

    `first` is the table for the first id that shows something; it is `entries` itself unless `leading` is FIRST_TOKEN.
    """

    entries: tuple[bytes, ...]
    leading: LeadingSpace
    first: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.first) != len(self.entries):
            raise ValueError(f"first has {len(self.first)} entries, entries has {len(self.entries)}; they must be equal")

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of the id in the middle of an output; b"" for an id that the tokenizer does not know."""
        return self.entries[token_id] if 0 <= token_id < len(self.entries) else b""


def plain_table(entries: Sequence[bytes], leading: LeadingSpace = LeadingSpace.KEEP) -> TokenBytes:
    """A table whose first id is like any other, or loses one leading space byte."""
    if leading is LeadingSpace.FIRST_TOKEN:
        raise ValueError("A FIRST_TOKEN table needs its own entries for the first token; build TokenBytes directly.")
    same = tuple(entries)
    return TokenBytes(same, leading, same)


class TextStream(Protocol):
    """Text of one sequence, token by token."""

    @property
    def pending(self) -> bytes:
        """Bytes that wait for the rest of their character."""
        ...

    def push(self, token_id: int) -> bytes:
        """UTF-8 of the characters that this id completes; b"" when it completes none. Raises BadUtf8 (policy ERROR)."""
        ...

    def finish(self, policy: Utf8Policy | None = None) -> bytes:
        """Ends the text: what the held bytes still give. Raises BadUtf8 when they are half a character (policy ERROR).

        `policy` overrides the stream's own for this end, because the right answer depends on why the output ends.
        """
        ...

    def drop(self) -> None:
        """Forgets the pending bytes, as after a stop hit."""
        ...


class Detokeniser:
    """The text of one sequence over a byte table. A push that raises changes nothing."""

    __slots__ = ("_at_start", "_errors", "_pending", "_policy", "_table")

    def __init__(self, table: TokenBytes, policy: Utf8Policy = Utf8Policy.ERROR) -> None:
        self._table = table
        self._policy = policy
        self._errors = "strict" if policy is Utf8Policy.ERROR else "ignore"
        self._at_start = table.leading is not LeadingSpace.KEEP
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete, at most three."""
        return self._pending

    def push(self, token_id: int) -> bytes:
        """See `TextStream.push`. Under ERROR it raises as soon as no later byte can repair the character."""
        data = self._table[token_id]
        if not data:
            return b""
        if self._at_start:
            data = self._first(token_id, data)
        data = self._pending + data
        try:
            text, used = codecs.utf_8_decode(data, self._errors, False)
        except UnicodeDecodeError as error:
            raise BadUtf8(error.object[error.start : error.end], error.reason) from None
        self._pending = self._without_surrogate(data[used:])
        self._at_start = False
        return text.encode()

    def finish(self, policy: Utf8Policy | None = None) -> bytes:
        """See `TextStream.finish`. A table stream holds only half characters back, so this gives b"" or raises."""
        if self._pending and (policy or self._policy) is Utf8Policy.ERROR:
            raise BadUtf8(self._pending, "the output ends inside a character")
        self._pending = b""
        return b""

    def drop(self) -> None:
        """See `TextStream.drop`."""
        self._pending = b""

    def _without_surrogate(self, held: bytes) -> bytes:
        """CPython waits for a third byte after the first two of a surrogate, though none makes them a character."""
        if held[:1] != SURROGATE_LEAD or held[1:2] < SURROGATE_SECOND:
            return held
        if self._policy is Utf8Policy.ERROR:
            raise BadUtf8(held, "surrogates are not allowed")
        return b""

    def _first(self, token_id: int, data: bytes) -> bytes:
        if self._table.leading is LeadingSpace.FIRST_TOKEN:
            return self._table.first[token_id]
        return data[1:] if data.startswith(SPACE) else data

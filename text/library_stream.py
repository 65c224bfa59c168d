"""Text by the tokenizer library's own incremental decode, for decoders that are no byte table (WordPiece and the like)."""

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from text.detokeniser import Utf8Policy
from text.errors import BadUtf8

REPLACEMENT = "�"


class LibraryStream:
    """A `TextStream` over `tokenizers.decoders.DecodeStream`, which re-decodes a short window of ids at each push.

    The library shows bytes that are no character as U+FFFD; such a mark is what ERROR refuses and DROP leaves out.
    """

    __slots__ = ("_backend", "_policy", "_stream", "_waiting")

    def __init__(self, backend: Backend, policy: Utf8Policy = Utf8Policy.ERROR) -> None:
        self._backend = backend
        self._policy = policy
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    @property
    def pending(self) -> bytes:
        """What the library makes of the ids that have given no text yet; b"" when none wait."""
        if not self._waiting:
            return b""
        return str(self._backend.decode(self._waiting, skip_special_tokens=True)).encode()

    def push(self, token_id: int) -> bytes:
        """See `TextStream.push`."""
        text = self._stream.step(self._backend, token_id)
        if text is None:
            self._waiting.append(token_id)
            return b""
        self._waiting.clear()
        if REPLACEMENT in text and self._policy is Utf8Policy.ERROR:
            raise BadUtf8(REPLACEMENT.encode(), "the tokenizer gave a replacement mark")
        return text.replace(REPLACEMENT, "").encode()

    def finish(self, policy: Utf8Policy | None = None) -> bytes:
        """See `TextStream.finish`."""
        held = self.pending
        self._waiting.clear()
        if held and (policy or self._policy) is Utf8Policy.ERROR:
            raise BadUtf8(held, "the output ends inside a character")
        return b""

    def drop(self) -> None:
        """See `TextStream.drop`."""
        self._waiting.clear()

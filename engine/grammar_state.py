"""Where one output stands in its grammar, and which ids may follow. Pure but for the matcher behind it."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.grammar_library import Bits, CompiledGrammar, bit_words

#: So much whitespace in a row ends in a JSON text: enough for indentation, and no output of nothing else.
SPACES_MAX = 32
_NONE = np.zeros(0, dtype=np.int64)


class GrammarState:
    """Advanced once for each token of an output that shows something; `mask` is filled ahead, by any one thread at a time.

    Tokens can be taken back, as those of a rejected draft are.
    """

    __slots__ = ("_bits", "_filled", "_in_json", "_last_bytes", "_matcher", "_spaces", "_vocabulary")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        self._bits: Bits = np.zeros(bit_words(grammar.vocabulary.size), dtype=np.int32)
        self._filled = False
        self._in_json = grammar.in_json
        #: The last byte of the text after each token, and how much whitespace it ends with.
        self._last_bytes = bytearray()
        self._spaces: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._last_bytes)

    @property
    def ready(self) -> bool:
        """Whether the mask is filled."""
        return self._filled

    def hides(self, token: int) -> bool:
        """Whether an id shows nothing. No grammar allows such an id; whether an output may end with it is the caller's matter."""
        return token in self._vocabulary.hidden

    def advance(self, token: int) -> bool:
        """Take one token; False, with nothing changed, when the grammar does not allow it here."""
        if not 0 <= token < self._vocabulary.size or self.hides(token) or token in self._unfit():
            return False
        if not self._matcher.accept(token):
            return False
        before = self._spaces[-1] if self._spaces and token in self._vocabulary.only_spaces else 0
        self._spaces.append(before + self._vocabulary.trailing_spaces[token])
        self._last_bytes.append(self._vocabulary.last_bytes[token])
        self._filled = False
        return True

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` tokens. Raises ValueError when there were not so many."""
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens are to be taken back, {self.tokens} were taken")
        if tokens:
            self._matcher.rollback(tokens)
            del self._last_bytes[-tokens:], self._spaces[-tokens:]
            self._filled = False

    def prepare(self) -> None:
        """Fill the mask, if that is not done yet."""
        if self._filled:
            return
        self._matcher.fill(self._bits)
        unfit = self._unfit()
        if len(unfit):
            clear_bits(self._bits, unfit)
        if self._in_json and self._spaces and self._spaces[-1] >= SPACES_MAX:
            self._end_spaces()
        self._filled = True

    @property
    def mask(self) -> Bits:
        """int32 [words]: bit i of the mask (bit i % 32 of word i // 32) is set when id i may follow. Prepares it.

        A bit beyond the vocabulary has a meaning of its own; see `may_end`.
        """
        self.prepare()
        return self._bits

    @property
    def may_end(self) -> bool:
        """Whether the output is whole as it is."""
        return self._matcher.may_end()

    def allows_any(self, but: Iterable[int] = ()) -> bool:
        """Whether any id may follow, other than those of `but`."""
        mask = self.mask
        left = int(np.bitwise_count(mask).sum()) - _bit(mask, self._vocabulary.size)
        return left > sum(_bit(mask, token) for token in set(but) if token < self._vocabulary.size)

    @property
    def complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""
        return self._matcher.may_end() and not self.allows_any()

    def _end_spaces(self) -> None:
        """No more whitespace, unless nothing else can follow."""
        without = self._bits.copy()
        clear_bits(without, self._vocabulary.spaced)
        if without.any():
            self._bits[:] = without

    def _unfit(self) -> npt.NDArray[np.int64]:
        """Ids that cannot follow although the matcher may allow them."""
        if not self._last_bytes:
            return self._vocabulary.not_first
        return self._vocabulary.no_character_after.get(self._last_bytes[-1], _NONE)


def allowed_ids(mask: Bits, vocabulary_size: int) -> npt.NDArray[np.bool_]:
    """A mask as one truth value for each id, [vocabulary_size]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocabulary_size).view(np.bool_)


def clear_bits(mask: Bits, ids: npt.NDArray[np.int64]) -> None:
    """Forbid ids."""
    words = mask.view(np.uint32)
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


def _bit(mask: Bits, place: int) -> int:
    return int(mask[place >> 5]) >> (place & 31) & 1

"""Where one output stands in its grammar, and which ids may follow. Pure but for the matcher behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.grammar_library import Bits, CompiledGrammar, Vocabulary, bit_words

#: So much whitespace in a row ends in a JSON text: enough for indentation, and no output of nothing else.
SPACES_MAX = 32
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class NextIds:
    """What may follow at one place of an output.

    mask: int32 [words], bit i of it (bit i % 32 of word i // 32) is set when id i may follow; a bit beyond the vocabulary has a
    meaning of its own, see `may_end`: whether the output is whole as it is.
    """

    mask: Bits
    may_end: bool
    vocabulary: Vocabulary

    def hides(self, token: int) -> bool:
        """Whether an id shows nothing. No grammar allows such an id; whether an output may end with it is the caller's matter."""
        return token in self.vocabulary.hidden

    def allows_any(self, but: Iterable[int] = ()) -> bool:
        """Whether any id may follow, other than those of `but`."""
        mask, size = self.mask, self.vocabulary.size
        left = int(np.bitwise_count(mask).sum()) - _bit(mask, size)
        return left > sum(_bit(mask, token) for token in set(but) if token < size)


class GrammarState:
    """Advanced once for each token of an output that shows something; masks are filled ahead, by any one thread at a time.

    Besides the mask of the next token it fills, on demand, those of the tokens after drafts. Drafts are only looked at: where the
    output stands is what `advance` took, before and after. Tokens can be taken back.
    """

    __slots__ = ("_ahead", "_bits", "_drafts", "_filled", "_from_draft", "_grammar", "_last_bytes", "_matcher", "_spaces")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._bits: Bits = _no_bits(grammar)
        self._filled = False
        self._drafts: tuple[int, ...] = ()
        self._ahead: list[NextIds] = []
        self._from_draft = False
        #: The last byte of the text after each token, and how much whitespace it ends with.
        self._last_bytes = bytearray()
        self._spaces: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._last_bytes)

    @property
    def filled(self) -> bool:
        """Whether the mask of the next token is filled. Once it is, it stays, whatever becomes of those after drafts."""
        return self._filled

    @property
    def ready(self) -> bool:
        """Whether all masks are filled, and the matcher is where the output stands."""
        return self._filled and len(self._ahead) == len(self._drafts)

    @property
    def from_draft(self) -> bool:
        """Whether the last token was a draft, and what may follow it was filled for that draft."""
        return self._from_draft

    def hides(self, token: int) -> bool:
        """See NextIds."""
        return token in self._grammar.vocabulary.hidden

    def advance(self, token: int) -> bool:
        """Take one token; False, with nothing changed, when the grammar does not allow it here."""
        if not self._take(token):
            return False
        self._from_draft = bool(self._ahead) and self._drafts[0] == token
        if self._from_draft:
            self._bits, self._filled = self._ahead.pop(0).mask, True
            self._drafts = self._drafts[1:]
        else:
            self._unfill()
        return True

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` tokens. Raises ValueError when there were not so many."""
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens are to be taken back, {self.tokens} were taken")
        if tokens:
            self._untake(tokens)
            self._unfill()

    def forced(self) -> tuple[int, ...]:
        """Ids that spell what has to follow; none where more than one text can, or the grammar cannot tell in bounded time."""
        return self._matcher.forced() if self._grammar.forces else ()

    def follow(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first on, may follow one another here. `prepare` fills the masks after these too."""
        taken = 0
        for token in drafts:
            if not self._take(token):
                break
            taken += 1
        self._untake(taken)
        self._drafts, self._ahead = tuple(drafts[:taken]), []
        return taken

    def prepare(self) -> None:
        """Fill the masks, as far as that is not done yet: first that of the next token."""
        self._fill_own()
        if self.ready:
            return
        ahead = []
        for token in self._drafts:
            taken = self._take(token)
            assert taken, f"draft {token} was allowed when it was looked at"
            bits = _no_bits(self._grammar)
            self._fill(bits)
            ahead.append(NextIds(bits, self.may_end, self._grammar.vocabulary))
        self._untake(len(ahead))
        # Last of all: from here on others may look.
        self._ahead = ahead

    def again(self, tokens: Sequence[int]) -> "GrammarState":
        """Another state after the same tokens, all that this one took, with its mask. This one's matcher is not touched."""
        assert self._filled, "there is no mask to be kept"
        other = GrammarState(self._grammar)
        for token in tokens:
            other._take(token)
        other._bits, other._filled = self._bits, True
        return other

    @property
    def mask(self) -> Bits:
        """That of the next token, see NextIds. Fills it."""
        self._fill_own()
        return self._bits

    @property
    def next(self) -> NextIds:
        """What may follow. Fills the mask."""
        return NextIds(self.mask, self.may_end, self._grammar.vocabulary)

    @property
    def ahead(self) -> Sequence[NextIds]:
        """What may follow after each draft; empty until that is filled."""
        return self._ahead

    @property
    def may_end(self) -> bool:
        """Whether the output is whole as it is."""
        return self._matcher.may_end()

    def allows_any(self, but: Iterable[int] = ()) -> bool:
        """See NextIds."""
        return self.next.allows_any(but)

    @property
    def complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""
        return self.may_end and not self.allows_any()

    def _take(self, token: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if not 0 <= token < vocabulary.size or self.hides(token) or token in self._unfit():
            return False
        if not self._matcher.accept(token):
            return False
        before = self._spaces[-1] if self._spaces and token in vocabulary.only_spaces else 0
        self._spaces.append(before + vocabulary.trailing_spaces[token])
        self._last_bytes.append(vocabulary.last_bytes[token])
        return True

    def _untake(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)
            del self._last_bytes[-tokens:], self._spaces[-tokens:]

    def _unfill(self) -> None:
        self._filled = self._from_draft = False
        self._drafts, self._ahead = (), []

    def _fill_own(self) -> None:
        if not self._filled:
            self._fill(self._bits)
            self._filled = True

    def _fill(self, bits: Bits) -> None:
        self._matcher.fill(bits)
        unfit = self._unfit()
        if len(unfit):
            clear_bits(bits, unfit)
        if self._grammar.in_json and self._spaces and self._spaces[-1] >= SPACES_MAX:
            self._end_spaces(bits)

    def _end_spaces(self, bits: Bits) -> None:
        """No more whitespace, unless nothing else can follow."""
        without = bits.copy()
        clear_bits(without, self._grammar.vocabulary.spaced)
        if without.any():
            bits[:] = without

    def _unfit(self) -> npt.NDArray[np.int64]:
        """Ids that cannot follow although the matcher may allow them."""
        if not self._last_bytes:
            return self._grammar.vocabulary.not_first
        return self._grammar.vocabulary.no_character_after.get(self._last_bytes[-1], _NONE)


def _no_bits(grammar: CompiledGrammar) -> Bits:
    return np.zeros(bit_words(grammar.vocabulary.size), dtype=np.int32)


def allowed_ids(mask: Bits, vocabulary_size: int) -> npt.NDArray[np.bool_]:
    """A mask as one truth value for each id, [vocabulary_size]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocabulary_size).view(np.bool_)


def clear_bits(mask: Bits, ids: npt.NDArray[np.int64]) -> None:
    """Forbid ids."""
    words = mask.view(np.uint32)
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


def _bit(mask: Bits, place: int) -> int:
    return int(mask[place >> 5]) >> (place & 31) & 1

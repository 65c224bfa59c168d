"""xgrammar behind a few typed calls: a vocabulary, rules compiled for it, and matchers that follow one output.

Only its native part is loaded. The package's own first module imports transformers and torch for helpers that are not used here;
without them it loads in a quarter of a second and needs 40 MB, in a process of its own too. The names used are those of
version 0.2.9, which pyproject.toml pins.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from text.detokeniser import LeadingSpace, TokenBytes
from text.errors import BadGrammar
from text.grammar_rule import GrammarKind, GrammarRule
from text.json_schema import enforced, parse_json

Bits = npt.NDArray[np.int32]

#: Whitespace of JSON, but for the tab.
SPACES = b" \n\r"
#: Bytes that begin a character, with second bytes that do not go on with it (Unicode standard, table 3-7): longer forms of
#: shorter characters, surrogates, and what is beyond the last character.
_NO_SECONDS = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90), 0xF4: range(0x90, 0xC0)}
_NO_CHARACTER = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]|[\xc0\xc1\xf5-\xff]")
_NO_JSON = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
#: Where in the library's own files an error was found; nothing that a client could use.
_ORIGIN = re.compile(r"^(?:\[[\d:]+\] \S+?:\d+: )?(?:Check failed: \(.*?\) is false: )?")


@cache
def _core() -> Any:
    """The library's native classes, loaded once."""
    # Otherwise a helper for torch is compiled and kept in the user's cache folder.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    found = importlib.util.find_spec("xgrammar")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("xgrammar is not installed; it comes with the extra tandem-serving[grammar]")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules.setdefault("xgrammar", package)
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")


def bit_words(vocabulary_size: int) -> int:
    """Length of a mask in words of 32 bits: one bit for each id, and one more that says whether the output may end."""
    return (vocabulary_size + 1 + 31) // 32


class Vocabulary:
    """The bytes of every id, as grammars see them. Safe to use from several threads.

    `size`: columns of the model's logits. Ids in `hidden` show nothing (special ids, end tokens, ids beyond the tokenizer's); no
    grammar ever allows them. Ids in `not_first` show something else at the start of an output than later; they are not allowed
    there. `no_character_after`: for a byte that begins a character, ids that would make none of it, such as a surrogate; the
    library allows some.

    Grammars of JSON have a vocabulary of their own without any control character but line breaks: the library allows them inside
    some strings, where JSON does not.
    """

    def __init__(self, table: TokenBytes, size: int, eos_ids: frozenset[int]) -> None:
        entries = [b"" if token in eos_ids else table[token] for token in range(size)]
        self.size = size
        self.hidden = frozenset(token for token, data in enumerate(entries) if not data)
        self.not_first = _ids(_not_first(table, entries))
        self.no_character_after = {
            lead: _ids(token for token, data in enumerate(entries) if data and data[0] in seconds)
            for lead, seconds in _NO_SECONDS.items()
        }
        #: Ids that begin with whitespace; the last byte of each id; how much whitespace ends it, and whether it is nothing else.
        self.spaced = _ids(token for token, data in enumerate(entries) if data and data[0] in SPACES)
        self.last_bytes = bytes(data[-1] if data else 0 for data in entries)
        self.trailing_spaces = tuple(len(data) - len(data.rstrip(SPACES)) for data in entries)
        self.only_spaces = frozenset(token for token, data in enumerate(entries) if data and not data.strip(SPACES))
        usable = [b"" if _NO_CHARACTER.search(data) else data for data in entries]
        self.text = _handle(usable)
        self.json = _handle([b"" if _NO_JSON.search(data) else data for data in usable])

    @property
    def saved(self) -> str:
        """Everything that `compile_rule` in another process needs, for `SavedVocabulary`."""
        return json.dumps([str(self.text.serialize_json()), str(self.json.serialize_json())])


class SavedVocabulary:
    """A vocabulary in the process that compiles. Raises ValueError when `saved` is none."""

    def __init__(self, saved: str) -> None:
        try:
            self.text, self.json = (_core().TokenizerInfo.deserialize_json(one) for one in json.loads(saved))
        except RuntimeError as wrong:
            raise ValueError(f"no vocabulary: {_words(wrong)}") from None


def _handle(entries: Sequence[bytes]) -> Any:
    # One id more than the model has: the only one that ends an output for the library.
    return _core().TokenizerInfo([*entries, b""], 0, len(entries) + 1, [len(entries)], False)


def _ids(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(ids, dtype=np.int64)


def _not_first(table: TokenBytes, entries: Sequence[bytes]) -> list[int]:
    if table.leading is LeadingSpace.KEEP:
        return []
    if table.leading is LeadingSpace.FIRST_BYTE:
        return [token for token, data in enumerate(entries) if data.startswith(b" ")]
    return [token for token, data in enumerate(entries) if data and table.first[token] != data]


class Matcher:
    """Follows one output. Used by one thread at a time."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def accept(self, token: int) -> bool:
        """Take one more token; False, with nothing changed, when the rule does not allow it."""
        return bool(self._handle.accept_token(token, False))

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens."""
        self._handle.rollback(tokens)

    def may_end(self) -> bool:
        """Whether what was taken is a whole output."""
        return bool(self._handle.is_completed())

    def forced(self) -> tuple[int, ...]:
        """Ids that spell what has to follow, the longest ones that fit; none where something else may follow too.

        Takes as long as what is forced is: see CompiledGrammar.forces.
        """
        return tuple(int(token) for token in self._handle.find_jump_forward_tokens())

    def fill(self, bits: Bits) -> None:
        """Set bit i of `bits`, int32 [bit_words], for each id i that can follow, and bit `size` when the output may end."""
        self._handle.fill_next_token_bitmask(bits, 0, False)


class CompiledGrammar:
    """A rule compiled for one vocabulary. Immutable; may be used from several threads."""

    __slots__ = ("_handle", "forces", "in_json", "size_bytes", "vocabulary")

    def __init__(self, handle: Any, rule: GrammarRule, vocabulary: Vocabulary) -> None:
        self._handle = handle
        self.in_json = _in_json(rule)
        #: Whether `Matcher.forced` may be asked: what follows is never forced for longer than one text in the rule is. It is not
        #: so where repeats are written as numbers, or rules call themselves: the library would go on and on.
        self.forces = rule.kind is GrammarKind.JSON_SCHEMA and not _has_pattern(parse_json(rule.text))
        self.vocabulary = vocabulary
        self.size_bytes = int(handle.memory_size_bytes())

    def matcher(self) -> Matcher:
        """One at the start of an output."""
        return Matcher(_core().GrammarMatcher(self._handle, None, False, -1, None))


def compile_rule(rule: GrammarRule, vocabulary: Vocabulary | SavedVocabulary) -> Any:
    """A rule as the library keeps it. Raises BadGrammar with the library's words about the place.

    Takes as long as it takes, and as much memory: for text that is not trusted see decode_svc.grammar_compiler.
    """
    compiler = _core().GrammarCompiler(_tokens(rule, vocabulary), 1, False, -1, False)
    try:
        if rule.kind is GrammarKind.JSON_SCHEMA:
            compiled = compiler.compile_json_schema(enforced(rule.text), True, None, None, True, None, False)
        elif rule.kind is GrammarKind.JSON_OBJECT:
            compiled = compiler.compile_json_schema('{"type":"object"}', True, None, None, False, None, False)
        elif rule.kind is GrammarKind.REGEX:
            compiled = compiler.compile_regex(rule.text)
        else:
            compiled = compiler.compile_grammar_from_strings(rule.text, "root")
    except (RuntimeError, ValueError) as wrong:
        if "bad_alloc" in str(wrong):
            raise MemoryError from None
        raise BadGrammar(_words(wrong)) from None
    _check_start(compiled)
    return compiled


def save(compiled: Any) -> str:
    """A compiled rule as text, for `load` in another process."""
    return str(compiled.serialize_json())


def load(saved: str, rule: GrammarRule, vocabulary: Vocabulary) -> CompiledGrammar:
    """A compiled rule out of another process. Raises ValueError when it is none for this vocabulary."""
    try:
        handle = _core().CompiledGrammar.deserialize_json(saved, _tokens(rule, vocabulary))
        return CompiledGrammar(handle, rule, vocabulary)
    except RuntimeError as wrong:
        raise ValueError(f"no compiled grammar: {_words(wrong)}") from None


def _tokens(rule: GrammarRule, vocabulary: Vocabulary | SavedVocabulary) -> Any:
    return vocabulary.json if _in_json(rule) else vocabulary.text


def _in_json(rule: GrammarRule) -> bool:
    return rule.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)


def _has_pattern(value: Any) -> bool:
    if isinstance(value, dict):
        return "pattern" in value or any(_has_pattern(each) for each in value.values())
    return isinstance(value, list) and any(_has_pattern(each) for each in value)


def _check_start(compiled: Any) -> None:
    """A rule that allows nothing, or nothing but the empty text, is a mistake."""
    size = int(compiled.tokenizer_info().vocab_size()) - 1
    bits = np.zeros(bit_words(size), dtype=np.int32)
    Matcher(_core().GrammarMatcher(compiled, None, False, -1, None)).fill(bits)
    bits[size >> 5] &= ~np.int32(np.uint32(1 << (size & 31)).astype(np.int32))
    if not bits.any():
        raise BadGrammar("allows no text, or only the empty one")


def _words(wrong: Exception) -> str:
    """What the library says, in one line and without its own places."""
    text = _ORIGIN.sub("", str(wrong).strip())
    return " ".join(text.split())[:400] or type(wrong).__name__

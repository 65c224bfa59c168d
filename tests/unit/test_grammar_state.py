"""Where an output stands in its grammar: masks, ends, taking tokens back. And which text a first token shows."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.grammar_library import SavedVocabulary, Vocabulary, compile_rule, load, save
from engine.grammar_state import SPACES_MAX, GrammarState, allowed_ids, clear_bits
from tests.grammars import compiled, ebnf, regex, schema
from text.detokeniser import LeadingSpace, TokenBytes, plain_table
from text.grammar_rule import GrammarKind, GrammarRule

ENTRIES = (*(bytes([value]) for value in range(256)), b"ab", b"\xe6\x97", b'"}', b" " * 20, b"", b"\xed\xa0\x80")
SIZE = 300  # more columns than the tokenizer has ids
EOS = 257
VOCABULARY = Vocabulary(plain_table(ENTRIES), SIZE, frozenset({EOS}))
CALL = 'root ::= "f(" arg ("," arg)* ")"\narg ::= [a-z]+ | root'


def state(rule: GrammarRule) -> GrammarState:
    return GrammarState(compiled(rule, VOCABULARY))


def allowed(of: GrammarState) -> list[int]:
    return np.flatnonzero(allowed_ids(of.mask, SIZE)).tolist()


def take(of: GrammarState, text: bytes) -> GrammarState:
    assert all(of.advance(byte) for byte in text), text
    return of


def test_a_mask_has_what_can_follow_and_nothing_else() -> None:
    one = state(regex("ab?"))
    assert allowed(one) == [97, 256] and not one.may_end and not one.complete
    assert not one.advance(98) and one.tokens == 0
    take(one, b"a")
    assert allowed(one) == [98] and one.may_end and not one.complete
    assert one.allows_any() and one.allows_any(but=[97, 299]) and not one.allows_any(but=[98, 98])
    take(one, b"b")
    assert allowed(one) == [] and one.complete and not one.allows_any()
    assert not one.advance(97) and not one.advance(-1) and not one.advance(SIZE)


def test_what_shows_nothing_is_never_allowed() -> None:
    free = state(regex("(.|\n)*"))
    hidden = {EOS, 260, *range(len(ENTRIES), SIZE)}
    assert {token for token in range(SIZE) if free.hides(token)} == hidden
    assert not hidden & set(allowed(free)) and free.may_end
    assert not any(free.advance(token) for token in hidden)


@pytest.mark.parametrize(
    ("lead", "seconds", "rest"),
    [
        (0xE0, range(0xA0, 0xC0), b"\x80"),
        (0xED, range(0x80, 0xA0), b"\x80"),
        (0xE1, range(0x80, 0xC0), b"\x80"),
        (0xF0, range(0x90, 0xC0), b"\x80\x80"),
        (0xF4, range(0x80, 0x90), b"\x80\x80"),
    ],
)
@pytest.mark.parametrize("rule", [regex(".+"), schema('{"type": "string", "pattern": "[^x]+"}'), schema('{"type": "string"}')])
def test_half_a_character_becomes_a_whole_one(rule: GrammarRule, lead: int, seconds: range, rest: bytes) -> None:
    free = state(rule)
    if rule.kind is GrammarKind.JSON_SCHEMA:
        take(free, b'"')
    assert lead in allowed(free) and not {0xC0, 0xC1, 0xF5, 0xFF, 261} & set(allowed(free))
    take(free, bytes([lead]))
    assert allowed(free) == list(seconds)
    assert not free.advance(seconds.start - 1) and not free.advance(seconds.stop)
    take(free, bytes([seconds[0]]) + rest)


@pytest.mark.slow
@given(text=st.lists(st.sampled_from([*b"f(ab,)", 256]), max_size=12), back=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_taking_tokens_back_is_as_if_they_had_never_been_taken(text: list[int], back: int) -> None:
    one, taken = state(ebnf(CALL)), list[int]()
    masks = [one.mask.copy()]
    for token in text:
        if one.advance(token):
            taken.append(token)
            masks.append(one.mask.copy())
    back = min(back, len(taken))
    one.rollback(back)
    assert one.tokens == len(taken) - back and (one.mask == masks[len(taken) - back]).all()
    for token, mask in zip(taken[len(taken) - back :], masks[len(taken) - back + 1 :], strict=True):
        assert one.advance(token) and (one.mask == mask).all()
    with pytest.raises(ValueError, match="taken"):
        one.rollback(len(taken) + 1)


@pytest.mark.slow
@given(
    text=st.lists(st.sampled_from([*b"f(ab,)", 256]), max_size=8),
    drafts=st.lists(st.sampled_from([*b"f(ab,)", 256, EOS, SIZE, -1]), max_size=8),
    right=st.integers(0, 8),
)
@settings(max_examples=80, deadline=None)
def test_masks_after_drafts_are_those_of_an_output_that_took_them(text: list[int], drafts: list[int], right: int) -> None:
    one, plain = state(ebnf(CALL)), state(ebnf(CALL))
    for token in text:
        assert one.advance(token) == plain.advance(token)
    before = one.tokens
    count = one.follow(drafts)
    assert one.tokens == before and (not one.ready or not count)
    one.prepare()
    assert one.ready and one.tokens == before and len(one.ahead) == count
    assert (one.mask == plain.mask).all() and one.may_end == plain.may_end
    masks = list(one.ahead)
    for place, token in enumerate(drafts[:count]):
        if place == right:
            break
        assert one.advance(token) and plain.advance(token)
        assert one.ready and one.from_draft and (one.mask == plain.mask).all() and (one.mask == masks[place].mask).all()
        assert one.may_end == plain.may_end == masks[place].may_end
    if right >= count < len(drafts):
        assert not one.follow(drafts[count:]), "drafts end where the grammar refuses one"
    for other in (*b"(,)f", 256):
        if other not in drafts[right : right + 1] and plain.advance(other):
            assert one.advance(other) and not one.from_draft
            break
    assert one.tokens == plain.tokens and (one.mask == plain.mask).all()


def test_drafts_end_at_the_first_token_that_is_refused() -> None:
    one = take(state(regex("ab(cd)*")), b"a")
    assert one.follow([*b"bcdxcd"]) == 3 and one.follow([*b"xb"]) == 0
    assert one.follow([98, EOS]) == 1
    one.prepare()
    assert [next_ids.may_end for next_ids in one.ahead] == [True]
    assert one.follow(()) == 0 and one.ready and one.ahead == []
    assert one.follow([*b"bc"]) == 2
    one.prepare()
    assert one.advance(98) and one.from_draft
    one.rollback(1)
    assert allowed(one) == [98] and not one.ahead


def test_another_state_takes_the_place_of_one_that_is_at_its_drafts() -> None:
    one = take(state(schema('{"type": "array", "items": {"enum": ["x", 1]}}')), b'["x",')
    mask = one.mask
    one.follow([*b"1,1]"])
    assert one.filled and not one.ready
    other = one.again(tuple(b'["x",'))
    assert other.ready and other.tokens == one.tokens and other.mask is mask
    assert other.advance(ord("1")) and not other.from_draft and {ord(","), ord("]")} <= set(allowed(other))


def test_what_a_schema_forces_is_told_and_nothing_that_has_no_end() -> None:
    first = '{"first": {"enum": ["abc", "abd"]}}'
    names = f'{{"type": "object", "properties": {first}, "required": ["first"], "additionalProperties": false}}'
    one = take(state(schema(names)), b'{"')
    assert one.forced() == tuple(b"first") and one.tokens == 2, "the quote is left out: it is the front of another token"
    assert take(one, b"fi").forced() == tuple(b"rst")
    assert take(one, b'rst"').forced() == ()
    assert take(one, b':"').forced() == (256,), "ab, and then it may be one or the other"
    for rule in (ebnf('root ::= "ab" root'), regex("(abc){9}"), schema('{"type": "string", "pattern": "^(abc){9}$"}')):
        assert state(rule).forced() == ()


def test_control_characters_are_in_no_json() -> None:
    """The library itself allows them in strings whose length is limited."""
    one = state(schema('{"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}'))
    take(one, b'{\n"a":\r"')
    inside = allowed(one)
    assert not set(inside) & set(range(32)) and ord("x") in inside and ord('"') in inside
    free = state(GrammarRule(GrammarKind.JSON_OBJECT))
    assert allowed(free) == [ord("{")]
    assert not set(allowed(take(free, b'{"'))) & set(range(32))


def test_whitespace_in_a_row_ends() -> None:
    one = take(state(GrammarRule(GrammarKind.JSON_OBJECT)), b"{")
    assert ord(" ") in allowed(one) and 259 in allowed(one)
    for token in (259, 10, 259):
        assert one.advance(token)
    assert one.tokens == 4 and allowed(one) == [ord('"'), ord("}"), 258]
    one.rollback(1)
    assert ord(" ") in allowed(one)
    # Where nothing else can follow it goes on.
    const = take(state(schema(f'{{"const": "{" " * 50}"}}')), b'"' + b" " * (SPACES_MAX + 2))
    assert allowed(const) == [ord(" ")]


@pytest.mark.parametrize("leading", [LeadingSpace.FIRST_BYTE, LeadingSpace.FIRST_TOKEN])
def test_a_first_token_shows_what_the_grammar_took(leading: LeadingSpace) -> None:
    entries = (b" a", b"a", b" ", b"b")
    first = (b"a", b"a", b"", b"b") if leading is LeadingSpace.FIRST_TOKEN else entries
    vocabulary = Vocabulary(TokenBytes(entries, leading, first), 4, frozenset())
    one = GrammarState(compiled(regex(" ?a a"), vocabulary))
    assert np.flatnonzero(allowed_ids(one.mask, 4)).tolist() == [1]
    assert not one.advance(0) and one.advance(1)
    assert np.flatnonzero(allowed_ids(one.mask, 4)).tolist() == [0, 2]


def test_a_compiled_grammar_travels_between_processes() -> None:
    rule = schema('{"type": "array", "items": {"enum": ["x", 1, null]}}')
    there = SavedVocabulary(VOCABULARY.saved)
    here = GrammarState(compiled(rule, VOCABULARY))
    travelled = GrammarState(load(save(compile_rule(rule, there)), rule, VOCABULARY))
    for byte in b'["x",1]':
        assert (here.mask == travelled.mask).all()
        assert here.advance(byte) and travelled.advance(byte)
    assert here.complete and travelled.complete
    with pytest.raises(ValueError, match="no compiled grammar"):
        load("{}", rule, VOCABULARY)
    with pytest.raises(ValueError, match="no vocabulary"):
        SavedVocabulary('["x", "y"]')


@pytest.mark.slow
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=40))
def test_bits_are_cleared_one_by_one(ids: Sequence[int]) -> None:
    mask = np.full(10, -1, dtype=np.int32)
    clear_bits(mask, np.array(ids, dtype=np.int64))
    assert set(np.flatnonzero(~allowed_ids(mask, SIZE)).tolist()) == set(ids)

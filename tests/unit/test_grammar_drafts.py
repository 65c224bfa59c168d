"""Drafts of what a grammar forces: each stretch is asked for once, and the model may cut it into other tokens."""

from functools import partial

from decode_svc.drafts import GrammarDrafts, Wish
from engine.grammar_library import Vocabulary
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceSpec, StopSpec
from lifecycle.record import AttemptKey
from tests.grammars import compiled, schema
from text.detokeniser import Detokeniser, plain_table

ENTRIES = (*(bytes([value]) for value in range(256)), b"abc", b"ab")
VOCABULARY = Vocabulary(plain_table(ENTRIES), len(ENTRIES), frozenset())


def sequence(text: str | None) -> Sequence:
    """One in which the opening quote waits to be fed."""
    made = SequenceSpec(
        key=AttemptKey("r", 1),
        index=0,
        prompt_token_ids=(1,),
        sampling=SamplingParams(temperature=0.0),
        stop=StopSpec(),
        max_output_tokens=30,
        context_tokens=100,
        grammar=None if text is None else compiled(schema(text), VOCABULARY),
    )
    one = Sequence(made, partial(Detokeniser, plain_table(ENTRIES)))
    one.completed(1)
    choose(one, ord('"'))
    return one


def choose(one: Sequence, *tokens: int) -> None:
    for token in tokens:
        if one.waiting:
            one.completed(1)
        assert one.choose(token, 0.0).ending is None


def test_a_stretch_is_asked_for_once_and_drafted_in_parts() -> None:
    one, asked = sequence('{"const": "abcabcxyz"}'), GrammarDrafts()
    assert asked.propose([Wish(3, one, 2)]) == {3: (256, 256)}
    choose(one, 256, 256)
    assert asked.propose([Wish(3, one, 9)]) == {3: tuple(b'xyz"')}
    choose(one, *b"xy")
    assert asked.propose([Wish(3, one, 9)]) == {3: tuple(b'z"')}
    assert asked._forced[3].first == 2, "the first answer is still the one that counts"
    asked.forget(3)
    asked.forget(3)
    assert asked.propose([Wish(3, one, 9)]) == {3: tuple(b'z"')} and asked._forced[3].first == one.tokens


def test_other_tokens_for_the_same_text_are_as_good() -> None:
    one, asked = sequence('{"enum": ["abcabcx", "abcabcy"]}'), GrammarDrafts()
    assert asked.propose([Wish(0, one, 9)]) == {0: (256, 256)}
    choose(one, 257)
    assert asked.propose([Wish(0, one, 9)]) == {0: (ord("c"), 256)}
    choose(one, ord("c"), 256)
    assert asked.propose([Wish(0, one, 9)]) == {}


def test_without_a_grammar_there_is_nothing() -> None:
    assert GrammarDrafts().propose([Wish(0, sequence(None), 9)]) == {}

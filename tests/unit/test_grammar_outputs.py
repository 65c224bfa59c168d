"""Outputs under random schemas and random logits: every one that ends by itself is what its schema asks for."""

import json
import re
from functools import partial

import jsonschema
import numpy as np
import pytest
import torch

from engine.grammar_library import CompiledGrammar, Vocabulary
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceSpec, StopSpec
from lifecycle.finish import FinishReason
from lifecycle.record import AttemptKey
from tests.grammars import compiled, ebnf, regex, schema
from tests.random_schemas import SchemaMaker, text_of
from text.detokeniser import Detokeniser, plain_table
from text.errors import BadGrammar

#: Every byte, words of JSON that cross its borders, halves of characters, and what shows nothing.
WORDS = (
    *(b'{"', b'":', b'": ', b'",', b'", "', b'"}', b"}}", b"],", b"[[", b"[]", b"{}", b"null", b"true", b"false", b", ", b'"a"'),
    *(
        b"name",
        b"\n  ",
        b"12",
        b"0.",
        b"-",
        b"e+1",
        "é".encode(),
        b"\xe6\x97",
        b"\xa5",
        b"\xed",
        b"\xa0\x80",
        b"x\ty",
        b'\\"',
        b"\\n",
    ),
)
ENTRIES = (*(bytes([value]) for value in range(256)), *WORDS, b"", b"")
EOS = len(ENTRIES) - 1
FINISHED = {FinishReason.EOS, FinishReason.GRAMMAR_COMPLETE}
OUTPUT_TOKENS = 300


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(plain_table(ENTRIES), len(ENTRIES), frozenset({EOS}))


def output(grammar: CompiledGrammar, seed: int, most: int = OUTPUT_TOKENS) -> tuple[str, FinishReason]:
    """The text under random logits, which like to close what is open, and how it ended."""
    spec = SequenceSpec(
        key=AttemptKey("r", 1),
        index=0,
        prompt_token_ids=(1,),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        stop=StopSpec(eos_ids=frozenset({EOS})),
        max_output_tokens=most,
        context_tokens=10_000,
        grammar=grammar,
    )
    sequence = Sequence(spec, partial(Detokeniser, plain_table(ENTRIES)))
    sampler, source = Sampler(len(ENTRIES)), np.random.default_rng(seed)
    text = b""
    while sequence.ending is None:
        sequence.completed(1)
        logits = source.normal(size=(1, len(ENTRIES))).astype(np.float32)
        logits[0, list(b'"}]0')] += 4.0
        logits[0, EOS] += 2.0
        assert not sequence.stuck, (text, "nothing can follow")
        token = sampler.choose(torch.from_numpy(logits), [sequence.sample_row()])[0]
        assert isinstance(token, int), (text, token)
        text += sequence.choose(token, 0.0).text
    return text.decode(), sequence.ending.reason


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_finished_output_parses_and_validates(vocabulary: Vocabulary, part: int) -> None:
    finished = 0
    for number in range(part * 50, part * 50 + 50):
        wanted = SchemaMaker(number).schema()
        grammar = compiled(schema(text_of(wanted)), vocabulary)
        validator = jsonschema.Draft202012Validator(wanted)
        text, reason = output(grammar, number)
        if reason in FINISHED:
            finished += 1
            found = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not found, (number, wanted, text, found)
        else:
            assert reason is FinishReason.MAX_OUTPUT_TOKENS, (number, text)
    assert finished >= 35, "too few outputs came to an end to show anything"


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    ["a+b?", "[a-f]{2,5}(x|yz)", "(\\d{1,3}\\.){3}\\d{1,3}", "[^b]{3}", ".{4}", "é+|日本*", "x{0,3}y"],
)
def test_every_output_matches_its_regular_expression(vocabulary: Vocabulary, pattern: str) -> None:
    grammar = compiled(regex(pattern), vocabulary)
    for seed in range(4):
        text, reason = output(grammar, seed, 60)
        assert reason not in FINISHED or re.fullmatch(pattern, text, re.ASCII | re.DOTALL), text
    assert reason in FINISHED or "+" in pattern


@pytest.mark.slow
def test_every_output_is_a_sentence_of_its_grammar(vocabulary: Vocabulary) -> None:
    sums = ebnf('root ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" root ")"')
    grammar = compiled(sums, vocabulary)
    finished = 0
    for seed in range(12):
        text, reason = output(grammar, seed, 60)
        if reason in FINISHED:
            finished += 1
            assert re.fullmatch(r"[0-9+()]+", text) and text.count("(") == text.count(")")
            assert not re.search(r"[0-9]{3}|\+\+|\(\)|\+$|\(\+|\+\)|[0-9]\(|\)[0-9(]|^\+", text)
    assert finished >= 3


def test_what_allows_no_text_is_bad(vocabulary: Vocabulary) -> None:
    for rule in (regex("()"), ebnf("root ::= root"), ebnf('root ::= ""')):
        with pytest.raises(BadGrammar, match="no text"):
            compiled(rule, vocabulary)

"""Compilers of grammars for tests: one that compiles in the test's own process, one whose compiles a test holds."""

import asyncio
from collections.abc import Callable
from functools import cache

from decode_svc.grammar_compiler import CompileLimits
from engine.grammar_library import CompiledGrammar, Vocabulary, compile_rule, load, save
from text.detokeniser import plain_table
from text.grammar_rule import GrammarKind, GrammarRule


def compiled(rule: GrammarRule, vocabulary: Vocabulary) -> CompiledGrammar:
    """As it comes out of the process that compiles."""
    return load(save(compile_rule(rule, vocabulary)), rule, vocabulary)


@cache
def bytes_vocabulary(size: int) -> Vocabulary:
    """Ids are bytes as long as these are ASCII; the others show nothing."""
    return Vocabulary(plain_table([bytes([token]) if token < 128 else b"" for token in range(size)]), size, frozenset())


class CompilerHere:
    """Without a process of its own. `rules`: what it was asked for."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self.rules: list[GrammarRule] = []

    async def compile(self, rule: GrammarRule) -> CompiledGrammar:
        """See decode_svc.grammars.Compiler."""
        self.rules.append(rule)
        self._vocabulary = self._vocabulary or self._make_vocabulary()
        return compiled(rule, self._vocabulary)

    async def close(self) -> None:
        """See decode_svc.grammars.Compiler."""


class HeldCompiler(CompilerHere):
    """Compiles when `go` is set. `begun`: a compile waits for that; `cancelled`: how many were given up."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits) -> None:
        super().__init__(make_vocabulary, limits)
        self.go, self.begun = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def compile(self, rule: GrammarRule) -> CompiledGrammar:
        """See CompilerHere."""
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().compile(rule)


def regex(text: str) -> GrammarRule:
    return GrammarRule(GrammarKind.REGEX, text)


def ebnf(text: str) -> GrammarRule:
    return GrammarRule(GrammarKind.EBNF, text)


def schema(text: str) -> GrammarRule:
    return GrammarRule(GrammarKind.JSON_SCHEMA, text)

"""Compiled grammars that are kept: found, joined, given up, dropped; and the process that compiles them."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from decode_svc.grammar_compiler import CHILD, ChildCompiler, CompileLimits, GrammarCostly
from decode_svc.grammars import GrammarBusy, GrammarLimits, GrammarNews, Grammars
from engine.grammar_library import Vocabulary
from engine.grammar_state import GrammarState
from tests.grammars import ebnf, regex, schema
from text.detokeniser import plain_table
from text.errors import BadGrammar
from text.grammar_rule import GrammarRule


@dataclass
class Thing:
    """Stands for a compiled grammar."""

    size_bytes: int


class Scripted:
    """`bad`, `costly`: texts that are. Others are as large as their text is long."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()

    async def compile(self, rule: GrammarRule) -> Thing:
        self.asked.append(rule.text)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if rule.text == "bad":
            raise BadGrammar("is bad")
        if rule.text == "costly":
            raise GrammarCostly("takes too long")
        return Thing(len(rule.text))

    async def close(self) -> None:
        self.asked.append("closed")


class Told(list[object]):
    def news(self) -> GrammarNews:
        return GrammarNews(self.append, lambda outcome, seconds: self.append((outcome, seconds >= 0)))


def grammars(compiler: Scripted, told: Told, **limits: int) -> Grammars:
    return Grammars(compiler, GrammarLimits(**limits), told.news(), lambda: 0.0)  # type: ignore[arg-type]


async def test_a_grammar_is_compiled_once() -> None:
    compiler, told = Scripted(), Told()
    made = grammars(compiler, told)
    first = await made.get(regex("a"))
    assert await made.get(regex("a")) is first and await made.get(ebnf("a")) is not first
    assert compiler.asked == ["a", "a"] and told == ["miss", ("ok", True), "hit", "miss", ("ok", True)]
    await made.close()
    assert compiler.asked[-1] == "closed"


async def test_what_is_kept_is_bounded_in_number_and_bytes() -> None:
    compiler = Scripted()
    made = grammars(compiler, Told(), entries=3, kept_bytes=10)
    for text in ("aaa", "bbb", "ccc"):
        await made.get(regex(text))
    assert (len(made), made.kept_bytes) == (3, 9)
    await made.get(regex("aaa"))
    await made.get(regex("dd"))  # drops the one used least recently
    assert (len(made), made.kept_bytes) == (3, 8)
    await made.get(regex("aaa"))
    assert compiler.asked == ["aaa", "bbb", "ccc", "dd"]
    await made.get(regex("e" * 9))
    assert (len(made), made.kept_bytes) == (1, 9)
    await made.get(regex("f" * 11))
    assert (len(made), made.kept_bytes) == (0, 0)


async def test_what_is_bad_is_remembered_and_what_was_costly_is_tried_again() -> None:
    compiler, told = Scripted(), Told()
    made = grammars(compiler, told, entries=2)
    for _ in range(2):
        with pytest.raises(BadGrammar, match="is bad"):
            await made.get(regex("bad"))
        with pytest.raises(GrammarCostly, match="too long"):
            await made.get(regex("costly"))
    assert compiler.asked == ["bad", "costly", "costly"]
    assert told == ["miss", ("bad", True), "miss", ("costly", True), "hit", "miss", ("costly", True)]
    assert made.compiling == 0


async def test_whoever_asks_meanwhile_waits_for_the_same_compile() -> None:
    compiler, told = Scripted(), Told()
    compiler.go.clear()
    made = grammars(compiler, told, waiting=2)
    asking = [asyncio.create_task(made.get(regex(text))) for text in ("a", "a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusy, match="at most 2"):
        await made.get(regex("c"))
    asking[0].cancel()
    await asyncio.wait([asking[0]])
    assert compiler.cancelled == 0, "somebody else still waits"
    asking[2].cancel()
    await asyncio.wait([asking[2]])
    compiler.go.set()
    assert await asking[1] == Thing(1)
    assert compiler.cancelled == 1 and made.compiling == 0 and compiler.asked == ["a", "b"]
    assert told[:4] == ["miss", "joined", "miss", "busy"] and ("cancelled", True) in told


async def test_who_asks_after_a_compile_was_given_up_begins_anew() -> None:
    compiler = Scripted()
    compiler.go.clear()
    made = grammars(compiler, Told(), waiting=1)
    asking = asyncio.create_task(made.get(regex("a")))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    compiler.go.set()
    assert await made.get(regex("a")) == Thing(1)


VOCABULARY = Vocabulary(plain_table([bytes([value]) for value in range(256)]), 256, frozenset())
#: Counted repetitions of counted repetitions: compiles for very long.
SLOW = "root ::= " + " ".join(f"([a-z]{{1,{n}}} [0-9]{{0,{n}}}){{1,900}}" for n in range(400, 420))


@pytest.mark.slow
async def test_a_child_compiles_and_lives_on() -> None:
    compiler = ChildCompiler(lambda: VOCABULARY, CompileLimits())
    try:
        one = GrammarState(await compiler.compile(regex("ab")))
        assert one.advance(97) and one.advance(98) and one.complete
        child = compiler._child
        assert child is not None
        for rule, says in (
            (regex("a(b"), "position 4"),
            (ebnf("root ::= x"), "line 1, column 10"),
            (schema("false"), "any value"),
        ):
            with pytest.raises(BadGrammar, match=says):
                await compiler.compile(rule)
        GrammarState(await compiler.compile(schema('{"type": "object"}')))
        assert compiler._child is child and child.returncode is None
    finally:
        await compiler.close()
    assert child.returncode is not None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["too long", "cancelled", "too large", "dead"])
async def test_a_child_that_does_not_answer_is_ended_and_the_next_one_is_there(how: str) -> None:
    limits = CompileLimits(compile_s=0.3) if how == "too long" else CompileLimits(compile_s=60.0)
    compiler = ChildCompiler(lambda: VOCABULARY, CompileLimits(limits.compile_s, compiled_bytes=20_000))
    try:
        await compiler.compile(regex("a"))
        child = compiler._child
        assert child is not None
        if how == "too large":
            with pytest.raises(GrammarCostly, match="at most 20000"):
                await compiler.compile(schema(json.dumps({"enum": [f"value {n}" for n in range(500)]})))
            assert compiler._child is child
            return
        if how == "too long":
            with pytest.raises(GrammarCostly, match=r"more than 0\.3 s"):
                await compiler.compile(ebnf(SLOW))
        elif how == "cancelled":
            task = asyncio.create_task(compiler.compile(ebnf(SLOW)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        else:
            child.kill()
            await child.wait()
            GrammarState(await compiler.compile(regex("b")))
        assert child.returncode is not None
        one = GrammarState(await compiler.compile(regex("b")))
        assert one.advance(98) and compiler._child is not child
    finally:
        await compiler.close()


@pytest.mark.slow
async def test_memory_beyond_the_limit_costs_the_child_only() -> None:
    compiler = ChildCompiler(lambda: VOCABULARY, CompileLimits(30.0, 400 * 1024**2))
    try:
        with pytest.raises(GrammarCostly):
            await compiler.compile(ebnf(SLOW))
        GrammarState(await compiler.compile(regex("b")))
    finally:
        await compiler.close()


@pytest.mark.slow
async def test_a_child_that_dies_as_it_starts_is_started_again(tmp_path: Path) -> None:
    """The first start of two ends at once, and of another compiler every one."""
    once, never = tmp_path / "once", tmp_path / "never"
    once.write_text(f'#!/bin/sh\nmkdir {tmp_path}/seen 2>/dev/null && exit 3\nexec {" ".join(CHILD)} "$@"\n')
    never.write_text("#!/bin/sh\nexit 3\n")
    for program in (once, never):
        program.chmod(0o700)
    compiler = ChildCompiler(lambda: VOCABULARY, CompileLimits(), [str(once)])
    try:
        assert await compiler.compile(regex("[ab]"))
    finally:
        await compiler.close()
    compiler = ChildCompiler(lambda: VOCABULARY, CompileLimits(), [str(never)])
    with pytest.raises(GrammarCostly, match="the compiler does not start"):
        await compiler.compile(regex("[ab]"))
    await compiler.close()


async def test_a_tokenizer_without_a_table_has_no_grammars() -> None:
    def none() -> Vocabulary:
        raise BadGrammar("cannot be used with this model: no table")

    compiler = ChildCompiler(none, CompileLimits())
    with pytest.raises(BadGrammar, match="no table"):
        await compiler.compile(regex("a"))
    assert compiler._child is None

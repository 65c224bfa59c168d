"""Compiles grammars in a child process, one at a time, within a time and a memory."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from engine.grammar_child import BAD, COMPILED, LENGTH, pack_rule
from engine.grammar_library import CompiledGrammar, Vocabulary, load
from text.errors import BadGrammar
from text.grammar_rule import GrammarRule

_LOG = logging.getLogger("decode.grammar")

#: For the child to be there, the first time and after it was killed, in seconds.
START_S = 30.0
#: A compiled grammar as text is at most so many times as long as it is in memory.
SAVED_PER_BYTE = 8


class GrammarCostly(Exception):
    """The grammar takes more time or memory than it may. The text names the limit."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Of one compile: `compile_s` seconds, `memory_bytes` of the child's address space, `compiled_bytes` of what comes of it."""

    compile_s: float = 3.0
    memory_bytes: int = 2 * 1024**3
    compiled_bytes: int = 64 * 1024**2


class ChildCompiler:
    """Starts its child with the first grammar. Lives on the event loop."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits) -> None:
        """`make_vocabulary` is called once, in a thread. It raises BadGrammar for a model that grammars cannot be used with."""
        self._make_vocabulary = make_vocabulary
        self._limits = limits
        self._vocabulary: Vocabulary | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def compile(self, rule: GrammarRule) -> CompiledGrammar:
        """Raises BadGrammar, or GrammarCostly. Cancelling it ends the child's work."""
        async with self._turn:
            try:
                vocabulary, child = await self._ready()
                answer = await self._asked(child, rule)
            except BaseException:
                await self._kill()
                raise
        kind, said = answer[:1], answer[1:].decode()
        if kind == BAD:
            raise BadGrammar(said)
        if kind != COMPILED:
            raise GrammarCostly(said)
        return await asyncio.to_thread(load, said, rule, vocabulary)

    async def close(self) -> None:
        """No child is left."""
        await self._kill()

    async def _ready(self) -> tuple[Vocabulary, asyncio.subprocess.Process]:
        if self._vocabulary is None:
            self._vocabulary = await asyncio.to_thread(self._make_vocabulary)
        if self._child is not None and self._child.returncode is None:
            return self._vocabulary, self._child
        limits = self._limits
        self._child = child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.grammar_child"),
            *(str(limits.compile_s), str(limits.memory_bytes), str(limits.compiled_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        saved = await asyncio.to_thread(lambda vocabulary: vocabulary.saved, self._vocabulary)
        try:
            async with asyncio.timeout(START_S):
                await self._exchange(child, saved.encode())
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as failed:
            _LOG.error("the process that compiles grammars does not start: %r", failed)
            raise GrammarCostly("cannot be compiled here now: the compiler does not start") from None
        return self._vocabulary, child

    async def _asked(self, child: asyncio.subprocess.Process, rule: GrammarRule) -> bytes:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.compile_s):
                return await self._exchange(child, pack_rule(rule))
        except TimeoutError:
            raise GrammarCostly(f"takes more than {limits.compile_s:g} s to compile") from None
        except (OSError, asyncio.IncompleteReadError):
            raise GrammarCostly(f"cannot be compiled within {limits.memory_bytes} bytes of memory") from None

    async def _exchange(self, child: asyncio.subprocess.Process, request: bytes) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(LENGTH.pack(len(request)) + request)
        await child.stdin.drain()
        (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        if size > SAVED_PER_BYTE * self._limits.compiled_bytes:
            raise GrammarCostly(f"takes {size} bytes when compiled, as text")
        return await child.stdout.readexactly(size)

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        if child.stdin is not None:
            child.stdin.close()

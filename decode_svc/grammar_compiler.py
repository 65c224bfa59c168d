"""Compiles grammars in a child process, one at a time, within a time and a memory."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.grammar_child import BAD, COMPILED, LENGTH, pack_rule
from engine.grammar_library import CompiledGrammar, Vocabulary, load
from text.errors import BadGrammar
from text.grammar_rule import GrammarRule

_LOG = logging.getLogger("decode.grammar")

#: For the child to be there, the first time and after it was killed, in seconds.
START_S = 30.0
#: Starts of a child that ends before it says anything: between fork and exec of a process with threads of gRPC it may die of what
#: is not its fault.
STARTS = 3
#: The program of the child, before its limits.
CHILD = (sys.executable, "-m", "engine.grammar_child")
#: A compiled grammar as text is at most so many times as long as it is in memory.
SAVED_PER_BYTE = 8
#: What a child's end shows as; RuntimeError where uvloop has closed the pipe already.
_DIED = (OSError, asyncio.IncompleteReadError, RuntimeError)


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

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limits: CompileLimits, program: Sequence[str] = CHILD) -> None:
        """`make_vocabulary` is called once, in a thread. It raises BadGrammar for a model that grammars cannot be used with."""
        self._program = tuple(program)
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
        saved = await asyncio.to_thread(lambda vocabulary: vocabulary.saved.encode(), self._vocabulary)
        for number in range(1, STARTS + 1):
            child = await self._started()
            try:
                async with asyncio.timeout(START_S):
                    await self._exchange(child, saved)
                return self._vocabulary, child
            except TimeoutError:
                _LOG.error("the process that compiles grammars did not start within %g s", START_S)
                break
            except _DIED as failed:
                await self._kill()
                _LOG.warning("the process that compiles grammars ended with %s, start %d: %r", child.returncode, number, failed)
        raise GrammarCostly("cannot be compiled here now: the compiler does not start")

    async def _started(self) -> asyncio.subprocess.Process:
        limits = self._limits
        self._child = child = await asyncio.create_subprocess_exec(
            *self._program,
            *(str(limits.compile_s), str(limits.memory_bytes), str(limits.compiled_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return child

    async def _asked(self, child: asyncio.subprocess.Process, rule: GrammarRule) -> bytes:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.compile_s):
                return await self._exchange(child, pack_rule(rule))
        except TimeoutError:
            raise GrammarCostly(f"takes more than {limits.compile_s:g} s to compile") from None
        except _DIED:
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

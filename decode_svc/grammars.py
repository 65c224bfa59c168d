"""The compiled grammars of a decode member: each is compiled once, by whoever asks first, and kept while there is room."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decode_svc.grammar_compiler import CompileLimits, GrammarCostly
from engine.grammar_library import CompiledGrammar, Vocabulary
from rpc import clocks
from telemetry.decode_metrics import DecodeMetrics
from text.detokeniser import TokenBytes
from text.errors import BadGrammar, UnsupportedModel
from text.grammar_rule import GrammarRule


class GrammarBusy(Exception):
    """Too many grammars wait to be compiled."""


class Compiler(Protocol):
    """Compiles one rule. Raises BadGrammar, or GrammarCostly."""

    async def compile(self, rule: GrammarRule) -> CompiledGrammar: ...

    async def close(self) -> None: ...


class TokenTable(Protocol):
    """What grammars need of a tokenizer. `token_bytes` raises UnsupportedModel where there is no such table."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def token_bytes(self) -> TokenBytes: ...


#: Makes a compiler from what makes its vocabulary, and its limits.
MakeCompiler = Callable[[Callable[[], Vocabulary], CompileLimits], Compiler]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """`entries`, `kept_bytes`: of compiled grammars that are kept. `waiting`: grammars being compiled or waiting for it."""

    entries: int = 256
    kept_bytes: int = 256 * 1024**2
    waiting: int = 16
    compile: CompileLimits = field(default_factory=CompileLimits)


@dataclass(frozen=True, slots=True)
class GrammarNews:
    """Who is told: `looked_up` with hit, joined, miss or busy; `compiled` with the outcome and the seconds; `opened` with how the
    grammar of a seat is written."""

    looked_up: Callable[[str], None] = lambda outcome: None
    compiled: Callable[[str, float], None] = lambda outcome, seconds: None
    opened: Callable[[str], None] = lambda kind: None


class _Compiling:
    """One compile, and how many wait for it."""

    def __init__(self, task: asyncio.Task[CompiledGrammar]) -> None:
        self.task = task
        self.waiting = 0


class Grammars:
    """Lives on the event loop. A grammar that sequences use stays with them, kept here or not."""

    def __init__(self, compiler: Compiler, limits: GrammarLimits, news: GrammarNews, clock: Callable[[], float]) -> None:
        self._compiler = compiler
        self._limits = limits
        self._news = news
        self._clock = clock
        self._kept: OrderedDict[GrammarRule, CompiledGrammar] = OrderedDict()
        self._bad: OrderedDict[str, str] = OrderedDict()
        self._compiling: dict[GrammarRule, _Compiling] = {}
        self.kept_bytes = 0

    def __len__(self) -> int:
        """Grammars that are kept."""
        return len(self._kept)

    @property
    def compiling(self) -> int:
        """Grammars that are being compiled or wait for it."""
        return len(self._compiling)

    async def get(self, rule: GrammarRule) -> CompiledGrammar:
        """The compiled grammar. Raises BadGrammar, GrammarCostly or GrammarBusy. When nobody waits any more, the compile ends."""
        kept = self._kept.get(rule)
        if kept is not None:
            self._kept.move_to_end(rule)
            self._news.looked_up("hit")
            return kept
        if (problem := self._bad.get(rule.digest)) is not None:
            self._bad.move_to_end(rule.digest)
            self._news.looked_up("hit")
            raise BadGrammar(problem)
        return await self._joined(rule)

    def opened(self, rule: GrammarRule) -> None:
        """A seat is opened with a grammar."""
        self._news.opened(rule.kind.value)

    async def close(self) -> None:
        """Nothing is compiled any more."""
        tasks = [one.task for one in self._compiling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._compiler.close()

    async def _joined(self, rule: GrammarRule) -> CompiledGrammar:
        compiling = self._compiling.get(rule)
        if compiling is None:
            if len(self._compiling) >= self._limits.waiting:
                self._news.looked_up("busy")
                raise GrammarBusy(f"{len(self._compiling)} grammars are being compiled; at most {self._limits.waiting} may wait")
            self._news.looked_up("miss")
            compiling = _Compiling(asyncio.create_task(self._compile(rule), name="compile a grammar"))
            self._compiling[rule] = compiling
            compiling.task.add_done_callback(lambda task: self._done(rule, task))
        else:
            self._news.looked_up("joined")
        compiling.waiting += 1
        try:
            return await asyncio.shield(compiling.task)
        finally:
            compiling.waiting -= 1
            if not compiling.waiting and not compiling.task.done():
                compiling.task.cancel()
                # Who asks from here on begins anew.
                if self._compiling.get(rule) is compiling:
                    del self._compiling[rule]

    def _done(self, rule: GrammarRule, task: "asyncio.Task[CompiledGrammar]") -> None:
        found = self._compiling.get(rule)
        if found is not None and found.task is task:
            del self._compiling[rule]
        if not task.cancelled():
            task.exception()  # whoever waited was told

    async def _compile(self, rule: GrammarRule) -> CompiledGrammar:
        began, outcome = self._clock(), "cancelled"
        try:
            compiled = await self._compiler.compile(rule)
            outcome = "ok"
        except BadGrammar as bad:
            outcome = "bad"
            self._remember_bad(rule, str(bad))
            raise
        except GrammarCostly:
            outcome = "costly"
            raise
        finally:
            self._news.compiled(outcome, self._clock() - began)
        self._keep(rule, compiled)
        return compiled

    def _keep(self, rule: GrammarRule, compiled: CompiledGrammar) -> None:
        self._kept[rule] = compiled
        self.kept_bytes += compiled.size_bytes
        while self._kept and (len(self._kept) > self._limits.entries or self.kept_bytes > self._limits.kept_bytes):
            _, oldest = self._kept.popitem(last=False)
            self.kept_bytes -= oldest.size_bytes

    def _remember_bad(self, rule: GrammarRule, problem: str) -> None:
        self._bad[rule.digest] = problem
        if len(self._bad) > self._limits.entries:
            self._bad.popitem(last=False)


def member_grammars(
    make: MakeCompiler, tokenizer: TokenTable, vocabulary_size: int, limits: GrammarLimits, metrics: DecodeMetrics
) -> Grammars:
    """Those of a decode member whose logits have `vocabulary_size` columns."""

    def vocabulary() -> Vocabulary:
        try:
            return Vocabulary(tokenizer.token_bytes, vocabulary_size, tokenizer.eos_ids)
        except UnsupportedModel as wrong:
            raise BadGrammar(f"cannot be used with this model: {wrong}") from None
        except ModuleNotFoundError as missing:
            raise BadGrammar(f"cannot be used here: {missing}") from None

    news = GrammarNews(
        looked_up=lambda outcome: metrics.grammar_lookups.inc(1, outcome),
        compiled=lambda outcome, seconds: metrics.grammar_compile.observe(seconds, outcome),
        opened=lambda kind: metrics.grammar_sequences.inc(1, kind),
    )
    return Grammars(make(vocabulary, limits.compile), limits, news, clocks.monotonic)

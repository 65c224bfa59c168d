"""From an Open to what the engine and the event loop know of its seat."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from decode_svc import admission, wire
from decode_svc.admission import Identity, Refusal, mismatch
from decode_svc.grammar_compiler import GrammarCostly
from decode_svc.grammars import GrammarBusy, Grammars, TokenTable
from decode_svc.messages import OpenSeat, Sibling
from decode_svc.stream_log import PromptPart
from decode_svc.streams import SeatOrigin
from engine.grammar_library import CompiledGrammar
from engine.sequence import CanNotGoOn, SequenceSpec
from engine.sequence import Sequence as TokenSequence
from member.adapters import adapter_of
from rpc.status import failed_precondition, resource_exhausted
from tandem.pools.v1 import decode_pb2 as pb
from tandem.v1 import inference_pb2 as v1
from text.detokeniser import TextStream, Utf8Policy
from text.errors import BadGrammar
from text.grammar_rule import GrammarRule, rule_from

#: So many tokens of earlier attempts are replayed on the event loop at once; more in a thread. A token takes some microseconds.
REPLAY_AT_ONCE_TOKENS = 1024


class Tokenizer(TokenTable, Protocol):
    """What a decode member needs of a tokenizer. vocabulary_size: ids from 0 to the highest one."""

    @property
    def vocabulary_size(self) -> int: ...

    def detokeniser(self, policy: Utf8Policy = ...) -> TextStream: ...

    def piece(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Opening:
    """A checked Open. `begun`: its sequence, when earlier attempts began the output, or it has a grammar; `siblings`: with
    several outputs of the prompt, those of the others."""

    request: wire.Request
    origin: SeatOrigin
    begun: TokenSequence | None
    siblings: tuple[TokenSequence | None, ...] = ()

    def command(self, seats: Sequence[int]) -> OpenSeat:
        """What the engine is told. `seats`: their numbers."""
        request, siblings = self.request, None
        if request.choices:
            others = zip(seats[1:], request.choices[1:], self.siblings, strict=True)
            siblings = tuple(Sibling(seat, spec, begun) for seat, spec, begun in others)
        return OpenSeat(
            seat=seats[0],
            siblings=siblings,
            sequence=request.spec,
            limits=request.limits,
            priority=request.priority,
            sends_output=request.sends_output,
            prefill=request.prefill,
            received_at=self.origin.opened_at,
            begun=self.begun,
            last_token_at=self._last_token_at(),
            moved=request.moved,
            slow_reader=request.slow_reader,
            salt=request.salt,
            most_computed_tokens=request.most_computed_tokens,
        )

    def _last_token_at(self) -> float | None:
        since_s = self.request.since_last_token_s
        begun = any(one.earlier.token_ids for one in (self.request.spec, *self.request.choices))
        if since_s is None and not begun:
            return None
        return self.origin.opened_at - (since_s or 0.0)


@dataclass(frozen=True, slots=True)
class Opener:
    """Reads Opens for one member, and compiles their grammars."""

    me: Identity
    tokenizer: Tokenizer
    grammars: Grammars

    async def read(self, message: pb.Open, received_at: float) -> Opening | Refusal:
        """The opening, or why this member gives no seat. Raises StatusError for what is wrong with the message."""
        wire.check_shape(message)
        tokens, adapter = wire.total_tokens(message), adapter_of(message)
        refusal = mismatch(self.me, message.incarnation, message.model_snapshot, tokens, adapter)
        if refusal is not None:
            return refusal
        request = wire.parse_open(message, self.me, self.tokenizer.eos_ids)
        spec = request.spec
        rule = request.grammar
        if rule is not None:
            compiled = await self._compiled(rule)
            if isinstance(compiled, Refusal):
                return compiled
            spec = replace(spec, grammar=compiled)
            choices = tuple(replace(one, grammar=compiled) for one in request.choices)
            request = replace(request, spec=spec, choices=choices)
            self.grammars.opened(rule)
        prompt = await self._prompt(message)
        origin = SeatOrigin(
            key=spec.key,
            traceparent=request.traceparent,
            opened_at=received_at,
            limits=request.limits,
            first_sequence_no=request.first_sequence_no,
            sends_output=request.sends_output,
            prompt_tokens=len(spec.prompt_token_ids),
            earlier=spec.earlier,
            moved=request.moved,
            prefill_member=request.prefill.member if request.prefill is not None else "",
            slow_reader=request.slow_reader,
            hold_s=request.hold_s,
            opening=message.SerializeToString() if request.hold_s > 0 else b"",
            log_probs=spec.log_probs,
            whole=message.output_mode == v1.OUTPUT_MODE_CUMULATIVE,
            prompt=prompt,
            choices=tuple((one.index, one.earlier) for one in request.choices),
            told_choices=message.told_choices,
            ranks_only=message.ranks_only,
        )
        begun = await self._replayed(spec, received_at)
        siblings = [await self._replayed(one, received_at) for one in request.choices[1:]]
        return Opening(request, origin, begun, tuple(siblings))

    async def _prompt(self, message: pb.Open) -> PromptPart | None:
        """The prompt as it is told, once, before the first output of the first attempt that gets so far."""
        if message.first_sequence_no > wire.FIRST_SEQUENCE_NO or not (message.echo_prompt or message.log_probabilities.prompt):
            return None
        token_ids, text = tuple(message.prompt_token_ids), ""
        if message.echo_prompt:
            long = len(token_ids) > REPLAY_AT_ONCE_TOKENS
            text = await asyncio.to_thread(self._text, token_ids) if long else self._text(token_ids)
        return PromptPart(token_ids, text)

    def _text(self, token_ids: Iterable[int]) -> str:
        stream = self.tokenizer.detokeniser(Utf8Policy.DROP)
        parts = [stream.push(token) for token in token_ids]
        return b"".join([*parts, stream.finish(Utf8Policy.DROP)]).decode()

    async def check(self, message: pb.CheckGrammarRequest) -> pb.CheckGrammarResponse:
        """Whether a grammar can be used; it is compiled then. Raises StatusError for another model's, and when too many wait."""
        if message.model_snapshot != self.me.model_snapshot:
            loaded = self.me.model_snapshot
            raise failed_precondition(
                f"model_snapshot {message.model_snapshot!r} was meant, {loaded!r} is loaded", "UNKNOWN_MODEL"
            )
        try:
            outcome = await self._compiled(rule_from(message.grammar))
        except BadGrammar as bad:
            return pb.CheckGrammarResponse(problem=str(bad))
        if isinstance(outcome, CompiledGrammar):
            return pb.CheckGrammarResponse()
        if outcome.reason == admission.GRAMMAR_BUSY:
            raise resource_exhausted(outcome.detail, "GRAMMAR_BUSY", retry_after_s=1.0)
        return pb.CheckGrammarResponse(problem=outcome.detail, costly=outcome.reason == admission.GRAMMAR_COSTLY)

    async def _compiled(self, rule: GrammarRule) -> CompiledGrammar | Refusal:
        try:
            return await self.grammars.get(rule)
        except BadGrammar as bad:
            return Refusal(admission.BAD_GRAMMAR, str(bad), False)
        except GrammarCostly as costly:
            return Refusal(admission.GRAMMAR_COSTLY, str(costly), True)
        except GrammarBusy as busy:
            return Refusal(admission.GRAMMAR_BUSY, str(busy), True)

    async def _replayed(self, spec: SequenceSpec, now: float) -> TokenSequence | None:
        """The sequence, with the tokens of earlier attempts; with a grammar also its first mask, so that no step waits for it."""
        count = len(spec.earlier.token_ids)
        if not count and not spec.earlier.text_bytes and spec.grammar is None:
            return None
        try:
            if count > REPLAY_AT_ONCE_TOKENS or (count and spec.grammar is not None):
                return await asyncio.to_thread(self._made, spec, now)
            return self._made(spec, now)
        except CanNotGoOn as wrong:
            raise wire.can_not_go_on(wrong) from None

    def _made(self, spec: SequenceSpec, now: float) -> TokenSequence:
        sequence = TokenSequence(spec, self.tokenizer.detokeniser, now)
        if sequence.grammar is not None:
            sequence.grammar.prepare()
        return sequence

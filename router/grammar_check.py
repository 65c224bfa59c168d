"""Whether a grammar can be used, before its request begins: a decode member compiles it, and keeps it for the seat."""

import logging
from collections import OrderedDict
from typing import Any

import grpc

from router import endings
from router.member_link import Member, Role
from router.members import Members
from router.pool_messages import grammar_message
from rpc.details import Violation
from rpc.status import StatusError, invalid_argument, resource_exhausted, unavailable
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc
from text.grammar_rule import GrammarRule

_log = logging.getLogger(__name__)

#: Grammars whose verdict is remembered.
VERDICTS_MAX = 1024
#: Members that are asked, and seconds for each to answer: grammars that came before may have to be compiled first.
MEMBERS_MAX = 3
CHECK_S = 15.0


class GrammarCheck:
    """A grammar that was found good or bad is not asked about again."""

    def __init__(self, members: Members, model_snapshot: str) -> None:
        self._members = members
        self._snapshot = model_snapshot
        #: What is wrong with a grammar, by its digest, as grammars are long; empty when nothing is.
        self._verdicts: OrderedDict[str, str] = OrderedDict()

    async def check(self, rule: GrammarRule) -> None:
        """Raises StatusError: INVALID_ARGUMENT when the grammar cannot be used; when nobody could say, UNAVAILABLE, or
        RESOURCE_EXHAUSTED when too many grammars wait."""
        if (known := self._verdicts.get(rule.digest)) is not None:
            self._verdicts.move_to_end(rule.digest)
            self._raise_bad(rule, known)
            return
        failure: StatusError = endings.no_member()
        for member in self._asked_in_turn(rule):
            try:
                answer = await self._asked(member, rule)
            except grpc.aio.AioRpcError as error:
                _log.warning("decode member %s did not check a grammar: %s %s", member.name, error.code().name, error.details())
                failure = _could_not(error)
                continue
            if not answer.costly:
                self._remember(rule, answer.problem)
            self._raise_bad(rule, answer.problem, costly=answer.costly)
            return
        raise failure

    def _asked_in_turn(self, rule: GrammarRule) -> list[Member]:
        """Each grammar has members of its own, so that they share the work and know it when it comes again."""
        taking = self._members.taking(Role.DECODE)
        first = int(rule.digest[:8], 16) % len(taking) if taking else 0
        return [*taking[first:], *taking[:first]][:MEMBERS_MAX]

    async def _asked(self, member: Member, rule: GrammarRule) -> Any:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(member.channel)
        request = decode_pb2.CheckGrammarRequest(model_snapshot=self._snapshot, grammar=grammar_message(rule))
        return await stub.CheckGrammar(request, timeout=CHECK_S)

    def _remember(self, rule: GrammarRule, problem: str) -> None:
        self._verdicts[rule.digest] = problem
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)

    @staticmethod
    def _raise_bad(rule: GrammarRule, problem: str, *, costly: bool = False) -> None:
        if problem:
            reason = "GRAMMAR_TOO_COSTLY" if costly else "BAD_GRAMMAR"
            raise invalid_argument([Violation(f"grammar.{rule.kind.value}", problem, reason)])


def _could_not(error: grpc.aio.AioRpcError) -> StatusError:
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return resource_exhausted("too many grammars are being compiled; try again", "GRAMMAR_BUSY", retry_after_s=1.0)
    return unavailable("no decode member could check the grammar; try again", "NO_MEMBER", retry_after_s=1.0)

"""Whether the processes of a cell fit one another. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tandem.pools.v1 import member_pb2
from tandem_cli.doctor.cell import Answered, MemberSeen, ProcessSeen, RouterSeen
from tandem_cli.doctor.finding import Finding, fails, ok, skipped, warning
from tandem_cli.doctor.told_judged import judge_skew

#: The header that tells a process's clock has whole seconds.
HEADER_DOUBT_S = 0.6
REQUEST_GOOD_S = 5.0
ROLES = {member_pb2.MEMBER_ROLE_PREFILL: "prefill", member_pb2.MEMBER_ROLE_DECODE: "decode"}
#: What all members must share, and what it is called: (title, setting to look at, value of a member).
_SHARED: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
    ("model", "--model", lambda info: f"{info.model} {info.model_snapshot[:12]}"),
    ("page layout", "--dtype, --page-tokens and --weight-quantisation", lambda info: info.layout_fingerprint[:12]),
    ("vocabulary", "--model", lambda info: info.vocabulary_size),
    ("context", "--context-tokens", lambda info: info.context_tokens),
    ("adapters", "--adapters", lambda info: tuple((one.name, one.identity[:12]) for one in info.adapters)),
)


def judge_routers(routers: Sequence[RouterSeen]) -> Iterator[Finding]:
    """Reachable, agreed on what they serve, books in order."""
    for one in routers:
        if one.problem:
            yield fails(
                f"router {one.address}", one.problem, "is it running, and does a firewall or a policy let this machine in?"
            )
            continue
        served = ", ".join(f"{m.name} ({m.prefill_members} prefill, {m.decode_members} decode)" for m in one.models)
        if not any(model.decode_members for model in one.models):
            yield fails(f"router {one.address}", served or "no model", "it sees no decode member: look at --decode and its log")
        else:
            yield ok(f"router {one.address}", served)
        yield _books(f"books {one.address}", one.faults)


def judge_members(members: Sequence[MemberSeen]) -> Iterator[Finding]:
    """Each by itself."""
    for one in members:
        if one.problem:
            yield fails(
                f"member {one.address}", one.problem, "is it running, and does a firewall or a policy let this machine in?"
            )
            continue
        info, load = one.info, one.load
        name = f"{ROLES.get(info.role, 'member')} {info.peer.member}"
        sequences = f"{load.running_sequences} running, {load.waiting_sequences} waiting"
        words = f"{load.free_pages} of {info.total_pages} pages free, {sequences}"
        if load.draining:
            yield warning(name, f"{words}; it drains", "it was told to stop: start another one, or wait for its successor")
        elif load.quarantined_pages:
            yield warning(
                name,
                f"{words}, {load.quarantined_pages} quarantined",
                "a writer is not known to have stopped; its log tells which",
            )
        else:
            yield ok(name, words)
        yield _books(f"books {info.peer.member}", one.faults)
        yield _room(name, info)


def _books(check: str, faults: tuple[str, ...] | None) -> Finding:
    if faults is None:
        return skipped(check, "it does not recount for this machine")
    if faults:
        return fails(check, "; ".join(faults), "this is a fault of Tandem: please report it with the process's log")
    return ok(check, "everything that is held adds up")


def _room(name: str, info: Any) -> Finding:
    """Whether the longest request that routers let in finds room."""
    check = f"limits {info.peer.member}"
    if info.role == member_pb2.MEMBER_ROLE_PREFILL and info.max_queued_tokens < info.context_tokens:
        words = f"{info.max_queued_tokens} prompt tokens at once, and the context is {info.context_tokens}"
        return warning(check, words, "a higher queue limit, or less --context-tokens: the longest prompts are refused")
    needed = -(-info.context_tokens // max(1, info.page_tokens))
    needed = min(needed, info.sequence_pages) if info.sequence_pages else needed
    have = info.total_pages - 1
    words = f"{have} pages of {info.page_tokens} tokens; a whole context of {info.context_tokens} takes {needed}"
    if have < needed:
        return warning(
            check, words, "--total-pages (or up --kv-tokens) up, or --context-tokens down: the longest requests are refused"
        )
    return ok(check, words)


def judge_agreement(routers: Sequence[RouterSeen], members: Sequence[MemberSeen]) -> Iterator[Finding]:
    """What all must share, and whether routers see as many members as there are."""
    seen = [one for one in members if not one.problem]
    for title, settings, value in _SHARED if seen else ():
        found: dict[object, list[str]] = {}
        for one in seen:
            found.setdefault(value(one.info), []).append(one.info.peer.member)
        if len(found) > 1:
            told = "; ".join(f"{what}: {', '.join(who)}" for what, who in found.items())
            yield fails(f"same {title}", told, f"start all members with the same {settings}")
        else:
            yield ok(
                f"same {title}",
                f"{next(iter(found))} at {len(seen)} members" if title != "adapters" else f"at {len(seen)} members",
            )
    for router in routers if seen else ():
        yield from _seen_by(router, seen)


def _seen_by(router: RouterSeen, members: Sequence[MemberSeen]) -> Iterator[Finding]:
    if router.problem:
        return
    for role, word in ROLES.items():
        there = sum(one.info.role == role and not one.load.draining for one in members)
        counted = sum(model.prefill_members if word == "prefill" else model.decode_members for model in router.models)
        check = f"{word} members of {router.address}"
        if counted < there:
            yield fails(
                check, f"it sees {counted} of {there}", f"the router's --{word}, and its log: a refused member is told there"
            )
        elif there or counted:
            yield ok(check, f"it sees {counted}")


def judge_processes(processes: Sequence[ProcessSeen]) -> Iterator[Finding]:
    """Versions and clocks."""
    known = [one for one in processes if not one.problem]
    for one in processes:
        if one.problem:
            yield warning(f"metrics {one.address}", one.problem, "is it a metrics port of this cell?")
    versions = {one.version for one in known}
    if len(versions) > 1:
        told = "; ".join(f"{one.kind} {one.address}: {one.version}" for one in known)
        yield warning("same version", told, "fine while an upgrade rolls; otherwise upgrade the rest (docs/upgrade.md)")
    elif known:
        yield ok("same version", f"{next(iter(versions))} at {len(known)} processes")
    for one in known:
        yield judge_skew(f"clock {one.kind} {one.address}", one.ahead_s, HEADER_DOUBT_S)


def judge_answer(answered: Answered) -> Iterator[Finding]:
    """A request of one token."""
    if answered.problem:
        yield fails(
            "request", answered.problem, "tandem generate shows the same with more words; the router's log tells the rest"
        )
        return
    parts = ", ".join(f"{name.removesuffix('_s')} {seconds * 1e3:.0f} ms" for name, seconds in answered.phases.items() if seconds)
    words = f"one token in {answered.total_s * 1e3:.0f} ms ({parts})"
    if answered.total_s > REQUEST_GOOD_S:
        yield warning("request", words, "the cell is slow or busy: tandem bench --profile tells where the time goes")
    else:
        yield ok("request", words)
    if answered.ahead_s is not None:
        yield judge_skew("router clock", answered.ahead_s, answered.doubt_s)

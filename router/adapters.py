"""Which adapters a cell has, by what its members tell. Pure.

An adapter can be asked for when its prompt can be computed and its tokens be generated with the same content: a decode member has
it, and so has a prefill member, or that decode member computes prompts itself.
"""

from collections.abc import Iterable, Sequence

from lifecycle.adapters import Adapter
from router.member_facts import MemberInfo
from rpc.details import Resource
from rpc.status import StatusError, failed_precondition, not_found, unavailable

#: Known names that the answer to an unknown one has.
NAMED_ADAPTERS = 16
#: Reasons for which a name means no adapter now.
REFUSALS = frozenset({"UNKNOWN_ADAPTER", "ADAPTER_MISMATCH", "NO_MEMBER"})


def servable(decode: Iterable[MemberInfo], prefill: Iterable[MemberInfo]) -> frozenset[Adapter]:
    """Adapters, each with the one content that it can be served with; there may be several of one name."""
    prompts = {each for info in prefill for each in info.adapters}
    return frozenset(each for info in decode for each in info.adapters if info.computes_prompts or each in prompts)


def chosen(name: str, decode: Sequence[MemberInfo], prefill: Sequence[MemberInfo]) -> Adapter:
    """The adapter of a name: with the content that most decode members have, if they differ. Raises StatusError: NOT_FOUND naming
    those that there are, FAILED_PRECONDITION when members have it and no two that go together, UNAVAILABLE without members."""
    there = servable(decode, prefill)
    mine = [each for each in there if each.name == name]
    if mine:
        return max(mine, key=lambda one: (sum(one in info.adapters for info in decode), one.identity))
    if not decode:
        raise unavailable("there is no decode member now that could have the adapter", "NO_MEMBER")
    holders = [info.name for info in (*decode, *prefill) if any(each.name == name for each in info.adapters)]
    if holders:
        raise failed_precondition(
            f"adapter {name!r} is on {', '.join(holders[:NAMED_ADAPTERS])}, and no prefill and decode member have the same "
            "content of it: give all members the same folder",
            "ADAPTER_MISMATCH",
        )
    raise _unknown(name, sorted({each.name for each in there}))


def unlike(infos: Iterable[MemberInfo]) -> list[str]:
    """Sentences about names under which members have other content."""
    found: dict[str, dict[str, list[str]]] = {}
    for info in infos:
        for each in info.adapters:
            found.setdefault(each.name, {}).setdefault(each.identity, []).append(info.name)
    return [
        f"adapter {name!r} is not the same on all members: "
        + "; ".join(f"{identity} on {', '.join(sorted(members))}" for identity, members in sorted(contents.items()))
        for name, contents in sorted(found.items())
        if len(contents) > 1
    ]


def _unknown(name: str, known: Sequence[str]) -> StatusError:
    shown = ", ".join(repr(each) for each in known[:NAMED_ADAPTERS]) or "none"
    more = f" and {len(known) - NAMED_ADAPTERS} more" if len(known) > NAMED_ADAPTERS else ""
    return not_found(
        Resource("adapter", name, f"this cell has {shown}{more}"),
        "UNKNOWN_ADAPTER",
        f"no adapter is called {name!r}; this cell has {shown}{more}",
    )

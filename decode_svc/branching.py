"""How a seat begins with what another one has: full pages are shared, the rest is cloned. Pure."""

from decode_svc.holding import Holding, shareable
from decode_svc.memory import DecodeMemory
from engine.page_copy import PageClone


def branch(memory: DecodeMemory, holding: Holding, parent: Holding, tokens: int) -> list[PageClone]:
    """Begin an empty seat, promised with `shared_tokens`, with the first `tokens` tokens of another one.

    Their full pages are read where they are, by both; what this seat will write into is cloned into pages of its own, out of its
    promise. The clones are to be run before the next step.
    """
    shared = shareable(memory.groups, tokens)
    for group, (pool, count) in enumerate(zip(memory.pools, shared, strict=True)):
        memory.skip(holding, group, memory.groups[group].first_page(tokens))
        if count:
            pool.share(holding.holder, parent.tables[group][:count])
            holding.tables[group].extend(parent.tables[group][:count])
    memory.take(holding, tokens)
    holding.salt = parent.salt
    holding.keys = parent.keys[: tokens // memory.prefixes.page_tokens]
    holding.indexed = min(parent.indexed, len(holding.keys))
    clones = []
    for group, (source, mine) in enumerate(zip(parent.tables, holding.tables, strict=True)):
        first = max(shared[group], holding.gone[group])
        if len(mine) > first:
            clones.append(PageClone(group, tuple(source[first : len(mine)]), tuple(mine[first:])))
    return clones

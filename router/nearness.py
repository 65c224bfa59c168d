"""How near members are to a prompt: what they are thought to have of it already. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lifecycle.prefix_keys import PrefixKeys, short
from router.member_facts import M, Role
from router.prefix_hints import PrefixHints

#: Pages of a prompt whose keys are made for hints; what comes after them is not looked for.
HASHED_PAGES_MAX = 2048
#: Members with the longest prefix that are looked at for one request.
HOLDERS_MAX = 16


def _nothing(member: str) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Nearness:
    """Of one pool: the places (in its views) of members that are thought to have most of a prompt, and how many tokens of it any
    member, by its name, is thought to have."""

    places: Sequence[int] = ()
    tokens: Callable[[str], int] = _nothing


@dataclass(frozen=True, slots=True)
class Near:
    """Of both pools."""

    decode: Nearness = field(default_factory=Nearness)
    prefill: Nearness = field(default_factory=Nearness)


FAR = Near()


@dataclass(slots=True)
class PromptPrefix:
    """What hints are looked up with. `keys` are made when a place in the queue is first looked at.

    refuted: a member that was thought to have most of the prompt had not; the request is not computed on a hint again.
    """

    token_ids: Sequence[int] = ()
    salt: bytes = b""
    refuted: bool = False
    _keys: list[int] = field(default_factory=list)
    _made_with: PrefixKeys | None = None

    def keys(self, maker: PrefixKeys | None) -> Sequence[int]:
        """Short keys of the prompt's first full pages; empty where members keep no prefixes."""
        if maker is None or not self.salt:
            return ()
        if maker != self._made_with:
            self._made_with = maker
            ids = self.token_ids[: HASHED_PAGES_MAX * maker.page_tokens]
            self._keys = [short(key) for key in maker.of(self.salt, ids)]
        return self._keys


def nearness(
    hints: PrefixHints[M], keys: Sequence[int], page_tokens: int, members: dict[str, M], place_of: Callable[[M], int | None]
) -> Nearness:
    """Of one pool. `members`: by name, those that can be chosen; `place_of`: the place of one of them."""
    keys = keys[: hints.longest(keys)]
    if not keys:
        return FAR.decode
    holders = hints.holders(keys)
    if len(holders) > HOLDERS_MAX:
        # Of a beginning that everybody has some are looked at, others for each prompt.
        first = keys[-1] % (len(holders) - HOLDERS_MAX)
        holders = holders[first : first + HOLDERS_MAX]
    places = [place for member in holders if (place := place_of(member)) is not None]
    return Nearness(places, lambda name: hints.pages(members[name], keys) * page_tokens if name in members else 0)


Hints = dict[Role, PrefixHints[M]]

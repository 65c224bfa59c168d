"""What placement is compared with."""

from collections.abc import Sequence

from router.placement import Choice, DecodeView, Dice, Need, Placement, PrefillView, decode_refusal, prefill_refusal


class RoundRobin:
    """The next member of each pool in turn; one that has no room is passed over. Like `router.placement.choose` in its form."""

    def __init__(self) -> None:
        self._decode = 0
        self._prefill = 0

    def __call__(self, need: Need, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rng: Dice) -> Choice:
        """Both members, or none when a pool has no room."""
        target = next((at for at in _turn(self._decode, len(decode)) if decode_refusal(need, decode[at]) is None), None)
        source = next((at for at in _turn(self._prefill, len(prefill)) if prefill_refusal(need, prefill[at]) is None), None)
        if target is None or (source is None and prefill):
            return Choice(None, 0.0, {})
        self._decode = target + 1
        if source is None:
            return Choice(Placement(decode[target].member), 0.0, {})
        self._prefill = source + 1
        return Choice(Placement(decode[target].member, prefill[source].member), 0.0, {})


def _turn(first: int, count: int) -> list[int]:
    return [(first + step) % count for step in range(count)]

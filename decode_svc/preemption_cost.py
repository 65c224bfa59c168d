"""What it costs to take a sequence's pages and to bring them back, as steps and copies have shown so far. Pure."""

#: Bytes per second between pages and host pages until a copy has been timed.
ASSUMED_BYTES_PER_S = 2e9
#: The share of a new copy in what is expected of the next.
COPY_WEIGHT = 0.25
#: By this factor the least time of a token is forgotten with each step, so that a machine that got slower is noticed.
FORGETTING = 1.01


class PreemptionCost:
    """Times in seconds, sizes in bytes."""

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._bytes_per_s: float | None = None

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens, of prompts and sequences, took that long in the model.

        A token of a prompt costs less than one of a step with few rows, so the least is what computing again costs.
        """
        if tokens <= 0:
            return
        token_s = seconds / tokens
        self._token_s = token_s if self._token_s is None else min(token_s, self._token_s * FORGETTING)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Copies of that size, in either direction, took that long."""
        if size_bytes <= 0:
            return
        rate = size_bytes / max(seconds, 1e-9)
        known = self._bytes_per_s
        self._bytes_per_s = rate if known is None else known + COPY_WEIGHT * (rate - known)

    def swap_s(self, size_bytes: int) -> float:
        """To copy pages of that size out, and back later."""
        return 2 * size_bytes / (self._bytes_per_s or ASSUMED_BYTES_PER_S)

    def recompute_s(self, tokens: int) -> float | None:
        """To compute the KV of that many tokens again; None while no step has shown it."""
        return None if self._token_s is None else tokens * self._token_s

    def swap_is_cheaper(self, tokens: int, size_bytes: int) -> bool:
        """For a sequence with so many tokens of KV in pages of that size. True while nobody knows."""
        recompute_s = self.recompute_s(tokens)
        return recompute_s is None or self.swap_s(size_bytes) <= recompute_s

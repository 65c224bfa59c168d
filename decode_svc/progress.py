"""The watch over progress: seats that could go on while nothing is scheduled are a fault. Pure."""

#: For so long, in seconds, nothing may be scheduled although seats could go on and no grant of a writer holds pages.
NO_PROGRESS_S = 10.0


class Progress:
    """Told after each planning how many seats could go on and were not scheduled."""

    def __init__(self, bound_s: float = NO_PROGRESS_S) -> None:
        self._bound_s = bound_s
        self._since: float | None = None
        self._stuck = 0
        self._fault = ""
        self._told = False

    def note(self, stuck: int, now: float) -> None:
        """`stuck`: seats that could go on though nothing was scheduled; 0 when something was, or when none could."""
        self._stuck = stuck
        if stuck == 0:
            self._since, self._fault, self._told = None, "", False
        elif self._since is None:
            self._since = now
        self.look(now)

    def look(self, now: float) -> None:
        """See whether the bound is over."""
        if self._since is not None and now - self._since >= self._bound_s:
            self._fault = f"nothing was scheduled for {now - self._since:.0f} s although {self._stuck} seats could go on"

    @property
    def fault(self) -> str:
        """What is wrong, in a sentence; empty while all is well."""
        return self._fault

    def take_news(self) -> str:
        """The fault, once, for the log; empty when there is none or it was told."""
        news = "" if self._told else self._fault
        self._told = self._told or bool(news)
        return news

    @property
    def due_at(self) -> float | None:
        """When the bound is over; None when nothing is waited for."""
        return None if self._since is None or self._fault else self._since + self._bound_s

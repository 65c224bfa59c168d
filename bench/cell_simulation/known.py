"""Members as the simulated routers know them: loads that are as old as the news that told them."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.cell_simulation.events import Events
from decode_svc.scheduler import Scheduler
from router.member_facts import MemberInfo, MemberLoad


@dataclass(eq=False, slots=True)
class Known:
    """One member, as every router knows it: their Watch streams bring the same news at the same time."""

    info: MemberInfo
    load: MemberLoad
    seen_at: float = 0.0


class News:
    """Tells a member's load, at most every `every_s` seconds, while it changes. `heard` is called after each."""

    def __init__(self, known: Known, events: Events, every_s: float, load: Callable[[], MemberLoad]) -> None:
        self._known = known
        self._events = events
        self._every_s = every_s
        self._load = load
        self._due = False
        self.heard: Callable[[], None] = lambda: None

    def changed(self) -> None:
        """The load may be another one."""
        if not self._due:
            self._due = True
            self._events.after(self._every_s, self._tell)

    def _tell(self) -> None:
        self._due = False
        self._known.load = self._load()
        self._known.seen_at = self._events.now
        self.heard()


def decode_load(scheduler: Scheduler, step_s: float, prompt_tokens_per_s: float) -> MemberLoad:
    """What a decode member tells."""
    now = scheduler.load()
    return MemberLoad(
        free_pages=now.free_pages,
        running_sequences=now.running,
        waiting_sequences=now.waiting + now.preempted,
        waiting_tokens=now.waiting_tokens,
        draining=now.draining,
        prefill_tokens_per_s=prompt_tokens_per_s,
        decode_step_s=step_s,
        expected_output_tokens=now.expected_output_tokens or 0,
    )

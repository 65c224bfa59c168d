"""What is kept of a soak, from wave to wave. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from tests.soak.verdict import Sample, Series


@dataclass(frozen=True, slots=True)
class Asked:
    """At a rest, `at_s` seconds after the beginning: requests with a record since the store's start, and bytes of all logs."""

    at_s: float
    since_store: int
    log_bytes: int


@dataclass(slots=True)
class Story:
    """What came of a soak, from wave to wave."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    #: Most memory of a process that was seen while it worked, in MiB, by name and start.
    peaks: dict[str, float] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    waves: int = 0
    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    #: Processes that are as old as the soak.
    eldest: tuple[str, ...] = ()

    @property
    def series(self) -> list[Series]:
        """Of every incarnation."""
        return [Series(name, samples) for name, samples in self.samples.items()]

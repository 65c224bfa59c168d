"""Violations of a request's fields, collected on the way so that a client learns all of them at once."""

import math
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from rpc.details import Violation


@dataclass(slots=True)
class Findings:
    """Violations collected on the way."""

    found: list[Violation] = field(default_factory=list)

    def add(self, path: str, description: str, reason: str) -> None:
        """One violation: the field's path, a sentence with the true limit, and a label for programs."""
        self.found.append(Violation(path, description, reason))

    def number(self, path: str, value: float, low: float, high: float, *, over_low: bool = False) -> None:
        """`value` must be finite and from `low` (or over it) to `high`."""
        start = f"over {low:g} up to" if over_low else f"from {low:g} to"
        if not math.isfinite(value):
            self.add(path, f"must be a finite number {start} {high:g}; got {value}", "NOT_FINITE")
        elif value > high or value < low or (over_low and value == low):
            self.add(path, f"must be {start} {high:g}; got {value:g}", "OUT_OF_RANGE")

    def name(self, path: str, value: str, limit_bytes: int) -> None:
        """`value` must be short printable ASCII."""
        size = len(value.encode())
        if size > limit_bytes:
            self.add(path, f"must be at most {limit_bytes} bytes; got {size}", "TOO_LONG")
        elif not all(" " <= letter <= "~" for letter in value):
            self.add(path, "must be printable ASCII, without control characters", "BAD_CHARACTER")

    def duration_s(self, path: str, value: Duration, most_s: float | None) -> float:
        """Seconds of `value`, which must be a valid Duration over 0 and at most `most_s`."""
        if abs(value.nanos) >= 1_000_000_000 or value.nanos * value.seconds < 0:
            self.add(path, "is no valid Duration: nanos out of range or of another sign than seconds", "BAD_DURATION")
            return 0.0
        seconds = value.seconds + value.nanos / 1e9
        if seconds <= 0 or (most_s is not None and seconds > most_s):
            most = "" if most_s is None else f" up to {most_s:g}"
            self.add(path, f"must be over 0{most} seconds; got {seconds:g}", "OUT_OF_RANGE")
        return seconds

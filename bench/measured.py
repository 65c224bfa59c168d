"""What clients saw in a benchmark, with what else the machine did meanwhile. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.disturbance import Disturbance
from tandem_cli.load import measured


@dataclass(frozen=True, slots=True)
class Measured(measured.Measured):
    """One run, and whether something else used the machine."""

    disturbance: Disturbance


def median(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    """The median of a figure over runs; 0 for none."""
    return statistics.median(figure(run) for run in runs) if runs else 0.0

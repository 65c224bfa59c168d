"""A run of load on this machine, with what else the machine did meanwhile."""

import os
from collections.abc import Sequence

from bench import disturbance
from bench.measured import Measured
from tandem_cli.load import drive as load
from tandem_cli.load.door import Door


async def drive(door: Door, run: load.Run, processes: Sequence[int]) -> Measured:
    """Run it and note what every client sees. A failed request is a figure of the run, not its end.

    processes: the roots of what is driven; what any other one uses, a side that should be idle too, is a disturbance.
    """
    before = disturbance.read_cpu_times()
    made = await load.drive(door, run)
    other = disturbance.between(before, disturbance.read_cpu_times(), processes, alone=[os.getpid()])
    return Measured(made.seconds, made.requests, other)

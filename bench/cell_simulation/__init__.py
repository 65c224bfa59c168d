"""A full-size cell as discrete events: the real admission, placement and schedulers, with steps that cost a modelled time.

`python -m bench.cell_simulation TRACE`; docs/simulation.md says what it shows and how.
"""

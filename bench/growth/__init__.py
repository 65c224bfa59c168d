"""What grows with the work and what does not: `python -m bench.growth`. bench/README.md says how to read it."""

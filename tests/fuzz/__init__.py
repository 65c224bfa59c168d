"""Fuzzing of everything that takes bytes from outside: `python -m tests.fuzz --minutes 30`."""

"""python -m tests.engine.correctness: docs/correctness.md on standard output."""

from tests.engine.correctness.page import page

print(page(), end="")

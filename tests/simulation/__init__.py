"""Whole cells in virtual time: see README.md."""

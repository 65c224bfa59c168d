"""Benchmarks: whole processes, real model, ratios within one run."""

"""Benchmarks: ratios in one process against a named baseline."""

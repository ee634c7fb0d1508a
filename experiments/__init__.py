"""Runnable experiments: one module a figure or table of the papers. `python -m experiments.NAME --help`."""

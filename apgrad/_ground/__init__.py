"""Nodes, messages, ports and JAX primitives: the ground floor of every wing. It stands on `_programs` and JAX."""

"""The ground floor, on which every wing stands: nodes, messages, ports and JAX primitives. It imports JAX alone."""

"""What JAX compiles while a test runs."""

import contextlib

import jax


@contextlib.contextmanager
def listening():
    """A list, to which the name of each compilation within the context is added."""
    found = []
    listen = lambda event, *_, **__: found.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)

"""Tests run under strict dtype promotion: no silent widening anywhere in the library."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield

"""What is refused, and in which words."""

import jax
import pytest


def refused(error, words, call, *args, **options):
    """The call raises such an error, which is returned; the words, a regular expression, are found in what it says."""
    with pytest.raises(error, match=words) as raised:
        jax.block_until_ready(
            call(*args, **options)
        )  # a device raises what the host's callback does when it is waited for
    return raised.value

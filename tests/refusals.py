"""What is refused, and in which words."""

import jax
import pytest


def refused(error, words, call, *args, **options):
    """The call raises such an error, which is returned; the words, a regular expression, are found in what it says."""
    with pytest.raises(error, match=words) as raised:
        # What a callback on the host raises, a device raises when its result is waited for.
        jax.block_until_ready(call(*args, **options))
    return raised.value

"""What is refused, and in which words."""

import pytest


def refused(error, words, call, *args, **options):
    """The call raises such an error, and the words, a regular expression, are found in what it says."""
    with pytest.raises(error, match=words):
        call(*args, **options)

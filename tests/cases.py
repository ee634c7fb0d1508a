"""Tests of each row of a table. Rows that exercise the same lines as other rows can be marked `long`."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def cases(name: str, table: Mapping[str, Any], long: Collection[str] = ()) -> pytest.MarkDecorator:
    """The argument `name` of a test is each value of the table in turn; those of the keys in `long` are long tests."""
    assert set(long) <= set(table), f"no rows: {set(long) - set(table)}"
    marks = lambda key: [pytest.mark.long] if key in long else []
    return pytest.mark.parametrize(name, [pytest.param(row, id=key, marks=marks(key)) for key, row in table.items()])

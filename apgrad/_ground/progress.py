"""A progress bar of tqdm's, which comes with NumPyro."""

from typing import Any

import tqdm


def progress_bar(what: str, steps: int, begun: int = 0, *, shown: bool = True) -> Any:
    """The bar; one that is not shown has the same methods, which do nothing."""
    return tqdm.tqdm(total=steps, initial=begun, unit="step", desc=what, disable=not shown)

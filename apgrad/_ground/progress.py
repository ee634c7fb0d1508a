"""A progress bar of tqdm's, which comes with NumPyro; one that is not shown has methods that do nothing."""

from typing import Any

import tqdm


def progress_bar(what: str, steps: int, begun: int = 0, *, shown: bool = True) -> Any:
    return tqdm.tqdm(total=steps, initial=begun, unit="step", desc=what, disable=not shown)

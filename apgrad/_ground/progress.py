"""A progress bar of tqdm's, which comes with the extra `meta`."""

from typing import Any


def progress_bar(what: str, steps: int, begun: int = 0) -> Any:
    try:
        import tqdm
    except ImportError as error:
        raise ImportError('progress needs tqdm: pip install "apgrad[meta]", or give progress=False') from error
    return tqdm.tqdm(total=steps, initial=begun, unit="step", desc=what)

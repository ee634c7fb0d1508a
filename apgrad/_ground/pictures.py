"""Matplotlib figures: pyplot's where pyplot is loaded, so that `plt.show` and `plt.savefig` find them."""

import sys
from typing import Any


def new_figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('this figure needs matplotlib: pip install matplotlib, or the extra "meta"') from error
    pyplot = sys.modules.get("matplotlib.pyplot")
    return (Figure if pyplot is None else pyplot.figure)(figsize=size, layout="constrained")

"""Randomized automatic differentiation: less memory in the reverse pass, in return for variance.

`ap.randomize(f, ap.memory.rounding(bits=4))` is a function `(key, *args)` with the value of `f` and an unbiased
gradient, and `ap.memory_report` measures what that saves. The samplers say how an array is remembered.
"""

from apgrad.memory._max_pool import max_pool as max_pool
from apgrad.memory._packing import narrow as narrow, packing as packing
from apgrad.memory._planner import Plan as Plan, plan as plan
from apgrad.memory._randomize import coefficients as coefficients, randomize as randomize
from apgrad.memory._report import *
from apgrad.memory._residuals import *
from apgrad.memory._rounding import rounding as rounding
from apgrad.memory._samplers import *
from apgrad.memory._slots import Coefficient as Coefficient

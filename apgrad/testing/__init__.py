"""Statistical tests of gradient estimators. A small bias is found by more samples, not by a tighter bound."""

from apgrad.testing._certify import *
from apgrad.testing._lanes import assert_independent_lanes as assert_independent_lanes
from apgrad.testing._moments import Moments as Moments, assert_unbiased as assert_unbiased, moments as moments
from apgrad.testing._transformable import assert_transformable as assert_transformable

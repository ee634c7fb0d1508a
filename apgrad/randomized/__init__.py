"""Randomized automatic differentiation: less memory in the reverse pass, in return for variance."""

from apgrad.randomized.plan import Coefficient as Coefficient
from apgrad.randomized.randomize import coefficients as coefficients
from apgrad.randomized.randomize import randomize as randomize
from apgrad.randomized.samplers import Sampler as Sampler
from apgrad.randomized.samplers import different_sample as different_sample
from apgrad.randomized.samplers import heavy as heavy
from apgrad.randomized.samplers import nbytes as nbytes
from apgrad.randomized.samplers import projection as projection
from apgrad.randomized.samplers import rounding as rounding
from apgrad.randomized.samplers import same_sample as same_sample
from apgrad.randomized.samplers import stratified as stratified

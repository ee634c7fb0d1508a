"""Randomized automatic differentiation: less memory in the reverse pass, in return for variance."""

from apgrad.randomized.memory import MemoryReport as MemoryReport
from apgrad.randomized.memory import memory_report as memory_report
from apgrad.randomized.memory import residuals as residuals
from apgrad.randomized.memory import temp_bytes as temp_bytes
from apgrad.randomized.paths import Graph as Graph
from apgrad.randomized.paths import linearized_graph as linearized_graph
from apgrad.randomized.paths import path_sampling as path_sampling
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

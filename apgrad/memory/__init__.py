"""Randomized automatic differentiation: less memory in the reverse pass, in return for variance."""

from apgrad.memory._layers import (
    conv as conv,
    dense as dense,
    dropout as dropout,
    embedding as embedding,
    max_pool as max_pool,
    recurrent_cell as recurrent_cell,
    relu as relu,
    smooth as smooth,
)
from apgrad.memory._modules import Conv as Conv, Linear as Linear, LinenConv as LinenConv, LinenDense as LinenDense
from apgrad.memory._paths import Graph as Graph, linearized_graph as linearized_graph, path_sampling as path_sampling
from apgrad.memory._plan import Coefficient as Coefficient
from apgrad.memory._randomize import coefficients as coefficients, randomize as randomize
from apgrad.memory._report import (
    MemoryReport as MemoryReport,
    memory_report as memory_report,
    residuals as residuals,
    temp_bytes as temp_bytes,
)
from apgrad.memory._samplers import (
    Sampler as Sampler,
    different_sample as different_sample,
    heavy as heavy,
    nbytes as nbytes,
    projection as projection,
    rounding as rounding,
    same_sample as same_sample,
    stratified as stratified,
)

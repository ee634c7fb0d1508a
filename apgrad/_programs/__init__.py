"""All that reads, evaluates and rebuilds jaxprs, which are JAX's records of programs.

* `jaxprs` traces functions and evaluates programs; other parts of the package call this module.
* `control` knows how this version of JAX writes an equation: control flow, and all other parameters.
* `flow` carries facts about variables through a program; `linearity` is one use of it.
* `kinds` lists primitives by what they do.
"""

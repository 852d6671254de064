"""A pytest plugin that runs NNX's own tests with `layout.jit` in place of `nnx.jit`: `pytest -p ... spmd_test.py`.

`nnx.jit` stays where a test asks for trees instead of graphs, or for shardings of its own.
"""

import functools

from flax import nnx

import flax_spmd as spmd

_THEIRS = ('graph', 'graph_updates', 'in_shardings', 'out_shardings')
_nnx_jit = nnx.jit


def jit(fun=None, **options):
  """`layout.jit` with the arguments of `nnx.jit`."""
  if fun is None:
    return functools.partial(jit, **options)
  theirs = [options.get(name) for name in _THEIRS]
  if any(value is not None and value is not True for value in theirs):
    return _nnx_jit(fun, **options)
  return spmd.Layout({'data': 1}).jit(fun, **{k: v for k, v in options.items() if k not in _THEIRS})


nnx.jit = jit
nnx.get_partition_spec = spmd.get_partition_spec

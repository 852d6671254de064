"""Bindings: jaxlib's MLIR and Shardy's passes, which nothing else of this package touches.

    check()
    module = load(code, parameters)                             # a lowered step, prepared once
    module.propagated(sizes, arguments, results, asked)         # how its values lie under a layout

jaxlib's bindings change between versions; `check` says whether these are known, and nothing of them is imported
before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax_spmd._src.compat import jaxlib_version
from flax_spmd.errors import EstimatorError

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.module import Module

_KNOWN = (0, 10), (0, 12)  # the oldest and the newest jaxlib whose bindings were tried


def check() -> None:
  """Raises unless jaxlib is of a version whose bindings are known.

  Raises:
    EstimatorError: it is older or newer.
  """
  major, minor = map(int, jaxlib_version().split('.')[:2])
  if not _KNOWN[0] <= (major, minor) <= _KNOWN[1]:
    raise EstimatorError(
      f'The estimator knows the MLIR bindings of jaxlib {_KNOWN[0][0]}.{_KNOWN[0][1]} to '
      f'{_KNOWN[1][0]}.{_KNOWN[1][1]}, this is jaxlib {jaxlib_version()}.\n'
      'Fix: use one of these, or go without estimates: every layout is then compiled, which takes seconds '
      'for each in place of a fraction of one.'
    )


def load(code: bytes, parameters: frozenset[str]) -> Module:
  """A lowered step, prepared; arguments and errors as of `Module`."""
  from flax_spmd._src.estimate.mlir.module import Module

  return Module(code, parameters)

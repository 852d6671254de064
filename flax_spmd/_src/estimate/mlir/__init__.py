"""jaxlib's MLIR bindings and Shardy's passes; only compat.py and `_src/mlir` import them too.

    check_jaxlib()
    module = prepare(code, 'cuda')                                  # a lowered step, prepared once
    specs = module.propagate(sizes, arguments, results, resolve)    # shardings of its values under a layout

The bindings change between versions of jaxlib, so nothing of this package is imported before `check_jaxlib` has run.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from flax_spmd.errors import EstimatorError

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.module import PreparedModule

_OLDEST, _NEWEST = (0, 10), (0, 12)  # jaxlib versions whose bindings are tested


def check_jaxlib() -> None:
  """Raises unless the bindings of the installed jaxlib are supported.

  Raises:
    EstimatorError: jaxlib is older or newer than the supported versions.
  """
  installed = version('jaxlib')
  major, minor = map(int, installed.split('.')[:2])
  if not _OLDEST <= (major, minor) <= _NEWEST:
    oldest, newest = ('.'.join(map(str, each)) for each in (_OLDEST, _NEWEST))
    raise EstimatorError(
      f'The estimator supports the MLIR bindings of jaxlib {oldest} to {newest}; this is jaxlib '
      f'{installed}.\n'
      'Fix: install a supported version, or do without estimates: each layout is then compiled, which takes '
      'seconds instead of a fraction of a second.'
    )


def prepare(code: bytes, platform: str) -> PreparedModule:
  """A lowered step, prepared for propagation; arguments and errors as of `PreparedModule`."""
  from flax_spmd._src.estimate.mlir.module import PreparedModule

  return PreparedModule(code, platform)

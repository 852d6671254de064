"""Unbound axes: errors of functions for `jax.pmap` that run without their axis name, in place of JAX's own.

JAX advises `shard_map`. Under a layout the remedy is another one.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import flax.linen as nn

from flax_spmd._src.source_lines import line_text, user_frame
from flax_spmd.errors import AxisNameError, LayoutError

_UNBOUND = re.compile(r'unbound axis name: ([^\s.]+)')


@contextlib.contextmanager
def explained_axis_names() -> Iterator[None]:
  """A block in which a function is traced.

  Raises:
    AxisNameError: it reduces over an axis name that nothing binds.
    LayoutError: it reduces over parts of an axis (`axis_index_groups`).
  """
  try:
    yield
  except AxisNameError:
    raise
  except NameError as error:
    found = _UNBOUND.search(str(error))
    if found is None:
      raise
    raise AxisNameError(_TEXT.format(name=found[1], place=place_of(error))) from error
  except NotImplementedError as error:
    if 'axis_index_groups' not in str(error):
      raise
    raise LayoutError(_GROUPS_TEXT.format(place=place_of(error))) from error


def place_of(error: BaseException) -> str:
  """The innermost Linen module of an error's traceback, and the user's line."""
  stack = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
  file = user_frame([frame.f_code.co_filename for frame, _ in stack])
  at = line_text(stack[file][0].f_code.co_filename, stack[file][1])
  for frame, _ in stack:
    module = frame.f_locals.get('self')
    if isinstance(module, nn.Module) and module.scope is not None:
      return f'module {"/".join(module.path)} at {at}' if module.path else f'the top module at {at}'
  return at


_TEXT = (
  'The axis name {name!r} is not bound, but {place} uses it.\n'
  'Fix: for a step that was written for jax.pmap, pass axis_name={name!r} to layout.jit or TrainStep. In a function '
  'that creates a state, or under pipeline_jit, omit the axis name: the function computes the whole batch.'
)
_GROUPS_TEXT = (
  'axis_index_groups is not supported under axis_name, but {place} uses it.\n'
  'Fix: omit it, to reduce over the whole axis.'
)

"""The active layout: the mesh and the rules in force, which constraints follow.

`with layout:` (or a bare `logical_axis_rules`, ours or Flax's) puts them in force for a block; the innermost
open block counts (`open_blocks.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import flax.linen as nn

from flax_spmd._src import compat, open_blocks
from flax_spmd._src.context_values import assigned
from flax_spmd._src.mesh import MeshLike, axis_sizes, current_mesh, describe
from flax_spmd._src.open_blocks import InForce as InForce
from flax_spmd._src.public import public
from flax_spmd.errors import LayoutError


class UnderLayout:
  """A function bound to a layout, which it uses regardless of the layout in force at the call."""

  in_force: InForce


def in_force(*, tracing: bool = False) -> InForce:
  """The mesh and rules in force in this task; `InForce(None, Rules())` if there are none.

  Includes rules set by Flax's own functions; of nested blocks, the inner one wins.

  Args:
    tracing: whether the result becomes part of a program that JAX caches.

  Raises:
    ContextError: with `tracing`, JAX would cache the program under another layout.
    RulesError: rules set by Flax's own functions are not a table.
    LayoutError: with `tracing`, such rules replace those of a strict layout.
  """
  if not tracing:
    return open_blocks.of_task().known()
  block = open_blocks.of_trace()
  if block.own.strict and block.by_flax and block.in_force != block.own:
    raise LayoutError(_FLAX_INSIDE.format(rules=block.flax_rules))
  return block.known()


def check_flax_rules(name: str, layout: InForce) -> None:
  """Checks that no other rules of Flax's own functions are in force around a call of a strict layout's function.

  Raises:
    LayoutError: they are; they would not apply to it.
  """
  block = open_blocks.of_task()
  differ = block.in_force is None or block.in_force.rules.pairs != layout.rules.pairs
  if layout.strict and block.by_flax and block.flax_rules and differ:
    raise LayoutError(_FLAX_AROUND.format(name=name, rules=block.flax_rules))


_FLAX_INSIDE = (
  "A constraint of a strict layout is in a block of Flax's logical_axis_rules (or after its set_logical_axis_rules), "
  'whose rules replace those of the layout: {rules}.\n'
  'Fix: remove the block, or pass its rules to the layout or to the constraint (rules=).'
)
_FLAX_AROUND = (
  "{name} is called in a block of Flax's logical_axis_rules (or after its set_logical_axis_rules), whose rules do not "
  'apply to a function of a strict layout: {rules}.\n'
  'Fix: call it outside of the block, or pass these rules to the layout.'
)


def mesh_in_force() -> MeshLike | None:
  """The mesh of the layout in force, or JAX's current mesh if it was set inside the layout's block; or None.

  The block of a layout makes the layout's mesh JAX's current one, so JAX's is never an older one. It has no
  devices inside a trace, and needs none: the program runs on those that are in force at the call. In a function
  of `layout.jit`, none have to be in force, so the layout's own mesh names them.
  """
  block = open_blocks.of_task()
  of_layout, current = block.own.mesh, current_mesh()
  if of_layout is None or current is None:
    return current if of_layout is None else of_layout
  is_newer = block.sets_devices or axis_sizes(current) != axis_sizes(of_layout)
  return current if is_newer else of_layout


@contextlib.contextmanager
def scope(inner: InForce) -> Iterator[None]:
  """Puts `inner` in force for a block: for this package, for JAX's caches and for Flax."""
  block = open_blocks.open_block(inner)
  try:
    yield
  finally:
    open_blocks.close(block)


def is_module(fn: Any) -> bool:
  """Whether this is a module of Linen without variables, which can be called by its methods `init` and `apply` only."""
  return isinstance(fn, nn.Module) and fn.scope is None


def check_function(fn: Callable[..., Any], active: InForce) -> None:
  """Checks that an argument of `jit` is a function, neither of `jax.pmap` nor of another layout, whose mesh it would use.

  Raises:
    LayoutError: it is not; the message names that layout's mesh and the unwrapped function.
  """
  if not callable(fn) or is_module(fn):
    fix = (
      'its method, such as layout.jit(model.apply)'
      if is_module(fn)
      else 'the function without calling it, such as layout.jit(step)'
    )
    raise LayoutError(f'jit has a {type(fn).__name__} in place of a function.\nFix: pass {fix}.')
  while isinstance(fn, functools.partial):
    fn = fn.func
  name = getattr(fn, '__name__', 'the function')
  if compat.is_pmapped(fn):
    raise LayoutError(
      f'{name} is a function of jax.pmap, which has a dimension of devices on every argument.\n'
      f'Fix: pass the function itself, {name}.__wrapped__, with axis_name and in_axes as of jax.pmap, and arguments '
      'without this dimension.'
    )
  bound = fn.in_force if isinstance(fn, UnderLayout) else active
  if (bound.mesh, bound.rules) != (active.mesh, active.rules):
    raise LayoutError(
      f'{name} is already jitted by another layout, with mesh {describe(bound.mesh or {})}.\n'
      f'Fix: pass the function itself, {name}.__wrapped__.'
    )


_recorded: ContextVar[set[str] | None] = ContextVar('flax_spmd_recorded_names', default=None)


@contextlib.contextmanager
def record_names() -> Iterator[set[str]]:
  """Records every logical name that this task plans or constrains in a block, here or in Flax.

  Two shortcuts hide names: JAX reuses a trace made under an equal layout, and Flax skips its constraints under an
  empty rule table. So record under a new table that has a rule, for any name.

  Example:
    >>> with record_names() as names:
    ...   spec = logical_to_mesh_axes(('batch', None), (('batch', 'data'),))
    >>> names
    {'batch'}
  """
  names: set[str] = set()
  with assigned(_recorded, names), compat.flax_resolutions(report_names):
    yield names


def report_names(names: Iterable[Any] | None) -> None:
  """Adds the logical names among the names of an array to the recorder in force, if there is one."""
  recorded = _recorded.get()
  if recorded is not None and names is not None:
    recorded.update(name for name in names if isinstance(name, str))


@public('flax_spmd')
@contextlib.contextmanager
def logical_axis_rules(rules: Any) -> Iterator[None]:
  """Puts rules in force for a block; the mesh in force does not change.

  Args:
    rules: a rule table: `Rules`, or a sequence of pairs.

  Raises:
    RulesError: `rules` is not a rule table.

  Example:
    >>> with logical_axis_rules((('batch', 'data'),)):
    ...   get_logical_axis_rules()
    (('batch', 'data'),)
  """
  block = open_blocks.open_rules(open_blocks.table_of(rules))
  try:
    yield
  finally:
    open_blocks.close(block)


@public('flax_spmd')
def get_logical_axis_rules() -> tuple[tuple[str, Any], ...]:
  """The rules in force, as plain pairs; `()` if there are none.

  Example:
    >>> get_logical_axis_rules()
    ()
    >>> with logical_axis_rules((('batch', 'data'),)):
    ...   get_logical_axis_rules()
    (('batch', 'data'),)
  """
  return in_force().rules.pairs


@public('flax_spmd')
def set_logical_axis_rules(rules: Any) -> None:
  """Puts rules in force in this thread: until the innermost block ends, or from now on if none is open.

  Prefer `logical_axis_rules`.

  Args:
    rules: a rule table; `()` removes the rules again.

  Raises:
    RulesError: `rules` is not a rule table.
    ContextError: another asyncio task of this thread has an open block.

  Example:
    >>> set_logical_axis_rules((('batch', 'data'), ('mlp', 'model')))
    >>> logical_to_mesh_axes(('batch', 'mlp'))
    P('data', 'model')
    >>> set_logical_axis_rules(())
  """
  open_blocks.set_rules(open_blocks.table_of(rules))

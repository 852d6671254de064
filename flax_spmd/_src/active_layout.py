"""The active layout: the mesh and the rules in force, which constraints follow.

`with layout:` (or a bare `logical_axis_rules`) puts them in force for a block, in three places:

* for this package, per task: a `ContextVar`, so threads and asyncio tasks each have their own;
* for JAX's caches, per thread: a `jax.make_user_context` value, so a function is traced again under other
  rules instead of running the program of the first rules;
* for Flax, per thread: its own rules, so constraints in third-party models follow them too.

JAX and Flax keep their state per thread, not per task. If a block is suspended by `await` while another
task puts another layout in force, programs would run under the wrong cache key. That raises an error here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import ContextError, LayoutError


class InForce(NamedTuple):
  """The mesh in force (None: JAX's current mesh) and the rules in force (possibly empty)."""

  mesh: MeshLike | None
  rules: Rules


class UnderLayout:
  """A function bound to a layout, which it uses regardless of the layout in force at the call."""

  in_force: InForce


_NOTHING = InForce(None, Rules())
_in_force: ContextVar[InForce | None] = ContextVar('flax_spmd_in_force', default=None)
_jit_key = jax.make_user_context(None)


def in_force(*, tracing: bool = False) -> InForce:
  """The mesh and rules in force in this task; `InForce(None, Rules())` if there are none.

  Includes rules set by Flax's own functions; of nested blocks, the inner one wins.

  Args:
    tracing: whether the result becomes part of a program that JAX caches.

  Raises:
    ContextError: with `tracing`, JAX would cache the program under another layout.
  """
  active = _in_force.get()
  if _jit_key.value != active:
    if tracing:
      raise ContextError(_OUT_OF_STEP)
    return active or _NOTHING
  rules = nn.get_logical_axis_rules()
  if active is None:
    return InForce(None, Rules.of(rules)) if rules else _NOTHING
  return active if rules == active.rules.pairs else active._replace(rules=Rules.of(rules))


@contextlib.contextmanager
def scope(inner: InForce) -> Iterator[None]:
  """Puts `inner` in force for a block: for this package, for JAX's caches and for Flax."""
  token = _in_force.set(inner)
  flax_rules = nn.get_logical_axis_rules()
  try:
    with _jit_key(inner):
      nn.set_logical_axis_rules(inner.rules.pairs)
      yield
  finally:
    nn.set_logical_axis_rules(flax_rules)
    _in_force.reset(token)


def check_in_step() -> None:
  """Checks that no other task of this thread has an open `with layout:` block.

  Raises:
    ContextError: another task has one; the message describes how to separate the two.
  """
  key = _jit_key.value
  if key is not None and key != _in_force.get():
    raise ContextError(_OUT_OF_STEP)


def check_not_jitted(fn: Callable[..., Any], active: InForce) -> None:
  """Checks that a function is not already jitted by another layout, whose mesh and rules it would use.

  Raises:
    LayoutError: it is; the message names that layout's mesh and the unwrapped function.
  """
  while isinstance(fn, functools.partial):
    fn = fn.func
  bound = fn.in_force if isinstance(fn, UnderLayout) else active
  if bound != active:
    name = getattr(fn, '__name__', 'the function')
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
  token = _recorded.set(names)
  try:
    with compat.flax_resolutions(report_names):
      yield names
  finally:
    _recorded.reset(token)


def report_names(names: Iterable[Any] | None) -> None:
  """Adds the logical names among the names of an array to the recorder in force, if there is one."""
  recorded = _recorded.get()
  if recorded is not None and names is not None:
    recorded.update(name for name in names if isinstance(name, str))


@set_module('flax_spmd')
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
  with scope(InForce(in_force().mesh, Rules.of(rules))):
    yield


@set_module('flax_spmd')
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


@set_module('flax_spmd')
def set_logical_axis_rules(rules: Any) -> None:
  """Puts rules in force from now on, in this thread and task. Prefer `logical_axis_rules`.

  Args:
    rules: a rule table; `()` removes the rules again.

  Raises:
    RulesError: `rules` is not a rule table.

  Example:
    >>> set_logical_axis_rules((('batch', 'data'), ('mlp', 'model')))
    >>> logical_to_mesh_axes(('batch', 'mlp'))
    P('data', 'model')
    >>> set_logical_axis_rules(())
  """
  inner = InForce(in_force().mesh, Rules.of(rules))
  active = None if inner == _NOTHING else inner
  _in_force.set(active)
  _jit_key(active).__enter__()
  nn.set_logical_axis_rules(inner.rules.pairs)


_OUT_OF_STEP = (
  "The layout in force in this task differs from the one in JAX's cache key: another task of this "
  'thread is suspended by an `await` inside a `with layout:` block, or this thread was started '
  'inside such a block.\n'
  'Fix: call functions from `layout.jit`, which carry their layout; or close the block '
  'before awaiting; or enter `with layout:` in the thread that runs the function.'
)

"""What is in force: the mesh and the rules that constraints follow, here and now.

A layout (or a bare `logical_axis_rules`) is put in force for a block. Three parties must see it:

* this code, per task: a `ContextVar`, so that threads and asyncio tasks each have their own;
* JAX's caches, per thread: a `jax.make_user_context` value, so that the same function under other
  rules is traced again and never silently runs the first rules' program;
* Flax, per thread: its own rules, so that constraints inside third-party models follow suit.

JAX and Flax know no tasks. A block that is suspended (`await`) while another task puts another
layout in force would run programs under the wrong key; that is an error here, never a wrong layout.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import ContextError, LayoutError


class InForce(NamedTuple):
  """The mesh (None: whatever JAX has in context) and the rules (possibly none)."""

  mesh: MeshLike | None
  rules: Rules


class UnderLayout:
  """A function that runs under a layout whatever is in force where it is called."""

  in_force: InForce


_NOTHING = InForce(None, Rules())
_in_force: ContextVar[InForce | None] = ContextVar('flax_spmd_in_force', default=None)
_jit_key = jax.make_user_context(None)


def in_force(*, tracing: bool = False) -> InForce:
  """The mesh and rules in force in this task; nothing is `InForce(None, Rules())`.

  Rules that were set with Flax's own functions count too, and win if they are the inner ones.

  Args:
    tracing: whether the answer goes into a program that JAX will cache.

  Raises:
    ContextError: when tracing, if JAX would cache the program under another layout.
  """
  held = _in_force.get()
  if _jit_key.value != held:
    if tracing:
      raise ContextError(_OUT_OF_STEP)
    return held or _NOTHING
  rules = nn.get_logical_axis_rules()
  if held is None:
    return InForce(None, Rules.of(rules)) if rules else _NOTHING
  return held if rules == held.rules.pairs else held._replace(rules=Rules.of(rules))


@contextlib.contextmanager
def scope(inner: InForce) -> Iterator[None]:
  """Puts `inner` in force for a block, for this code, for JAX's caches and for Flax."""
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
  """Raises if another task of this thread has a layout in force in a block that is still open.

  Raises:
    ContextError: says how to keep the two apart.
  """
  key = _jit_key.value
  if key is not None and key != _in_force.get():
    raise ContextError(_OUT_OF_STEP)


def check_not_jitted(fn: Callable[..., Any], here: InForce) -> None:
  """Raises if a function is what some layout's `jit` made: that mesh and those rules would hold, not these.

  Raises:
    LayoutError: says which mesh, and where the function itself is.
  """
  while isinstance(fn, functools.partial):
    fn = fn.func
  held = fn.in_force if isinstance(fn, UnderLayout) else here
  if held != here:
    name = getattr(fn, '__name__', 'the function')
    raise LayoutError(
      f'{name} was jitted by a layout already, and keeps its mesh {describe(held.mesh or {})} and its rules.\n'
      f'Fix: give the function itself, which is {name}.__wrapped__.'
    )


@set_module('flax_spmd')
@contextlib.contextmanager
def logical_axis_rules(rules: Any) -> Iterator[None]:
  """Puts rules in force for a block; the mesh stays what it was.

  Args:
    rules: a rule table (`Rules`, or a tuple or list of pairs).

  Raises:
    RulesError: `rules` is no rule table.

  Example:
    >>> with logical_axis_rules((('batch', 'data'),)):
    ...   get_logical_axis_rules()
    (('batch', 'data'),)
  """
  with scope(InForce(in_force().mesh, Rules.of(rules))):
    yield


@set_module('flax_spmd')
def get_logical_axis_rules() -> tuple[tuple[str, Any], ...]:
  """The rules in force, as plain pairs; `()` where there are none.

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
  """Puts rules in force from here on, in this thread and task. Prefer the block form.

  Args:
    rules: a rule table; `()` takes the rules out of force again.

  Raises:
    RulesError: `rules` is no rule table.

  Example:
    >>> set_logical_axis_rules((('batch', 'data'), ('mlp', 'model')))
    >>> logical_to_mesh_axes(('batch', 'mlp'))
    P('data', 'model')
    >>> set_logical_axis_rules(())
  """
  inner = InForce(in_force().mesh, Rules.of(rules))
  held = None if inner == _NOTHING else inner
  _in_force.set(held)
  _jit_key(held).__enter__()
  nn.set_logical_axis_rules(inner.rules.pairs)


_OUT_OF_STEP = (
  "The layout in force in this task is not the one in JAX's cache key: another task of this "
  'thread is inside a `with layout:` block that was suspended by an `await`, or this thread was '
  'started inside such a block.\n'
  'Fix: call functions made by `layout.jit`, which carry their layout along; or close the block '
  'before awaiting; or enter `with layout:` in the thread that runs the function.'
)

"""jit under a layout: outputs get the layout's shardings, and constraints follow its rules.

    step = layout.jit(train_step, donate_argnums=0)
    state, loss = step(state, batch)

Arguments are taken as they lie. Outputs that carry names (boxes), or that are a state which the
layout has planned before (`layout.init(..., boxed=False)`), are pinned to the very shardings that the
layout planned, so that the next call finds its arguments just as they were compiled for; the rest is
the compiler's choice.

Three facts about JAX make this cost next to nothing per call. Mesh and rules matter only while a
function is traced, so a call sets neither (but for Explicit axes, which are part of the types). All
`jax.jit` objects of one function share its traces, so the outputs' shardings can be read off a first
trace and given to the real one. And as long as every signature seen has the same output shardings,
JAX's own dispatch does all the work; a new signature is noticed because it is traced.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd import compat
from flax_spmd.context import InForce, scope
from flax_spmd.mesh import MeshLike
from flax_spmd.rules import Rules

OutputPlanner = Callable[[Any], Sequence[NamedSharding | None]]


class _Outputs(NamedTuple):
  """The structure of a function's result and a sharding (or None: free) for each of its leaves."""

  treedef: Any
  shardings: tuple[NamedSharding | None, ...]


class _Changed(Exception):
  """Raised by a trace whose outputs need other shardings than it is being traced for."""


_reading: ContextVar[list[_Outputs] | None] = ContextVar('flax_spmd_reading', default=None)


class Jitted:
  """A function compiled under a layout; called, lowered and traced like a `jax.jit` function.

  Args:
    fn: the function.
    mesh, rules: the layout.
    plan_outputs: gives a sharding, or None, for each leaf of a result.
    options: arguments of `jax.jit`, without shardings.
    finish: what is done to a result once its outputs are planned; it keeps the order of the leaves.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    mesh: MeshLike,
    rules: Rules,
    plan_outputs: OutputPlanner,
    options: Mapping[str, Any],
    finish: Callable[[Any], Any] | None = None,
  ):
    functools.update_wrapper(self, fn)
    self._mesh = mesh
    self._in_force = InForce(mesh, rules)
    self._mesh_at_calls = not isinstance(mesh, Mesh) or AxisType.Explicit in mesh.axis_types
    self._plan_outputs = plan_outputs
    self._options = dict(options)
    self._finish = finish
    self._body = _traced_body(self, fn)
    self._statics = _Statics.of(fn, options)
    self._only: tuple[_Outputs, Any] | None = None
    self._by_outputs: dict[_Outputs, Any] = {}
    self._by_signature: dict[Any, Any] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the function; compiles it first where these arguments are new."""
    if self._mesh_at_calls:
      with self._scope():
        return self._call(args, kwargs)
    return self._call(args, kwargs)

  def _scope(self) -> AbstractContextManager[Any]:
    return compat.mesh_scope(self._mesh) if self._mesh_at_calls else nullcontext()

  def _call(self, args, kwargs) -> Any:
    if self._only is not None:
      try:
        return self._only[1](*args, **kwargs)
      except _Changed:
        pass
    return self._for(args, kwargs)(*args, **kwargs)

  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)

  def __repr__(self) -> str:
    return f'<layout.jit of {getattr(self, "__qualname__", self._body)}>'

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Lowered` for these arguments, which may be abstract."""
    with self._scope():
      return self._for(args, kwargs).lower(*args, **kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Traced` for these arguments, which may be abstract."""
    with self._scope():
      return self._for(args, kwargs).trace(*args, **kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    """Shapes and dtypes of the result for these arguments, which may be abstract."""
    with self._scope():
      return self._for(args, kwargs).eval_shape(*args, **kwargs)

  def _for(self, args, kwargs) -> Any:
    """The `jax.jit` function with the output shardings that these arguments lead to."""
    signature = self._statics.signature(args, kwargs)
    jitted = self._by_signature.get(signature)
    if jitted is None:
      outputs = self._read_outputs(args, kwargs)
      jitted = self._by_outputs.get(outputs)
      if jitted is None:
        shardings = outputs.treedef.unflatten(outputs.shardings)
        jitted = jax.jit(self._body, out_shardings=shardings, **self._options)
        self._by_outputs[outputs] = jitted
      self._by_signature[signature] = jitted
      self._only = (outputs, jitted) if len(self._by_outputs) == 1 else None
    return jitted

  def _read_outputs(self, args, kwargs) -> _Outputs:
    """Traces the function for these arguments; the trace is used again by the real call."""
    read: list[_Outputs] = []
    token = _reading.set(read)
    try:
      result = jax.jit(self._body, **self._options).eval_shape(*args, **kwargs)
    finally:
      _reading.reset(token)
    return read[-1] if read else self._outputs(result, result)  # JAX had the trace already

  def _outputs(self, result: Any, finished: Any) -> _Outputs:
    return _Outputs(jax.tree.structure(finished), tuple(self._plan_outputs(result)))


def _traced_body(jitted: Jitted, fn: Callable[..., Any]) -> Callable[..., Any]:
  """`fn` under the layout; each trace of it says, or checks, what its outputs need."""

  @functools.wraps(fn)
  def body(*args, **kwargs):
    with scope(jitted._in_force), compat.mesh_scope(jitted._mesh):
      result = fn(*args, **kwargs)
    finished = result if jitted._finish is None else jitted._finish(result)
    outputs = jitted._outputs(result, finished)
    reading, only = _reading.get(), jitted._only
    if reading is not None:
      reading.append(outputs)
    elif only is not None and only[0] != outputs:
      raise _Changed
    return finished if any(outputs.shardings) else _on_all_devices(finished, jitted._mesh)

  return body


def _on_all_devices(result: Any, mesh: MeshLike) -> Any:
  """The same result, from a program that surely runs on the mesh.

  Where neither arguments nor results say on which devices, JAX would compile for one of them, and
  constraints that know the mesh's axes only (Flax's) would mean nothing.
  """
  leaves, treedef = jax.tree.flatten(result)
  if isinstance(mesh, Mesh) and leaves and isinstance(leaves[0], Tracer):
    anywhere = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(leaves[0].shape))
    if AxisType.Explicit not in mesh.axis_types:
      leaves[0] = jax.lax.with_sharding_constraint(leaves[0], NamedSharding(mesh, anywhere))
  return treedef.unflatten(leaves)


class _Statics(NamedTuple):
  """Which arguments are static, by position and by name, however they were declared and passed."""

  positions: frozenset[int]
  names: frozenset[str]

  @classmethod
  def of(cls, fn: Callable[..., Any], options: Mapping[str, Any]) -> _Statics:
    numbers = options.get('static_argnums')
    names = options.get('static_argnames')
    numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
    names = {names} if isinstance(names, str) else set(names or ())
    try:
      parameters = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in _BY_POSITION]
    except (TypeError, ValueError):  # builtins without a signature
      parameters = []
    numbers = {number % len(parameters) if parameters and number < 0 else number for number in numbers}
    numbers |= {parameters.index(name) for name in names if name in parameters}
    names |= {parameters[number] for number in numbers if number < len(parameters)}
    return cls(frozenset(numbers), frozenset(names))

  def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the structure and the shardings of a result can depend on."""
    static = tuple(value for i, value in enumerate(args) if i in self.positions)
    static += tuple(item for item in sorted(kwargs.items()) if item[0] in self.names)
    dynamic = tuple(None if i in self.positions else value for i, value in enumerate(args))
    named = {name: value for name, value in kwargs.items() if name not in self.names}
    leaves, treedef = jax.tree.flatten((dynamic, named))
    return treedef, tuple(map(_leaf_signature, leaves)), static


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _leaf_signature(leaf: Any) -> Any:
  shape = getattr(leaf, 'shape', None)
  return type(leaf) if shape is None else (shape, leaf.dtype)

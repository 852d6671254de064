"""jit under a layout: outputs get the layout's shardings, and constraints follow its rules.

    step = layout.jit(train_step, donate_argnums=0)
    state, loss = step(state, batch)

Arguments are taken as they lie, unless `in_rules` say where they have to. Outputs that carry names
(boxes), or that are a state which the layout has planned before (by `layout.init`, without boxes), are
pinned to the very shardings that the layout planned, so that the next call finds its arguments just as
they were compiled for; the rest is the compiler's choice, unless `out_rules` say otherwise.

Three facts about JAX make this cost next to nothing per call. Mesh and rules matter only while a
function is traced, so a call sets neither (but for Explicit axes, which are part of the types). All
`jax.jit` objects of one function share its traces, so the outputs' shardings can be read off a first
trace and given to the real one. And as long as every signature seen has the same shardings, JAX's own
dispatch does all the work; a new signature is noticed because it is traced, or refused.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, UnderLayout, check_not_jitted, scope
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.jit.tree_constraints import reporting
from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, raise_problems

LeafPlanner = Callable[[Any], Sequence[Sharding | None]]


class _Placed(NamedTuple):
  """The structure of a tree and a sharding (or None: free) for each of its leaves."""

  treedef: Any
  shardings: tuple[Sharding | None, ...]

  def tree(self) -> Any:
    return self.treedef.unflatten(self.shardings)


class _Plan(NamedTuple):
  """What one compiled function is for: where its arguments have to lie (None: anywhere), and its results."""

  inputs: _Placed | None
  outputs: _Placed


class _Changed(Exception):
  """Raised by a trace whose plan is another than the one that it is being traced for."""


_reading: ContextVar[list[_Placed] | None] = ContextVar('flax_spmd_reading', default=None)


class Jitted(UnderLayout):
  """A function compiled under a layout; called, lowered and traced like a `jax.jit` function.

  Args:
    fn: the function.
    mesh, rules: the layout.
    plan_outputs: gives a sharding, or None, for each leaf of a result.
    options: arguments of `jax.jit`, without shardings.
    finish: what is done to a result once its outputs are planned; it keeps the order of the leaves.
    plan_inputs: gives a sharding, or None, for each leaf of the arguments that are not static, which it
      gets as a pair `(args, kwargs)`; None: they may lie anywhere.

  Raises:
    LayoutError: the function was jitted by another layout.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    mesh: MeshLike,
    rules: Rules,
    plan_outputs: LeafPlanner,
    options: Mapping[str, Any],
    finish: Callable[[Any], Any] | None = None,
    plan_inputs: LeafPlanner | None = None,
  ):
    check_not_jitted(fn, InForce(mesh, rules))
    functools.update_wrapper(self, fn)
    self._mesh = mesh
    self.in_force = InForce(mesh, rules)
    self._mesh_at_calls = not isinstance(mesh, Mesh) or AxisType.Explicit in mesh.axis_types
    self._plan_outputs = plan_outputs
    self._plan_inputs = plan_inputs
    self._options = dict(options)
    self._finish = finish
    self._body = _traced_body(self, fn)
    self._arguments = Arguments.of(fn, options)
    self.reported: set[str] = set()
    self._only: tuple[_Plan, Any] | None = None
    self._planning = threading.RLock()
    self._by_plan: dict[_Plan, Any] = {}
    self._by_signature: dict[Any, tuple[_Plan, Any]] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the function; compiles it first where these arguments are new."""
    if self._mesh_at_calls:
      with self._scope():
        return self._call(args, kwargs)
    return self._call(args, kwargs)

  def _scope(self) -> AbstractContextManager[Any]:
    return compat.mesh_scope(self._mesh) if self._mesh_at_calls else nullcontext()

  def _call(self, args, kwargs) -> Any:
    if self._plan_inputs is not None:
      return self._call_placed(*self._arguments.by_position(args, kwargs))
    only = self._only
    if only is not None:
      try:
        return self._checked(only, only[1](*args, **kwargs), args, kwargs)
      except _Changed:
        pass
      except Exception:
        if self._only is only:  # else another thread traced for these arguments: see `_checked`
          raise
    return self._apply_planned('__call__', args, kwargs)

  def _call_placed(self, args, kwargs) -> Any:
    """A call whose arguments have places: JAX checks them, and refuses where they lie elsewhere."""
    if kwargs:  # JAX takes no keyword arguments together with shardings
      args, kwargs = self._placed(args, kwargs)
    only = self._only
    if only is not None and not kwargs:
      try:
        return self._checked(only, only[1](*args), args, kwargs)
      except _Changed:
        pass
      except (ValueError, TypeError):  # refused, maybe because another function is needed
        if self._for(args, kwargs)[1] is only[1]:
          self._check_placed(only[0], args)
          raise
    self._check_placed(self._for(args, kwargs)[0], args)
    return self._apply_planned('__call__', args, kwargs)

  def _checked(self, only: tuple[_Plan, Any], result: Any, args, kwargs) -> Any:
    """A result of the one function, or where another thread found meanwhile that there are two, moved.

    Traces are shared, so that thread may have traced for these very arguments, and this one called the
    wrong function without a trace that would have noticed. Its arguments may be donated by now.
    """
    if self._only is only:
      return result
    plan, jitted = self._for(args, kwargs)
    if jitted is only[1]:
      return result
    leaves, treedef = jax.tree.flatten(result)
    return treedef.unflatten(map(_put, leaves, plan.outputs.shardings))

  def _placed(self, args, kwargs) -> Any:
    """The arguments, put where they have to lie; abstract ones say so."""
    dynamic = self._arguments.dynamic(args, kwargs)
    leaves, treedef = jax.tree.flatten(dynamic)
    shardings = self._inputs(dynamic).shardings
    check_as_planned(dynamic, shardings)
    placed = map(_put, leaves, shardings)
    return self._arguments.filled(treedef.unflatten(placed), args, kwargs)

  def _check_placed(self, plan: _Plan, args) -> None:
    if plan.inputs is not None:
      check_as_planned(self._arguments.dynamic(args, {})[0], plan.inputs.shardings)

  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)

  def __repr__(self) -> str:
    return f'<layout.jit of {getattr(self, "__qualname__", self._body)}>'

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Lowered` for these arguments, which may be abstract."""
    return self._apply('lower', args, kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Traced` for these arguments, which may be abstract."""
    return self._apply('trace', args, kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    """Shapes and dtypes of the result for these arguments, which may be abstract."""
    return self._apply('eval_shape', args, kwargs)

  def _apply(self, method: str, args, kwargs) -> Any:
    with self._scope():
      if self._plan_inputs is not None:
        args, kwargs = self._arguments.by_position(args, kwargs)
        if kwargs:
          args, kwargs = self._placed(args, kwargs)
      return self._apply_planned(method, args, kwargs)

  def _apply_planned(self, method: str, args, kwargs) -> Any:
    """Calls, lowers or traces the function for these arguments."""
    try:
      return getattr(self._for(args, kwargs)[1], method)(*args, **kwargs)
    except _Changed:  # the layout has met a state of the result's form since this was planned
      _, jitted = self._planned(self._arguments.signature(args, kwargs), args, kwargs)
      return getattr(jitted, method)(*args, **kwargs)

  def _for(self, args, kwargs) -> tuple[_Plan, Any]:
    """The plan for these arguments, and the `jax.jit` function for it."""
    signature = self._arguments.signature(args, kwargs)
    found = self._by_signature.get(signature)
    return self._planned(signature, args, kwargs) if found is None else found

  def _planned(self, signature: Any, args, kwargs) -> tuple[_Plan, Any]:
    """Plans for a new signature; one thread at a time, or `_only` could outlive a second plan."""
    with self._planning:
      self._only = None  # a trace for the outputs must not be run by another thread's fast call
      plan = _Plan(self._inputs_of_call(args, kwargs), self._read_outputs(args, kwargs))
      jitted = self._by_plan.get(plan)
      if jitted is None:
        jitted = self._by_plan[plan] = self._compiled(plan)
      found = self._by_signature[signature] = plan, jitted
      self._only = found if len(self._by_plan) == 1 else None
      return found

  def _compiled(self, plan: _Plan) -> Any:
    inputs = {} if plan.inputs is None else {'in_shardings': plan.inputs.tree()}
    return jax.jit(self._body, out_shardings=plan.outputs.tree(), **inputs, **self._options)

  def _inputs_of_call(self, args, kwargs) -> _Placed | None:
    """Where the arguments have to lie; with keyword arguments they have been placed already."""
    if self._plan_inputs is None or kwargs:
      return None
    args, _ = self._arguments.dynamic(args, kwargs)
    return _Placed(jax.tree.structure(args), self._inputs((args, {})).shardings)

  def _inputs(self, dynamic) -> _Placed:
    planned = () if self._plan_inputs is None else tuple(self._plan_inputs(dynamic))
    return _Placed(jax.tree.structure(dynamic), planned)

  def _read_outputs(self, args, kwargs) -> _Placed:
    """Traces the function for these arguments; the trace is used again by the real call."""
    read: list[_Placed] = []
    token = _reading.set(read)
    try:
      result = jax.jit(self._body, **self._options).eval_shape(*args, **kwargs)
    finally:
      _reading.reset(token)
    return read[-1] if read else self._outputs(result, result)  # JAX had the trace already

  def _outputs(self, result: Any, finished: Any) -> _Placed:
    return _Placed(jax.tree.structure(finished), tuple(self._plan_outputs(result)))


def _traced_body(jitted: Jitted, fn: Callable[..., Any]) -> Callable[..., Any]:
  """`fn` under the layout; each trace of it says, or checks, what its outputs need."""

  @functools.wraps(fn)
  def body(*args, **kwargs):
    with scope(jitted.in_force), compat.mesh_scope(jitted._mesh), reporting(fn, jitted.reported):
      result = fn(*args, **kwargs)
    finished = result if jitted._finish is None else jitted._finish(result)
    outputs = jitted._outputs(result, finished)
    reading, only = _reading.get(), jitted._only
    if reading is not None:
      reading.append(outputs)
    elif only is not None and only[0] != _Plan(jitted._inputs_of_call(args, kwargs), outputs):
      raise _Changed
    return finished if any(outputs.shardings) else _on_all_devices(finished, jitted._mesh)

  return body


def _put(leaf: Any, sharding: Sharding | None) -> Any:
  if sharding is None:
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return jax.device_put(leaf, sharding)


def check_as_planned(args: Any, shardings: Sequence[Sharding | None]) -> None:
  """Raises if an array was put elsewhere than where it has to lie.

  Raises:
    LayoutError: names every such argument, where it lies and where it should.
  """
  problems = [
    Problem(
      'argument {} lies as {}, but in_rules ask for {}.'.format(
        path_string(path), *_lie(leaf.sharding, sharding)
      ),
      'place it by layout.shard before the call, or give the rules as in_constraints, which take '
      'arguments as they lie.',
    )
    for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(args), shardings, strict=True)
    if sharding is not None
    and isinstance(leaf, jax.Array)
    and not isinstance(leaf, Tracer)
    and leaf.committed
    and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  ]
  raise_problems(problems)


def _lie(one: Any, other: Any) -> tuple[str, str]:
  """How two shardings differ: specs and meshes, and the order of the devices where only that does."""
  said = _lies(one), _lies(other)
  if said[0] != said[1]:
    return said
  ids = ([device.id for device in each.mesh.devices.flat] for each in (one, other))
  first, second = (f'{text} with devices {order}' for text, order in zip(said, ids, strict=True))
  return first, second


def _lies(sharding: Any) -> str:
  """`P('data',) on {'data': 8}`, or whatever another kind of sharding says of itself."""
  if not isinstance(sharding, NamedSharding):
    return repr(sharding)
  return f'{sharding.spec} on {describe(sharding.mesh)}'


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

"""Jitted: `jax.jit` under a layout; its output shardings come from the layout, its constraints from the rules.

    step = layout.jit(train_step, donate_argnums=0)
    state, loss = step(state, batch)

Arguments keep their shardings unless `in_rules` require others. Outputs with boxes, and unboxed states
that the layout planned before, are pinned to the planned shardings, so the next call finds its arguments
sharded as compiled. The compiler chooses the rest, unless `out_rules` specify it.

Three facts about JAX keep the cost per call near zero:

* Mesh and rules matter only during tracing, so a call sets neither (except for Explicit axes, which are
  part of the types).
* All `jax.jit` objects of one function share its traces, so a first trace yields the output shardings
  for the real one.
* While all signatures seen have the same shardings, JAX's own dispatch does all the work. A new
  signature is noticed, because JAX traces or rejects it.
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
from flax_spmd._src.jit.tree_constraints import warn_of_unused_annotations
from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, raise_problems

LeafPlanner = Callable[[Any], Sequence[Sharding | None]]


class _LeafShardings(NamedTuple):
  """The structure of a tree, and the sharding of each leaf (None: unspecified)."""

  treedef: Any
  shardings: tuple[Sharding | None, ...]

  def tree(self) -> Any:
    return self.treedef.unflatten(self.shardings)


class _CallShardings(NamedTuple):
  """The shardings that one `jax.jit` function is compiled for; `inputs` is None if it accepts any."""

  inputs: _LeafShardings | None
  outputs: _LeafShardings


class _ShardingsChanged(Exception):
  """Raised in a trace whose shardings differ from those of the function being compiled."""


_recorded_outputs: ContextVar[list[_LeafShardings] | None] = ContextVar(
  'flax_spmd_recorded_outputs', default=None
)


class Jitted(UnderLayout):
  """A function compiled under a layout; called, lowered and traced like a `jax.jit` function.

  Args:
    fn: function to compile.
    mesh, rules: mesh and rule table of the layout.
    plan_outputs: function from a result to the sharding (or None) of each leaf.
    options: arguments of `jax.jit`, without shardings.
    finish: function applied to a result after its outputs are planned; keeps the order of the leaves.
    plan_inputs: function from the dynamic arguments, a pair `(args, kwargs)`, to the required sharding (or
      None) of each leaf. None: arguments keep their shardings.

  Raises:
    LayoutError: `fn` was jitted by another layout.

  Attributes:
    in_force: the mesh and rules that the function uses.
    functions: the `jax.jit` functions so far, by the shardings that they are compiled for.
    reported: the kinds of warnings already issued.
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
    self._single: tuple[_CallShardings, Any] | None = None  # the only entry of functions, if it has one
    self._planning = threading.RLock()
    self.functions: dict[_CallShardings, Any] = {}
    self._by_signature: dict[Any, tuple[_CallShardings, Any]] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the function; compiles it first if these arguments have a new signature."""
    if self._mesh_at_calls:
      with self._scope():
        return self._call(args, kwargs)
    return self._call(args, kwargs)

  def _scope(self) -> AbstractContextManager[Any]:
    return compat.mesh_scope(self._mesh) if self._mesh_at_calls else nullcontext()

  def _call(self, args, kwargs) -> Any:
    if self._plan_inputs is not None:
      return self._call_with_placements(*self._arguments.by_position(args, kwargs))
    single = self._single
    if single is not None:
      try:
        return self._resharded_if_stale(single, single[1](*args, **kwargs), args, kwargs)
      except _ShardingsChanged:
        pass
      except Exception:
        if self._single is single:  # else another thread traced for these arguments
          raise
    return self._apply_planned('__call__', args, kwargs)

  def _call_with_placements(self, args, kwargs) -> Any:
    """A call with `in_rules`: JAX compares the arguments' shardings, and rejects those that differ."""
    if kwargs:  # jax.jit rejects them with in_shardings: https://github.com/jax-ml/jax/issues/17400
      args, kwargs = self._transferred(args, kwargs)
    single = self._single
    if single is not None and not kwargs:
      try:
        return self._resharded_if_stale(single, single[1](*args), args, kwargs)
      except _ShardingsChanged:
        pass
      except (ValueError, TypeError):  # rejected, maybe because another function is needed
        if self._planned_for(args, kwargs)[1] is single[1]:
          self._check_inputs(single[0], args)
          raise
    self._check_inputs(self._planned_for(args, kwargs)[0], args)
    return self._apply_planned('__call__', args, kwargs)

  def _resharded_if_stale(self, single: tuple[_CallShardings, Any], result: Any, args, kwargs) -> Any:
    """A result of the single function, resharded if another thread planned a second function meanwhile.

    Threads share traces. The other thread may have traced for these very arguments, so that this one
    called the wrong function without a trace to notice it. Its arguments may be donated by now.
    """
    if self._single is single:
      return result
    planned, function = self._planned_for(args, kwargs)
    if function is single[1]:
      return result
    leaves, treedef = jax.tree.flatten(result)
    return treedef.unflatten(map(_put, leaves, planned.outputs.shardings))

  def _transferred(self, args, kwargs) -> Any:
    """The arguments with their required shardings; abstract ones only record them."""
    dynamic = self._arguments.dynamic(args, kwargs)
    leaves, treedef = jax.tree.flatten(dynamic)
    shardings = self._input_shardings(dynamic).shardings
    check_shardings(dynamic, shardings)
    transferred = map(_put, leaves, shardings)
    return self._arguments.filled(treedef.unflatten(transferred), args, kwargs)

  def _check_inputs(self, planned: _CallShardings, args) -> None:
    if planned.inputs is not None:
      check_shardings(self._arguments.dynamic(args, {})[0], planned.inputs.shardings)

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
          args, kwargs = self._transferred(args, kwargs)
      return self._apply_planned(method, args, kwargs)

  def _apply_planned(self, method: str, args, kwargs) -> Any:
    """Calls, lowers or traces the function for these arguments."""
    try:
      return getattr(self._planned_for(args, kwargs)[1], method)(*args, **kwargs)
    except _ShardingsChanged:  # the layout has planned a state with the result's structure since then
      _, function = self._plan(self._arguments.signature(args, kwargs), args, kwargs)
      return getattr(function, method)(*args, **kwargs)

  def _planned_for(self, args, kwargs) -> tuple[_CallShardings, Any]:
    """The shardings for these arguments, and the `jax.jit` function compiled for them."""
    signature = self._arguments.signature(args, kwargs)
    planned = self._by_signature.get(signature)
    return self._plan(signature, args, kwargs) if planned is None else planned

  def _plan(self, signature: Any, args, kwargs) -> tuple[_CallShardings, Any]:
    """Plans a new signature. One thread at a time, or `_single` could outlive a second function."""
    with self._planning:
      self._single = None  # another thread's fast call must not run a trace for output shardings
      shardings = _CallShardings(self._inputs_of_call(args, kwargs), self._traced_outputs(args, kwargs))
      function = self.functions.get(shardings)
      if function is None:
        function = self.functions[shardings] = self._jit(shardings)
      planned = self._by_signature[signature] = shardings, function
      self._single = planned if len(self.functions) == 1 else None
      return planned

  def _jit(self, shardings: _CallShardings) -> Any:
    inputs = {} if shardings.inputs is None else {'in_shardings': shardings.inputs.tree()}
    return jax.jit(self._body, out_shardings=shardings.outputs.tree(), **inputs, **self._options)

  def _inputs_of_call(self, args, kwargs) -> _LeafShardings | None:
    """The required shardings of the arguments; None with keyword arguments, already transferred."""
    if self._plan_inputs is None or kwargs:
      return None
    args, _ = self._arguments.dynamic(args, kwargs)
    return _LeafShardings(jax.tree.structure(args), self._input_shardings((args, {})).shardings)

  def _input_shardings(self, dynamic) -> _LeafShardings:
    planned = () if self._plan_inputs is None else tuple(self._plan_inputs(dynamic))
    return _LeafShardings(jax.tree.structure(dynamic), planned)

  def _traced_outputs(self, args, kwargs) -> _LeafShardings:
    """Traces the function for its output shardings; the real call reuses the trace."""
    recorded: list[_LeafShardings] = []
    token = _recorded_outputs.set(recorded)
    try:
      result = jax.jit(self._body, **self._options).eval_shape(*args, **kwargs)
    finally:
      _recorded_outputs.reset(token)
    return recorded[-1] if recorded else self._output_shardings(result, result)  # JAX had cached it

  def _output_shardings(self, result: Any, finished: Any) -> _LeafShardings:
    return _LeafShardings(jax.tree.structure(finished), tuple(self._plan_outputs(result)))


def _traced_body(jitted: Jitted, fn: Callable[..., Any]) -> Callable[..., Any]:
  """`fn` under the layout; each trace records its output shardings, or compares them."""

  @functools.wraps(fn)
  def body(*args, **kwargs):
    with (
      scope(jitted.in_force),
      compat.mesh_scope(jitted._mesh),
      warn_of_unused_annotations(fn, jitted.reported),
    ):
      result = fn(*args, **kwargs)
    finished = result if jitted._finish is None else jitted._finish(result)
    outputs = jitted._output_shardings(result, finished)
    recorded, single = _recorded_outputs.get(), jitted._single
    if recorded is not None:
      recorded.append(outputs)
    elif single and single[0] != _CallShardings(jitted._inputs_of_call(args, kwargs), outputs):
      raise _ShardingsChanged
    return finished if any(outputs.shardings) else _on_all_devices(finished, jitted._mesh)

  return body


def _put(leaf: Any, sharding: Sharding | None) -> Any:
  if sharding is None:
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return jax.device_put(leaf, sharding)


def check_shardings(args: Any, shardings: Sequence[Sharding | None]) -> None:
  """Checks that every committed array has its required sharding.

  Raises:
    LayoutError: names every array that has another, with both shardings.
  """
  problems = [
    Problem(
      'argument {} is sharded as {}, but in_rules require {}.'.format(
        path_string(path), *_sharding_texts(leaf.sharding, sharding)
      ),
      'reshard it with layout.shard before the call, or pass the rules as in_constraints, which accept '
      'any sharding.',
    )
    for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(args), shardings, strict=True)
    if sharding is not None
    and isinstance(leaf, jax.Array)
    and not isinstance(leaf, Tracer)
    and leaf.committed
    and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  ]
  raise_problems(problems)


def _sharding_texts(one: Any, other: Any) -> tuple[str, str]:
  """Two shardings as text: specs and meshes, and the device order if only that differs."""
  texts = _sharding_text(one), _sharding_text(other)
  if texts[0] != texts[1]:
    return texts
  ids = ([device.id for device in each.mesh.devices.flat] for each in (one, other))
  first, second = (f'{text} with devices {order}' for text, order in zip(texts, ids, strict=True))
  return first, second


def _sharding_text(sharding: Any) -> str:
  """`P('data',) on {'data': 8}`, or the `repr` of another kind of sharding."""
  if not isinstance(sharding, NamedSharding):
    return repr(sharding)
  return f'{sharding.spec} on {describe(sharding.mesh)}'


def _on_all_devices(result: Any, mesh: MeshLike) -> Any:
  """The same result, from a program that is certain to run on the whole mesh.

  If neither arguments nor results have shardings, JAX compiles for a single device, where constraints
  without devices (Flax's) have no effect (https://github.com/jax-ml/jax/issues/23634). One open constraint
  on the concrete mesh prevents that.
  """
  leaves, treedef = jax.tree.flatten(result)
  if isinstance(mesh, Mesh) and leaves and isinstance(leaves[0], Tracer):
    anywhere = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(leaves[0].shape))
    if AxisType.Explicit not in mesh.axis_types:
      leaves[0] = jax.lax.with_sharding_constraint(leaves[0], NamedSharding(mesh, anywhere))
  return treedef.unflatten(leaves)

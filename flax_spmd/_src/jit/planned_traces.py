"""Planned traces: a function as JAX traces it under a layout, which it does only where a plan has asked for it.

All `jax.jit` objects of one function share its traces, so a trace that yields the structure of the result serves the
real call too. A call with new shapes traces: the traced body interrupts a trace that no plan has asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce
from flax_spmd._src.context_values import assigned
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.data.unusable_leaves import check_usable
from flax_spmd._src.host_memory import on_device, on_host
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.jit.batch_constraints import with_batch_constraints
from flax_spmd._src.jit.batch_leaves import BatchLeaves
from flax_spmd._src.jit.late_fetches import with_late_fetches
from flax_spmd._src.jit.required_shardings import LeafShardings
from flax_spmd._src.jit.resource_meshes import called_without_resources
from flax_spmd._src.jit.trace_scope import trace_scope
from flax_spmd._src.jit.tree_constraints import warn_of_unused_annotations
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.names.nnx_variables import has_modules
from flax_spmd._src.names.unit_paths import leaves_with_paths


class TakesModules(Exception):
  """Raised while a call is planned: its arguments or its result have NNX modules."""


class Unplanned(Exception):
  """Raised in a trace or, under a strict layout, a compilation that no plan has asked for."""


_planned_trace: ContextVar[bool] = ContextVar('flax_spmd_planned_trace', default=False)
_no_compilation: ContextVar[bool] = ContextVar('flax_spmd_no_compilation', default=False)


def planned_traces() -> contextlib.AbstractContextManager[None]:
  """A block whose traces a plan has asked for."""
  return assigned(_planned_trace, True)


def repeated(function: Any, *args: Any, **kwargs: Any) -> Any:
  """A call that is interrupted if JAX has to compile for it."""
  with assigned(_no_compilation, True):
    return function(*args, **kwargs)


def _interrupt() -> None:
  if _no_compilation.get():
    raise Unplanned


compat.interrupt_compilation(_interrupt)


def may_run_again(function: Any, args: Any, kwargs: Any) -> bool:
  """Whether nobody can notice that a `jax.jit` object runs a second time."""
  arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
  if any(array.is_deleted() for array in arrays):
    return False
  with planned_traces():
    return not function.trace(*args, **kwargs).jaxpr.effects


class JitProgram(NamedTuple):
  """The properties of one `jax.jit` object.

  Attributes:
    inputs: shardings of the arguments; None if it accepts any.
    outputs: shardings of the results.
    anchored: whether a constraint in its body makes it a program for the whole mesh; no argument does.
    batch: the arguments whose batch dimension is constrained throughout; None if none is.
    hosted: the leaves of the result that its body moves to the host's memory, as their shardings are the compiler's.
  """

  inputs: LeafShardings | None
  outputs: LeafShardings
  anchored: bool
  batch: BatchLeaves | None
  hosted: tuple[int, ...]


def _is_array(leaf: Any) -> bool:
  """Whether a result has a shape and a dtype, as arrays have, abstract ones included; a module may have a dtype."""
  return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


class TracedFunction:
  """A function as JAX traces it under a layout.

  Args:
    fn: the function.
    in_force: mesh and rules of the layout.
    arguments: the function's arguments.
    options: arguments of `jax.jit`, without shardings.
    stored_specs: function from the dynamic arguments to the specs that boxes are opened with; see `InForce`.

  Attributes:
    reported: the kinds of warnings already issued.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    in_force: InForce,
    arguments: Arguments,
    options: Mapping[str, Any],
    stored_specs: Callable[[Any], Any] | None,
  ):
    self._fn, self._in_force, self._arguments, self._options = fn, in_force, arguments, options
    self._stored_specs, self._mesh = stored_specs, cast(MeshLike, in_force.mesh)
    self._body = functools.cache(self._new_body)  # JAX shares the traces of one object
    self.reported: set[str] = set()

  def trace(self, anchored: bool, args: Any, kwargs: Any) -> Any:
    """The `jax.stages.Traced` of a plan, without shardings of the results."""
    with planned_traces():
      return jax.jit(self._body(anchored, None, (), False), **self._options).trace(*args, **kwargs)

  def jit(self, program: JitProgram) -> Any:
    """The `jax.jit` object of a program."""
    inputs = {} if program.inputs is None else {'in_shardings': program.inputs.tree()}
    fetches = self._in_force.rules.uses_host
    body = self._body(program.anchored, program.batch, program.hosted, fetches)
    return jax.jit(body, out_shardings=program.outputs.tree(), **inputs, **self._options)

  def _new_body(
    self, anchored: bool, batch: BatchLeaves | None, hosted: tuple[int, ...], fetches: bool
  ) -> Any:
    """The function for `jax.jit`; arguments as of `JitProgram`, and whether it fetches arrays from the host, which is late."""
    fn = self._fn

    @functools.wraps(fn, updated=() if isinstance(fn, type) else ('__dict__',))
    def body(*args, **kwargs):
      if not _planned_trace.get():
        raise Unplanned
      if hosted:
        return on_host(self._inlined(anchored, batch, fetches)(*args, **kwargs), hosted)
      if batch is not None or fetches:
        return self._rewritten(anchored, batch, fetches, args, kwargs)
      result = self._under_layout(args, kwargs)
      if has_modules(result):  # before JAX flattens them: parts of a module may be no arrays
        raise TakesModules
      check_no_cycles(result)
      check_usable(each for each in leaves_with_paths(result) if not _is_array(each[1]))
      return _on_all_devices(result, self._mesh) if anchored else result

    return body

  def _under_layout(self, args: Any, kwargs: Any) -> Any:
    if self._in_force.rules.uses_host:
      args, kwargs = on_device((args, kwargs))
    args, kwargs = self._arguments.without_static_objects(args, kwargs)
    dynamic = self._arguments.dynamic(args, kwargs)
    stored = () if self._stored_specs is None else self._stored_specs(dynamic)
    with (
      trace_scope(dataclasses.replace(self._in_force, stored=stored)),
      warn_of_unused_annotations(self._fn, self.reported),
    ):
      return called_without_resources(self._fn, self._mesh, self.reported, args, kwargs)

  def _inlined(self, anchored: bool, batch: BatchLeaves | None, fetches: bool) -> Any:
    """The function as another program contains it: the trace of the plan, not a new one."""
    statics = {name: value for name, value in self._options.items() if name.startswith('static_')}
    return jax.jit(self._body(anchored, batch, (), fetches), inline=compat.KEEPS_LINES_INLINE, **statics)

  def _rewritten(
    self, anchored: bool, batch: BatchLeaves | None, fetches: bool, args: Any, kwargs: Any
  ) -> Any:
    """The result with constraints on the batch of the dynamic arguments, and late fetches.

    Its program is the trace of the plan, so that static parts of the result, such as functions, are those of the plan.
    A last trace restores what the function has recorded in Python, such as the size of the batch.
    """
    planned = self._inlined(anchored, None, False)
    leaves, treedef = jax.tree.flatten(self._arguments.dynamic(args, kwargs))

    def filled(leaves: Any) -> Any:
      return self._arguments.filled(jax.tree.unflatten(treedef, leaves), args, kwargs)

    def of_leaves(leaves: Any) -> Any:
      positional, named = filled(leaves)
      return planned(*positional, **named)

    def restore(leaves: Any) -> None:
      jax.eval_shape(lambda leaves: self._under_layout(*filled(leaves)), leaves)

    rewritten = (
      of_leaves
      if batch is None
      else with_batch_constraints(of_leaves, batch, self._mesh, self._fn, restore)
    )
    result = (with_late_fetches(rewritten) if fetches else rewritten)(leaves)
    if fetches:
      with contextlib.suppress(Exception):
        restore(leaves)
    return result


def _on_all_devices(result: Any, mesh: MeshLike) -> Any:
  """The same result, from a program that is certain to run on the whole mesh.

  If neither arguments nor results have shardings, JAX compiles for a single device, where constraints
  without devices (Flax's) have no effect (https://github.com/jax-ml/jax/issues/23634). One open constraint
  on the concrete mesh prevents that.
  """
  leaves, treedef = jax.tree.flatten(result)
  traced = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
  if traced and isinstance(mesh, Mesh) and set(mesh.axis_types) == {AxisType.Auto}:
    anchor = leaves[traced[0]]
    anywhere = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(anchor.shape))
    leaves[traced[0]] = jax.lax.with_sharding_constraint(anchor, NamedSharding(mesh, anywhere))
  return jax.tree.unflatten(treedef, leaves)

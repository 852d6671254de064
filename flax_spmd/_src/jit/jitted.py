"""Jitted: `jax.jit` under a layout; its constraints follow the rules, its results also the arguments.

    step = layout.jit(train_step, donate_argnums=0)
    state, loss = step(state, batch)

Arguments keep their shardings unless `in_rules` require others. The layout plans the shardings of the results
from placements, names, and the shardings of this call's arguments. The compiler chooses the rest.

Mesh and rules matter only during tracing, so a call sets neither (except for Explicit axes, which are part of the
types). A plan's trace serves the real call too (`planned_traces`), and JAX's own dispatch does the calls that repeat a
planned one (`steady_calls`).
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload

import jax
from jax.sharding import AxisType, Mesh, Sharding

from flax_spmd._src import compat
from flax_spmd._src.active_layout import (
  InForce,
  UnderLayout,
  check_flax_rules,
)
from flax_spmd._src.compat import NO_TRACE, trace_context
from flax_spmd._src.constraint_log import record_constraints
from flax_spmd._src.jit.arguments import Arguments, abstract_leaf
from flax_spmd._src.jit.batch_leaves import BatchLeaves
from flax_spmd._src.jit.compiled_program import CompiledCall, explain_program
from flax_spmd._src.jit.constrained_results import result_memories, results_of_constrained_shapes
from flax_spmd._src.jit.donated_arguments import DonatedArguments, check_not_deleted
from flax_spmd._src.jit.doubtful_operations import warn_of_doubtful_operations
from flax_spmd._src.jit.foreign_meshes import check_meshes
from flax_spmd._src.jit.nnx_modules import ModulePlans, PureFunction, SplitCall, Updated
from flax_spmd._src.jit.planned_traces import (
  JitProgram,
  TakesModules,
  TracedFunction,
  Unplanned,
  may_run_again,
  planned_traces,
  repeated,
)
from flax_spmd._src.jit.program_explanation import ProgramExplanation
from flax_spmd._src.jit.replicated_batches import batch_and_state, warn_of_replicated_batches
from flax_spmd._src.jit.required_shardings import (
  LeafShardings,
  check_required,
  explained_arguments,
  put,
  with_shardings,
)
from flax_spmd._src.jit.steady_calls import SteadyCalls
from flax_spmd._src.jit.whole_batches import warn_of_whole_batches
from flax_spmd._src.mesh import MeshLike, describe, placed_sharding
from flax_spmd._src.names.nnx_variables import has_modules
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd._src.whereabouts import counted
from flax_spmd.errors import MeshError

InputPlanner = Callable[[Any], Sequence[Sharding | None]]


ResultPlanner = Callable[[Any, Any, Sequence[bool]], Sequence[PlannedResult]]

CallCheck = Callable[[CompiledCall], None]

BatchFinder = Callable[[Any, Any, Any], BatchLeaves | None]

P = ParamSpec('P')
Rest = ParamSpec('Rest')
Result = TypeVar('Result')


class CallPlan(NamedTuple):
  """The plan of a call.

  Attributes:
    program: its shardings.
    results: per leaf of the result, its sharding and where that comes from.
    function: the `jax.jit` object that is compiled for these shardings.
  """

  program: JitProgram
  results: tuple[PlannedResult, ...]
  function: Any


class Jitted(UnderLayout, Generic[P, Result]):
  """A function compiled under a layout; called, lowered and traced like a `jax.jit` function.

  Args:
    fn: function to compile.
    in_force: mesh and rules of the layout.
    plan_results: function from a result, the dynamic arguments, a pair `(args, kwargs)`, and a flag per leaf of the
      result (whether the function constrains values of its shape) to the plan of each leaf. The leaves of the
      arguments have their shardings, or those that `plan_inputs` requires.
    options: arguments of `jax.jit`, without shardings.
    plan_inputs: function from the dynamic arguments to the required sharding (or None) of each leaf. None:
      arguments keep their shardings.
    stored_specs: function from the dynamic arguments to the specs that boxes are opened with; see `InForce`.
    check: function that raises an error if a compiled call is not as it should be; called once for every
      signature, before the call.
    plan_updates: as `plan_results`, without placements of the caller; for the modules of the arguments.
    find_batch: function from the dynamic arguments, the abstract result and the program to the batch that the program
      should be constrained to. None: it has the constraints that it asks for, and no others.

  Attributes:
    in_force: the mesh and rules that the function uses.
    functions: the `jax.jit` objects so far, by the shardings that they are compiled for.
  """

  __name__: str
  __wrapped__: Callable[P, Result]

  def __init__(
    self,
    fn: Callable[P, Result],
    in_force: InForce,
    plan_results: ResultPlanner,
    options: Mapping[str, Any],
    plan_inputs: InputPlanner | None = None,
    stored_specs: Callable[[Any], Any] | None = None,
    check: CallCheck | None = None,
    plan_updates: ResultPlanner | None = None,
    find_batch: BatchFinder | None = None,
  ):
    functools.update_wrapper(self, fn, updated=() if isinstance(fn, type) else ('__dict__',))
    self._modular: _Modular | None = None
    self._fn, self._plan_updates = fn, plan_updates or plan_results
    self._mesh = mesh = cast(MeshLike, in_force.mesh)
    self.in_force = in_force
    self._mesh_at_calls = not isinstance(mesh, Mesh) or AxisType.Explicit in mesh.axis_types
    self._plan_results = plan_results
    self._plan_inputs = plan_inputs
    self._stored_specs = stored_specs
    self._check = check
    self._find_batch = find_batch
    self._checked: set[int] = set()  # ids of the plans whose programs have been checked
    self._options = dict(options)
    self._arguments = Arguments.of(fn, options)
    self._donated = DonatedArguments(fn, options) if compat.ENDS_AT_DONATED else None
    self._traced = TracedFunction(fn, in_force, self._arguments, self._options, stored_specs)
    self._planning = threading.RLock()
    self.functions: dict[JitProgram, Any] = {}
    self._by_signature: dict[Any, CallPlan] = {}
    self._steady = SteadyCalls(self._for_dispatch)

  @property
  def reported(self) -> set[str]:
    """The kinds of warnings already issued."""
    return self._traced.reported

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
    """Runs the function; compiles it first if these arguments have a new signature."""
    if self._modular is not None:
      return self._modular.call('__call__', args, kwargs)
    steady = self._steady.of_all
    if steady is None and self._steady.by_structure:
      steady = self._steady.by_structure.get(self._arguments.structure(args, kwargs))
    if steady is None or get_ident() != steady.thread or trace_context.trace is not NO_TRACE:
      return self._apply('__call__', args, kwargs)
    function = steady.function
    entries = function._cache_size()
    try:
      result = steady.call(*args, **kwargs)
    except BaseException as error:
      return self._after_an_error(function, error, args, kwargs)
    if function._cache_size() == entries:
      return result
    return self._verified(function, result, args, kwargs)

  def _after_an_error(self, function: Any, error: BaseException, args, kwargs) -> Any:
    """The result of a call that needs another plan than JAX's dispatch had; raises its error if it is its own."""
    with self._scope(), explained_arguments(self._arguments, args, kwargs, self._mesh):
      if isinstance(error, Unplanned):
        return self._apply('__call__', args, kwargs)
      if not isinstance(error, Exception):
        self._steady.end()
        raise error
      if self._is_planned_for(function, args, kwargs):
        raise error
      return self._apply('__call__', args, kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Lowered` for these arguments, which may be abstract."""
    return self._apply('lower', args, kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> Any:
    """The `jax.stages.Traced` for these arguments, which may be abstract."""
    return self._apply('trace', args, kwargs)

  def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
    """Shapes and dtypes of the result for these arguments, which may be abstract."""
    return self._apply('eval_shape', args, kwargs)

  def plan_of(self, *args: Any, **kwargs: Any) -> CallPlan:
    """The shardings of a call with these arguments, which may be abstract; compiles nothing."""
    self._find_modules(args, kwargs)
    if self._modular is None:
      try:
        with self._scope(), explained_arguments(self._arguments, args, kwargs, self._mesh):
          return self._planned_for(*self._prepared(args, kwargs))[0]
      except TakesModules:
        self._modular = self._made_modular()
    return self._modular.call('plan_of', args, kwargs)

  def explain(self, *args: Any, **kwargs: Any) -> ProgramExplanation:
    """Explains the compiled program for these arguments, which may be abstract.

    Compiles the program, and traces the function anew to record its constraints; runs nothing.

    Returns:
      Shardings of arguments and results, collectives, constraints without effect, and whether a second call
      compiles again.

    Raises:
      MeshError: the mesh is abstract.
    """
    if not isinstance(self._mesh, Mesh):
      raise MeshError(
        f'explain compiles the program, but the mesh {describe(self._mesh)} is abstract.\n'
        'Fix: use a concrete mesh, layout.replace(mesh=make_mesh(...)), or explore.compare.'
      )
    self.plan_of(*args, **kwargs)  # finds modules
    if self._modular is not None:
      return self._modular.call('explain', args, kwargs)
    if self._plan_inputs is not None:
      args, kwargs = self._arguments.by_position(args, kwargs)
    explained = explained_arguments(self._arguments, args, kwargs, self._mesh)
    with explained, record_constraints() as constraints:
      anew = self._anew()
      result = anew.eval_shape(*args, **kwargs)
      compiled = anew.lower(*args, **kwargs).compile()
    dynamic = self._arguments.dynamic(*self._arguments.with_static_objects(args, kwargs))
    required = self._plan_inputs and self._plan_inputs(dynamic)
    results = self.plan_of(*args, **kwargs).results
    rules = self.in_force.rules
    return explain_program(
      self._name, self._mesh, rules, compiled, dynamic, required, result, results, constraints
    )

  def batch_of(self, dynamic: Any, result: Any, jaxpr: Any) -> BatchLeaves | None:
    """The batch that a call constrains; None if it adds no constraints. All three are as traced, with modules split."""
    find = self._find_batch
    if find is not None and isinstance(result, Updated):
      find = ModulePlans.batch(find)
    return None if find is None else find(dynamic, result, jaxpr)

  def with_batch(self, batch: BatchLeaves) -> Jitted[P, Result]:
    """The function with this batch constrained in all of its calls, whatever their arguments."""
    return self._anew(lambda *_: batch)

  def _anew(self, find_batch: BatchFinder | None = None) -> Jitted[P, Result]:
    """The function without plans: static parts of its result, such as an optimizer, may be others in each trace."""
    anew = Jitted(
      cast(Callable[P, Result], self._fn),
      self.in_force,
      self._plan_results,
      self._options,
      self._plan_inputs,
      self._stored_specs,
      self._check,
      self._plan_updates,
      find_batch or self._find_batch,
    )
    anew._traced.reported = self.reported
    return anew

  @overload
  def __get__(self, instance: None, owner: type | None = None) -> Self: ...
  @overload
  def __get__(
    self: Jitted[Concatenate[Any, Rest], Result], instance: object, owner: type | None = None
  ) -> Callable[Rest, Result]: ...
  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)

  def __repr__(self) -> str:
    return f'<layout.jit of {getattr(self, "__qualname__", self.__wrapped__)}>'

  @property
  def _name(self) -> str:
    return getattr(self, '__name__', 'the function')

  def _scope(self) -> AbstractContextManager[Any]:
    return compat.mesh_scope(self._mesh) if self._mesh_at_calls else nullcontext()

  def _for_dispatch(self, function: Any) -> Callable[..., Any]:
    """A `jax.jit` object with all that the calls that JAX dispatches need."""
    call = function if self._check is None else functools.partial(repeated, function)
    if self._mesh_at_calls:
      call = functools.partial(self._in_scope, call)
    if self._donated is not None:
      call = functools.partial(self._with_checked_donations, call)
    return counted(self._mesh, call)

  def _with_checked_donations(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cast(DonatedArguments, self._donated).check(args, kwargs)
    return call(*args, **kwargs)

  def _in_scope(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with self._scope():
      return call(*args, **kwargs)

  def _apply(self, method: str, args, kwargs) -> Any:
    """Calls, lowers or traces the function that is planned for these arguments."""
    self._find_modules(args, kwargs)
    if self._modular is None:
      try:
        return self._apply_planned(method, args, kwargs)
      except TakesModules:
        self._modular = self._made_modular()
    return self._modular.call(method, args, kwargs)

  def _find_modules(self, args, kwargs) -> None:
    """Finds modules in the arguments of the first call, before JAX flattens them: a module may contain itself."""
    first = self._modular is None and not self._by_signature
    if first and has_modules(self._arguments.dynamic(args, kwargs), self._arguments.named_path):
      self._modular = self._made_modular()

  def _made_modular(self) -> _Modular:
    """The function for arguments and results with modules."""
    plans = ModulePlans(self._plan_results, self._plan_updates)
    inputs, stored = self._plan_inputs, self._stored_specs
    return _Modular(
      Jitted(
        PureFunction(self._fn, self._options),
        self.in_force,
        plans.results,
        self._options,
        inputs and plans.inputs(inputs),
        stored and plans.of_modules(stored),
        self._check,
        find_batch=self._find_batch and plans.batch(self._find_batch),
      )
    )

  def _apply_planned(self, method: str, args, kwargs) -> Any:
    with self._scope(), explained_arguments(self._arguments, args, kwargs, self._mesh):
      check_flax_rules(self._name, self.in_force)
      prepared, named = self._prepared(args, kwargs)
      planned, known = self._planned_for(prepared, named)
      if planned.program.inputs is not None:
        check_required(
          self._arguments.dynamic(prepared, {}), planned.program.inputs.shardings, self._arguments
        )
      if method == '__call__':
        self._check_once(planned, prepared, named)
      is_begun = method == '__call__' and trace_context.trace is NO_TRACE
      if known and is_begun and prepared is args and named is kwargs:
        structure = functools.partial(self._arguments.structure, args, kwargs)
        self._steady.add(planned.function, structure, len(self.functions) == 1)
      if is_begun and self._donated is not None:
        check_not_deleted(self._arguments.dynamic(prepared, named))
        self._donated.check(prepared, named)
      with planned_traces():
        apply = getattr(planned.function, method)
        return (counted(self._mesh, apply) if is_begun else apply)(*prepared, **named)

  def _check_once(self, planned: CallPlan, args, kwargs) -> None:
    """Checks the compiled program of a planned call, which JAX keeps for the call itself."""
    if id(planned) in self._checked or trace_context.trace is not NO_TRACE:
      return
    if self._check is None or not isinstance(self._mesh, Mesh):
      return
    with planned_traces():
      traced = planned.function.trace(*args, **kwargs)
      compiled = planned.function.lower(*args, **kwargs).compile()
    dynamic = self._arguments.dynamic(args, kwargs)
    required = self._plan_inputs and self._plan_inputs(dynamic)
    self._check(
      CompiledCall.of(self._name, self._mesh, traced, compiled, dynamic, required, planned.results)
    )
    self._checked.add(id(planned))

  def _prepared(self, args, kwargs) -> tuple[Any, Any]:
    """The arguments as JAX accepts them: by position under `in_rules`, objects that are not arrays as static."""
    if self._plan_inputs is not None:
      args, kwargs = self._arguments.by_position(args, kwargs)
      if kwargs:  # jax.jit rejects them with in_shardings: https://github.com/jax-ml/jax/issues/17400
        args, kwargs = self._transferred(self._plan_inputs, args, kwargs)
    return self._arguments.with_static_objects(args, kwargs)

  def _is_planned_for(self, function: Any, args, kwargs) -> bool:
    """Whether a function is the one for these arguments, so that an error of its call is the call's own."""
    prepared, named = self._prepared(args, kwargs)
    if prepared is not args or named is not kwargs:  # JAX has refused them
      return False
    planned = self._by_signature.get(self._arguments.signature(args, kwargs, self._mesh))
    if planned is None or planned.function is not function:
      self._steady.end()
      return False
    if planned.program.inputs is not None:
      check_required(
        self._arguments.dynamic(prepared, {}), planned.program.inputs.shardings, self._arguments
      )
    return True

  def _verified(self, function: Any, result: Any, args, kwargs) -> Any:
    """The result of a call that JAX's dispatch had not seen before, as its plan requires it.

    A program with effects does not run twice, nor one whose arguments are donated by now: its result is resharded.
    That commits it, as its plan does: JAX reuses a trace only if the same arguments are on the mesh.
    """
    try:
      with self._scope():
        planned, _ = self._planned_for(args, kwargs)
        if self._check is not None:  # the program was explained before, say
          self._check_once(planned, *self._without_data(args, kwargs))
    except BaseException:
      self._steady.end()
      raise
    if planned.function is function:
      return result
    self._steady.end()
    if may_run_again(planned.function, args, kwargs):
      with planned_traces():
        return planned.function(*args, **kwargs)
    leaves, treedef = jax.tree.flatten(result)
    return jax.tree.unflatten(treedef, map(put, leaves, self._final_shardings(planned, args, kwargs)))

  def _final_shardings(self, planned: CallPlan, args, kwargs) -> Sequence[Any]:
    """The shardings of a call's results, those of the compiler's choice included."""
    shardings = planned.program.outputs.shardings
    if None not in shardings:
      return shardings
    args, kwargs = self._without_data(args, kwargs)
    with self._scope(), planned_traces():
      return jax.tree.leaves(planned.function.lower(*args, **kwargs).compile().output_shardings)

  def _without_data(self, args, kwargs) -> tuple[Any, Any]:
    """The arguments with abstract arrays, as the arrays may be donated."""
    dynamic = jax.tree.map(abstract_leaf, self._arguments.dynamic(args, kwargs))
    return self._arguments.filled(dynamic, args, kwargs)

  def _transferred(self, plan_inputs: InputPlanner, args, kwargs) -> Any:
    """The arguments with their required shardings; abstract ones only record them."""
    dynamic = self._arguments.dynamic(args, kwargs)
    leaves, treedef = jax.tree.flatten(dynamic)
    shardings = plan_inputs(dynamic)
    check_required(dynamic, shardings, self._arguments)
    transferred = map(put, leaves, shardings)
    return self._arguments.filled(jax.tree.unflatten(treedef, transferred), args, kwargs)

  def _planned_for(self, args, kwargs) -> tuple[CallPlan, bool]:
    """The plan for prepared arguments, and whether it was known."""
    signature = self._arguments.signature(args, kwargs, self._mesh)
    planned = self._by_signature.get(signature)
    if planned is not None:
      return planned, True
    planned = self._plan(signature, args, kwargs)
    self._steady.end_other(planned.function)
    return planned, False

  def _plan(self, signature: Any, args, kwargs) -> CallPlan:
    """Plans a new signature; one thread at a time."""
    with self._planning:
      planned = self._by_signature.get(signature)
      if planned is not None:  # another thread has planned it meanwhile
        return planned
      dynamic = self._arguments.dynamic(*self._arguments.without_static_objects(args, kwargs))
      if has_modules(dynamic, self._arguments.named_path):
        raise TakesModules
      dynamic = self._arguments.dynamic(args, kwargs)
      inputs = self._inputs_of_call(dynamic, kwargs)
      known = dynamic if inputs is None else with_shardings(dynamic, inputs.shardings)
      anchored = not self._is_on_mesh(known)
      with record_constraints(anew=False) as constraints:
        traced = self._traced.trace(anchored, args, kwargs)
      result = traced.out_info
      check_meshes(traced.jaxpr, self._mesh)
      constrained = results_of_constrained_shapes(traced.jaxpr)
      keeps_host = self.in_force.rules.uses_host
      results = tuple(
        _in_memory(planned, kind, keeps_host)
        for planned, kind in zip(
          self._plan_results(result, known, constrained), result_memories(traced.jaxpr), strict=True
        )
      )
      outputs = LeafShardings(jax.tree.structure(result), tuple(each.sharding for each in results))
      batch = None if self._find_batch is None else self._find_batch(known, result, traced.jaxpr)
      if self._find_batch:
        call = known, traced.jaxpr, self._mesh, self.in_force.rules
        if isinstance(self._mesh, Mesh):  # for others it is a finding of `compare`
          find = functools.partial(batch_and_state, *call)
          warn_of_replicated_batches(self._name, constraints, find, self.reported)
        if batch is None:
          warn_of_whole_batches(self._name, self._arguments.named_path, *call, self.reported)
      hosted = tuple(index for index, each in enumerate(results) if each.on_host)
      program = JitProgram(inputs, outputs, anchored, batch, hosted)
      if program not in self.functions:
        self.functions[program] = self._traced.jit(program)
      self._check_operations(traced.jaxpr, self.functions[program], args, kwargs)
      planned = self._by_signature[signature] = CallPlan(program, results, self.functions[program])
      return planned

  def _check_operations(self, jaxpr: Any, function: Any, args, kwargs) -> None:
    """Lowers a program, as the call does after it, to find operations that XLA may compute wrongly, if it may have any."""
    if not isinstance(self._mesh, Mesh) or trace_context.trace is not NO_TRACE:
      return
    with planned_traces():
      lower = lambda: [function.lower(*args, **kwargs)]
      warn_of_doubtful_operations(self._name, jaxpr, lower, self._mesh, self.reported)

  def _is_on_mesh(self, dynamic: Any) -> bool:
    """Whether any argument is sharded on the layout's mesh, which makes the program one for all its devices."""
    return any(placed_sharding(leaf, self._mesh) is not None for leaf in jax.tree.leaves(dynamic))

  def _inputs_of_call(self, dynamic, kwargs) -> LeafShardings | None:
    """The required shardings of the arguments; None with keyword arguments, already transferred."""
    if self._plan_inputs is None or kwargs:
      return None
    shardings = tuple(self._plan_inputs(dynamic))
    return LeafShardings(jax.tree.structure(dynamic[0]), shardings)


class _Modular:
  """A function whose arguments or results have NNX modules.

  Args:
    pure: the function of split modules.
  """

  def __init__(self, pure: Jitted[..., Updated]):
    self._pure = pure

  def call(self, method: str, args: Any, kwargs: Any) -> Any:
    """Calls a method of `Jitted`; a call updates the variables of the caller."""
    split = SplitCall.of(args, kwargs)
    result = getattr(self._pure, method)(*split.args, **split.kwargs)
    if method == '__call__':
      return split.finished(result)
    return split.result(result) if method == 'eval_shape' else result


def _in_memory(planned: PlannedResult, kind: str, keeps_host: bool) -> PlannedResult:
  """The plan of a result in the memory that the program puts it into.

  A caller's placement comes first, and so does a layout that puts arrays into the host's memory itself.
  """
  sharding = planned.sharding
  if sharding is None or (sharding.memory_kind or 'device') == kind:
    return planned
  if kind == 'device' and (keeps_host or planned.source == 'placement'):
    return planned
  return planned._replace(sharding=sharding.with_memory_kind(kind))

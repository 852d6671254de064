"""Jitted: `jax.jit` under a layout; its constraints follow the rules, its results also the arguments.

    step = layout.jit(train_step, donate_argnums=0)
    state, loss = step(state, batch)

Arguments keep their shardings unless `in_rules` require others. The layout plans the shardings of the results
from placements, names, and the shardings of this call's arguments. The compiler chooses the rest.

Four facts about JAX keep the cost per call near zero:

* Mesh and rules matter only during tracing, so a call sets neither (except for Explicit axes, which are
  part of the types).
* All `jax.jit` objects of one function share its traces, so a trace that yields the structure of the result
  serves the real call too.
* A `jax.jit` object has one cache entry per combination of shapes, dtypes, shardings and settings. So a call that
  adds no entry repeats a planned one, and JAX's own dispatch does all the work. This holds in one thread: of an entry
  that another call is adding, it is not certain yet whether it is planned. Where several `jax.jit` objects alternate, the
  structure of the arguments selects one; if it is the wrong one, the call adds an entry.
* A call with new shapes traces. The traced body interrupts a trace that no plan has asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from threading import get_ident
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flax_spmd._src import compat
from flax_spmd._src.active_layout import (
  InForce,
  UnderLayout,
  check_flax_rules,
)
from flax_spmd._src.compat import NO_TRACE, trace_context
from flax_spmd._src.constraint_log import record_constraints
from flax_spmd._src.host_memory import on_device, on_host
from flax_spmd._src.jit.arguments import Arguments, abstract_leaf
from flax_spmd._src.jit.batch_constraints import with_batch_constraints
from flax_spmd._src.jit.batch_leaves import BatchLeaves
from flax_spmd._src.jit.compiled_program import CompiledCall, explain_program
from flax_spmd._src.jit.constrained_results import result_memories, results_of_constrained_shapes
from flax_spmd._src.jit.foreign_meshes import check_meshes
from flax_spmd._src.jit.nnx_modules import ModulePlans, PureFunction, SplitCall, Updated
from flax_spmd._src.jit.program_explanation import ProgramExplanation
from flax_spmd._src.jit.trace_scope import trace_scope
from flax_spmd._src.jit.tree_constraints import warn_of_unused_annotations
from flax_spmd._src.mesh import MeshLike, describe, placed_sharding
from flax_spmd._src.names.nnx_variables import check_no_cycles, has_modules
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd._src.tree_paths import path_string
from flax_spmd._src.whereabouts import counted
from flax_spmd.errors import MeshError, Problem, raise_problems

InputPlanner = Callable[[Any], Sequence[Sharding | None]]


ResultPlanner = Callable[[Any, Any, Sequence[bool]], Sequence[PlannedResult]]

CallCheck = Callable[[CompiledCall], None]

BatchFinder = Callable[[Any, Any, Any], BatchLeaves | None]

P = ParamSpec('P')
Rest = ParamSpec('Rest')
Result = TypeVar('Result')


class _LeafShardings(NamedTuple):
  """The structure of a tree, and the sharding of each leaf (None: unspecified)."""

  treedef: Any
  shardings: tuple[Sharding | None, ...]

  def tree(self) -> Any:
    return self.treedef.unflatten(self.shardings)


class _Program(NamedTuple):
  """The properties of one `jax.jit` object.

  Attributes:
    inputs: shardings of the arguments; None if it accepts any.
    outputs: shardings of the results.
    anchored: whether a constraint in its body makes it a program for the whole mesh; no argument does.
    batch: the arguments whose batch dimension is constrained throughout; None if none is.
    hosted: the leaves of the result that its body moves to the host's memory, as their shardings are the compiler's.
  """

  inputs: _LeafShardings | None
  outputs: _LeafShardings
  anchored: bool
  batch: BatchLeaves | None
  hosted: tuple[int, ...]


class CallPlan(NamedTuple):
  """The plan of a call.

  Attributes:
    program: its shardings.
    results: per leaf of the result, its sharding and where that comes from.
    function: the `jax.jit` object that is compiled for these shardings.
  """

  program: _Program
  results: tuple[PlannedResult, ...]
  function: Any


class _Steady:
  """A function whose calls JAX's own dispatch has taken over, in one thread.

  Attributes:
    call: the function, with all that its calls need.
    function: the `jax.jit` object.
    thread: identifies the thread.
  """

  __slots__ = ('call', 'function', 'thread')

  def __init__(self, call: Callable[..., Any], function: Any, thread: int):
    self.call, self.function, self.thread = call, function, thread


class _TakesModules(Exception):
  """Raised while a call is planned: its arguments or its result have NNX modules."""


class _Unplanned(Exception):
  """Raised in a trace or, under a strict layout, a compilation that no plan has asked for."""


_REPEATED_ENOUGH = 8  # calls in a row that need the same function, where several have been compiled
_planned_trace: ContextVar[bool] = ContextVar('flax_spmd_planned_trace', default=False)
_no_compilation: ContextVar[bool] = ContextVar('flax_spmd_no_compilation', default=False)


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
    reported: the kinds of warnings already issued.
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
    self._body = functools.cache(functools.partial(_traced_body, self, fn))
    self.reported: set[str] = set()
    self._planning = threading.RLock()
    self.functions: dict[_Program, Any] = {}
    self._by_signature: dict[Any, CallPlan] = {}
    self._steady: _Steady | None = None
    self._thread: int | None = None  # the thread whose calls it has taken over
    self._steady_by_structure: dict[Any, _Steady] = {}  # of arguments, if their calls alternate
    self._repeated: dict[Any, tuple[Any, int]] = {}  # the function of the last calls, and their number
    self._alternates = False  # whether the function depends on the structure of the arguments
    self._varied = False  # whether a call needed another function than the steady one

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
    """Runs the function; compiles it first if these arguments have a new signature."""
    if self._modular is not None:
      return self._modular.call('__call__', args, kwargs)
    steady = self._steady
    if steady is None and self._steady_by_structure:
      steady = self._steady_by_structure.get(self._arguments.structure(args, kwargs))
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
    with self._scope():
      if isinstance(error, _Unplanned):
        return self._apply('__call__', args, kwargs)
      if not isinstance(error, Exception):
        self._take_back()
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
        with self._scope():
          return self._planned_for(*self._prepared(args, kwargs))[0]
      except _TakesModules:
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
    with record_constraints() as constraints:
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

  def _anew(self) -> Jitted[P, Result]:
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
      self._find_batch,
    )
    anew.reported = self.reported
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

  def _in_scope(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with self._scope():
      return call(*args, **kwargs)

  def _apply(self, method: str, args, kwargs) -> Any:
    """Calls, lowers or traces the function that is planned for these arguments."""
    self._find_modules(args, kwargs)
    if self._modular is None:
      try:
        return self._apply_planned(method, args, kwargs)
      except _TakesModules:
        self._modular = self._made_modular()
    return self._modular.call(method, args, kwargs)

  def _find_modules(self, args, kwargs) -> None:
    """Finds modules in the arguments of the first call, before JAX flattens them: a module may contain itself."""
    first = self._modular is None and not self._by_signature
    if first and has_modules(self._arguments.dynamic(args, kwargs)):
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
    with self._scope():
      check_flax_rules(self._name, self.in_force)
      prepared, named = self._prepared(args, kwargs)
      planned, known = self._planned_for(prepared, named)
      if planned.program.inputs is not None:
        check_shardings(self._arguments.dynamic(prepared, {})[0], planned.program.inputs.shardings)
      if method == '__call__':
        self._check_once(planned, prepared, named)
      if known and method == '__call__' and prepared is args and named is kwargs:
        self._hand_over(planned.function, args, kwargs)
      with _planned_traces():
        apply = getattr(planned.function, method)
        is_begun = method == '__call__' and trace_context.trace is NO_TRACE
        return (counted(self._mesh, apply) if is_begun else apply)(*prepared, **named)

  def _check_once(self, planned: CallPlan, args, kwargs) -> None:
    """Checks the compiled program of a planned call, which JAX keeps for the call itself."""
    if id(planned) in self._checked or trace_context.trace is not NO_TRACE:
      return
    if self._check is None or not isinstance(self._mesh, Mesh):
      return
    with _planned_traces():
      traced = planned.function.trace(*args, **kwargs)
      compiled = planned.function.lower(*args, **kwargs).compile()
    dynamic = self._arguments.dynamic(args, kwargs)
    required = self._plan_inputs and self._plan_inputs(dynamic)
    self._check(
      CompiledCall.of(self._name, self._mesh, traced, compiled, dynamic, required, planned.results)
    )
    self._checked.add(id(planned))

  def _hand_over(self, function: Any, args, kwargs) -> None:
    """Lets JAX's dispatch take over the calls of a function, if others are unlikely to be needed.

    Other functions may be needed for arguments of another structure. A call that needs another one is noticed,
    but only after JAX has compiled this one for it.
    """
    if self._varied or trace_context.trace is not NO_TRACE:
      return
    structure = self._arguments.structure(args, kwargs) if self._alternates else None
    last, count = self._repeated.get(structure, (function, 0))
    self._repeated[structure] = function, count + 1 if last is function else 1
    if last is not function:
      self._alternates = True
      self._forget(structure)
    elif len(self.functions) == 1 or count + 1 >= _REPEATED_ENOUGH:
      self._let_dispatch(structure, function)

  def _let_dispatch(self, structure: Any, function: Any) -> None:
    """Lets JAX dispatch the calls with arguments of a structure (None: of any), if they are in the right thread."""
    if self._thread != get_ident() and not self._claimed():
      return
    call = function if self._check is None else functools.partial(_repeated, function)
    if self._mesh_at_calls:
      call = functools.partial(self._in_scope, call)
    call = counted(self._mesh, call)
    steady = _Steady(call, function, get_ident())
    if structure is None:
      self._steady = steady
    else:
      self._steady_by_structure[structure] = steady

  def _forget(self, structure: Any) -> None:
    """Ends the dispatch by JAX of calls with arguments of a structure (None: of any)."""
    if structure is None:
      self._steady = None
    else:
      self._steady_by_structure.pop(structure, None)

  def _claimed(self) -> bool:
    """Whether this thread is now the one whose calls JAX may dispatch: the first, or the first after it has ended."""
    if self._thread in [thread.ident for thread in threading.enumerate()]:
      return False
    with self._planning:
      if self._thread in [thread.ident for thread in threading.enumerate()]:
        return False
      self._steady, self._thread = None, get_ident()
      self._steady_by_structure.clear()
      return True

  def _take_back(self) -> None:
    """Ends the dispatch by JAX for good: it has, or may have, an entry of a call that needs another function."""
    self._steady, self._varied = None, True
    self._steady_by_structure.clear()

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
      self._take_back()
      return False
    if planned.program.inputs is not None:
      check_shardings(self._arguments.dynamic(prepared, {})[0], planned.program.inputs.shardings)
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
      self._take_back()
      raise
    if planned.function is function:
      return result
    self._take_back()
    if _may_run_again(planned.function, args, kwargs):
      with _planned_traces():
        return planned.function(*args, **kwargs)
    leaves, treedef = jax.tree.flatten(result)
    return treedef.unflatten(map(_put, leaves, self._final_shardings(planned, args, kwargs)))

  def _final_shardings(self, planned: CallPlan, args, kwargs) -> Sequence[Any]:
    """The shardings of a call's results, those of the compiler's choice included."""
    shardings = planned.program.outputs.shardings
    if None not in shardings:
      return shardings
    args, kwargs = self._without_data(args, kwargs)
    with self._scope(), _planned_traces():
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
    check_shardings(dynamic, shardings)
    transferred = map(_put, leaves, shardings)
    return self._arguments.filled(treedef.unflatten(transferred), args, kwargs)

  def _planned_for(self, args, kwargs) -> tuple[CallPlan, bool]:
    """The plan for prepared arguments, and whether it was known."""
    signature = self._arguments.signature(args, kwargs, self._mesh)
    planned = self._by_signature.get(signature)
    if planned is not None:
      return planned, True
    planned = self._plan(signature, args, kwargs)
    if self._steady is not None and self._steady.function is not planned.function:
      self._steady = None
    return planned, False

  def _plan(self, signature: Any, args, kwargs) -> CallPlan:
    """Plans a new signature; one thread at a time."""
    with self._planning:
      dynamic = self._arguments.dynamic(*self._arguments.without_static_objects(args, kwargs))
      if has_modules(dynamic):
        raise _TakesModules
      dynamic = self._arguments.dynamic(args, kwargs)
      inputs = self._inputs_of_call(dynamic, kwargs)
      known = dynamic if inputs is None else _with_shardings(dynamic, inputs.shardings)
      anchored = not self._is_on_mesh(known)
      with _planned_traces():
        traced = jax.jit(self._body(anchored, None, ()), **self._options).trace(*args, **kwargs)
      result = traced.out_info
      if has_modules(result):
        raise _TakesModules
      check_meshes(traced.jaxpr, self._mesh)
      constrained = results_of_constrained_shapes(traced.jaxpr)
      keeps_host = self.in_force.rules.uses_host
      results = tuple(
        _in_memory(planned, kind, keeps_host)
        for planned, kind in zip(
          self._plan_results(result, known, constrained), result_memories(traced.jaxpr), strict=True
        )
      )
      outputs = _LeafShardings(jax.tree.structure(result), tuple(each.sharding for each in results))
      batch = None if self._find_batch is None else self._find_batch(known, result, traced.jaxpr)
      hosted = tuple(index for index, each in enumerate(results) if each.on_host)
      program = _Program(inputs, outputs, anchored, batch, hosted)
      if program not in self.functions:
        self.functions[program] = self._jit(program)
      planned = self._by_signature[signature] = CallPlan(program, results, self.functions[program])
      return planned

  def _jit(self, program: _Program) -> Any:
    inputs = {} if program.inputs is None else {'in_shardings': program.inputs.tree()}
    body = self._body(program.anchored, program.batch, program.hosted)
    return jax.jit(body, out_shardings=program.outputs.tree(), **inputs, **self._options)

  def _is_on_mesh(self, dynamic: Any) -> bool:
    """Whether any argument is sharded on the layout's mesh, which makes the program one for all its devices."""
    return any(placed_sharding(leaf, self._mesh) is not None for leaf in jax.tree.leaves(dynamic))

  def _inputs_of_call(self, dynamic, kwargs) -> _LeafShardings | None:
    """The required shardings of the arguments; None with keyword arguments, already transferred."""
    if self._plan_inputs is None or kwargs:
      return None
    shardings = tuple(self._plan_inputs(dynamic))
    return _LeafShardings(jax.tree.structure(dynamic[0]), shardings)


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


def _repeated(function: Any, *args: Any, **kwargs: Any) -> Any:
  """A call that is interrupted if JAX has to compile for it."""
  token = _no_compilation.set(True)
  try:
    return function(*args, **kwargs)
  finally:
    _no_compilation.reset(token)


def _interrupt() -> None:
  if _no_compilation.get():
    raise _Unplanned


compat.interrupt_compilation(_interrupt)


@contextlib.contextmanager
def _planned_traces() -> Iterator[None]:
  """A block whose traces a plan has asked for."""
  token = _planned_trace.set(True)
  try:
    yield
  finally:
    _planned_trace.reset(token)


def _may_run_again(function: Any, args, kwargs) -> bool:
  """Whether nobody can notice that a function runs a second time."""
  arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
  if any(array.is_deleted() for array in arrays):
    return False
  with _planned_traces():
    return not function.trace(*args, **kwargs).jaxpr.effects


def _traced_body(
  jitted: Jitted,
  fn: Callable[..., Any],
  anchored: bool,
  batch: BatchLeaves | None,
  hosted: tuple[int, ...],
) -> Callable[..., Any]:
  """`fn` under the layout, as JAX traces it; see `_Program`."""

  def under_layout(args, kwargs):
    if jitted.in_force.rules.uses_host:
      args, kwargs = on_device((args, kwargs))
    args, kwargs = jitted._arguments.without_static_objects(args, kwargs)
    dynamic = jitted._arguments.dynamic(args, kwargs)
    stored = () if jitted._stored_specs is None else jitted._stored_specs(dynamic)
    with (
      trace_scope(dataclasses.replace(jitted.in_force, stored=stored)),
      warn_of_unused_annotations(fn, jitted.reported),
    ):
      return fn(*args, **kwargs)

  @functools.wraps(fn, updated=() if isinstance(fn, type) else ('__dict__',))
  def body(*args, **kwargs):
    if not _planned_trace.get():
      raise _Unplanned
    if hosted:
      return on_host(_planned_program(jitted, anchored, batch)(*args, **kwargs), hosted)
    if batch is not None:
      return _with_batch(under_layout, jitted, anchored, batch)(args, kwargs)
    result = under_layout(args, kwargs)
    return _on_all_devices(result, jitted._mesh) if anchored else result

  return body


def _planned_program(jitted: Jitted, anchored: bool, batch: BatchLeaves | None) -> Any:
  """The function as another program contains it: the trace of the plan, not a new one."""
  statics = {name: value for name, value in jitted._options.items() if name.startswith('static_')}
  return jax.jit(jitted._body(anchored, batch, ()), inline=True, **statics)


def _with_batch(
  fn: Callable[..., Any], jitted: Jitted, anchored: bool, batch: BatchLeaves
) -> Callable[..., Any]:
  """`fn`, a function of `args` and `kwargs`, with constraints on the batch of its dynamic arguments.

  Its program is the trace of the plan, so that static parts of the result, such as functions, are those of the plan. A
  last trace restores what `fn` has recorded in Python, such as the size of the batch.
  """
  planned = _planned_program(jitted, anchored, None)

  def constrained(args, kwargs):
    leaves, treedef = jax.tree.flatten(jitted._arguments.dynamic(args, kwargs))

    def of_leaves(leaves):
      filled, named = jitted._arguments.filled(treedef.unflatten(leaves), args, kwargs)
      return planned(*filled, **named)

    result = with_batch_constraints(of_leaves, batch, jitted._mesh)(leaves)
    with contextlib.suppress(Exception):
      jax.eval_shape(
        lambda leaves: fn(*jitted._arguments.filled(treedef.unflatten(leaves), args, kwargs)), leaves
      )
    return result

  return constrained


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
  """Two shardings as text: specs and meshes, memories if they differ, and the device order if only that differs."""
  texts = _sharding_text(one), _sharding_text(other)
  if one.memory_kind != other.memory_kind:
    return f'{texts[0]} in {one.memory_kind}', f'{texts[1]} in {other.memory_kind or "device"}'
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
  check_no_cycles(result)
  leaves, treedef = jax.tree.flatten(result)
  traced = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
  if traced and isinstance(mesh, Mesh) and AxisType.Explicit not in mesh.axis_types:
    anchor = leaves[traced[0]]
    anywhere = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(anchor.shape))
    leaves[traced[0]] = jax.lax.with_sharding_constraint(anchor, NamedSharding(mesh, anywhere))
  return treedef.unflatten(leaves)


def _with_shardings(tree: Any, shardings: Sequence[Sharding | None]) -> Any:
  """The tree with abstract leaves in place of those that have a required sharding."""
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(
    leaf
    if sharding is None
    else jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding)
    for leaf, sharding in zip(leaves, shardings, strict=True)
  )

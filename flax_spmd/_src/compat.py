"""Compatibility: every branch on a JAX or Flax version, and every private name of theirs.

Supported: jax 0.10.2 and newer, flax 0.12.8 and newer. Each branch names the version at which it can go.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import math
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import lift, meta
from flax.core import scope as flax_scope
from flax.core import spmd as core_spmd
from flax.linen import spmd as linen_spmd
from jax._src import (
  array,
  compiler,
  core,
  custom_partitioning,
  dispatch,
  distributed,
  pjit,
  sharding_impls,
  xla_bridge,
)
from jax._src import config as jax_config
from jax._src import custom_partitioning_sharding_rule as sharding_rules
from jax._src import lib as jax_lib
from jax._src import mesh as mesh_lib
from jax._src import named_sharding as jax_named_sharding
from jax._src import shard_map as jax_shard_map
from jax._src.callback import io_callback_p, pure_callback_p
from jax._src.debugging import debug_callback_p, debug_print_p, inspect_sharding_p
from jax._src.interpreters.batching import BatchTrace, BatchTracer
from jax._src.interpreters.mlir import build_mlir_module_helper
from jax._src.lib import _jax, xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.core import ShapedArray
from jax.experimental import serialize_executable
from jax.extend import source_info_util
from jax.extend.backend import get_compile_options
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import batching, mlir, partial_eval
from jax.lax import conv_general_dilated_p, dot_general_p, gather_p, sharding_constraint_p
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy, stablehlo

from flax_spmd._src.context_values import assigned
from flax_spmd._src.mlir.functions import main_of
from flax_spmd._src.mlir.simplification import inline, order_by_operands, simplify

ARRAY = array.ArrayImpl  # the type of concrete arrays

# -- meshes; before jax 0.11 their contexts are in another module


def mesh_scope(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
  """A context in which `mesh` is JAX's current mesh, inside or outside a trace.

  `jax.set_mesh` also sets the devices, but it rejects abstract meshes, and raises inside a trace, where only
  the abstract mesh can change.
  """
  if isinstance(mesh, Mesh):
    try:
      return jax.set_mesh(mesh)
    except ValueError:  # inside a trace
      return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
  return jax.sharding.use_abstract_mesh(mesh)


class OpenMesh:
  """A mesh that is JAX's current one from its creation until `close`, which may come in any order.

  JAX's own blocks restore what they found, which is wrong if an outer block ends first.

  Attributes:
    mesh: the mesh.
    sets_devices: whether its devices are JAX's current ones too; not inside a trace, or of an abstract mesh.
  """

  def __init__(self, mesh: Mesh | AbstractMesh):
    self.mesh = mesh
    self._before = _mesh_state()
    mesh_scope(mesh).__enter__()
    self._inside = _mesh_state()
    self.sets_devices = isinstance(mesh, Mesh) and self._inside[1] == mesh

  def close(self, later: OpenMesh | None = None) -> bool:
    """Removes the mesh. Returns False, and changes nothing, if one that JAX has set inside is still in force.

    Args:
      later: the first mesh that was opened after this one and is still open.
    """
    if (_mesh_state() if later is None else later._before) != self._inside:
      return False
    if later is None:
      _abstract_mesh.set_local(self._before[0])
      _devices.set_local(self._before[1])
    else:
      later._before = self._before
    return True


# before jax 0.11 they are in jax._src.config
_of_meshes: Any = mesh_lib if hasattr(mesh_lib, 'device_context') else jax_config
_UNSET: Any = jax_config.config_ext.unset
_abstract_mesh, _devices = _of_meshes.abstract_mesh_context_manager, _of_meshes.device_context


def _mesh_state() -> tuple[Any, Any]:
  """The abstract mesh and the devices that this thread has set."""
  return _abstract_mesh.get_local(), _devices.get_local()


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
  """A block in which JAX has no current mesh: `use_abstract_mesh` cannot change the size of one."""
  before = _mesh_state()
  _abstract_mesh.set_local(_UNSET)
  _devices.set_local(_UNSET)
  try:
    yield
  finally:
    _abstract_mesh.set_local(before[0])
    _devices.set_local(before[1])


def concrete_mesh() -> Mesh | None:
  """JAX's current mesh with its devices, or None. `jax.sharding.get_mesh` is the same, but not inside a trace."""
  mesh = mesh_lib.get_concrete_mesh()
  return None if mesh.empty else mesh


class TargetDevice(NamedTuple):
  """A device of a target: all that a model may ask an absent device for.

  Attributes:
    id: its position in the mesh.
    platform: `'gpu'`, `'tpu'` or `'cpu'`, as of a `jax.Device`.
  """

  id: int
  platform: str


_target_platform: ContextVar[str | None] = ContextVar('flax_spmd_target_platform', default=None)
_no_devices = AbstractMesh.__dict__['devices']
_no_enter, _no_exit = AbstractMesh.__enter__, AbstractMesh.__exit__


@contextlib.contextmanager
def target_devices(platform: str) -> Iterator[None]:
  """A block in which abstract meshes have `TargetDevice`s, since models ask for `mesh.devices.flat[0].platform`.

  Models may also enter them, by `with mesh:`. JAX's own abstract meshes raise a ValueError.
  """
  meshes = cast(Any, AbstractMesh)
  meshes.devices = property(_abstract_devices)
  meshes.__enter__, meshes.__exit__ = _enter_abstract, _exit_abstract
  with assigned(_target_platform, {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)):
    yield


def _abstract_devices(mesh: AbstractMesh) -> Any:
  platform = _target_platform.get()
  if platform is None:
    return _no_devices.fget(mesh)
  devices = np.empty(mesh.size, object)
  devices[:] = [TargetDevice(number, platform) for number in range(mesh.size)]
  return devices.reshape(mesh.axis_sizes)


def _enter_abstract(mesh: Any) -> Any:
  return (_no_enter if _target_platform.get() is None else Mesh.__enter__)(mesh)


def _exit_abstract(mesh: Any, *error: Any) -> Any:
  return (_no_exit if _target_platform.get() is None else Mesh.__exit__)(mesh, *error)


class _ReadResources(mesh_lib.ResourceEnv):
  """What `with mesh:` sets, while it is not used: the lines that read it are recorded."""

  record: Callable[[str, int], object] | None = None

  @property
  def physical_mesh(self) -> Mesh:  # pyright: ignore[reportIncompatibleVariableOverride]
    frame = sys._getframe(1)
    if self.record is not None and not frame.f_globals.get('__name__', '').startswith('jax.'):
      self.record(frame.f_code.co_filename, frame.f_lineno)
    return self[0]


@contextlib.contextmanager
def recorded_readers(record: Callable[[str, int], object]) -> Iterator[None]:
  """A block in which each line outside JAX that looks for the mesh of `with mesh:`, and finds none, is recorded.

  Args:
    record: called with its file and number.
  """
  resources = mesh_lib.thread_resources
  before = resources.env
  if not before[0].empty:
    yield
    return
  read = _ReadResources(before[0])
  read.record = record
  resources.stack.append(read)
  resources.env = read
  try:
    yield
  finally:
    resources.stack.pop()
    resources.env = before


@contextlib.contextmanager
def resource_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
  """A block `with mesh:`, of an abstract mesh too."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    Mesh.__enter__(cast(Any, mesh))
  try:
    yield
  finally:
    Mesh.__exit__(cast(Any, mesh), None, None, None)


def is_pmapped(fn: Any) -> bool:
  """Whether a function is the result of `jax.pmap`."""
  return getattr(fn, '__globals__', {}).get('__name__') == 'jax._src.pmap' and hasattr(fn, '__wrapped__')


# -- functions of JAX and Flax that this package handles the calls of


class _Detour:
  """A function of JAX or Flax whose calls another function handles while any thread has a layout in force.

  Args:
    owner: the class or module that has it.
    name: its name there.

  Attributes:
    handler: called with the function itself and the arguments of each call.
  """

  handler: Callable[..., Any] | None = None

  def __init__(self, owner: Any, name: str):
    self._owner, self._name = owner, name
    self._original: Any = None
    self._detoured: Any = None

  def open(self) -> None:
    """Lets the handler have the calls."""
    handler, original = self.handler, getattr(self._owner, self._name)
    if handler is None or original is self._detoured:
      return
    if original is not self._original:
      self._original, self._detoured = original, _handled(original, handler)
    setattr(self._owner, self._name, self._detoured)

  def close(self) -> None:
    """Puts the function back, unless somebody else has replaced it since."""
    if getattr(self._owner, self._name) is self._detoured:
      setattr(self._owner, self._name, self._original)


def _handled(original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
  @functools.wraps(original)
  def detoured(*args: Any, **kwargs: Any) -> Any:
    return handler(original, *args, **kwargs)

  return detoured


class _Detours:
  """Detours that are open as long as anything needs them, in any thread."""

  def __init__(self, *detours: _Detour):
    self._detours, self._users = detours, 0
    self._lock = threading.RLock()  # a generator that is collected meanwhile ends its block

  def begin(self) -> None:
    """Opens them for one more user."""
    with self._lock:
      self._users += 1
      if self._users == 1:
        for detour in self._detours:
          detour.open()

  def end(self) -> None:
    """Closes them, if this was the last user."""
    with self._lock:
      self._users -= 1
      if not self._users:
        for detour in self._detours:
          detour.close()

  @contextlib.contextmanager
  def opened(self) -> Iterator[None]:
    """A block that needs them."""
    self.begin()
    try:
      yield
    finally:
      self.end()


def detours(methods: Iterable[tuple[Any, str]], handler: Callable[..., Any]) -> _Detours:
  """Detours of methods of classes; the handler is called with a method's name, the method and its arguments."""
  each = [_Detour(cls, name) for cls, name in methods]
  for detour, (_, name) in zip(each, methods, strict=True):
    detour.handler = functools.partial(handler, name)
  return _Detours(*each)


# -- Flax Linen; true of flax 0.12.8 to 0.12.12


class FlaxRules:
  """Flax's rules of each thread, as Flax reads and writes them; every change by Flax's functions is reported.

  Flax keeps them where JAX's caches do not see them. It has one object for them, which this one replaces, so
  it does not matter by which name a program has imported Flax's functions.

  Attributes:
    report: called with the new rules, and with a number that identifies the block of Flax's `logical_axis_rules`
      that begins or ends; None for `set_logical_axis_rules`.
  """

  report: Callable[[Any, int | None], None]

  def __init__(self, stored: Any):
    self._stored = stored

  @property
  def rules(self) -> Any:
    """The rules of this thread."""
    return self._stored.rules

  @rules.setter
  def rules(self, rules: Any) -> None:
    caller = sys._getframe(1)
    is_block = caller.f_code is _flax_block
    self.report(rules, id(caller) if is_block else None)

  def put(self, rules: Any) -> None:
    """Changes the rules of this thread without a report."""
    self._stored.rules = rules


_flax_block = inspect.unwrap(nn.logical_axis_rules).__code__
flax_rules = FlaxRules(core_spmd._axis_rules)


def watch_flax_rules(report: Callable[[Any, int | None], None]) -> None:
  """Reports every change of Flax's rules from now on; see `FlaxRules`."""
  flax_rules.report = report
  core_spmd._axis_rules = flax_rules


@contextlib.contextmanager
def lifted_results(change: Callable[[Any], Any]) -> Iterator[None]:
  """Applies `change` to the results of lifted modules and methods (`nn.remat`, `nn.jit`, `nn.scan`) in a block.

  `nn.intercept_methods` intercepts calls inside lifted functions, but not the lifted functions themselves. As there, other
  threads are left alone.
  """
  with assigned(_change, change), _lifted.opened():
    yield


def _changed(name: str, pack: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
  lifted, change = pack(*args, **kwargs), _change.get()
  return lifted if change is None else lambda *inner, **named: change(lifted(*inner, **named))


_change: ContextVar[Callable[[Any], Any] | None] = ContextVar('flax_spmd_lifted_results', default=None)
_lifted = detours([(lift, 'pack')], _changed)


def module_fingerprint_detour(handler: Callable[..., Any]) -> _Detours:
  """The detour of the function by whose result `nn.jit` recognizes equal modules."""
  return detours([(nn.transforms, '_module_fingerprint')], lambda name, *args: handler(*args))


_unbox = _Detour(meta.Partitioned, 'unbox')
_unbox_logical = _Detour(linen_spmd.LogicallyPartitioned, 'unbox')
_remove_axis = _Detour(meta.Partitioned, 'remove_axis')
_prepare = _Detour(pjit, 'prepare_axis_resources')
_check_spec = _Detour(jax_named_sharding, '_check_mesh_resource_axis')
_shard_map = _Detour(jax_shard_map, '_shard_map')
under_layouts = _Detours(_unbox, _unbox_logical, _remove_axis, _prepare, _check_spec, _shard_map)


def handle_flax_boxes(unbox: Callable[..., Any], remove_axis: Callable[..., Any]) -> None:
  """Handles the calls of two methods of Flax's boxes, while any thread has a layout in force.

  Flax opens boxes inside its modules, and boxes do not survive a transformation as objects. So it is the class that
  the methods are replaced in.

  Args:
    unbox, remove_axis: called with the method itself, the box and the arguments.
  """
  _unbox.handler = _unbox_logical.handler = unbox
  _remove_axis.handler = remove_axis


def handle_constraints(
  fitted: Callable[[Any, Any, Any], Any],
  refused: Callable[[Any, Any], None],
  placed: Callable[[Any], Any],
  mapped_over: Callable[[Any, Any, Any], tuple[Any, Any]],
) -> None:
  """Changes the shardings of every constraint, `jit` and `shard_map` of JAX's, while any thread has a layout in force.

  Programs import `jax.lax.with_sharding_constraint` by many names, so it is the first function that it calls which is
  replaced.

  Args:
    fitted: function from the arrays, the tree of their shardings and, in a constraint of Flax's, the logical names to
      the tree of shardings to use; or it raises an error.
    refused: called with the mesh and the spec of a `NamedSharding` that JAX refuses to make; may raise another error.
    placed: function from the shardings of the arguments or results of a `jit` to those to use.
    mapped_over: function from the mesh, the specs and the axes of a `shard_map` to the mesh and the axes to use.
  """

  def prepared(prepare: Callable[..., Any], shardings: Any, *args: Any, **kwargs: Any) -> Any:
    caller = sys._getframe(2)
    if caller.f_code is _jax_constraint:
      shardings = fitted(caller.f_locals['x'], shardings, _names_of_constraint(caller))
    else:
      shardings = placed(shardings)
    return prepare(shardings, *args, **kwargs)

  def checked(check: Callable[..., Any], mesh: Any, spec: Any, *args: Any) -> Any:
    try:
      return check(mesh, spec, *args)
    except ValueError:
      refused(mesh, spec)
      raise

  def mapped(
    shard_map: Callable[..., Any], f: Any, *, mesh: Any, axis_names: Any, **options: Any
  ) -> Any:
    specs = options['in_specs'], options['out_specs']
    mesh, axis_names = mapped_over(mesh, specs, axis_names)
    return shard_map(f, mesh=mesh, axis_names=axis_names, **options)

  _prepare.handler, _check_spec.handler, _shard_map.handler = prepared, checked, mapped


_jax_constraint = inspect.unwrap(jax.lax.with_sharding_constraint).__code__
_flax_constraint = linen_spmd._with_sharding_constraint_one_fallback.__code__


def _names_of_constraint(frame: Any) -> Any:
  """The logical names of the constraint of Flax's that has called JAX's, if one has."""
  by_flax = frame.f_back and frame.f_back.f_back
  if by_flax is None or by_flax.f_code is not _flax_constraint:
    return None
  return by_flax.f_locals['axis_resources']


class _ReportedCalls:
  """A private function of Flax whose calls are reported, while any thread wants it.

  Args:
    name: its name in `flax.linen.spmd`.
    of_call: function from the result and the arguments of a call to the arguments of a report.
  """

  def __init__(self, name: str, of_call: Callable[..., tuple[Any, ...]]):
    self._of_call = of_call
    self._reports: list[Callable[..., None]] = []
    self._detours = detours([(linen_spmd, name)], self._reporting)

  @contextlib.contextmanager
  def to(self, report: Callable[..., None]) -> Iterator[None]:
    """Reports the calls in a block."""
    with self._detours.opened():
      self._reports.append(report)
      try:
        yield
      finally:
        self._reports.remove(report)

  def _reporting(self, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    reported = self._of_call(result, *args, **kwargs)
    for report in dict.fromkeys(self._reports):
      report(*reported)
    return result


def flax_resolutions(report: Callable[[Sequence[Any] | None], None]) -> AbstractContextManager[None]:
  """Reports the logical names of every array that Flax Linen resolves in a block.

  Its constraints, its boxes and its public `logical_to_mesh_axes` all call one private function.
  """
  return _resolutions.to(report)


def flax_constraints(
  report: Callable[[Any, PartitionSpec | None, Sequence[int], bool, list[str]], None],
) -> AbstractContextManager[None]:
  """Reports the constraints of Flax Linen in a block: names, spec, shape, whether it emitted them, unmatched names.

  The spec is None if Flax skips the constraint since a name has no rule. Every logical constraint under rules
  calls one private function, boxes included.
  """
  return _constraints.to(report)


def _resolved_names(result: Any, names: Sequence[Any] | None, *args: Any, **kwargs: Any) -> tuple[Any]:
  return (names,)


def _constraint(
  result: Any, names: Any, x: Any, fallback: Any = None, rules: Any = None, mesh: Any = None
) -> tuple[Any, PartitionSpec | None, Sequence[int], bool, list[str]]:
  """Flax returns the value itself if it emits no constraint."""
  emitted = result is not x
  has_mesh = mesh is not None or meta.global_mesh_defined()
  spec = nn.logical_to_mesh_axes(names, rules) if emitted or not has_mesh else None
  known = {name for name, _ in (nn.get_logical_axis_rules() if rules is None else rules)}
  unmatched = [name for name in names or () if isinstance(name, str) and name not in known]
  return names, spec, x.shape, emitted, unmatched


_resolutions = _ReportedCalls('_logical_to_mesh_axes', _resolved_names)
_constraints = _ReportedCalls('_with_sharding_constraint_one_fallback', _constraint)


def current_module() -> str | None:
  """The Linen module that is running, such as `'module decoder/layers'`, or None; for error messages.

  Flax has no public access to its module stack.
  """
  stack = nn.module._context.module_stack
  modules = [module for module in stack if module is not None]
  if not modules:
    return None
  return f'module {"/".join(modules[-1].path)}' if modules[-1].path else 'the top module'


def is_lifted_type(cls: type) -> bool:
  """Whether a class is that of a transformed module (`nn.scan(Block)`); the modules inside have the class `Block`."""
  return cls.__module__ == nn.transforms.__name__


def rewind_point(scope: Any, module: Any = None) -> Callable[[], None]:
  """A function that takes a scope back to here, after an error in it.

  The variables and random numbers are those of all modules, as a module may call others that are beside it. Flax does the
  same at the end of a method.

  Args:
    scope: the scope.
    module: the module whose method runs in it, if one does: it takes its names anew.
  """
  root = scope.root
  variables, counters = _copy(_mutable(root)), _copy(root.rng_counters)
  in_method = isinstance(module, nn.Module) and module._state.in_compact_method

  def rewind() -> None:
    _restore(_mutable(root), variables)
    _restore(root.rng_counters, counters, first=0)
    if in_method:
      object.__setattr__(module, 'scope', cast(Any, module.scope).rewound())
      module._state.reset()
      module._state.in_compact_method = True

  return rewind


def _mutable(scope: Any) -> dict[str, Any]:
  """The variables of the collections of a scope that its modules may change."""
  return {name: tree for name, tree in scope._variables.items() if scope.is_mutable_collection(name)}


def _copy(tree: Any) -> Any:
  return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _restore(tree: dict[Any, Any], copy: dict[Any, Any], first: Any = None) -> None:
  """Makes nested dictionaries equal to a copy, but for new ones, which others may hold: they are empty, or count from `first`."""
  for key, value in list(tree.items()):
    if isinstance(value, dict):
      _restore(value, copy.get(key, {}), first)
    elif key in copy:
      tree[key] = copy[key]
    elif first is None:
      del tree[key]
    else:
      tree[key] = first


def scope_detours(handler: Callable[..., Any]) -> _Detours:
  """Detours of the functions by which modules of Linen read and write variables, and get keys, and of `lift.pack`.

  The last begins every transformation of Linen.
  """
  of_scopes = [(flax_scope.Scope, name) for name in ('get_variable', 'put_variable')]
  return detours([*of_scopes, (flax_scope.LazyRng, 'as_jax_rng'), (lift, 'pack')], handler)


# -- Flax NNX, which takes a second to import and is not imported here; true of flax 0.12.8 to 0.12.12


@functools.cache
def is_variable_type(cls: type) -> bool:
  """Whether a class is `nnx.Variable` or derives from it. `flax.nnx` takes a second to import, so it is not imported."""
  return _has_base(cls, 'flax.nnx.variablelib', 'Variable')


@functools.cache
def is_parameter_type(cls: type) -> bool:
  """Whether a class is `nnx.Param` or derives from it."""
  return _has_base(cls, 'flax.nnx.variablelib', 'Param')


def has_nnx() -> bool:
  """Whether NNX has been imported; without it there are no modules of it."""
  return 'flax.nnx' in sys.modules


@functools.cache
def is_bridge_box_type(cls: type) -> bool:
  """Whether a class is the box in which `nnx.bridge.ToLinen` keeps the metadata of a variable."""
  return _has_base(cls, 'flax.nnx.bridge.variables', 'NNXMeta')


@functools.cache
def is_random_state_type(cls: type) -> bool:
  """Whether a class is the type of the key, or of the count, of a stream of random numbers: `nnx.RngState`."""
  return _has_base(cls, 'flax.nnx.rnglib', 'RngState')


@functools.cache
def is_nnx_module_type(cls: type) -> bool:
  """Whether the instances of a class have attributes that are nodes of NNX's graphs: modules, optimizers, `Rngs`."""
  return _has_base(cls, 'flax.nnx.pytreelib', 'Pytree')


@functools.cache
def is_nnx_state_type(cls: type) -> bool:
  """Whether a class is `nnx.State` or derives from it."""
  return _has_base(cls, 'flax.nnx.statelib', 'State')


def _has_base(cls: type, module: str, name: str) -> bool:
  return any(base.__name__ == name and base.__module__ == module for base in cls.__mro__)


def variable_metadata(variable: Any) -> Mapping[str, Any]:
  """The metadata of an `nnx.Variable`; not a copy, so that it costs nothing."""
  return variable._var_metadata


def variable_names(metadata: Mapping[str, Any]) -> Any:
  """The names in a variable's metadata; None if there are none.

  The key is `out_sharding`. It was `sharding_names`, then `sharding`; Flax 0.12 accepts and renames them where a variable
  is created, but not in metadata that was made before.
  """
  return metadata.get('out_sharding') or metadata.get('sharding_names') or metadata.get('sharding')


def _graphlib() -> Any:
  """NNX's functions for graphs; only called where NNX is in use."""
  from flax.nnx import graphlib

  return graphlib


def nnx_ref_map(nodes: Mapping[int, Any] | None = None) -> Any:
  """A map from the nodes of an NNX graph, by identity, to their indices; filled by `nnx_split`."""
  graphlib = _graphlib()
  return graphlib.RefMap() if nodes is None else graphlib.RefMap.from_indexmap(nodes)


def nnx_index_map(nodes: Mapping[int, Any]) -> Any:
  """A map from the indices of an NNX graph to its nodes; filled by `nnx_merge`."""
  return _graphlib().IndexMap(nodes)


def nnx_split(node: Any, indices: Any, onto: Any = None) -> tuple[Any, list[Any]]:
  """The structure of a module, and its arrays; `nnx.split` without paths, which take most of its time.

  Args:
    node: a module or a variable.
    indices: a `nnx_ref_map` of the graph so far; the nodes of the module are added.
    onto: a `nnx_ref_map` of another graph, whose nodes a merge is to update.
  """
  return _graphlib().flatten(node, ref_index=indices, ref_outer_index=onto, with_paths=False, graph=True)


def nnx_merge(structure: Any, leaves: Sequence[Any], nodes: Any, onto: Any = None) -> Any:
  """The module of a structure and arrays.

  Args:
    structure, leaves: as `nnx_split` returns them.
    nodes: a `nnx_index_map` of the graph so far; the nodes of the module are added.
    onto: a `nnx_index_map` of the nodes to update, where the structure refers to them.
  """
  return _graphlib().unflatten(structure, list(leaves), index_ref=nodes, outer_index_outer_ref=onto)


def nnx_children(module: Any) -> list[tuple[Any, Any]]:
  """The attributes of a module that JAX takes for its children, with JAX's keys; the module may be among them."""
  return module._pytree__flatten_with_paths()[0]


def nnx_leaf_paths(structure: Any) -> list[str]:
  """The path of each array of a structure: `up/kernel`."""
  return [path for path, value in _nnx_attributes(structure) if value is _ARRAY]


def nnx_static_arrays(structure: Any) -> list[str]:
  """The path of each array that is part of the structure itself, as one in the place of a number is."""
  return [path for path, value in _nnx_attributes(structure) if isinstance(value, jax.Array)]


_ARRAY = object()


def _nnx_attributes(structure: Any) -> list[tuple[str, Any]]:
  """The path of each array of a structure, with `_ARRAY`, and of each static attribute, with its value."""
  graphlib = _graphlib()
  nodes, attributes = iter(structure.nodes), iter(structure.attributes)
  found: list[tuple[str, Any]] = []

  def visit(node: Any, path: str) -> None:
    if isinstance(node, graphlib.VariableDef):
      found.append((path, _ARRAY))
    for _ in range(getattr(node, 'num_attributes', 0)):
      key, value = next(attributes)
      below = f'{path}/{key}' if path else str(key)
      if isinstance(value, graphlib.NodeAttr):
        visit(next(nodes), below)
      elif isinstance(value, graphlib.LeafAttr):
        found.append((below, _ARRAY))
      elif isinstance(value, graphlib.Static):
        found.append((below, value.value))

  visit(next(nodes), '')
  return found


# -- errors of types over Explicit axes; their texts are those of jax 0.10.2 to 0.12


UNTYPED = (
  core.ShardingTypeError,
  jax_named_sharding.DuplicateSpecError,
  NotImplementedError,
  ValueError,
  TypeError,
  AssertionError,
)
_UNTYPED_TEXT = re.compile(
  'out_sharding|sharding rule for|0th dimension of .* should be replicated|over sharded axes|should be unsharded|'
  'should be sharded the same|scan `xs` cannot be sharded|'
  'acts as an assert when all axes of mesh|can only refer to Auto axes of the mesh'
)
_EXPLICIT_TEXT = re.compile('axis names that are of type Auto|should match the aval mesh')
_DOUBTFUL_TEXT = re.compile('must have equal (output )?types|Incompatible types for broadcasting')
_DIFFERENT_TYPES = re.compile(r'has type (\w+\[[^\]]*\]).*? has type (\w+\[[^\]]*\])')


def is_untyped(error: Exception, or_doubtful: bool = False) -> bool:
  """Whether an error, one of `UNTYPED`, is that of an operation without a type on Explicit axes, or of a constraint.

  JAX's constraints, Flax's logical ones among them, only compare types there.

  Args:
    error: the error.
    or_doubtful: whether types that differ count (of a carry, branches or a broadcast), which may be for another reason.
      Those that differ in their shardings alone always count.
  """
  if not isinstance(error, (core.ShardingTypeError, jax_named_sharding.DuplicateSpecError)):
    texts = (_UNTYPED_TEXT, _DOUBTFUL_TEXT) if or_doubtful else (_UNTYPED_TEXT,)
    return any(each.search(str(error)) for each in texts) or _differ_in_shardings(str(error))
  return True


def _differ_in_shardings(text: str) -> bool:
  """Whether all types that an error of a carry or of branches calls different differ in their shardings only."""
  pairs = _DIFFERENT_TYPES.findall(text)
  return bool(pairs) and all(
    len({re.sub(r'@(\w+|\(.*?\))', '', each) for each in pair}) == 1 for pair in pairs
  )


def needs_explicit(error: Exception) -> bool:
  """Whether an error is that of an operation which has a sharding or an operand of Explicit axes, over Auto axes."""
  return isinstance(error, ValueError) and _EXPLICIT_TEXT.search(str(error)) is not None


# -- JAX's settings and services; true of jax 0.10.2 to 0.12


def with_settings(fn: Callable[..., Any]) -> Callable[..., Any]:
  """A function that keeps this thread's settings of JAX, such as `jax.enable_x64`, in other threads."""
  local = [(state, state.get_local()) for state in _STATES]
  own = [(state, value) for state, value in local if value is not _UNSET]
  if not own:
    return fn

  def run(*args: Any) -> Any:
    with contextlib.ExitStack() as settings:
      for state, value in own:
        settings.enter_context(state(value))
      return fn(*args)

  return run


_STATES: tuple[Any, ...] = tuple(jax_config.config_states.values())


def may_run_at_once(meshes: Iterable[Any]) -> bool:
  """Whether several threads may dispatch programs, each for one of these concrete meshes.

  XLA for CPUs before jax 0.12 may run two of them with collectives at once, without threads for both: they never end.
  """
  several = (mesh.devices.flat[0] for mesh in meshes if mesh.size > 1)
  return jax.__version_info__ >= (0, 12) or all(device.platform != 'cpu' for device in several)


def shardy() -> contextlib.AbstractContextManager[None]:
  """A block in which programs are partitioned by Shardy, whatever the option for GSPMD, its predecessor."""
  return jax_config.use_shardy_partitioner(True)


def threefry_partitionable() -> bool:
  """Whether each device can generate its own shard of a random array. JAX's type stubs omit the option."""
  return bool(getattr(jax.config, 'jax_threefry_partitionable'))  # noqa: B009


def interrupt_compilation(interrupt: Callable[[], None]) -> None:
  """Calls `interrupt` from now on whenever JAX has lowered a program, before it is compiled.

  An error that it raises ends the call for which JAX compiles; nothing has run or been donated then.
  """

  def listener(event: str, duration_secs: float, **details: Any) -> None:
    if event == '/jax/core/compile/jaxpr_to_mlir_module_duration':
      interrupt()

  jax.monitoring.register_event_duration_secs_listener(listener)


def coordination_service() -> Any:
  """The client of JAX's coordination service, or None if it is not running. JAX has no public name for it."""
  return distributed.global_state.client


def copies_across_processes() -> bool:
  """Whether `jax.device_put` copies arrays to the devices of other processes: JAX has an address for its servers."""
  return bool(xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS.value)


def has_cpu_collectives() -> bool:
  """Whether programs on CPUs of several processes can exchange arrays."""
  return jax.config.values['jax_cpu_collectives_implementation'] is not None


# -- JAX's traces; true of jax 0.10.2 to 0.12


# JAX's trace in progress is `trace_context.trace`; outside of all traces it is `NO_TRACE`. JAX's own
# `trace_state_clean` takes three times as long, in every call.
trace_context = core.trace_ctx
NO_TRACE = core.eval_trace


def is_mapped(value: Any) -> bool:
  """Whether a value inside a mapped function has one entry per index of the mapped axis, also where it is differentiated."""
  value = _undifferentiated(value)
  return isinstance(value, BatchTracer) and value.batch_dim is not None


def staged(value: Any) -> Any:
  """The value of the program that JAX is tracing, also where it is differentiated; None for another value.

  Its attribute `val` is its variable, and `parent` its equation, or None for an argument or a constant.
  """
  value = _undifferentiated(value)
  is_variable = isinstance(value, partial_eval.DynamicJaxprTracer) and not isinstance(value.val, Literal)
  return value if is_variable else None


def unmapped(value: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
  """A value without `vmap` around it: with its dimensions that those of the value are, and its mapped ones."""
  dims, mapped = tuple(range(np.ndim(value))), ()
  while isinstance(value := _undifferentiated(value), BatchTracer):
    if isinstance(value.batch_dim, int):
      place = value.batch_dim
      dims, mapped = (tuple(dim + (dim >= place) for dim in each) for each in (dims, mapped))
      mapped = (*mapped, place)
    value = value.val
  return value, dims, mapped


def trace_of(tracer: Any) -> Any:
  """The trace that a traced value is of."""
  return tracer._trace


def is_in_vmap(tracer: Any) -> bool:
  """Whether the program that a traced value is of is a part of a mapped function."""
  trace = trace_of(tracer)
  while trace is not None and not isinstance(trace, BatchTrace):
    trace = getattr(trace, 'parent_trace', None)
  return trace is not None


def _undifferentiated(value: Any) -> Any:
  while hasattr(value, 'primal'):
    value = value.primal
  return value


# -- groups of devices: `vmap` over a dimension that is sharded over mesh axes; true of jax 0.10.2 to 0.12


class GroupAxisName(str):
  """An axis name that compares as the string itself, and marks a `vmap` over groups of devices for the rules below."""

  __slots__ = ()


def _on_groups(
  primitive: Any, where: Callable[[Sequence[Any]], bool] = lambda dims: None not in dims
) -> Callable[[Callable[..., Any]], None]:
  """Puts a function in the place of JAX's batching rule of a primitive, for axes of groups of devices only.

  Args:
    primitive: the primitive.
    where: whether the function applies to operands with these dimensions of groups, None for one that every group has
      whole. Default: no operand is.
  """
  batchers = batching.fancy_primitive_batchers
  original = batchers[primitive]

  def install(rule: Callable[..., Any]) -> None:
    def batched(axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
      of_groups = isinstance(axis.name, GroupAxisName) and axis.spmd_name and where(dims)
      return (
        rule(original, axis, operands, dims, **params)
        if of_groups
        else original(axis, operands, dims, **params)
      )

    batchers[primitive] = batched

  return install


@_on_groups(conv_general_dilated_p)
def _convolution(original: Any, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
  """A convolution with a kernel per group, on the devices of each group.

  JAX makes one with feature groups of it. XLA cannot shard these, and would gather all groups on every device. The
  gradient of a kernel is such a convolution.
  """

  def local(*operands: Any) -> Any:
    result, dim = original(axis, operands, dims, **params | {'out_sharding': None})
    return jnp.moveaxis(result, dim, 0)

  specs = tuple(PartitionSpec(*[None] * dim, axis.spmd_name) for dim in dims)
  of_groups = jax.shard_map(
    local,
    in_specs=specs,
    out_specs=PartitionSpec(axis.spmd_name),
    axis_names=set(axis.spmd_name),
    check_vma=False,
  )
  return of_groups(*operands), 0


def _product_with_weights(
  original: Any, axis: Any, operands: Any, dims: Any, **params: Any
) -> tuple[Any, int]:
  """A product of the parts of all groups with an array that every group has whole, sharded over the groups.

  Where that array is sharded over the same mesh axes (FSDP), XLA may move the parts instead of gathering it.
  """
  result, dim = original(axis, operands, dims, **params)
  spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * result.ndim
  spec[dim] = axis.spmd_name
  return jax.lax.with_sharding_constraint(result, PartitionSpec(*spec)), dim


for _primitive in (dot_general_p, conv_general_dilated_p, gather_p):
  _on_groups(_primitive, where=lambda dims: None in dims and {*dims} != {None})(_product_with_weights)


@_on_groups(sharding_constraint_p)
def _constraint_in_group(original: Any, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
  """A constraint on the part of a group, without the mesh axes that the groups are sharded over.

  JAX raises a ValueError instead.
  """
  sharding = params['sharding']
  if isinstance(sharding, NamedSharding):
    spec = [_without(entry, axis.spmd_name) for entry in sharding.spec]
    params['sharding'] = sharding.update(spec=PartitionSpec(*spec))
  return original(axis, operands, dims, **params)


def _constraint_of_size_1(axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
  """JAX's batching rule of a constraint, with mesh axes of size 1 kept at their dimensions, as a mesh of names has them.

  JAX takes a sharding over such axes for a replicated one, and does not move its entries past the mapped dimension.
  """
  sharding, [dim] = params['sharding'], dims
  is_named = isinstance(sharding, NamedSharding) and sharding.is_fully_replicated
  if is_named and dim is not None and axis.spmd_name is None:
    entries = [*sharding.spec, *[None] * (operands[0].ndim - 1 - len(sharding.spec))]
    entries.insert(dim, None)
    params['sharding'] = sharding.update(spec=PartitionSpec(*entries))
  return _constraint_rule(axis, operands, dims, **params)


_constraint_rule = batching.fancy_primitive_batchers[sharding_constraint_p]
batching.fancy_primitive_batchers[sharding_constraint_p] = _constraint_of_size_1


def _without(entry: Any, axes: Sequence[str]) -> Any:
  """The entry of a spec without some mesh axes."""
  if entry is None or entry is PartitionSpec.UNCONSTRAINED:
    return entry
  kept = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry) if axis not in axes)
  return kept[0] if len(kept) == 1 else kept or None


# -- jaxprs; before jax 0.12 there are two classes, `Jaxpr` and `ClosedJaxpr`


class JaxprParts(NamedTuple):
  """The parts of a jaxpr: variables and values of its constants, inputs, equations and outputs."""

  constants: list[Any]
  arrays: list[Any]
  inputs: list[Any]
  equations: list[Any]
  outputs: list[Any]


def jaxpr_parts(jaxpr: Any) -> JaxprParts:
  """The parts of a jaxpr, closed or not."""
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  arrays = list(getattr(jaxpr, 'consts', None) or ())
  return JaxprParts(
    list(inner.constvars), arrays, list(inner.invars), list(inner.eqns), list(inner.outvars)
  )


# JAX 0.10 gives the operations of an inlined program the source line of its call. Can go with jax >= 0.12.
KEEPS_LINES_INLINE = jax.__version_info__ >= (0, 12)

ENDS_AT_DONATED = jax.__version_info__ < (0, 11, 1)
"""Whether a call with an array that was donated to an earlier one may end the process; later versions raise an error."""

JITS = frozenset({'jit', 'closed_call', 'eval_jaxpr'})
"""Names of the calls of a program; JAX 0.12 has `eval_jaxpr` in place of `closed_call`."""
REMATS = frozenset({'remat2'})
CALLS = JITS | REMATS | {'custom_jvp_call', 'custom_vjp_call'}
"""Names of the operations that run one program, with their operands as its inputs."""


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
  """The jaxprs among an equation's parameters."""
  for param in params.values():
    if is_jaxpr(param):
      yield param
    elif isinstance(param, (tuple, list)):
      yield from filter(is_jaxpr, param)


def equations_in(jaxpr: Any, enters: Callable[[Any], bool] | None = None) -> Iterable[Any]:
  """The equations of a program and of the programs inside it, each program once, however often it is called.

  Args:
    jaxpr: the program, closed or not.
    enters: whether the programs inside an equation are looked into. None: all are, and the equations are kept as long
      as the program, as several checks walk through it.
  """
  if enters is not None:
    return _equations_in(jaxpr, enters)
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  if inner not in _walked:
    _walked[inner] = tuple(_equations_in(inner, lambda equation: True))
  return _walked[inner]


_walked: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _equations_in(jaxpr: Any, enters: Callable[[Any], bool]) -> Iterator[Any]:
  seen, left = set(), [iter(jaxpr_parts(jaxpr).equations)]
  while left:
    equation = next(left[-1], None)
    if equation is None:
      left.pop()
      continue
    yield equation
    for inner in reversed(list(jaxprs_in(equation.params)) if enters(equation) else []):
      if id(inner) not in seen:
        seen.add(id(inner))
        left.append(iter(jaxpr_parts(inner).equations))


def callbacks_in(jaxpr: Any) -> Iterator[tuple[str, Any]]:
  """The Python functions whose results a program uses, each with the name of the primitive that calls it."""
  for equation in equations_in(jaxpr):
    function = equation.params.get('callback')
    if function is not None and equation.outvars:
      yield equation.primitive.name, getattr(function, 'callback_func', function)


def is_jaxpr(param: Any) -> bool:
  """Whether an equation's parameter is a jaxpr, closed or not."""
  return isinstance(param, (Jaxpr, ClosedJaxpr))


def is_on_host(equation: Any) -> bool:
  """Whether an equation is computed on the host, or its first result is in the host's memory.

  Before jax 0.12, the equations of `compute_on` are among the others, and their context has the type of computation.
  """
  space = getattr(equation.outvars[0].aval, 'memory_space', None)
  return getattr(equation.ctx, 'compute_type', None) is not None or space is jax.memory.Space.Host


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
  """The number of a scan's operands that are loop constants, and the number that are carried."""
  if 'num_consts' in params:  # before jax 0.12
    return params['num_consts'], params['num_carry']
  constants, carried, _ = (len(group) for group in params['ft_in'].unpack())
  return constants, carried


def bind(
  primitive: Any, params: Mapping[str, Any], context: Any, operands: Iterable[Any], source: Any = None
) -> list[Any]:
  """Runs a primitive with an equation's parameters, under the settings of its trace.

  `source` is the source info of the equation, for profiles and error messages.
  """
  with (
    nullcontext() if context is None else context.manager,
    nullcontext() if source is None else source_info_util.user_context(source.traceback),
  ):
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
  return results if primitive.multiple_results else [results]


def pruned(fn: Any, avals: Iterable[Any], used: list[bool]) -> tuple[Any, list[bool]]:
  """The jaxpr of the used results of a function, and a flag per argument: whether it still uses it."""
  closed: Any = jax.make_jaxpr(fn)(*avals)
  return partial_eval.dce_jaxpr(getattr(closed, 'jaxpr', closed), used)


def drop_unused_operands(primitive: Any) -> None:
  """Lets JAX remove the operands of an identity whose results are not used, with the equations that compute them.

  JAX 0.10.2 fails to differentiate a `scan` whose stacked results are such operands, and nothing else uses them. Goes with JAX 0.12.
  """

  def rule(used: list[bool], *others: Any) -> tuple[list[bool], Any]:
    equation = others[-1]  # from JAX 0.12 on, after the live operands
    variables = (itertools.compress(each, used) for each in (equation.invars, equation.outvars))
    invars, outvars = map(list, variables)
    return used, equation.replace(invars=invars, outvars=outvars) if outvars else None

  partial_eval.dce_rules[primitive] = rule


def live_program(jaxpr: Any) -> Any:
  """A program, closed or not, without the equations that no result needs; not closed."""
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  return partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))[0]


def needs_primitive(
  jaxpr: Any, name: str, is_meant: Callable[[Any], bool] = lambda equation: True
) -> bool:
  """Whether results of a program need an operation outside of `shard_map`; of its equations, one that is meant."""

  def contains(program: Any) -> bool:
    equations = equations_in(program, lambda one: one.primitive.name != 'shard_map')
    return any(each.primitive.name == name and is_meant(each) for each in equations)

  return contains(jaxpr) and contains(live_program(jaxpr))


# -- lowered programs, and Shardy's propagation in them

KEEPS_FFT_BATCHES = jax.__version_info__ >= (0, 12)
"""Whether XLA keeps dimensions sharded that an FFT does not transform; before jax 0.12 it replicates them."""
SLICES_ANY_ROWS_FIRST = jax.__version_info__ >= (0, 11, 1)
"""Whether XLA slices any rows of an array before it reshapes the array; before jax 0.11.1 only the first ones, from 0 on."""


def mlir_context() -> Any:
  """An MLIR context with all dialects that JAX lowers to."""
  return mlir.make_ir_context()


def program_bytes(lowered: Any) -> bytes:
  """A lowered program as MLIR bytecode, with source locations."""
  return mlir.module_to_bytecode(lowered.compiler_ir('stablehlo'))


def separate_compilation(lowered: Any) -> Callable[[], Any]:
  """A function that compiles a program in another thread, while this one lowers more programs.

  An MLIR context serves one thread at a time, and from JAX 0.12 on the programs that a thread lowers share one. A warning
  in one thread then went to the compiler of another, and the process ended with SIGSEGV. So the function reads a copy of
  the program, in a context of the thread that calls it.
  """
  code = program_bytes(lowered)

  def compiled() -> Any:
    own = copy.copy(lowered)
    own._lowering = copy.copy(lowered._lowering)
    with mlir.make_ir_context():
      own._lowering._hlo = ir.Module.parse(code)
    return own.compile()

  return compiled


def used_arguments(lowered: Any) -> list[int]:
  """The indices of the arguments that a lowered program has; JAX drops unused ones."""
  return sorted(lowered._lowering.compile_args['kept_var_idx'])


def required_results(lowered: Any, mesh: Mesh | AbstractMesh) -> list[PartitionSpec]:
  """Requires of the compiler the shardings of results that Shardy's propagation alone chooses.

  The compiler simplifies a program before it propagates shardings, and could choose others.

  Args:
    lowered: the program.
    mesh: its mesh.

  Returns:
    The spec of each result. No spec can name a part of an axis; such a part and all axes after it are omitted.
  """
  with _propagated(lowered) as (module, copy):
    (types, chosen, _), (_, given, main) = map(_results_of_main, (copy, module.operation))
    axes = []
    for type_, one, other in zip(types, chosen, given, strict=True):
      if isinstance(type_, ir.RankedTensorType):  # the others are the tokens of ordered effects
        axes.append(_axes_of(one['sdy.sharding']) if 'sdy.sharding' in one else [()] * len(type_.shape))
        if mesh.size > 1:
          other['sdy.sharding'] = _closed_sharding(module, axes[-1])
    main.attributes['res_attrs'] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in given])
  arguments = lowered._lowering.compile_args
  avals = arguments['global_out_avals']  # keys have fewer dimensions than their arrays
  specs = [trimmed_spec(each[: len(aval.shape)]) for each, aval in zip(axes, avals, strict=True)]
  if mesh.size > 1:
    arguments['out_shardings'] = tuple(NamedSharding(mesh, spec) for spec in specs)
  return specs


@contextlib.contextmanager
def _propagated(lowered: Any, simplified: bool = False) -> Iterator[tuple[Any, Any]]:
  """The module of a lowered program, and a copy in which Shardy's propagation has sharded every value.

  Args:
    lowered: the program.
    simplified: whether the copy is simplified first, as by the compiler, which can change the shardings.
  """
  module = lowered.compiler_ir('stablehlo')
  with module.context, ir.Location.unknown():
    copy = module.operation.clone()
    if simplified:
      inline(copy)
      simplify(copy)
      order_by_operands(main_of(copy).regions[0].blocks[0])
    passmanager.PassManager.parse('builtin.module(sdy-propagation-pipeline)').run(copy)
    yield module, copy


def trimmed_spec(entries: Iterable[Any]) -> PartitionSpec:
  """A spec without trailing None entries, empty tuples, and tuples of one axis, as compiled programs have it."""
  spec = [each[0] if isinstance(each, tuple) and len(each) == 1 else each or None for each in entries]
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)


def _results_of_main(module: Any) -> tuple[Any, list[dict[str, Any]], Any]:
  """The types and attributes of the results of a module's main function, and the function."""
  [main] = [
    each
    for each in module.regions[0].blocks[0]
    if ir.StringAttr(each.attributes['sym_name']).value == 'main'
  ]
  types = ir.FunctionType(ir.TypeAttr(main.attributes['function_type']).value).results
  if 'res_attrs' not in main.attributes:
    return types, [{} for _ in types], main
  attributes = map(_dict, cast(Any, main.attributes['res_attrs']))
  return types, [{one.name: one.attr for one in each} for each in attributes], main


def _closed_sharding(module: Any, axes: Sequence[Sequence[str]]) -> Any:
  """A sharding over axes of a module's mesh, per dimension, which the compiler cannot extend."""
  mesh = next(each for each in module.body if isinstance(each, sdy.MeshOp))
  dimensions = [
    sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in each], is_closed=True)
    for each in axes
  ]
  return sdy.TensorShardingAttr.get(ir.StringAttr(mesh.sym_name).value, dimensions)


def _dict(attribute: Any) -> Any:
  return ir.DictAttr(attribute) if isinstance(attribute, ir.Attribute) else attribute


def _axes_of(attribute: Any) -> list[tuple[str, ...]]:
  dimensions = []
  for axes in _axis_references(attribute):
    full = itertools.takewhile(lambda axis: axis.sub_axis_info is None, axes)
    dimensions.append(tuple(axis.name for axis in full))
  return dimensions


class ConvolutionArray(NamedTuple):
  """The input, the kernel or the result of a convolution.

  Attributes:
    shape: its shape.
    spatial: its spatial dimensions.
    feature: the dimension that is summed over, of an input and a kernel.
    other: the batch of an input and a result; the result's features, of a kernel.
    axes: mesh axes per dimension, parts of an axis by its name.
    shards: number of shards per dimension.
  """

  shape: tuple[int, ...]
  spatial: tuple[int, ...]
  feature: int
  other: int
  axes: tuple[tuple[str, ...], ...]
  shards: tuple[int, ...]


class Convolution(NamedTuple):
  """A convolution in a lowered program.

  Attributes:
    location: the text of its MLIR location.
    input: its input, sharded as Shardy's propagation chooses.
    kernel: its kernel.
    result: its result.
    feature_groups: groups of its input's features.
    batch_groups: groups of its input's batch: the gradient of a grouped kernel has them.
  """

  location: str
  input: ConvolutionArray
  kernel: ConvolutionArray
  result: ConvolutionArray
  feature_groups: int
  batch_groups: int


class ProductArray(NamedTuple):
  """An operand or the result of a product or a padding.

  Attributes:
    shape: its shape.
    axes: mesh axes per dimension, of more than one shard, parts of an axis by its name.
    shards: number of shards per dimension.
  """

  shape: tuple[int, ...]
  axes: tuple[tuple[str, ...], ...]
  shards: tuple[int, ...]


class PropagatedProduct(NamedTuple):
  """A matrix product in a lowered program.

  Attributes:
    location: the text of its MLIR location.
    left, right: its operands, sharded as Shardy's propagation chooses.
    result: its result.
    summed: the dimensions that are summed over, of the left and of the right operand.
    sources: for each dimension of the result, that of the left and that of the right operand; None for one without it.
  """

  location: str
  left: ProductArray
  right: ProductArray
  result: ProductArray
  summed: tuple[tuple[int, int], ...]
  sources: tuple[tuple[int | None, int | None], ...]


class PropagatedPad(NamedTuple):
  """A padding in a lowered program.

  Attributes:
    location: the text of its MLIR location.
    operand, result: its arrays, sharded as Shardy's propagation chooses.
    low, high, interior: elements before, after, and between two of the operand, per dimension; negative numbers remove some.
  """

  location: str
  operand: ProductArray
  result: ProductArray
  low: tuple[int, ...]
  high: tuple[int, ...]
  interior: tuple[int, ...]


class PropagatedOperations(NamedTuple):
  """The operations of a lowered program that XLA may compute wrongly."""

  convolutions: list[Convolution]
  products: list[PropagatedProduct]
  pads: list[PropagatedPad]


def propagated_operations(lowered: Any, sizes: Mapping[str, int]) -> PropagatedOperations:
  """The convolutions, products and paddings of a lowered program, without those of `shard_map`.

  Args:
    lowered: the program.
    sizes: size per mesh axis.
  """
  found = PropagatedOperations([], [], [])
  with _propagated(lowered, simplified=True) as (_, copy):
    for op in _operations(copy):
      if op.name == 'stablehlo.convolution':
        found.convolutions.append(_propagated_convolution(op, sizes))
      elif op.name == 'stablehlo.dot_general':
        found.products.append(_propagated_product(op, sizes))
      elif op.name == 'stablehlo.pad':
        operand, result = (_product_array(value, sizes) for value in (op.operands[0], op.results[0]))
        numbers = (
          (*ir.DenseI64ArrayAttr(op.attributes[each]),)
          for each in ('edge_padding_low', 'edge_padding_high', 'interior_padding')
        )
        found.pads.append(PropagatedPad(str(op.location), operand, result, *numbers))
  return found


def _operations(op: Any) -> Iterator[Any]:
  for region in op.regions:
    for block in region:
      for view in block:
        yield view.operation
        if view.operation.name != 'sdy.manual_computation':
          yield from _operations(view.operation)


def _propagated_convolution(op: Any, sizes: Mapping[str, int]) -> Convolution:
  numbers = stablehlo.ConvDimensionNumbers(op.attributes['dimension_numbers'])
  roles = (
    (numbers.input_spatial_dimensions, numbers.input_feature_dimension, numbers.input_batch_dimension),
    (
      numbers.kernel_spatial_dimensions,
      numbers.kernel_input_feature_dimension,
      numbers.kernel_output_feature_dimension,
    ),
    (
      numbers.output_spatial_dimensions,
      numbers.output_feature_dimension,
      numbers.output_batch_dimension,
    ),
  )
  images, kernel, result = (
    _convolution_array(value, (tuple(spatial), feature, other), sizes)
    for value, (spatial, feature, other) in zip((*op.operands, op.results[0]), roles, strict=True)
  )
  feature_groups, batch_groups = (
    ir.IntegerAttr(op.attributes[f'{each}_group_count']).value for each in ('feature', 'batch')
  )
  return Convolution(str(op.location), images, kernel, result, feature_groups, batch_groups)


def _convolution_array(
  value: Any, roles: tuple[tuple[int, ...], int, int], sizes: Mapping[str, int]
) -> ConvolutionArray:
  shape, axes, shards = _product_array(value, sizes)
  return ConvolutionArray(shape, *roles, axes, shards)


def _propagated_product(op: Any, sizes: Mapping[str, int]) -> PropagatedProduct:
  numbers = stablehlo.DotDimensionNumbers(op.attributes['dot_dimension_numbers'])
  left, right, result = (_product_array(value, sizes) for value in (*op.operands, op.results[0]))
  batches = [*zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True)]
  summed = [*zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True)]
  of_left, of_right = ({each[side] for each in (*batches, *summed)} for side in (0, 1))
  rows = [(dim, None) for dim in range(len(left.shape)) if dim not in of_left]
  columns = [(None, dim) for dim in range(len(right.shape)) if dim not in of_right]
  return PropagatedProduct(
    str(op.location), left, right, result, (*summed,), (*batches, *rows, *columns)
  )


def _product_array(value: Any, sizes: Mapping[str, int]) -> ProductArray:
  shape = tuple(ir.RankedTensorType(value.type).shape)
  attribute = _sharding_of(value)
  listed = [[] for _ in shape] if attribute is None else _axis_references(attribute)
  axes = tuple(tuple(axis.name for axis in each if _shards(axis, sizes) > 1) for each in listed)
  shards = tuple(math.prod(_shards(axis, sizes) for axis in each) for each in listed)
  return ProductArray(shape, axes, shards)


def _shards(axis: Any, sizes: Mapping[str, int]) -> int:
  return sizes[axis.name] if axis.sub_axis_info is None else sdy.SubAxisInfoAttr(axis.sub_axis_info).size


def _sharding_of(value: Any) -> Any:
  """The sharding of a value in a propagated module, for a loop's argument that of its result; None if it has none."""
  is_argument = isinstance(value.owner, ir.Block)
  op = value.owner.owner if is_argument else value.owner
  index = ir.BlockArgument(value).arg_number if is_argument else ir.OpResult(value).result_number
  attributes = op.attributes
  if 'arg_attrs' in attributes:  # of a function
    attributes = _dict(cast(Any, attributes['arg_attrs'])[index])
  names = ('sdy.sharding', 'sharding', *(() if is_argument else ('out_shardings',)))  # of a `shard_map`
  found = next((attributes[name] for name in names if name in attributes), None)
  try:
    return None if found is None else sdy.TensorShardingPerValueAttr(found).shardings[index]
  except ValueError:
    return found


def _axis_references(attribute: Any) -> list[list[Any]]:
  dimensions = sdy.TensorShardingAttr(attribute).dimension_shardings
  return [
    [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(each).axes] for each in dimensions
  ]


# -- compiling for devices you don't have: jax.experimental.topologies creates them, but compiles no modules


def dump_program(code: bytes, devices: np.ndarray, folder: Path, flags: Mapping[str, Any]) -> None:
  """Compiles MLIR bytecode for devices, possibly those of a topology you don't have, and dumps it.

  The file whose name ends with `after_optimizations.hlo.pb` is an `HloProto` with the buffer assignment. XLA writes it
  before it generates code, which takes most of its time.

  Args:
    code: the program.
    devices: devices, in the order of the mesh.
    folder: folder for the files.
    flags: further flags of XLA for this program.
  """
  _compiled(code, devices, {'xla_dump_to': str(folder), 'xla_dump_hlo_as_proto': True, **flags})


def partition_program(code: bytes, devices: np.ndarray) -> str:
  """Partitions MLIR bytecode, and returns the HLO text of one device's program.

  For GPUs, the compiler ends before it assigns layouts, which is after its partitioner and its passes over
  collectives. Collectives are not combined, and operations are not fused. For the CPU the program is compiled.

  Args:
    code: the program.
    devices: devices, in the order of the mesh.
  """
  flags = {} if devices.flat[0].platform == 'cpu' else {'xla_early_exit_with_layouts': True}
  return _compiled(code, devices, flags).hlo_modules()[0].to_string()


def hlo_text(module: bytes, partitions: int) -> str:
  """The text of a serialized HLO module; its number of partitions is not serialized."""
  hlo = cast(Any, jax_lib).hlo
  parsed = hlo.HloModule.from_serialized_hlo_module_proto(module)
  text = parsed.to_string()
  if 'splash_m' in text:  # kernels of attention, whose masks are constants
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    text = parsed.to_string(options)
  header, end, rest = text.partition('\n')
  return f'{header}, num_partitions={partitions}{end}{rest}'


def _compiled(code: bytes, devices: np.ndarray, flags: Mapping[str, Any]) -> Any:
  client = devices.flat[0].client
  options = get_compile_options(
    num_replicas=1,
    num_partitions=devices.size,
    device_assignment=devices.reshape(1, -1),
    env_options_overrides=dict(flags),
    backend=client,
  )
  with mlir_context():
    module = ir.Module.parse(code)
    return compiler.backend_compile_and_load(
      client, module, _jax.DeviceList(tuple(devices.flat)), options, []
    )


# -- custom partitioning and calls of Python for them; true of jax 0.10.2 to 0.12


def lower_for_target(traced: Any, platform: str, mesh: Any) -> Any:
  """Lowers a traced program for devices that are absent.

  JAX lowers a function of `custom_partitioning` (cuDNN's attention is one) to a callback of the compiler, which needs
  devices, and this process. Here the function is partitioned at once: a first lowering contains a placeholder, from
  which Shardy determines the shardings of the operands and results; in a second one, the function's own lowering for
  these shardings is in a `shard_map`.

  Calls of Python (`is_python_call`) need this process, too, and are left out. In the place of their results are numbers of
  which the compiler knows nothing either.

  Args:
    traced: program as `jax.jit(f).trace(...)` returns it.
    platform: platform to lower for: 'cuda', 'tpu' or 'cpu'.
    mesh: mesh of the program's shardings.
  """
  lowered = lower_with_placeholders(traced, platform, mesh)
  axes = _placeholder_axes(lowered)
  if not axes:
    return lowered
  numbers = itertools.count()

  def rule(ctx: Any, *values: Any, **params: Any) -> Any:
    function = _partitioned(mesh, *axes[str(next(numbers))], **params)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)

  return _lowered_by(rule, traced, platform, mesh)


def lower_with_placeholders(traced: Any, platform: str, mesh: Any) -> Any:
  """Lowers a traced program for absent devices, with a custom call for each function of `custom_partitioning`.

  The custom call has Shardy's rule for the function, and as its attribute `kernel` the target and configuration of the kernel in it.
  """
  numbers = itertools.count()

  def rule(ctx: Any, *values: Any, **params: Any) -> Any:
    return _placeholder(ctx, values, mesh, str(next(numbers)), params)

  # XLA for GPUs replaces products of ragged groups by dense ones before it propagates shardings.
  with jax_config.jax_ragged_dot_use_ragged_dot_instruction(platform == 'tpu'):
    return _lowered_by(rule, traced, platform, mesh)


PLACEHOLDER = 'CustomSPMDPartitioning'
_PYTHON_CALLS = (pure_callback_p, io_callback_p, debug_callback_p, debug_print_p)
_needs_lock = threading.RLock()  # one thread at a time changes which primitives need them


def is_python_call(equation: Any) -> bool:
  """Whether an operation is a call of Python while the program runs, such as that of `jax.debug.print`."""
  return equation.primitive in _PYTHON_CALLS


def is_ordered_print(equation: Any) -> bool:
  """Whether an operation is a call of `jax.debug` with `ordered=True`, which JAX lowers for one device only."""
  return equation.primitive in (debug_callback_p, debug_print_p) and bool(equation.params.get('ordered'))


def _lowered_by(rule: Callable[..., Any], traced: Any, platform: str, mesh: Any) -> Any:
  """Lowers a program with a rule of its own for `custom_partitioning`, except in a `shard_map` over all axes."""

  def applied(ctx: Any, *values: Any, **params: Any) -> Any:
    context = ctx.module_context.axis_context
    names = getattr(context, 'manual_axes', frozenset())
    if names and names == frozenset(context.mesh.axis_names):
      call = jaxpr_as_fun(params['call'])
      return mlir.lower_fun(call, multiple_results=True)(ctx, *values)
    return rule(ctx, *values, **params)

  def without_python(ctx: Any, *values: Any, **params: Any) -> Any:
    if not ctx.avals_out:
      ctx.set_tokens_out(ctx.tokens_in)
      return []
    is_manual = bool(getattr(ctx.module_context.axis_context, 'manual_axes', None))
    numbers = functools.partial(_unknown_numbers, ctx.avals_out, None if is_manual else mesh)
    return mlir.lower_fun(numbers, multiple_results=True)(ctx, *values)

  rules = [(custom_partitioning.custom_partitioning_p, applied)]
  rules += [(primitive, without_python) for primitive in (*_PYTHON_CALLS, inspect_sharding_p)]
  parameters = mlir.LoweringParameters(override_lowering_rules=cast(Any, tuple(rules)))
  with _needs_lock:
    needing = dispatch.prim_requires_devices_during_lowering
    before = {*needing}
    needing.clear()
    dispatch.jaxpr_has_prim_requiring_devices.cache_clear()
    try:
      return traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    finally:
      needing |= before
      dispatch.jaxpr_has_prim_requiring_devices.cache_clear()


def _unknown_numbers(avals: Sequence[Any], mesh: Any, *operands: Any) -> Any:
  """Numbers, behind a barrier, in the place of the results of a call of Python, to which a device sends all operands.

  Args:
    avals: shape and dtype of the results.
    mesh: mesh of the program; None in a `shard_map`.
    operands: the operands, on which the numbers depend as results do.
  """
  if mesh is not None:
    whole = NamedSharding(mesh, PartitionSpec())
    operands = tuple(jax.lax.with_sharding_constraint(one, whole) for one in operands)
  numbers = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
  return jax.lax.optimization_barrier((operands, numbers))[1]


def _placeholder(
  ctx: Any, values: Sequence[Any], mesh: AbstractMesh, key: str, params: Mapping[str, Any]
) -> Any:
  call, rule = params['call'], cast(Any, params['sharding_rule'])
  results: list[Any] = [
    ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in call.out_avals
  ]
  attributes = {
    'call_target_name': ir.StringAttr.get(PLACEHOLDER),
    'api_version': mlir.i32_attr(2),
    'backend_config': ir.StringAttr.get(key),
    'kernel': ir.StringAttr.get(_kernel(ctx, call)),
  }
  if rule is not None:
    types = [value.type for value in values]
    sizes: Mapping[str, Any] = {}
    if callable(rule):
      rule = cast(Any, rule(*params['static_args'], mesh, types, results))
    if isinstance(rule, (list, tuple)) and len(rule) == 2:
      rule, sizes = rule
    if isinstance(rule, str):
      rule = sharding_rules.str_to_sdy_sharding_rule(rule, **sizes)
    attributes['sdy.sharding_rule'] = sharding_rules.sdy_sharding_rule_to_mlir(
      cast(Any, rule), types, results
    )
  return ir.Operation.create(
    'stablehlo.custom_call', results=results, operands=list(values), attributes=attributes
  ).results


def _kernel(ctx: Any, call: Any) -> str:
  """The target and the configuration of the first custom call in a function; its name if it has none."""
  module = build_mlir_module_helper(
    call,
    name='kernel',
    platforms=ctx.module_context.platforms,
    backend=None,
    axis_context=ctx.module_context.axis_context,
  )
  calls = list(_custom_calls(module.operation))
  return kernel_text(calls[0].attributes) if calls else call.jaxpr.debug_info.func_name


def kernel_text(attributes: Any) -> str:
  """The target and the configuration of a custom call."""
  config = attributes.get('backend_config', '')
  text = ir.StringAttr(config).value if isinstance(config, ir.StringAttr) else str(config)
  return f'{ir.StringAttr(attributes["call_target_name"]).value} {text}'


def _custom_calls(module: Any) -> list[Any]:
  found: list[Any] = []

  def visit(op: Any) -> Any:
    if op.name == 'stablehlo.custom_call':
      found.append(op)
    return ir.WalkResult.ADVANCE

  module.walk(visit)
  return found


def _partitioned(
  mesh: AbstractMesh, arguments: Sequence[Any], results: Sequence[Any], **params: Any
) -> Callable[..., Any]:
  """A function of `custom_partitioning` as its own `partition` makes it for these shardings."""
  call, in_tree, out_tree = (params[name] for name in ('call', 'in_tree', 'out_tree'))
  shapes = [
    jax.tree.unflatten(
      tree,
      [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for aval, axes in zip(avals, listed, strict=True)
      ],
    )
    for tree, avals, listed in ((in_tree, call.in_avals, arguments), (out_tree, call.out_avals, results))
  ]
  _, local, out, into = params['partition'](*params['static_args'], mesh, *shapes)

  def flat(*args: Any) -> Any:
    return out_tree.flatten_up_to(local(*jax.tree.unflatten(in_tree, args)))

  return jax.shard_map(
    flat,
    mesh=mesh,
    in_specs=tuple(_specs(in_tree.flatten_up_to(into), call.in_avals)),
    out_specs=_specs(out_tree.flatten_up_to(out), call.out_avals),
    check_vma=False,
  )


def _specs(shardings: Iterable[Any], avals: Sequence[Any]) -> list[PartitionSpec]:
  """The specs of arrays; cuDNN's has one entry too many, which the compiler ignores."""
  return [
    PartitionSpec(*each.spec[: len(aval.shape)]) for each, aval in zip(shardings, avals, strict=True)
  ]


def _placeholder_axes(lowered: Any) -> dict[str, tuple[list[Any], list[Any]]]:
  """Per placeholder, the mesh axes of its operands and results, by Shardy's propagation."""
  found: dict[str, tuple[list[Any], list[Any]]] = {}
  with _propagated(lowered) as (_, copy):
    for op in _custom_calls(copy):
      if ir.StringAttr(op.attributes['call_target_name']).value == PLACEHOLDER:
        key = ir.StringAttr(op.attributes['backend_config']).value
        found[key] = [*map(_value_axes, op.operands)], [*map(_value_axes, op.results)]
  return found


def _value_axes(value: Any) -> list[tuple[str, ...]]:
  """The mesh axes of a value after propagation."""
  sharding = _sharding_of(value)
  return [] if sharding is None else _axes_of(sharding)


# -- compiled programs and arrays


def named_sharding(sharding: Sharding, mesh: Mesh, rank: int) -> Sharding:
  """The same sharding with the axis names of a mesh, if there is one.

  JAX describes the shardings that the compiler chooses for arguments without axis names.
  """
  if not isinstance(sharding, GSPMDSharding):
    return sharding
  [spec] = sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
  named = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
  return named if named.is_equivalent_to(sharding, rank) else sharding


def needs_host_objects(compiled: Any, text: str) -> bool:
  """Whether a program depends on more than its text: host callbacks, or arrays that it closes over."""
  return 'callback' in text or bool(compiled._params.const_args)


class _ExecutableLoader(serialize_executable._JaxPjrtUnpickler):
  """Loads a compiled program on other devices than those that it was compiled for."""

  def __init__(self, file: io.BytesIO, old_devices: Sequence[Any], devices: Sequence[Any]):
    super().__init__(file, devices[0].client, tuple(devices))
    self.devices_by_id = {old.id: new for old, new in zip(old_devices, devices, strict=True)}
    assignment = np.array(devices).reshape(1, -1)
    self._options = get_compile_options(1, len(devices), assignment, backend=devices[0].client)

  def persistent_load(self, pid: Any) -> Any:
    if pid[0] != 'exec':
      return super().persistent_load(pid)
    return self.backend.deserialize_executable(
      pid[1], executable_devices=self.execution_devices, compile_options=self._options
    )


def _has_persistent_cache() -> bool:
  values = jax.config.values
  return bool(values['jax_enable_compilation_cache'] and values['jax_compilation_cache_dir'])


def reloaded(compiled: Any, old_devices: Sequence[Any], devices: Sequence[Any]) -> Any:
  """A compiled program on other devices of the same kind, or None if JAX does not support that.

  `jax.experimental.serialize_executable` loads a program on its own devices only. A CPU program from JAX's
  persistent cache cannot be serialized again ("Function ... not found" when it runs), and nothing marks the
  programs that came from there.
  """
  if devices[0].platform == 'cpu' and _has_persistent_cache():
    return None
  try:
    code, in_tree, out_tree = serialize_executable.serialize(compiled)
  except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
    return None
  unloaded, info, no_kwargs = _ExecutableLoader(io.BytesIO(code), old_devices, devices).load()
  return jax.stages.Compiled(
    unloaded.load(), [], jax.tree.unflatten(in_tree, info), out_tree, no_kwargs=no_kwargs
  )


class DeviceCopy:
  """Copies arrays to other devices, in a sixth of the time per call that `jax.device_put` takes.

  It calls the same function of XLA, but computes everything that is constant between calls once. Source and
  target shardings have to divide an array in the same way. `jax.device_put` copies key arrays, and arrays of several
  processes.
  """

  def __init__(self, avals: Sequence[Any], shardings: Sequence[Any]):
    self._shardings = list(shardings)
    self._devices = [each._internal_device_list.addressable_device_list for each in shardings]
    self._copies = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(self._shardings)
    keys = any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)
    self._by_jax = keys or not all(each.is_fully_addressable for each in shardings)

  def __call__(self, arrays: list[Any]) -> list[Any]:
    """Starts the copies and returns them."""
    if self._by_jax:
      return jax.device_put(arrays, self._shardings)
    return xla_client.batched_copy_array_to_devices_with_sharding(
      arrays, self._devices, self._shardings, self._copies
    )


def from_shards(like: Any, sharding: Any, shards: Sequence[jax.Array]) -> jax.Array:
  """An array with the shape, dtype and weak type of `like`, from its shards on this process.

  `jax.make_array_from_single_device_arrays` drops the weak type.
  """
  if not getattr(like, 'weak_type', False):  # keys have none
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards, dtype=like.dtype)
  aval = ShapedArray(like.shape, like.dtype, weak_type=True)
  return ARRAY(aval, sharding, cast(Any, list(shards)), committed=True)


def compiled_call(
  jitted: Any, compiled: Any, mesh: Mesh | AbstractMesh, dtype: Any
) -> Callable[..., Any]:
  """The call of a compiled program for arrays of a dtype.

  JAX 0.10.2 refuses arrays of less than a byte an element, such as int4, for a program that was compiled ahead: the
  texts of their layouts differ. `jax.jit` takes them. Goes with JAX 0.12.

  Args:
    jitted: the jitted function, which is called instead.
    compiled: its program.
    mesh: mesh of the program.
    dtype: dtype of the arrays.
  """
  is_number = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
  info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
  if not is_number or info(dtype).bits >= 8:
    return compiled

  def call(*args: Any) -> Any:
    with mesh_scope(mesh):
      return jitted(*args)

  return call


# -- Orbax 0.12.8


@functools.cache
def redirect_orbax(kvstore: Callable[[str], Any], files: Callable[[str], Any]) -> None:
  """Makes Orbax and etils ask how to reach a path in a bucket.

  Orbax 0.12.8 has no option for it: it reaches `gs://` through TensorStore and refuses `s3://`, and lists through
  fsspec, which remembers lists. A path without an answer is reached as before; but a URL is refused before Orbax writes a part
  of it to a local folder, `./s3:/bucket`.

  Args:
    kvstore: returns the TensorStore spec of a path, or None.
    files: returns the fsspec file system of a path, or None.

  Raises:
    AttributeError, ImportError: the installed Orbax or etils has another structure.
  """
  from etils.epath import backend, gpath
  from orbax.checkpoint._src.path import gcs_utils
  from orbax.checkpoint._src.serialization import tensorstore_utils

  normalize, is_gcs = tensorstore_utils._normalize_path, tensorstore_utils._use_gcs_driver
  spec, file_system = gcs_utils.get_kvstore_for_gcs, backend.fsspec_backend.fs
  backend_of = gpath._GPath._backend.fget

  def normalized(path: str) -> str:
    if kvstore(path):
      return path.rstrip('/')
    if '://' in path and not is_gcs(path):
      raise ValueError(f'Orbax has no storage for {path}.\nFix: save with flax_spmd.checkpoint.')
    return normalize(path)

  tensorstore_utils._normalize_path = normalized
  tensorstore_utils._use_gcs_driver = lambda directory: bool(kvstore(directory)) or is_gcs(directory)
  gcs_utils.get_kvstore_for_gcs = lambda path: kvstore(path) or spec(path)
  cast(Any, backend.fsspec_backend).fs = lambda path: files(os.fspath(path)) or file_system(path)
  # With TensorFlow installed, etils would take TensorFlow's file systems.
  cast(Any, gpath._GPath)._backend = property(
    lambda path: backend.fsspec_backend if files(path._path_str) else cast(Any, backend_of)(path)
  )


def orbax_operation(at_least: int = 0) -> int:
  """The number of Orbax's last operation in this process, raised to `at_least`.

  Orbax 0.12.8 puts it into the names of its barriers, and counts operations of one process too.
  """
  from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

  while int(OperationIdGenerator.get_current_operation_id()) < at_least:
    OperationIdGenerator.next_operation_id()
  return int(OperationIdGenerator.get_current_operation_id())


@functools.cache
def store_absent_arrays() -> None:
  """Makes Orbax write nothing for an array without a shard on this process.

  Orbax 0.12.8 reads the shape of a shard from the first one of this process, and raises IndexError if there is none.

  Raises:
    AttributeError, ImportError: the installed Orbax has another structure.
  """
  from orbax.checkpoint._src.serialization import replica_slices

  slices_of = replica_slices.get_replica_slices

  def slices(arr: jax.Array, *args: Any, **kwargs: Any) -> Any:
    if arr.addressable_shards:
      return slices_of(arr, *args, **kwargs)
    shard = arr.sharding.shard_shape(arr.shape)
    return replica_slices.ReplicaSlices(arr.shape, shard, arr.sharding, arr.dtype, False, [])

  replica_slices.get_replica_slices = slices


@functools.cache
def describe_numbers() -> None:
  """Makes Orbax describe every Python number that it saves and restores.

  Orbax 0.12.8 fails at states with a bool, with a complex number of NumPy, or with a number that `SaveArgs(dtype=)` has made
  one of bfloat16. It loads no Python complex, so a complex number is described as NumPy's. An Orbax of another structure
  stays as it is.
  """
  with contextlib.suppress(ImportError, AttributeError):
    from orbax.checkpoint.experimental.v1._src.serialization import scalar_leaf_handler

    kinds = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}
    scalar_leaf_handler._np_dtype_to_python_type = lambda dtype: next(
      (kind for kind, dtypes in kinds.items() if jnp.issubdtype(dtype, dtypes)), dtype.type
    )


def orbax_kvstore(path: str) -> Any:
  """The TensorStore spec that Orbax builds for a folder of arrays, without its own layers."""
  from orbax.checkpoint._src.serialization import tensorstore_utils

  return tensorstore_utils.build_kvstore_tspec(path, use_ocdbt=True)['base']

"""Compatibility: every branch on a JAX or Flax version, and every private name of theirs.

Supported: jax 0.10.2 and newer, flax 0.12.8 and newer. Each branch names the version at which it can go.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift
from flax.linen import spmd as linen_spmd
from jax._src import array, compiler, core, distributed, source_info_util
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax.experimental import serialize_executable
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy


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


@contextlib.contextmanager
def lifted_results(change: Callable[[Any], Any]) -> Iterator[None]:
  """Applies `change` to the results of lifted modules and methods (`nn.remat`, `nn.jit`, `nn.scan`) in a block.

  `nn.intercept_methods` intercepts calls inside lifted functions, but not the lifted functions themselves.
  """
  original = lift.pack

  def pack(*args: Any, **kwargs: Any) -> Any:
    lifted = original(*args, **kwargs)
    return lambda *inner, **named: change(lifted(*inner, **named))

  lift.pack = pack
  try:
    yield
  finally:
    lift.pack = original


@contextlib.contextmanager
def flax_resolutions(report: Callable[[Sequence[Any] | None], None]) -> Iterator[None]:
  """Reports the logical names of every array that Flax Linen resolves in a block.

  Its constraints, its boxes and its public `logical_to_mesh_axes` all call one private function, which is
  wrapped while any thread is in such a block. True of flax 0.12.8 to 0.12.12.
  """
  with _resolution_lock:
    if not _resolution_reports:
      linen_spmd._logical_to_mesh_axes = _reporting_resolution
    _resolution_reports.append(report)
  try:
    yield
  finally:
    with _resolution_lock:
      _resolution_reports.remove(report)
      if not _resolution_reports:
        linen_spmd._logical_to_mesh_axes = _flax_resolution


_flax_resolution = linen_spmd._logical_to_mesh_axes
_resolution_reports: list[Callable[[Sequence[Any] | None], None]] = []
_resolution_lock = threading.Lock()


def _reporting_resolution(names: Sequence[Any] | None, *args: Any, **kwargs: Any) -> Any:
  for report in dict.fromkeys(_resolution_reports):
    report(names)
  return _flax_resolution(names, *args, **kwargs)


def current_module() -> str | None:
  """The Linen module that is running, such as `'module decoder/layers'`, or None; for error messages.

  Flax has no public access to its module stack.
  """
  stack = nn.module._context.module_stack
  modules = [module for module in stack if module is not None]
  if not modules:
    return None
  return f'module {"/".join(modules[-1].path)}' if modules[-1].path else 'the top module'


def coordination_service() -> Any:
  """The client of JAX's coordination service, or None if it is not running. JAX has no public name for it."""
  return distributed.global_state.client


def threefry_partitionable() -> bool:
  """Whether each device can generate its own shard of a random array. JAX's type stubs omit the option."""
  return bool(getattr(jax.config, 'jax_threefry_partitionable'))  # noqa: B009


def jaxlib_version() -> str:
  """The version of jaxlib, which contains the MLIR bindings and the compilers' interface."""
  return importlib.metadata.version('jaxlib')


# -- compiling for devices you don't have: jax.experimental.topologies creates them, but compiles no modules


def program_bytes(lowered: Any) -> bytes:
  """A lowered program as MLIR bytecode, with source locations."""
  return mlir.module_to_bytecode(lowered.compiler_ir('stablehlo'))


def needs_host_objects(compiled: Any, text: str) -> bool:
  """Whether a program depends on more than its text: host callbacks, or arrays that it closes over."""
  return 'callback' in text or bool(compiled._params.const_args)


def program_text(lowered: Any, locations: bool) -> str:
  """A lowered program as text, with or without source locations."""
  return lowered.compiler_ir('stablehlo').operation.get_asm(enable_debug_info=locations)


def result_axes(lowered: Any) -> list[list[tuple[str, ...]]]:
  """The mesh axes of each dimension of each result of a lowered program, by Shardy's propagation.

  No `PartitionSpec` can name a part of an axis; such a part and all axes after it are omitted.
  """
  module = lowered.compiler_ir('stablehlo')
  with module.context:
    copy = module.operation.clone()
    passmanager.PassManager.parse('builtin.module(sdy-propagation-pipeline)').run(copy)
    [main] = [
      each
      for each in copy.regions[0].blocks[0]
      if ir.StringAttr(each.attributes['sym_name']).value == 'main'
    ]
    types = ir.FunctionType(ir.TypeAttr(main.attributes['function_type']).value).results
    attributes = main.attributes['res_attrs'] if 'res_attrs' in main.attributes else [{}] * len(types)
    return [
      _axes_of(each['sdy.sharding']) if 'sdy.sharding' in each else [] for each in map(_dict, attributes)
    ]


def _dict(attribute: Any) -> Any:
  return ir.DictAttr(attribute) if isinstance(attribute, ir.Attribute) else attribute


def _axes_of(attribute: Any) -> list[tuple[str, ...]]:
  dimensions = []
  for each in sdy.TensorShardingAttr(attribute).dimension_shardings:
    axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(each).axes]
    full = itertools.takewhile(lambda axis: axis.sub_axis_info is None, axes)
    dimensions.append(tuple(axis.name for axis in full))
  return dimensions


def mlir_context() -> Any:
  """An MLIR context with all dialects that JAX lowers to."""
  return mlir.make_ir_context()


def compile_program(code: bytes, devices: np.ndarray) -> tuple[str, dict[str, int]]:
  """Compiles MLIR bytecode for devices, possibly those of a topology you don't have.

  Returns:
    The optimised HLO text, and the compiler's memory statistics in bytes: `arguments`, `results`, `shared`
    (results in the memory of donated arguments), `temporaries`, and `peak` (0 if the backend does not
    report it).
  """
  client = devices.flat[0].client
  options = compiler.get_compile_options(
    num_replicas=1, num_partitions=devices.size, device_assignment=devices.reshape(1, -1), backend=client
  )
  with mlir_context():
    module = ir.Module.parse(code)
    compiled = compiler.backend_compile_and_load(
      client, module, _jax.DeviceList(tuple(devices.flat)), options, []
    )
  stats = compiled.get_compiled_memory_stats()
  memory = {
    'arguments': stats.argument_size_in_bytes,
    'results': stats.output_size_in_bytes,
    'shared': stats.alias_size_in_bytes,
    'temporaries': stats.temp_size_in_bytes,
    'peak': getattr(stats, 'peak_memory_in_bytes', 0),
  }
  return compiled.hlo_modules()[0].to_string(), memory


# -- jaxprs (before jax 0.12 there are two classes, `Jaxpr` and `ClosedJaxpr`)


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


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
  """The jaxprs among an equation's parameters."""
  for param in params.values():
    for each in param if isinstance(param, (tuple, list)) else (param,):
      if hasattr(each, 'eqns') or hasattr(each, 'jaxpr'):
        yield each


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


class _ExecutableLoader(serialize_executable._JaxPjrtUnpickler):
  """Loads a compiled program on other devices than those that it was compiled for."""

  def __init__(self, file: io.BytesIO, old_devices: Sequence[Any], devices: Sequence[Any]):
    super().__init__(file, devices[0].client, tuple(devices))
    self.devices_by_id = {old.id: new for old, new in zip(old_devices, devices, strict=True)}
    assignment = np.array(devices).reshape(1, -1)
    self._options = compiler.get_compile_options(1, len(devices), assignment, backend=devices[0].client)

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
  return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(info), out_tree, no_kwargs=no_kwargs)


class DeviceCopy:
  """Copies arrays to other devices, in a sixth of the time per call that `jax.device_put` takes.

  It calls the same function of XLA, but computes everything that is constant between calls once. Source and
  target shardings have to divide an array in the same way. Key arrays are copied by `jax.device_put`.
  """

  def __init__(self, avals: Sequence[Any], shardings: Sequence[Any]):
    self._shardings = list(shardings)
    self._devices = [each._internal_device_list.addressable_device_list for each in shardings]
    self._copies = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(self._shardings)
    self._keys = any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)

  def __call__(self, arrays: list[Any]) -> list[Any]:
    """Starts the copies and returns them."""
    if self._keys:
      return jax.device_put(arrays, self._shardings)
    return xla_client.batched_copy_array_to_devices_with_sharding(
      arrays, self._devices, self._shardings, self._copies
    )


def aval_of(shape: Sequence[int], dtype: Any, weak_type: bool) -> Any:
  """The abstract value of an array, without its sharding."""
  return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def from_shards(like: Any, sharding: Any, shards: Sequence[jax.Array]) -> jax.Array:
  """An array with the shape, dtype and weak type of `like`, from its shards on this process.

  `jax.make_array_from_single_device_arrays` drops the weak type.
  """
  if not getattr(like, 'weak_type', False):  # keys have none
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards, dtype=like.dtype)
  aval = aval_of(like.shape, like.dtype, True)
  return array.ArrayImpl(aval, sharding, cast(Any, list(shards)), committed=True)

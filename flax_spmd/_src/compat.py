"""Every branch on a JAX or Flax version, and every name they do not promise to keep.

Supported: jax 0.10.2 and newer, flax 0.12.8 and newer. A branch says with which version it can go.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift
from jax._src import array, compiler, core, distributed, source_info_util
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax.experimental import serialize_executable
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy


def mesh_scope(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
  """Makes `mesh` JAX's current mesh, inside a trace or outside of one.

  `jax.set_mesh` knows the devices, so it is preferred; it refuses abstract meshes and refuses to
  run inside a trace, where only the abstract mesh can change.
  """
  if isinstance(mesh, Mesh):
    try:
      return jax.set_mesh(mesh)
    except ValueError:  # inside a trace
      return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
  return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def lifted_results(change: Callable[[Any], Any]) -> Iterator[None]:
  """Within it, what lifted modules and methods (`nn.remat`, `nn.jit`, `nn.scan`) return is changed.

  `nn.intercept_methods` sees what is called inside of these, and not these themselves.
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


def current_module() -> str | None:
  """`'module decoder/layers'` for the Linen module that is running, or None outside of any.

  Flax keeps its module stack private; a message without a place would send its reader searching.
  """
  stack = nn.module._context.module_stack
  modules = [module for module in stack if module is not None]
  if not modules:
    return None
  return f'module {"/".join(modules[-1].path)}' if modules[-1].path else 'the top module'


def coordination_service() -> Any:
  """JAX's coordination service, or None where it does not run; JAX has no public name for it."""
  return distributed.global_state.client


def random_numbers_divide() -> bool:
  """Whether each device draws its own piece of a random array; JAX's stubs leave its options out."""
  return bool(getattr(jax.config, 'jax_threefry_partitionable'))  # noqa: B009


def jaxlib_version() -> str:
  """The version of the wheel that has the compilers' interface."""
  return importlib.metadata.version('jaxlib')


# -- compiling for devices that are not here (jax.experimental.topologies makes them, but takes no module)


def program_bytes(lowered: Any) -> bytes:
  """A lowered program as MLIR bytecode, with its locations."""
  return mlir.module_to_bytecode(lowered.compiler_ir('stablehlo'))


def is_alone(compiled: Any, text: str) -> bool:
  """Whether a program has more to it than its text: functions of the host, or arrays that it closes over."""
  return 'callback' in text or bool(compiled._params.const_args)


def program_text(lowered: Any, locations: bool) -> str:
  """A lowered program as text, with the places in the source that it comes from or without."""
  return lowered.compiler_ir('stablehlo').operation.get_asm(enable_debug_info=locations)


def result_places(lowered: Any) -> list[list[tuple[str, ...]]]:
  """Over which mesh axes each dimension of each result of a lowered program will lie: Shardy's propagation.

  A part of an axis, which no `PartitionSpec` can name, is left out, with what comes after it.
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
    said = main.attributes['res_attrs'] if 'res_attrs' in main.attributes else [{}] * len(types)
    return [
      _places_of(each['sdy.sharding']) if 'sdy.sharding' in each else [] for each in map(_dict, said)
    ]


def _dict(attribute: Any) -> Any:
  return ir.DictAttr(attribute) if isinstance(attribute, ir.Attribute) else attribute


def _places_of(attribute: Any) -> list[tuple[str, ...]]:
  places = []
  for each in sdy.TensorShardingAttr(attribute).dimension_shardings:
    axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(each).axes]
    whole = itertools.takewhile(lambda axis: axis.sub_axis_info is None, axes)
    places.append(tuple(axis.name for axis in whole))
  return places


def mlir_context() -> Any:
  """A context that has all the dialects that JAX lowers to."""
  return mlir.make_ir_context()


def compile_program(code: bytes, devices: np.ndarray) -> tuple[str, dict[str, int]]:
  """Compiles MLIR bytecode for devices, which may be those of a topology that is not here.

  Returns:
    The optimised HLO, and the compiler's account of memory: bytes of arguments, results, what results
    share with arguments, temporaries, and the peak (0 where a backend does not say it).
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


# -- jaxprs (jax 0.12 has one class where older versions have `Jaxpr` and `ClosedJaxpr`)


class Opened(NamedTuple):
  """The parts of a jaxpr: variables of closed-over arrays, these arrays, and what is in every jaxpr."""

  constants: list[Any]
  arrays: list[Any]
  inputs: list[Any]
  equations: list[Any]
  outputs: list[Any]


def opened(jaxpr: Any) -> Opened:
  """The parts of a jaxpr, closed or not."""
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  arrays = list(getattr(jaxpr, 'consts', None) or ())
  return Opened(list(inner.constvars), arrays, list(inner.invars), list(inner.eqns), list(inner.outvars))


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
  """The jaxprs among an equation's parameters."""
  for param in params.values():
    for each in param if isinstance(param, (tuple, list)) else (param,):
      if hasattr(each, 'eqns') or hasattr(each, 'jaxpr'):
        yield each


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
  """How many of a scan's operands are constants of its loop, and how many are carried."""
  if 'num_consts' in params:  # before jax 0.12
    return params['num_consts'], params['num_carry']
  constants, carried, _ = (len(group) for group in params['ft_in'].unpack())
  return constants, carried


def bind(
  primitive: Any, params: Mapping[str, Any], context: Any, operands: Iterable[Any], source: Any = None
) -> list[Any]:
  """Runs a primitive with an equation's parameters, under the settings that it was traced under.

  `source` is where it was traced, which is what profiles and messages then say.
  """
  with (
    nullcontext() if context is None else context.manager,
    nullcontext() if source is None else source_info_util.user_context(source.traceback),
  ):
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
  return results if primitive.multiple_results else [results]


def pruned(fn: Any, avals: Iterable[Any], wanted: list[bool]) -> tuple[Any, list[bool]]:
  """The jaxpr of those results of a function that are wanted, and which of its arguments it still uses."""
  closed: Any = jax.make_jaxpr(fn)(*avals)
  return partial_eval.dce_jaxpr(getattr(closed, 'jaxpr', closed), wanted)


class _Mover(serialize_executable._JaxPjrtUnpickler):
  """Reads a compiled program for other devices than those that it was compiled for."""

  def __init__(self, file: io.BytesIO, there: Sequence[Any], here: Sequence[Any]):
    super().__init__(file, here[0].client, tuple(here))
    self.devices_by_id = {old.id: new for old, new in zip(there, here, strict=True)}
    assignment = np.array(here).reshape(1, -1)
    self._options = compiler.get_compile_options(1, len(here), assignment, backend=here[0].client)

  def persistent_load(self, pid: Any) -> Any:
    if pid[0] != 'exec':
      return super().persistent_load(pid)
    return self.backend.deserialize_executable(
      pid[1], executable_devices=self.execution_devices, compile_options=self._options
    )


def _has_persistent_cache() -> bool:
  values = jax.config.values
  return bool(values['jax_enable_compilation_cache'] and values['jax_compilation_cache_dir'])


def moved(compiled: Any, there: Sequence[Any], here: Sequence[Any]) -> Any:
  """A compiled program on other devices of the same kind, or None where JAX cannot do that.

  `jax.experimental.serialize_executable` loads a program for its own devices only. XLA's CPU programs that
  came from JAX's persistent cache cannot be written a second time ("Function ... not found" when they run);
  which ones came from there is not known.
  """
  if here[0].platform == 'cpu' and _has_persistent_cache():
    return None
  try:
    code, in_tree, out_tree = serialize_executable.serialize(compiled)
  except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
    return None
  unloaded, info, no_kwargs = _Mover(io.BytesIO(code), there, here).load()
  return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(info), out_tree, no_kwargs=no_kwargs)


class Sender:
  """Copies arrays onto other devices, each to the sharding that it has there.

  It is what `jax.device_put` comes to, at a sixth of its time per call: what does not change from call
  to call is found out once. Arrays have to be divided alike here and there. Keys go by `jax.device_put`.
  """

  def __init__(self, avals: Sequence[Any], shardings: Sequence[Any]):
    self._shardings = list(shardings)
    self._devices = [each._internal_device_list.addressable_device_list for each in shardings]
    self._copies = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(self._shardings)
    self._keys = any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)

  def __call__(self, arrays: list[Any]) -> list[Any]:
    """The copies; copying goes on while the caller does."""
    if self._keys:
      return jax.device_put(arrays, self._shardings)
    return xla_client.batched_copy_array_to_devices_with_sharding(
      arrays, self._devices, self._shardings, self._copies
    )


def aval_of(shape: Sequence[int], dtype: Any, weak_type: bool) -> Any:
  """What JAX knows of an array while it traces, but for its sharding."""
  return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def from_shards(like: Any, sharding: Any, shards: Sequence[jax.Array]) -> jax.Array:
  """An array of the shape, dtype and weak type of another one, of those of its shards that are here.

  `jax.make_array_from_single_device_arrays` forgets the weak type.
  """
  if not getattr(like, 'weak_type', False):  # keys have none
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards, dtype=like.dtype)
  aval = aval_of(like.shape, like.dtype, True)
  return array.ArrayImpl(aval, sharding, cast(Any, list(shards)), committed=True)

"""Every branch on a JAX or Flax version, and every name they do not promise to keep.

Supported: jax 0.10.2 and newer, flax 0.12.8 and newer. A branch says with which version it can go.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax._src import compiler, distributed
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir


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


def program_text(lowered: Any, locations: bool) -> str:
  """A lowered program as text, with the places in the source that it comes from or without."""
  return lowered.compiler_ir('stablehlo').operation.get_asm(enable_debug_info=locations)


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
  with mlir.make_ir_context():
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

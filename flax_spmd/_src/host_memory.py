"""Host memory: arrays that rules with `host` keep in the memory of the host between steps.

A program computes on arrays in the device's memory. `on_device` moves those that it received in the host's
(`jit.late_fetches` decides when); the output shardings of the program move its results back, and `on_host` those whose shardings the compiler chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.rules.clauses import HOST_MEMORY
from flax_spmd._src.rules.decisions import rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import MeshError, Problem, raise_problems

_WITHOUT = 'remove host(...) from the rules'
_WITH = 'use a backend with this memory: GPUs, TPUs, and CPUs since JAX 0.4.31.'


def check_memories(mesh: MeshLike, rules: Rules, without: str = _WITHOUT) -> None:
  """Raises `MeshError` if a rule has `host`, and the devices of the mesh cannot use the host's memory.

  Args:
    mesh, rules: those of a layout.
    without: remedy that needs no such memory, for the message.
  """
  if rules.uses_host:
    uses = [f'rule {rule_text(rule)} {rules.at(rule)!r}' for rule in rules.host_rules()]
    check_host(mesh, uses, without)


def memory_kinds(device: Any) -> list[str]:
  """The kinds of memory that a device can use, such as 'device' and 'pinned_host'; a topology's are not known."""
  return [memory.kind for memory in device.addressable_memories()]


def check_host(mesh: MeshLike, uses: Sequence[str], without: str) -> None:
  """Raises `MeshError` if the devices of a mesh cannot use the host's memory.

  Args:
    mesh: the mesh; of an abstract one nothing is known.
    uses: what needs this memory, one problem each.
    without: remedy that needs no such memory.
  """
  if not isinstance(mesh, Mesh):
    return
  device = mesh.devices.flat[0]
  kinds = memory_kinds(device)
  if HOST_MEMORY in kinds:
    return
  lacking = (
    f'{device.platform} devices have no memory {HOST_MEMORY!r}, only {", ".join(map(repr, kinds))}.'
  )
  raise_problems([Problem(f'{use}: {lacking}', f'{without}, or {_WITH}', MeshError) for use in uses])


def check_no_host(rules: Rules, function: str) -> None:
  """Raises `LayoutError` if a rule has `host`, for a function that moves no arrays between memories."""
  raise_problems(
    [
      Problem(
        f'rule {rule_text(rule)} {rules.at(rule)!r}: {function} moves no arrays out of the memory of the host.',
        'use layout.jit, or rules without host(...).',
      )
      for rule in rules.host_rules()
    ]
  )


def on_device(tree: Any) -> Any:
  """A tree of traced arguments with every array in the memory of the device."""
  return jax.tree.map(_on_device, tree)


def _on_device(leaf: Any) -> Any:
  space = getattr(getattr(leaf, 'aval', None), 'memory_space', None)
  return jax.device_put(leaf, jax.memory.Space.Device) if space is jax.memory.Space.Host else leaf


def on_host(result: Any, hosted: Collection[int]) -> Any:
  """A traced result with some of its leaves, by their indices, in the memory of the host."""
  if not hosted:
    return result
  leaves, treedef = jax.tree.flatten(result)
  return jax.tree.unflatten(
    treedef,
    [
      jax.device_put(leaf, jax.memory.Space.Host) if index in hosted else leaf
      for index, leaf in enumerate(leaves)
    ],
  )

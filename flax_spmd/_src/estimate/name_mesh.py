"""Naming: which logical names a step uses, and the step lowered on a mesh whose axes are these names.

Every dimension that has a name is then divided over the axis of that name, of size 1, which every size can be
divided by. What a layout's table says of a name can be filled in afterwards, so that the step is traced and
lowered once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compare.lowering import abstract_batch
from flax_spmd._src.compat import program_bytes
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.rules.decisions import Resolution
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import EstimatorError, MeshAxisError

_OWN_MESH = (
  'The step is written for a mesh of its own (shard_map?), and cannot be laid out by names alone.\n'
  'Fix: compare layouts that you choose, with spmd.compare; it compiles each.'
)
_OWN_AXES = (
  'The state has mesh axes among its names, and cannot be laid out by names alone.\n'
  'Fix: give every dimension one logical name, or compare layouts that you choose, with spmd.compare.'
)
_BESIDE = (
  '_'  # a mesh axis of size 2 that no name is laid over: with one device, JAX drops all shardings
)


class Lowered(NamedTuple):
  """A step on a mesh of names.

  Attributes:
    code: as MLIR bytecode.
    state: what the step takes first: shapes, with boxes.
    result: what it returns: shapes.
  """

  code: bytes
  state: Any
  result: Any


def lower_on_names(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  *,
  args: Sequence[Any],
  places: Any,
  platform: str,
) -> Lowered:
  """Traces a step to hear its names, and once more on a mesh of them.

  Raises:
    EstimatorError: the step or the state is made for meshes of its own.
    LayoutError: a layout has jitted the step.
    Exception: whatever the step raises when it is traced.
  """
  listening = _Listening()
  layout = Layout(abstract_mesh({_BESIDE: 2}), listening)
  try:
    state = layout.abstract(create, *args)
  except MeshAxisError as error:  # of a mesh that the user has never seen
    raise EstimatorError(_OWN_AXES) from error
  for names in layout.names(state, logical_only=True):
    listening.hear(names or ())
  for names in jax.tree.leaves(places, is_leaf=_is_names) if places is not None else [('batch',)]:
    listening.hear(names if _is_names(names) else ())
  jitted = layout.jit(step)
  try:
    jitted.trace(state, abstract_batch(layout, batch, places))
  except ValueError as error:  # a real mistake of the step's is told when it is compiled
    if 'mesh' in str(error):
      raise EstimatorError(_OWN_MESH) from error
    raise

  layout = Layout(
    abstract_mesh(dict.fromkeys(sorted(listening.heard), 1) | {_BESIDE: 2}),
    Rules(*((name, name) for name in sorted(listening.heard))),
  )
  state = layout.abstract(create, *args)
  data = abstract_batch(layout, batch, places)
  lowered = layout.jit(step).trace(state, data).lower(lowering_platforms=(platform,))
  return Lowered(program_bytes(lowered), state, lowered.out_info)


def _is_names(place: Any) -> bool:
  return type(place) is tuple and all(name is None or isinstance(name, str) for name in place)


class _Listening(Rules):
  """A table that decides nothing, and hears which names it is asked about."""

  def __init__(self):
    self.heard: set[str] = set()
    super().__init__((_Ear(self.heard), None))

  def hear(self, names: Iterable[Any]) -> None:
    """Takes note of names."""
    self.heard.update(name for name in names if isinstance(name, str))

  def resolve(
    self,
    names: Sequence[Any],
    shape: Sequence[int] | None = None,
    sizes: Mapping[str, int] | None = None,
  ) -> Resolution:
    """Hears names; as no rule is for them, nothing is divided."""
    self.hear(names)
    return super().resolve(names, shape, sizes)


class _Ear(str):
  """A rule's name that hears those of arrays: Flax compares each rule's name with them."""

  heard: set[str]

  def __new__(cls, heard: set[str]):
    """An ear; its text is no name of anything."""
    made = super().__new__(cls, '(any)')
    made.heard = heard
    return made

  def __eq__(self, other: object) -> bool:
    if type(other) is str:
      self.heard.add(other)
    return self is other

  __hash__ = str.__hash__

"""The estimator: what a step would do under a layout, in a small part of a second and without a compiler.

    estimator = Estimator(train_step, create_state, batch)      # traced and lowered once
    estimator.estimate(layout, parse('h100:64')).cost            # per layout: propagated, and counted

How it is done: the step is lowered on a mesh whose axes are its logical names (`naming`); per layout the names
are replaced by mesh axes and Shardy's own propagation says how every value lies (`bindings`); then one walk
counts what that needs (`walking`, `operations`, `moving`), and what is in memory at once (`storing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.lowering import abstract_batch
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.constraints import resolve_for_constraint
from flax_spmd._src.estimate import mlir as bindings
from flax_spmd._src.estimate.cost_walk import Program
from flax_spmd._src.estimate.graph import Dims, tile
from flax_spmd._src.estimate.name_mesh import Lowered, lower_on_names
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes, axis_types
from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names
from flax_spmd._src.text import size_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import TargetDeviceError, raise_problems

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.shardings import Named, Wanted

_CLOSE = 0.12  # of the limit; by so much an estimate of memory may be off
_PARTS = ('params', 'opt_state', '', 'batch')


@set_module('flax_spmd.explore')
class Estimator:
  """A step, lowered once, whose work, traffic and memory can be estimated under any layout.

  Args:
    step: `step(state, batch)`; anything that can be jitted.
    create: makes a state, of `args`; is traced only.
    batch: the step's second argument in full size: arrays, or `jax.ShapeDtypeStruct`s.
    args: arguments of `create`.
    places: where the batch goes, as of `Layout.shard`; default: each first dimension is named `batch`.
    donate: whether the state is donated.
    platform: what the step is lowered for: 'cuda', 'tpu' or 'cpu'.

  Attributes:
    names: the sizes of the dimensions that each logical name stands for.
    parameter_names: those that stand for dimensions of the state.
    together: pairs of names that stand on one array.

  Raises:
    EstimatorError: jaxlib's bindings are not known, or the step has parts of which nothing can be estimated.
    Exception: whatever the step raises when it is traced.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> from flax_spmd.explore import parse
    >>> estimator = Estimator(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> layout = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> estimator.estimate(layout, parse('h100:8')).counts.flops
    131072.0
  """

  names: Mapping[str, tuple[int, ...]]
  parameter_names: frozenset[str]
  together: frozenset[frozenset[str]]

  def __init__(
    self,
    step: Callable[..., Any],
    create: Callable[..., Any],
    batch: Any,
    *,
    args: Sequence[Any] = (),
    places: Any = None,
    donate: bool = True,
    platform: str = 'cuda',
  ):
    bindings.check()
    self._batch, self._places, self._donate = batch, places, donate
    self._lowered = lower_on_names(step, create, batch, args=args, places=places, platform=platform)
    state = jax.tree_util.tree_leaves_with_path(self._lowered.state)
    self.parameter_names = frozenset(
      name for _, leaf in state for name in leaf.sharding.spec if isinstance(name, str)
    )
    self._module = bindings.load(self._lowered.code, self.parameter_names)
    self._program = Program(self._module.graph)
    self._result_places = list(_places_of_results(self._lowered))
    batches = len(self._module.graph.main.arguments) - len(state)
    self._argument_parts = [*(_part(path) for path, _ in state), *['batch'] * batches]
    self._learn_names()

  def _learn_names(self) -> None:
    sizes: dict[str, set[int]] = {}
    together: set[frozenset[str]] = set()
    leaves = jax.tree.leaves((self._lowered.state, self._data(self._named_layout())))
    asked = [(leaf.sharding.spec, leaf.shape) for leaf in leaves]
    asked += [(named.names, shape) for named, shape in self._module.names]
    for names, shape in asked:
      found = {name: size for name, size in zip(names, shape) if isinstance(name, str)}
      for name, size in found.items():
        sizes.setdefault(name, set()).add(size)
      together |= {frozenset((one, other)) for one in found for other in found if one != other}
    self.names = {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}
    self.together = frozenset(together)

  def _named_layout(self) -> Layout:
    """The layout that the step was lowered under."""
    mesh = next(iter(jax.tree.leaves(self._lowered.state))).sharding.mesh
    return Layout(mesh, tuple((name, name) for name in mesh.axis_names[:-1]))

  def _data(self, layout: Layout) -> Any:
    return abstract_batch(layout, self._batch, self._places)

  def estimate(self, layout: Layout, target: Target) -> Outcome:
    """What the step does under a layout, on a target; nothing is compiled.

    Args:
      layout: its mesh counts by its axes only; it has as many devices as the target.
      target: the hardware.

    Raises:
      TargetDeviceError: the mesh is of another size than the target.
      LayoutError: names that do not fit the mesh.
    """
    sizes = axis_sizes(layout.mesh)
    if math.prod(sizes.values()) != target.devices:
      raise TargetDeviceError(
        f'The mesh {sizes} has {math.prod(sizes.values())} devices, the target {target.text} '
        f'{target.devices}.\nFix: give the layout a mesh of {target.devices} devices.'
      )
    layout = layout.replace(mesh=abstract_mesh(sizes, axis_types=axis_types(layout.mesh)))
    state = jax.tree.leaves(layout.sharding(self._lowered.state))
    data = [leaf.sharding for leaf in jax.tree.leaves(self._data(layout))]
    arguments = [
      _dims(sharding, len(self._module.graph.values[number].shape))
      for sharding, number in zip([*state, *data], self._module.graph.main.arguments, strict=True)
    ]
    results = [None if place is None else arguments[place] for place in self._result_places]
    dims = self._module.propagated(sizes, arguments, results, lambda *one: _wanted(layout, *one))
    walked = self._program.walk(dims, results, sizes)
    memory = self._memory(arguments, sizes, walked.temporaries)
    return Outcome(
      '',
      layout,
      memory,
      walked.counts,
      cost(walked.counts, target, sizes, self.dtype),
      memory.peak <= target.chip.memory,
      None,
      None,
      None,
      'estimated',
      (*walked.doubts, *_close(memory.peak, target.chip.memory)),
    )

  @property
  def dtype(self) -> str:
    """Of the operands of most of the step's matrix products, `bf16` or `f32`."""
    return self._program.dtype

  def _memory(self, arguments: Sequence[Dims], sizes: Mapping[str, int], temporaries: float) -> Memory:
    """Bytes on a device: those of the arguments by part, and what a step needs besides.

    A state that is not donated is there twice at the end, when the memory of everything else can be had for it.
    """
    values = self._module.graph.values
    bytes_ = [
      int(tile(values[number].shape, dims, sizes) * values[number].item)
      for number, dims in zip(self._module.graph.main.arguments, arguments)
    ]
    parts: dict[str, int] = dict.fromkeys(_PARTS, 0)
    for part, size in zip(self._argument_parts, bytes_):
      parts[part] += size
    again = 0 if self._donate else sum(bytes_) - parts['batch']
    extra = max(int(temporaries), again)
    parameters, optimizer, rest, batch = (parts[part] for part in _PARTS)
    return Memory(parameters, optimizer, rest, batch, extra, sum(bytes_) + extra)


def _close(peak: int, limit: int) -> Iterator[str]:
  """A doubt about whether it fits, where that is a matter of little."""
  if abs(peak / limit - 1) < _CLOSE:
    yield (
      f'memory: {size_text(peak)} of {size_text(limit)}, too close to tell; compilers compute again what just '
      'does not fit'
    )


def _dims(sharding: NamedSharding, rank: int) -> Dims:
  entries = [axis_names(entry) for entry in sharding.spec]
  return tuple(entries + [()] * (rank - len(entries)))


def _wanted(layout: Layout, named: Named, shape: tuple[int, ...]) -> Wanted | None:
  """What a constraint by names means under a layout; None if it means nothing."""
  rules = layout.rules
  if not rules.pairs:
    return None
  found = resolve_for_constraint(rules, named.names, shape, layout.mesh)
  raise_problems([problem.at('constraint') for problem in found.problems])
  entries = [*found.spec, *[None] * (len(shape) - len(found.spec))]
  return [None if entry is UNCONSTRAINED else axis_names(entry) for entry in entries]


def _part(path: Any) -> str:
  """Which part of the state an array belongs to, by its path."""
  names = path_string(path).split('/')
  return next((name for name in names if name in ('params', 'opt_state')), '')


def _places_of_results(lowered: Lowered) -> Iterator[int | None]:
  """For each result, which argument it takes the place of: the state's, or a part of it; None for others."""
  state, result = lowered.state, lowered.result
  known: list[tuple[Any, int]] = [(state, 0)]
  begin = 0
  for child in jax.tree.leaves(state, is_leaf=lambda node: node is not state):
    known.append((child, begin))
    begin += len(jax.tree.leaves(child))
  for part in result if type(result) in (tuple, list) else [result]:
    leaves = jax.tree.leaves(part)
    place = next((start for tree, start in known if leaves and _alike(tree, part)), None)
    yield from (None if place is None else place + number for number in range(len(leaves)))


def _alike(tree: Any, other: Any) -> bool:
  """Whether two trees have the same structure and arrays of the same shapes."""
  return jax.tree.structure(tree) == jax.tree.structure(other) and all(
    one.shape == two.shape for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other))
  )

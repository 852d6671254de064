"""`optimizer_over('data')`: shards the optimizer's state over further mesh axes than its parameters (ZeRO-1)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses.axes_with_options import AxesWithOptions
from flax_spmd._src.rules.clauses.base import Idle, Leaf, WideningClause
from flax_spmd._src.rules.decisions import Axes, Reason, axis_names


@dataclasses.dataclass(frozen=True, repr=False)
class OptimizerOver(AxesWithOptions, WideningClause):
  """The result of `optimizer_over(...)`: a clause that adds mesh axes to one dimension of optimizer state."""

  avoid: tuple[str, ...] = ()

  form = 'optimizer_over(...)'
  toml_head = 'optimizer_over'
  toml_keys = frozenset({'optimizer_over', 'min_size', 'avoid'})
  toml_form = '{optimizer_over = "axis"}'
  names_of = 'mesh axes'

  def choose(
    self, leaf: Leaf, entries: Sequence[Axes], sizes: Mapping[str, int]
  ) -> tuple[int, tuple[str, ...]] | Reason:
    """The first dimension whose shards the axes divide, and the axes that are added; or why there is none."""
    present = [axis for axis in self.mesh_axes if axis in sizes]
    if not present:
      return 'missing'
    if leaf.size < self.min_size or leaf.size <= 1:
      return 'small'
    added = tuple(axis for axis in present if axis not in axis_names(tuple(entries)))
    if not added:
      return 'taken'
    parts = math.prod(sizes[axis] for axis in added)
    shards = {
      dim: leaf.shape[dim] // math.prod(sizes[axis] for axis in axis_names(entry))
      for dim, entry in enumerate(entries)
      if set(self.avoid).isdisjoint(axis_names(entry))
    }
    dividing = [dim for dim, size in shards.items() if size % parts == 0]
    if not dividing:
      return 'indivisible' if shards else 'no open dimension'
    return dividing[0], added

  def idle(self, paths: Sequence[str], reasons: Counter[Reason]) -> Idle | None:
    """The reasons for which it skipped optimizer state, or that there is none."""
    if not reasons:
      return Idle("found no optimizer state, which is an Optax state, or below a key 'opt_state'.")
    return super().idle(paths, reasons)


@public('flax_spmd')
def optimizer_over(
  axes: Axes, *, min_size: int = 2**20, avoid: str | Sequence[str] = ()
) -> OptimizerOver:
  """A clause that shards the state of optimizers over further mesh axes than the parameters (ZeRO-1).

  The other rules of the table decide about optimizer state as about parameters, wherever this clause stands.
  Then the axes are added to the first dimension whose shards they divide, as the outermost axes of that dimension.
  Axes that the array is sharded over already are left out. The algorithm is that of MaxText's
  `shard_optimizer_over_data`.

  Optimizer state is the state of Optax, and everything below a key `opt_state` (or `param_states`, T5X's). In
  a rule for an annotation, the clause applies to the annotated values: `('@gradients',
  optimizer_over('data'))` shards gradients like the state (ZeRO-2).

  Args:
    axes: mesh axis, or tuple of mesh axes.
    min_size: number of elements below which an array is left alone.
    avoid: mesh axes; a dimension that is sharded over one of them is left alone. MaxText: `'tensor'`.

  Raises:
    RulesError: an argument is of the wrong kind.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'), optimizer_over('data', min_size=1)))
    >>> w = LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))
    >>> layout.spec({'params': {'w': w}, 'opt_state': {'momentum': {'w': w}}})
    {'opt_state': {'momentum': {'w': P('data', 'model')}}, 'params': {'w': P(None, 'model')}}
  """
  return OptimizerOver.of(axes, min_size, avoid=avoid)

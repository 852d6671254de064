"""`fsdp('data')`: shards one open dimension of every large array that is left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax import dtypes

from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses.axes_with_options import AxesWithOptions
from flax_spmd._src.rules.clauses.base import FillingClause, Leaf
from flax_spmd._src.rules.decisions import Axes, Reason


@dataclasses.dataclass(frozen=True, repr=False)
class Fsdp(AxesWithOptions, FillingClause):
  """The result of `fsdp(...)`: a clause that shards one open dimension of an array over `axes`."""

  skip: tuple[str, ...] = ('layers',)

  form = 'fsdp(...)'
  toml_head = 'fsdp'
  toml_keys = frozenset({'fsdp', 'min_size', 'skip'})
  toml_form = '{fsdp = "axis"}'
  names_of = 'names'

  def choose(
    self, leaf: Leaf, is_open: Sequence[bool], taken: set[str], sizes: Mapping[str, int]
  ) -> int | Reason:
    """The largest open dimension that the axes divide, the first of equals; or why there is none."""
    axes = [axis for axis in self.mesh_axes if axis in sizes]
    if not axes:
      return 'missing'
    if leaf.dtype is not None and dtypes.issubdtype(leaf.dtype, dtypes.extended):
      return 'not numbers'
    if leaf.size < self.min_size or leaf.size <= 1:
      return 'small'
    if not taken.isdisjoint(axes):
      return 'taken'
    skipped = [name in self.skip for name in leaf.names or [None] * len(leaf.shape)]
    candidates = [
      dim for dim, (free, skip) in enumerate(zip(is_open, skipped, strict=True)) if free and not skip
    ]
    parts = math.prod(sizes[axis] for axis in axes)
    dividing = [dim for dim in candidates if leaf.shape[dim] % parts == 0]
    if not dividing:
      return 'indivisible' if candidates else 'no open dimension'
    return max(dividing, key=lambda dim: (leaf.shape[dim], -dim))


@public('flax_spmd')
def fsdp(axes: Axes, *, min_size: int = 2**20, skip: Sequence[str] = ('layers',)) -> Fsdp:
  """A clause that shards every array that is left: one open dimension of each large one.

  A dimension is open if no other clause has decided it. The largest open dimension that the mesh axes
  divide is sharded; of equal ones the first, so that every host decides alike. Arrays of integers count too,
  such as quantised weights; random keys do not.

  Args:
    axes: mesh axis, or tuple of mesh axes.
    min_size: number of elements below which an array is left alone: a small array costs more to gather
      than to keep.
    skip: logical names of dimensions that are never sharded, such as the one that `nn.scan` adds.

  Raises:
    RulesError: an argument is of the wrong kind.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('heads', 'model'), fsdp('data', min_size=1024)))
    >>> layout.spec({'wq': LogicallyPartitioned(jnp.ones((512, 64)), ('embed', 'heads')), 'wi': jnp.ones((64, 256))})
    {'wi': P(None, 'data'), 'wq': P('data', 'model')}
  """
  return Fsdp.of(axes, min_size, skip=skip)

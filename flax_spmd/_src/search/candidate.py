"""Candidates: what a search tries, as a value that is small, hashable, and has one spelling.

    Candidate((Axis(8), Axis(8)), placed=(('batch', (0,)), ('mlp', (1,))), fill=(0,))

Axes are counted, and not named: which name a mesh axis gets follows from what lies over it, but for
axes that the user named. So two candidates that differ in names only are one. `canonical` removes what
else makes no difference: axes that are only used together are one axis, names that never meet on
one array may stand in any order, and equal places in the machine may be exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.rules.clauses import fsdp
from flax_spmd._src.rules.table import Rules

MIN_SIZE = 2**20  # what `fsdp` leaves whole, unless a candidate says otherwise
OPTIMIZER = '(^|/)opt_state/'
_KINDS = {'expert': 'expert', 'length': 'context'}


class Axis(NamedTuple):
  """A mesh axis: its size, and what the user calls it, if that is known."""

  size: int
  label: str = ''


class Candidate(NamedTuple):
  """A layout to try. Axes are given by their numbers.

  Attributes:
    axes: of the mesh, in order; the devices of the last one are next to each other.
    placed: the names that lie over axes; the first one has first choice where two want the same.
    fill: what `fsdp` lays the open dimensions over, or nothing.
    least: elements of the smallest array that it takes.
    state: the same for the optimizer's state alone (ZeRO-1).
    paths: of a model without names: expression, rank, dimension, axes.
    choices: arguments of the step that are tried too, such as `('remat', 'full')`.
  """

  axes: tuple[Axis, ...]
  placed: tuple[tuple[str, tuple[int, ...]], ...] = ()
  fill: tuple[int, ...] = ()
  least: int = MIN_SIZE
  state: tuple[int, ...] = ()
  paths: tuple[tuple[str, int, int, tuple[int, ...]], ...] = ()
  choices: tuple[tuple[str, Any], ...] = ()

  @property
  def devices(self) -> int:
    """How many there are."""
    return math.prod(axis.size for axis in self.axes)

  def size(self, axes: Iterable[int]) -> int:
    """Into how many pieces these axes cut."""
    return math.prod(self.axes[axis].size for axis in axes)

  def over(self, name: str) -> tuple[int, ...]:
    """The axes that a name lies over."""
    return dict(self.placed).get(name, ())

  def place(self, name: str, axes: Sequence[int]) -> Candidate:
    """The same with one name elsewhere, or nowhere; a new one comes last."""
    if any(name == other for other, _ in self.placed):
      placed = tuple((other, tuple(axes) if other == name else old) for other, old in self.placed)
    else:
      placed = (*self.placed, (name, tuple(axes)))
    return self._replace(placed=tuple(pair for pair in placed if pair[1]))

  def renumbered(self, axes: Sequence[Axis], numbers: Mapping[int, Sequence[int]]) -> Candidate:
    """The same on other axes; `numbers` says which ones each of the old ones becomes."""
    to = lambda old: tuple(new for axis in old for new in numbers[axis])
    placed = ((name, to(over)) for name, over in self.placed)
    paths = ((text, rank, dim, to(over)) for text, rank, dim, over in self.paths)
    return self._replace(
      axes=tuple(axes),
      placed=tuple(pair for pair in placed if pair[1]),
      fill=to(self.fill),
      state=to(self.state),
      paths=tuple(path for path in paths if path[-1]),
    )

  @property
  def used(self) -> list[tuple[int, ...]]:
    """Everything that lies over axes."""
    return [
      *(over for _, over in self.placed),
      *(over for *_, over in self.paths),
      *filter(None, (self.fill, self.state)),
    ]


# -- as a layout


def axis_names(candidate: Candidate, batch: frozenset[str]) -> list[str]:
  """What the mesh axes are called: as the user calls them, or by what lies over them.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('mlp', (1,))))
    >>> axis_names(candidate, frozenset({'batch'}))
    ['data', 'model']
  """
  found: list[str] = []
  labels = {axis.label for axis in candidate.axes}
  for number, axis in enumerate(candidate.axes):
    plain = axis.label or _kind(candidate, number, batch)
    others = (f'{plain}_{count}' for count in itertools.count(2))
    taken = labels.union(found) if not axis.label else set()
    found.append(next(name for name in itertools.chain([plain], others) if name not in taken))
  return found


def _kind(candidate: Candidate, number: int, batch: frozenset[str]) -> str:
  over = {name for name, axes in candidate.placed if number in axes}
  filled = number in (*candidate.fill, *candidate.state)
  if batch & over:
    elsewhere = not filled and (candidate.fill or candidate.state)
    return 'replica' if elsewhere and over <= batch else _special(over) or 'data'
  if not over and filled:
    return 'fsdp'
  return _special(over) or ('model' if over or candidate.paths else 'idle')


def _special(over: set[str]) -> str:
  """Of an axis that experts, or nothing but the sequence, lie over."""
  if any('expert' in name for name in over):
    return 'expert'
  return 'context' if over == {'length'} else ''


def rules_of(candidate: Candidate, batch: frozenset[str]) -> Rules:
  """The rule table.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('mlp', (1,))), fill=(0,))
    >>> rules_of(candidate, frozenset({'batch'}))
    Rules(('batch', 'data'), ('mlp', 'model'), fsdp('data'))
  """
  names = axis_names(candidate, batch)
  axes = lambda numbers: _plain([names[number] for number in numbers])
  pairs = [(name, axes(over)) for name, over in candidate.placed]
  paths = [
    (text, PartitionSpec(*(axes(over) if at == dim else None for at in range(rank))))
    for text, rank, dim, over in candidate.paths
  ]
  fill = [fsdp(axes(candidate.fill), min_size=candidate.least)] if candidate.fill else []
  state = []
  if candidate.state:
    own = fsdp(axes(candidate.state), min_size=candidate.least)
    state = [(OPTIMIZER, Rules(*(pair for pair in pairs if pair[0] not in batch), own))]
  return Rules(*state, *pairs, *paths, *fill)


def layout_of(candidate: Candidate, batch: frozenset[str]) -> Layout:
  """The layout, on an abstract mesh."""
  names = axis_names(candidate, batch)
  sizes = {name: axis.size for name, axis in zip(names, candidate.axes, strict=True)}
  return Layout(abstract_mesh(sizes), rules_of(candidate, batch))


def text_of(candidate: Candidate, batch: frozenset[str]) -> str:
  """In a line: `data 8, model 4: batch data; mlp model; fsdp data`.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('heads', (1,)), ('mlp', (1,))))
    >>> text_of(candidate, frozenset({'batch'}))
    'data 8, model 4: batch data; heads mlp model'
  """
  names = axis_names(candidate, batch)
  mesh = ', '.join(f'{name} {axis.size}' for name, axis in zip(names, candidate.axes, strict=True))
  axes = lambda numbers: '+'.join(names[number] for number in numbers)
  parts = [
    f'{" ".join(name for name, _ in pairs)} {axes(over)}'
    for over, pairs in itertools.groupby(candidate.placed, key=lambda pair: pair[1])
  ]
  parts += [f'{text} [{dim}] {axes(over)}' for text, _, dim, over in candidate.paths]
  least = '' if candidate.least == MIN_SIZE else f' from {candidate.least}'
  parts += [f'fsdp {axes(candidate.fill)}{least}'] if candidate.fill else []
  parts += [f'optimizer {axes(candidate.state)}{least}'] if candidate.state else []
  parts += [f'{name}={value}' for name, value in candidate.choices]
  return f'{mesh}: {"; ".join(parts) or "nothing is split"}'


def _plain(axes: Sequence[str]) -> Any:
  return axes[0] if len(axes) == 1 else tuple(axes)


# -- one spelling


def canonical(
  candidate: Candidate, together: frozenset[frozenset[str]], per_node: int, exchange: bool = True
) -> Candidate:
  """The one of all equal candidates that stands for them.

  Args:
    candidate: any.
    together: pairs of names that stand on one array: these compete for axes.
    per_node: devices of a node.
    exchange: whether axes that lie within a node, or between nodes, are as good as each other. On a
      torus they are not.
  """
  merged = _merged(candidate)
  if not merged.fill and not merged.state:
    merged = merged._replace(least=MIN_SIZE)
  orders = _orders(merged.axes, per_node) if exchange else [tuple(range(len(merged.axes)))]
  spelled = [_sorted(_merged(_reordered(merged, order)), together) for order in orders]
  best = min(spelled, key=_rank)
  if len(best.axes) < len(merged.axes):  # in another order, two axes are one
    return canonical(best, together, per_node, exchange)
  return best


def _rank(candidate: Candidate) -> Any:
  return len(candidate.axes), candidate.over('batch') or (len(candidate.axes),), repr(candidate)


def _reordered(candidate: Candidate, order: Sequence[int]) -> Candidate:
  """With the axes in another order: the n-th is what was the `order[n]`-th."""
  numbers = {old: (new,) for new, old in enumerate(order)}
  return candidate.renumbered([candidate.axes[old] for old in order], numbers)


def _merged(candidate: Candidate) -> Candidate:
  """Without axes of one device, and with axes as one that only occur side by side."""
  kept = [n for n, axis in enumerate(candidate.axes) if axis.size > 1 or axis.label] or [0]
  if len(kept) < len(candidate.axes):
    numbers = {n: (kept.index(n),) if n in kept else () for n in range(len(candidate.axes))}
    candidate = candidate.renumbered([candidate.axes[n] for n in kept], numbers)
  for first in range(len(candidate.axes) - 1):
    one, next_ = candidate.axes[first : first + 2]
    if one.label or next_.label or not all(_as_one(over, first) for over in candidate.used):
      continue
    axes = [
      *candidate.axes[:first],
      Axis(one.size * next_.size),
      *candidate.axes[first + 2 :],
    ]
    numbers = {n: (n - (n > first),) if n != first + 1 else () for n in range(len(candidate.axes))}
    return _merged(candidate.renumbered(axes, numbers))
  return candidate


def _as_one(over: tuple[int, ...], first: int) -> bool:
  """Whether an axis and the next one are both left out, or follow each other."""
  if first not in over:
    return first + 1 not in over
  return over[over.index(first) :][1:2] == (first + 1,)


def _orders(axes: Sequence[Axis], per_node: int) -> list[tuple[int, ...]]:
  """The orders in which the axes lie as they do: within a node, between nodes, or over its border."""
  classes: list[int] = []
  inside = 1
  for axis in reversed(axes):
    within, inside = inside, inside * axis.size
    classes.append(0 if inside <= per_node else 2 if within >= per_node else 1)
  classes.reverse()
  groups = [[n for n, one in enumerate(classes) if one == which] for which in sorted({*classes})]
  found = []
  for permuted in itertools.product(*map(itertools.permutations, groups)):
    to = {
      old: new for group, many in zip(groups, permuted, strict=True) for old, new in zip(group, many)
    }
    found.append(tuple(to[n] for n in range(len(axes))))
  return found


def _sorted(candidate: Candidate, together: frozenset[frozenset[str]]) -> Candidate:
  """With the names in alphabetical order, but for those that compete for an axis."""
  left = list(candidate.placed)
  placed: list[tuple[str, tuple[int, ...]]] = []
  while left:
    free = [
      pair
      for n, pair in enumerate(left)
      if not any(compete(pair, earlier, together) for earlier in left[:n])
    ]
    placed.append(min(free))
    left.remove(placed[-1])
  return candidate._replace(placed=tuple(placed), paths=tuple(sorted(candidate.paths)))


def compete(
  one: tuple[str, tuple[int, ...]],
  other: tuple[str, tuple[int, ...]],
  together: frozenset[frozenset[str]],
) -> bool:
  """Whether two names want the same axis, and stand on one array."""
  return not {*one[1]}.isdisjoint(other[1]) and frozenset((one[0], other[0])) in together

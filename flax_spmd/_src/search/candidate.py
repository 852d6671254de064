"""Candidates: layouts that a search may try, as small hashable values.

    Candidate((Axis(8), Axis(8)), name_rules=(('batch', (0,)), ('mlp', (1,))), fsdp_axes=(0,))

Mesh axes are referred to by number. Except for axes named by the user, an axis gets its name from the
dimensions sharded over it, so candidates that differ in axis names only are equal. `canonical` removes
other differences without effect: axes that are always used together are merged, names that share no
array are sorted, and axes at equivalent levels of the machine are ordered.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.rules.clauses import fsdp, host, optimizer_over
from flax_spmd._src.rules.table import Rules

MIN_SIZE = 2**20  # elements; the default of `fsdp`
Choices = tuple[tuple[str, Any], ...]
"""Arguments of the step, as name and value."""


class Axis(NamedTuple):
  """A mesh axis.

  Attributes:
    size: number of devices along the axis.
    label: name given by the user, or ''.
  """

  size: int
  label: str = ''


class Candidate(NamedTuple):
  """A layout to try. Mesh axes are given by number.

  Attributes:
    axes: mesh axes in order; neighbouring devices are along the last one.
    name_rules: axes per logical name; an earlier name takes precedence.
    fsdp_axes: axes of the `fsdp` clause; none without the clause.
    min_size: elements of the smallest array that `fsdp` shards.
    zero1_axes: axes of an `optimizer_over` clause (ZeRO-1).
    path_rules: rules of a model without names: path pattern, rank, dimension, axes.
    choices: arguments of the step, such as `('remat', 'full')`.
    on_host: path expressions of the arrays in the host's memory.
  """

  axes: tuple[Axis, ...]
  name_rules: tuple[tuple[str, tuple[int, ...]], ...] = ()
  fsdp_axes: tuple[int, ...] = ()
  min_size: int = MIN_SIZE
  zero1_axes: tuple[int, ...] = ()
  path_rules: tuple[tuple[str, int, int, tuple[int, ...]], ...] = ()
  choices: Choices = ()
  on_host: tuple[str, ...] = ()

  @property
  def devices(self) -> int:
    """Number of devices of the mesh."""
    return math.prod(axis.size for axis in self.axes)

  def shards(self, axes: Iterable[int]) -> int:
    """Number of shards of a dimension over these axes."""
    return math.prod(self.axes[axis].size for axis in axes)

  def axes_of(self, name: str) -> tuple[int, ...]:
    """The axes that a logical name is sharded over."""
    return dict(self.name_rules).get(name, ())

  def with_name(self, name: str, axes: Sequence[int]) -> Candidate:
    """The candidate with a name sharded over these axes; a new name comes last."""
    if any(name == other for other, _ in self.name_rules):
      rules = tuple((other, tuple(axes) if other == name else old) for other, old in self.name_rules)
    else:
      rules = (*self.name_rules, (name, tuple(axes)))
    return self._replace(name_rules=tuple(rule for rule in rules if rule[1]))

  def renumbered(self, axes: Sequence[Axis], numbers: Mapping[int, Sequence[int]]) -> Candidate:
    """The candidate on other axes.

    Args:
      axes: the new mesh axes.
      numbers: for each old axis, the new axes that replace it.
    """
    to = lambda old: tuple(new for axis in old for new in numbers[axis])
    name_rules = ((name, to(over)) for name, over in self.name_rules)
    path_rules = ((text, rank, dim, to(over)) for text, rank, dim, over in self.path_rules)
    return self._replace(
      axes=tuple(axes),
      name_rules=tuple(rule for rule in name_rules if rule[1]),
      fsdp_axes=to(self.fsdp_axes),
      zero1_axes=to(self.zero1_axes),
      path_rules=tuple(rule for rule in path_rules if rule[-1]),
    )

  @property
  def used_axes(self) -> list[tuple[int, ...]]:
    """The axes of each rule and clause."""
    return [
      *(over for _, over in self.name_rules),
      *(over for *_, over in self.path_rules),
      *filter(None, (self.fsdp_axes, self.zero1_axes)),
    ]


# -- conversion to a layout


def axis_names(candidate: Candidate, batch: frozenset[str]) -> list[str]:
  """Names of the mesh axes: the user's labels, or names by use.

  Args:
    candidate: any candidate.
    batch: logical names of the batch dimension.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('mlp', (1,))))
    >>> axis_names(candidate, frozenset({'batch'}))
    ['data', 'model']
  """
  names: list[str] = []
  labels = {axis.label for axis in candidate.axes}
  for number, axis in enumerate(candidate.axes):
    plain = axis.label or _use(candidate, number, batch)
    numbered = (f'{plain}_{count}' for count in itertools.count(2))
    taken = labels.union(names) if not axis.label else set()
    names.append(next(name for name in itertools.chain([plain], numbered) if name not in taken))
  return names


def _use(candidate: Candidate, number: int, batch: frozenset[str]) -> str:
  """The conventional name of an axis with these rules."""
  over = {name for name, axes in candidate.name_rules if number in axes}
  in_fsdp = number in (*candidate.fsdp_axes, *candidate.zero1_axes)
  if batch & over:
    elsewhere = not in_fsdp and (candidate.fsdp_axes or candidate.zero1_axes)
    return 'replica' if elsewhere and over <= batch else _special(over) or 'data'
  if not over and in_fsdp:
    return 'fsdp'
  return _special(over) or ('model' if over or candidate.path_rules else 'idle')


def may_be_axis(name: str) -> bool:
  """Whether an axis without a label may get this name."""
  return re.fullmatch(r'(data|replica|fsdp|expert|context|model|idle)(_\d+)?', name) is not None


def _special(names: set[str]) -> str:
  """`expert` for an axis of experts, `context` for an axis of the sequence alone, else ''."""
  if any('expert' in name for name in names):
    return 'expert'
  return 'context' if names == {'length'} else ''


def rules_of(candidate: Candidate, batch: frozenset[str]) -> Rules:
  """The rule table of a candidate.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('mlp', (1,))), fsdp_axes=(0,))
    >>> rules_of(candidate, frozenset({'batch'}))
    Rules(('batch', 'data'), ('mlp', 'model'), fsdp('data'))
  """
  names = axis_names(candidate, batch)
  axes = lambda numbers: _unwrapped([names[number] for number in numbers])
  name_rules = [(name, axes(over)) for name, over in candidate.name_rules]
  path_rules = [
    (text, PartitionSpec(*(axes(over) if at == dim else None for at in range(rank))))
    for text, rank, dim, over in candidate.path_rules
  ]
  clauses: list[Any] = []
  if candidate.fsdp_axes:
    clauses.append(fsdp(axes(candidate.fsdp_axes), min_size=candidate.min_size))
  if candidate.zero1_axes:
    clauses.append(optimizer_over(axes(candidate.zero1_axes), min_size=candidate.min_size))
  on_host = [
    (path, host(_of_state(name_rules, path_rules, clauses, batch))) for path in candidate.on_host
  ]
  return Rules(*on_host, *name_rules, *path_rules, *clauses)


def _of_state(
  name_rules: Sequence[tuple[str, Any]],
  path_rules: Sequence[Any],
  clauses: Sequence[Any],
  batch: frozenset[str],
) -> Any:
  """The rules that arrays of a state have in a table: the only one itself, or a spec without axes if there is none."""
  rules = [*(rule for rule in name_rules if rule[0] not in batch), *path_rules, *clauses]
  return rules[0] if len(rules) == 1 and not name_rules else Rules(*rules) if rules else PartitionSpec()


def layout_of(
  candidate: Candidate, batch: frozenset[str], missing_axis: Literal['error', 'drop'] = 'error'
) -> Layout:
  """The layout of a candidate, on an abstract mesh, with this policy for names in boxes of mesh axes."""
  names = axis_names(candidate, batch)
  sizes = {name: axis.size for name, axis in zip(names, candidate.axes, strict=True)}
  return Layout(abstract_mesh(sizes), rules_of(candidate, batch), missing_axis=missing_axis)


def text_of(candidate: Candidate, batch: frozenset[str]) -> str:
  """A candidate in one line, in the spelling of the command line's `--mesh` and `--pin`.

  Example:
    >>> candidate = Candidate((Axis(8), Axis(4)), (('batch', (0,)), ('heads', (1,)), ('mlp', (1,))))
    >>> text_of(candidate, frozenset({'batch'}))
    'data=8,model=4: batch=data heads,mlp=model'
  """
  names = axis_names(candidate, batch)
  mesh = ','.join(f'{name}={axis.size}' for name, axis in zip(names, candidate.axes, strict=True))
  axes = lambda numbers: ','.join(names[number] for number in numbers)
  parts = [
    f'{",".join(name for name, _ in rules)}={axes(over)}'
    for over, rules in itertools.groupby(candidate.name_rules, key=lambda rule: rule[1])
  ]
  parts += [f'{text}[{dim}]={axes(over)}' for text, _, dim, over in candidate.path_rules]
  size = '' if candidate.min_size == MIN_SIZE else f' min_size={candidate.min_size}'
  parts += [f'fsdp={axes(candidate.fsdp_axes)}{size}'] if candidate.fsdp_axes else []
  parts += [f'zero1={axes(candidate.zero1_axes)}{size}'] if candidate.zero1_axes else []
  parts += [f'{name}={value}' for name, value in candidate.choices]
  parts += [f'host={",".join(candidate.on_host)}'] if candidate.on_host else []
  return f'{mesh}: {" ".join(parts) or "replicated"}'


def _unwrapped(axes: Sequence[str]) -> Any:
  return axes[0] if len(axes) == 1 else tuple(axes)


# -- canonical form


def canonical(
  candidate: Candidate, together: frozenset[frozenset[str]], per_node: int, exchange: bool = True
) -> Candidate:
  """The representative of all candidates with the same effect.

  Args:
    candidate: any candidate.
    together: pairs of names that occur on one array and so compete for axes.
    per_node: number of devices of a node.
    exchange: whether axes within a node, and axes between nodes, may be reordered. Not on a torus, where
      each axis has links of its own.
  """
  merged = _merged(candidate)
  if not merged.fsdp_axes and not merged.zero1_axes:
    merged = merged._replace(min_size=MIN_SIZE)
  orders = _orders(merged.axes, per_node) if exchange else [tuple(range(len(merged.axes)))]
  spelled = [_sorted(_merged(_reordered(merged, order)), together) for order in orders]
  best = min(spelled, key=_sort_key)
  if len(best.axes) < len(
    merged.axes
  ):  # a new order made two axes adjacent that are always used together
    return canonical(best, together, per_node, exchange)
  return best


def _sort_key(candidate: Candidate) -> Any:
  return len(candidate.axes), candidate.axes_of('batch') or (len(candidate.axes),), repr(candidate)


def _reordered(candidate: Candidate, order: Sequence[int]) -> Candidate:
  """The candidate with its axes in another order; the new axis n is the old axis `order[n]`."""
  numbers = {old: (new,) for new, old in enumerate(order)}
  return candidate.renumbered([candidate.axes[old] for old in order], numbers)


def _merged(candidate: Candidate) -> Candidate:
  """The candidate without axes of size 1, and with neighbouring axes merged that are always used together."""
  real = [n for n, axis in enumerate(candidate.axes) if axis.size > 1 or axis.label] or [0]
  if len(real) < len(candidate.axes):
    numbers = {n: (real.index(n),) if n in real else () for n in range(len(candidate.axes))}
    candidate = candidate.renumbered([candidate.axes[n] for n in real], numbers)
  for first in range(len(candidate.axes) - 1):
    one, next_ = candidate.axes[first : first + 2]
    if one.label or next_.label or not all(_mergeable(over, first) for over in candidate.used_axes):
      continue
    axes = [
      *candidate.axes[:first],
      Axis(one.size * next_.size),
      *candidate.axes[first + 2 :],
    ]
    numbers = {n: (n - (n > first),) if n != first + 1 else () for n in range(len(candidate.axes))}
    return _merged(candidate.renumbered(axes, numbers))
  return candidate


def _mergeable(over: tuple[int, ...], first: int) -> bool:
  """Whether an axis and the next one are both absent, or follow each other."""
  if first not in over:
    return first + 1 not in over
  return over[over.index(first) :][1:2] == (first + 1,)


def _orders(axes: Sequence[Axis], per_node: int) -> list[tuple[int, ...]]:
  """Equivalent orders of the axes: each keeps its level, within a node, between nodes, or across both."""
  levels: list[int] = []
  inside = 1
  for axis in reversed(axes):
    within, inside = inside, inside * axis.size
    levels.append(0 if inside <= per_node else 2 if within >= per_node else 1)
  levels.reverse()
  groups = [[n for n, other in enumerate(levels) if other == level] for level in sorted({*levels})]
  orders = []
  for permuted in itertools.product(*map(itertools.permutations, groups)):
    to = {
      old: new for group, many in zip(groups, permuted, strict=True) for old, new in zip(group, many)
    }
    orders.append(tuple(to[n] for n in range(len(axes))))
  return orders


def _sorted(candidate: Candidate, together: frozenset[frozenset[str]]) -> Candidate:
  """The candidate with its rules in alphabetical order, except for names that compete for an axis."""
  left = list(candidate.name_rules)
  rules: list[tuple[str, tuple[int, ...]]] = []
  while left:
    movable = [
      rule
      for n, rule in enumerate(left)
      if not any(compete(rule, earlier, together) for earlier in left[:n])
    ]
    rules.append(min(movable))
    left.remove(rules[-1])
  return candidate._replace(name_rules=tuple(rules), path_rules=tuple(sorted(candidate.path_rules)))


def compete(
  one: tuple[str, tuple[int, ...]],
  other: tuple[str, tuple[int, ...]],
  together: frozenset[frozenset[str]],
) -> bool:
  """Whether two name rules share an axis and their names occur on one array."""
  return not {*one[1]}.isdisjoint(other[1]) and frozenset((one[0], other[0])) in together

"""big_vision's strategies: pairs of a regular expression and a tactic, such as `fsdp(axis="data")`."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.rules.clauses.axes_with_options import are_axes, as_axes, is_count
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import value_text
from flax_spmd.errors import MeshAxisError, Problem, RulesError, raise_problems

Spec = tuple[Any, ...]


@public('flax_spmd.translate')
def from_big_vision(
  strategy: Iterable[tuple[str, str]], mesh: MeshLike | Mapping[str, int], logical_rules: Any = ()
) -> Rules:
  """The rule table of a big_vision `sharding_strategy`.

  The first expression that matches the whole path of an array decides. Its tactic is a sequence of `replicate`,
  `fsdp(axis, min_size_to_shard_mb)`, `shard_dim(axis, dim, ignore_ndim_error)` and `logical_partitioning`, joined by `|`.
  Other arrays are replicated. Fields of an optimizer's state have their names in a path, `opt/0/mu/...`, where
  big_vision has their positions.

  Args:
    strategy: pairs of a regular expression and a tactic, as `config.sharding_strategy`.
    mesh: the mesh, or the size of each axis: `fsdp` shards the largest dimension that the axis divides.
    logical_rules: rules for the logical names that `logical_partitioning` reads.

  Raises:
    RulesError: an expression or a tactic is not one of big_vision's (lists all of them).
    MeshAxisError: the mesh lacks an axis of a tactic.

  Example:
    >>> rules = translate.from_big_vision([('params/.*', 'fsdp(axis="data")')], {'data': 8})
    >>> kernel = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
    >>> Layout({'data': 8}, rules).spec({'params': {'kernel': kernel}, 'other': kernel})
    {'other': P(None, None), 'params': {'kernel': P(None, 'data')}}
  """
  sizes = dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh)
  strategy, names = (
    tuple(strategy) if isinstance(strategy, Iterable) else (strategy,),
    Rules.of(logical_rules),
  )
  raise_problems(
    [problem for number, pair in enumerate(strategy) for problem in _problems(number, pair)]
  )
  tactics = [
    Tactic(pattern, tactic, tuple(sizes.items()), names, _operations(tactic))
    for pattern, tactic in strategy
  ]
  missing = [problem for number, each in enumerate(tactics) for problem in each.missing_axes(number)]
  raise_problems(missing)
  return Rules(*tactics, ('.*', PartitionSpec()), *names.clauses)


@dataclasses.dataclass(frozen=True, repr=False)
class Tactic:
  """One pair of a strategy, as a function in a rule table.

  Attributes:
    pattern: the regular expression, for whole paths.
    text: the tactic, as written.
    sizes: the size of each mesh axis.
    names: the rules for logical names.
    operations: name and arguments of each part of the tactic.
  """

  pattern: str
  text: str
  sizes: tuple[tuple[str, int], ...]
  names: Rules
  operations: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]

  def __repr__(self) -> str:
    return f'big_vision({self.pattern!r}, {self.text!r})'

  def __call__(self, leaf: Leaf) -> PartitionSpec | None:
    """The spec of an array; None for one with another path."""
    if not re.fullmatch(self.pattern, leaf.path):
      return None
    spec: Spec = (None,) * len(leaf.shape)
    for name, arguments in self.operations:
      spec = _OPERATIONS[name](self, leaf, spec, **dict(arguments))
    return PartitionSpec(*spec)

  def replicate(self, leaf: Leaf, spec: Spec) -> Spec:
    """The spec, which no part before may have changed."""
    if any(spec):
      raise RulesError(
        f'{leaf.path}: {value_text(self)} replicates an array that it has sharded as {PartitionSpec(*spec)}.\n'
        'Fix: remove replicate, or the parts before it.'
      )
    return spec

  def fsdp(self, leaf: Leaf, spec: Spec, axis: Any, min_size_to_shard_mb: float = 4) -> Spec:
    """The largest open dimension that the axis divides, sharded; the last of equal ones."""
    axis = axis if isinstance(axis, str) else tuple(axis)
    parts = math.prod(dict(self.sizes)[each] for each in axis_names(axis))
    if leaf.dtype is None or leaf.size * leaf.dtype.itemsize <= min_size_to_shard_mb * 2**20:
      return spec
    for dim in np.argsort(leaf.shape)[::-1]:
      if leaf.shape[dim] % parts == 0 and spec[dim] is None:
        return _sharded(spec, int(dim), axis)
    return spec

  def shard_dim(
    self, leaf: Leaf, spec: Spec, axis: Any, dim: int, ignore_ndim_error: bool = False
  ) -> Spec:
    """One dimension sharded."""
    if abs(dim) >= len(spec):
      if ignore_ndim_error:
        return spec
      raise RulesError(
        f'{leaf.path}: {value_text(self)} shards dimension {dim} of an array of shape {leaf.shape}.\n'
        'Fix: choose a dimension that the array has, or pass ignore_ndim_error=True.'
      )
    if spec[dim % len(spec)] is not None:
      raise RulesError(
        f'{leaf.path}: {value_text(self)} shards dimension {dim} twice.\nFix: shard every dimension once.'
      )
    return _sharded(spec, dim % len(spec), axis)

  def logical_partitioning(self, leaf: Leaf, spec: Spec) -> Spec:
    """The spec of the array's logical names."""
    return spec if leaf.names is None else tuple(self.names.spec(leaf.names) or spec)

  def missing_axes(self, number: int) -> Iterator[Problem]:
    """The axes of the tactic that the mesh lacks."""
    for _, arguments in self.operations:
      for axis in axis_names(dict(arguments).get('axis')):
        if axis not in dict(self.sizes):
          yield Problem(
            f'Pair {number} {value_text(self)} has axis {value_text(axis)}, which the mesh {dict(self.sizes)} lacks.',
            'pass the mesh that the strategy is written for.',
            MeshAxisError,
          )


_OPERATIONS = {
  'replicate': Tactic.replicate,
  'fsdp': Tactic.fsdp,
  'shard_dim': Tactic.shard_dim,
  'logical_partitioning': Tactic.logical_partitioning,
}
_ARGUMENTS = {
  'replicate': (),
  'fsdp': ('axis', 'min_size_to_shard_mb'),
  'shard_dim': ('axis', 'dim', 'ignore_ndim_error'),
  'logical_partitioning': (),
}
_KINDS: Mapping[str, Callable[[Any], bool]] = {
  'axis': lambda value: are_axes(as_axes(value)),
  'dim': is_count,
  'min_size_to_shard_mb': lambda value: isinstance(value, (int, float)),
  'ignore_ndim_error': lambda value: isinstance(value, (bool, int)),
}
_REQUIRED = {'fsdp': {'axis'}, 'shard_dim': {'axis', 'dim'}}


def _sharded(spec: Sequence[Any], dim: int, axis: Any) -> Spec:
  return (*spec[:dim], axis, *spec[dim + 1 :])


def _problems(number: int, pair: Any) -> Iterator[Problem]:
  """Everything wrong with one pair of a strategy."""
  if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, str) for x in pair)):
    yield Problem(
      f'Pair {number} is {value_text(pair)}.', 'write pairs of a path regex and a tactic.', RulesError
    )
    return
  try:
    re.compile(pair[0])
  except re.error as error:
    text = f'Pair {number} {pair!r} has an invalid expression: {error}.'
    yield Problem(text, 'correct the expression.', RulesError)
  try:
    _operations(pair[1])
  except (ValueError, SyntaxError, TypeError):
    yield Problem(
      f'Pair {number} {value_text(pair)} has a tactic that is none of big_vision.', _TACTICS, RulesError
    )


_TACTICS = (
  'write replicate, fsdp(axis="..."), shard_dim("axis", dim) or logical_partitioning, joined by |.'
)


def _operations(tactic: str) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
  """The parts of a tactic; raises ValueError, SyntaxError or TypeError if one is none of big_vision's."""
  return tuple(_operation(part) for part in tactic.split('|'))


def _operation(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
  call = ast.parse(text.strip(), mode='eval').body
  if isinstance(call, ast.Name):
    call = ast.Call(call, [], [])
  if (
    not isinstance(call, ast.Call)
    or not isinstance(call.func, ast.Name)
    or call.func.id not in _OPERATIONS
  ):
    raise ValueError(f'{value_text(text)} is no tactic')
  name = call.func.id
  positional = zip(_ARGUMENTS[name], map(ast.literal_eval, call.args), strict=False)
  arguments = {
    **dict(positional),
    **{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
  }
  known = arguments.keys() <= set(_ARGUMENTS[name]) and len(call.args) <= len(_ARGUMENTS[name])
  if not known or not _REQUIRED.get(name, set()) <= arguments.keys():
    raise ValueError(f'{value_text(text)} has other arguments')
  if not all(_KINDS[key](value) for key, value in arguments.items()):
    raise ValueError(f'{value_text(text)} has arguments of other kinds')
  return name, tuple(
    (key, tuple(value) if isinstance(value, list) else value) for key, value in arguments.items()
  )

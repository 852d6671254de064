"""Second calls: whether a call with the result of the first one, fed back, compiles again.

`jax.jit` compiles a program for shapes, dtypes, weak types and shardings of its arguments. A step whose
result differs from its argument in one of them compiles twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from flax_spmd._src.jit.program_arrays import ProgramArray, result_path, sharding_text


class SecondCall(NamedTuple):
  """A call with each result in the place of the argument that has its form.

  Attributes:
    fed_back: pairs of a result and an argument with the same structure and shapes.
    changes: the differences for which the second call compiles again, one text per array.
    refused: the results that `in_rules` refuse as arguments, one text per array.
  """

  fed_back: tuple[tuple[str, str], ...]
  changes: tuple[str, ...]
  refused: tuple[str, ...] = ()

  @property
  def compiles(self) -> bool:
    """Whether the second call compiles again."""
    return bool(self.changes)

  def __str__(self) -> str:
    if not self.fed_back:
      return 'second call: no result has the form of an argument'
    fed = ', '.join(f'{result} as {argument}' for result, argument in self.fed_back)
    outcome = 'compiles again' if self.compiles else 'no compilation'
    return f'second call, with {fed}: {"an error" if self.refused else outcome}'


class _FedPart(NamedTuple):
  """An argument, or the result or an element of it.

  Attributes:
    path: such as `argument 0`.
    form: its tree structure and shapes.
    first: number of its first array among those of all arguments or of the result.
  """

  path: str
  form: tuple[Any, tuple[tuple[int, ...], ...]]
  first: int

  @property
  def numbers(self) -> range:
    """The numbers of its arrays."""
    return range(self.first, self.first + len(self.form[1]))


def second_call(
  arguments: Sequence[tuple[str, Any]],
  result: Any,
  passed: Sequence[ProgramArray],
  returned: Sequence[ProgramArray],
) -> SecondCall:
  """Compares the arguments of a call with its result.

  Args:
    arguments: path and value of each argument.
    result: the result, as a tree of shapes.
    passed: rows of the arrays of the arguments, in the order of their leaves.
    returned: rows of the arrays of the result.
  """
  pairs = _pairs(_parts(arguments), _parts_of_result(result))
  arrays = [
    (passed[old], returned[new])
    for one, argument in pairs
    for old, new in zip(argument.numbers, one.numbers, strict=True)
  ]
  fed_back = tuple((one.path, argument.path) for one, argument in pairs)
  changes, refused = (
    tuple(text for old, new in arrays if (text := of(old, new))) for of in (_change, _refusal)
  )
  return SecondCall(fed_back, changes, refused)


def _parts(trees: Iterable[tuple[str, Any]]) -> list[_FedPart]:
  parts, first = [], 0
  for path, tree in trees:
    leaves, treedef = jax.tree.flatten(tree)
    shapes = tuple(map(np.shape, leaves))
    parts.append(_FedPart(path, (treedef, shapes), first))
    first += len(leaves)
  return parts


def _parts_of_result(result: Any) -> list[_FedPart]:
  """The result as a whole, and each of its elements."""
  children = jax.tree_util.tree_leaves_with_path(result, is_leaf=lambda node: node is not result)
  elements = [(result_path(path), child) for path, child in children if path]
  return _parts([('result', result)]) + _parts(elements)


def _pairs(arguments: list[_FedPart], results: list[_FedPart]) -> list[tuple[_FedPart, _FedPart]]:
  """Each argument with the first result of its form, every array of the result once; no single numbers."""
  pairs, fed = [], set()
  for argument in arguments:
    for result in results:
      if result.form == argument.form and any(argument.form[1]) and fed.isdisjoint(result.numbers):
        pairs.append((result, argument))
        fed.update(result.numbers)
        break
  return pairs


def _change(old: ProgramArray, new: ProgramArray) -> str:
  """The reason why an array compiles the next call again, or ''."""
  if old.dtype != new.dtype:
    return f'{old.path} is {old.dtype}, {new.path} is {new.dtype}'
  if old.weak_type != new.weak_type:
    kinds = ('weak', 'strong') if old.weak_type else ('strong', 'weak')
    return f'{old.path} has a {kinds[0]} dtype, {new.path} a {kinds[1]} one'
  if old.passed is None:
    if isinstance(new.actual, SingleDeviceSharding):  # JAX may move both
      return ''
    return f'{old.path} is passed without a sharding, {new.path} has {sharding_text(new.actual)}'
  if _is_same(old.passed, new):
    return ''
  return (
    f'{old.path} is passed as {sharding_text(old.passed)}, {new.path} is {sharding_text(new.actual)}'
  )


def _refusal(old: ProgramArray, new: ProgramArray) -> str:
  """The reason why `in_rules` refuse an array of the result as an argument, or ''."""
  if old.source != 'in_rules' or old.planned is None or new.actual is None:
    return ''
  if new.actual.is_equivalent_to(old.planned, len(new.shape)):
    return ''
  required, actual = sharding_text(old.planned), sharding_text(new.actual)
  return f'{old.path} has to be {required} by in_rules, {new.path} is {actual}'


def _is_same(passed: Sharding, new: ProgramArray) -> bool:
  """Whether JAX compiles one program for both shardings; it compares meshes with their axis names."""
  actual = new.actual
  if (
    isinstance(passed, NamedSharding)
    and isinstance(actual, NamedSharding)
    and passed.mesh != actual.mesh
  ):
    return False
  return actual is not None and passed.is_equivalent_to(actual, len(new.shape))

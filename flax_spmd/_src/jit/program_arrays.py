"""Program arrays: one row per argument and result of a compiled program, and one per collective."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath

from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.text import array_text, size_text
from flax_spmd._src.tree_paths import path_string


class ProgramArray(NamedTuple):
  """One array among the arguments or results of a compiled program.

  Attributes:
    path: such as `argument 0/params/w` or `result 1`. Static arguments are not counted.
    shape: shape of the whole array.
    dtype: its dtype.
    planned: sharding that the plan requires, or else that the argument is passed with. None: left to the
      compiler.
    actual: sharding in the compiled program; None for an argument that the program does not use.
    source: origin of `planned`: `'in_rules'` or `'as passed'` for arguments; `'out_rules'`, `'names'` or
      the path of an argument for results; `'compiler'` if there is none.
    passed: sharding that the argument is passed with; None for host arrays and for results.
    donated: whether the argument is donated.
    reused: whether a result reuses the memory of the argument.
    weak_type: whether the dtype is weak, as that of a Python number.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  planned: Sharding | None
  actual: Sharding | None
  source: str
  passed: Sharding | None = None
  donated: bool = False
  reused: bool = False
  weak_type: bool = False

  @property
  def pinned(self) -> bool:
    """Whether the sharding is planned, and not the compiler's choice."""
    return self.planned is not None

  @property
  def deviates(self) -> bool:
    """Whether the compiled program has another sharding than planned."""
    if self.planned is None or self.actual is None:
      return False
    return not self.actual.is_equivalent_to(self.planned, len(self.shape))

  @property
  def bytes_per_device(self) -> int:
    """Bytes of one device's shard in the compiled program."""
    if self.actual is None:
      return 0
    return math.prod(self.actual.shard_shape(self.shape)) * self.dtype.itemsize

  @property
  def array(self) -> str:
    """`float32[8,16]`."""
    return array_text(self.dtype, self.shape)

  @property
  def sharding(self) -> str:
    """The sharding as text; the planned one too if it differs."""
    if self.actual is None:
      return 'not used'
    actual = sharding_text(self.actual)
    return f'{actual}, planned {sharding_text(self.planned)}' if self.deviates else actual


class ProgramCollective(NamedTuple):
  """One collective of a compiled program, and the arrays that it moves.

  Attributes:
    collective: kind, mesh axes, bytes, runs and source line.
    arguments: paths of the arguments whose values it moves, perhaps cast, transposed or sliced before.
    results: paths of the results that it produces.
  """

  collective: Collective
  arguments: tuple[str, ...]
  results: tuple[str, ...]

  def __str__(self) -> str:
    """`all-gather over data (2): 1 x 64 B f32, 64 B sent, of argument 0/params/w, model.py:31`."""
    one = self.collective
    moved = [f'of {", ".join(self.arguments)}'] if self.arguments else []
    moved += [f'for {", ".join(self.results)}'] if self.results else []
    details = [
      f'{one.times} x {size_text(one.bytes)} {one.dtype}',
      f'{size_text(one.wire)} sent',
      *moved,
    ]
    return f'{over(one)} ({one.group}): {", ".join([*details, *filter(None, (one.source,))])}'


def result_path(path: KeyPath) -> str:
  """`result 0/params/w`, `result loss`, or `result` for a single array."""
  return _with_path('result', path)


def argument_path(path: KeyPath) -> str:
  """`argument 0/params/w`, or `argument x` for one that is passed by name."""
  return _with_path('argument', path)


def _with_path(noun: str, path: KeyPath) -> str:
  return f'{noun} {path_string(path)}' if path else noun


def over(one: Collective) -> str:
  """`all-gather over data+model`."""
  return f'{one.kind} over {"+".join(one.axes) or "?"}'


def sharding_text(sharding: Sharding | None) -> str:
  """`P('data', None)`, or `one device`; the `repr` of another kind of sharding."""
  if isinstance(sharding, NamedSharding):
    memory = sharding.memory_kind
    return f'{sharding.spec}' + (f' in {memory}' if memory not in (None, 'device') else '')
  return 'one device' if isinstance(sharding, SingleDeviceSharding) else repr(sharding)

"""Conversion: in which ways a checkpoint may differ from what it is restored into.

Nothing is converted that was not asked for. Whatever differs and could be converted is an error that
says what to ask for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from flax_spmd.errors import CheckpointError, did_you_mean

Dtypes = Literal['keep', 'cast'] | Mapping[str, str]


class Stack(NamedTuple):
  """Modules that are one stacked module on one side.

  Attributes:
    stacked: path of the stacked module, or its last parts: `decoder/layers`.
    single: of the single ones, with `{}` for the number: `decoder/layers_{}`.
    axis: the stacked dimension; None: what the names or the shapes say.
  """

  stacked: str
  single: str
  axis: int | None = None

  @property
  def name(self) -> str:
    """What the stacked dimension is called where nobody says it: by its module."""
    return self.stacked.rpartition('/')[2]

  def split(self, path: str) -> tuple[str, str] | None:
    """What of a path comes before and after the stacked module."""
    found = re.search(f'(?:^|/)({re.escape(self.stacked)})(?:/|$)', path)
    return (path[: found.start(1)], path[found.end(1) :]) if found else None

  def number(self, path: str) -> tuple[str, int] | None:
    """The path of the stacked module's leaf, and which of them a single module's leaf is."""
    before, after = (re.escape(part) for part in self.single.split('{}'))
    found = re.search(f'(?:^|/)({before}(\\d+){after})(?:/|$)', path)
    if not found:
      return None
    return path[: found.start(1)] + self.stacked + path[found.end(1) :], int(found[2])

  def single_path(self, path: str, number: int) -> str:
    """The path of a single module's leaf."""
    before, after = self.split(path) or ('', '')
    return before + self.single.format(number) + after


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What may differ, as the arguments of `restore` say it."""

  only: str | None = None
  renames: tuple[tuple[str, str], ...] = ()
  stacks: tuple[Stack, ...] = ()
  axes: tuple[tuple[str, str], ...] = ()
  moved: frozenset[str] = frozenset()
  dtypes: str | tuple[tuple[str, str], ...] = 'keep'
  missing: str | None = None
  unused: str | None = None

  @classmethod
  def of(
    cls,
    only: str | None = None,
    renames: Mapping[str, str] | None = None,
    stacks: Mapping[str, Any] | None = None,
    axes: Mapping[str, str] | None = None,
    moved: str | Iterable[str] = (),
    dtypes: Dtypes = 'keep',
    missing: str | None = None,
    unused: str | None = None,
  ) -> Conversion:
    """From the arguments of `restore`.

    Raises:
      CheckpointError: one of them is not what it should be.
    """
    for name, pattern in (
      ('missing', missing),
      ('unused', unused),
      *(('renames', p) for p in renames or ()),
    ):
      _check_pattern(name, pattern)
    return cls(
      only.strip('/') if only else None,
      tuple((renames or {}).items()),
      tuple(_stack(stacked, single) for stacked, single in (stacks or {}).items()),
      tuple((axes or {}).items()),
      frozenset([moved] if isinstance(moved, str) else moved),
      _dtypes(dtypes),
      missing,
      unused,
    )

  def wants(self, path: str) -> bool:
    """Whether a path is in the part that is wanted."""
    return self.only is None or path == self.only or path.startswith(f'{self.only}/')

  def check_part(self, paths: Iterable[str]) -> None:
    """Raises CheckpointError if none of a checkpoint's paths is in the part that is wanted."""
    paths = [self.renamed(path) for path in paths]
    if not any(map(self.wants, paths)):
      tops = dict.fromkeys(path.partition('/')[0] for path in paths)
      raise CheckpointError(
        f'The checkpoint has no part {self.only!r}; it has {", ".join(tops)}.'
        f'{did_you_mean(self.only or "", tops)}\nFix: pass only= one of them, or the path of a part of one.'
      )

  def renamed(self, path: str) -> str:
    """Where a saved path goes: the first rename that is found in it, from there on as it says."""
    for pattern, to in self.renames:
      changed, times = re.subn(pattern, to, path, count=1)
      if times:
        return changed.strip('/')
    return path

  def names(self, names: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Saved names as the target calls them."""
    new = dict(self.axes)
    return None if names is None else tuple(new.get(name, name) for name in names)

  def keeps(self, path: str) -> bool:
    """Whether a wanted leaf may keep its own value."""
    return self.missing is not None and re.search(self.missing, path) is not None

  def leaves_out(self, path: str) -> bool:
    """Whether a saved leaf may be left out."""
    return self.unused is not None and re.search(self.unused, path) is not None

  def may_cast(self, saved: str, wanted: str) -> bool:
    """Whether an array may become one of another dtype."""
    if isinstance(self.dtypes, tuple):
      return (saved, wanted) in self.dtypes
    return self.dtypes == 'cast' and is_lossless(saved, wanted)


def is_lossless(saved: str, wanted: str) -> bool:
  """Whether every float of one dtype is one of another dtype.

  Example:
    >>> is_lossless('bfloat16', 'float32'), is_lossless('float32', 'bfloat16')
    (True, False)
  """
  one, two = jnp.dtype(saved), jnp.dtype(wanted)
  if not (jnp.issubdtype(one, jnp.floating) and jnp.issubdtype(two, jnp.floating)):
    return False
  a, b = jnp.finfo(one), jnp.finfo(two)
  return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp - a.nmant >= b.minexp - b.nmant


def _stack(stacked: str, single: Any) -> Stack:
  pattern, axis = single if isinstance(single, tuple) else (single, None)
  if not isinstance(pattern, str) or pattern.count('{}') != 1:
    raise CheckpointError(
      f'stacks={{{stacked!r}: {single!r}}} does not say where the number of a layer stands.\n'
      f"Fix: write {{}} in its place once, as in stacks={{{stacked!r}: '{stacked}_{{}}'}}."
    )
  return Stack(stacked.strip('/'), pattern.strip('/'), axis)


def _dtypes(dtypes: Any) -> str | tuple[tuple[str, str], ...]:
  if isinstance(dtypes, Mapping):
    try:
      return tuple((jnp.dtype(one).name, jnp.dtype(two).name) for one, two in dtypes.items())
    except TypeError as error:
      raise CheckpointError(
        f"dtypes={dict(dtypes)!r} names no dtype: {error}.\nFix: write dtypes={{'float32': 'bfloat16'}}."
      ) from error
  if dtypes not in ('keep', 'cast'):
    raise CheckpointError(
      f'dtypes={dtypes!r} is none of keep, cast, or a mapping of dtypes.\n'
      "Fix: write dtypes='cast', or what may lose digits by name, dtypes={'float32': 'bfloat16'}."
    )
  return dtypes


def _check_pattern(name: str, pattern: str | None) -> None:
  try:
    re.compile(pattern or '')
  except re.error as error:
    raise CheckpointError(
      f'{name} has {pattern!r}, which is no regular expression: {error}.\n'
      'Fix: escape what is meant literally with a backslash.'
    ) from error

"""Arrangements: how the dimensions of a saved array are split, reordered and merged.

They are written as in einops (https://einops.rocks): the saved dimensions, an arrow, the new ones.

    'out in -> in out'                                                a Linear weight of PyTorch, as a kernel of Flax
    'out in height width -> height width in out'                      a convolution's
    '(heads=12 head) embed -> embed heads head'                       the heads of a projection
    'embed (three=3 heads=12 head) -> three embed heads head'         a projection of queries, keys and values
    '... embed heads head -> ... (heads head) embed'                  back, with or without stacked layers

A name in brackets is a part of a dimension. Sizes follow from the saved array; `heads=12` gives one, and a dimension
may leave one of its parts open. `...` stands for any further first dimensions.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NamedTuple

from flax_spmd._src.checkpoint.storage.parsed_json import expect

_GROUPS = re.compile(r'\(([^()]*)\)|([^\s()]+)')
_NAME = re.compile(r'([A-Za-z_]\w*)(?:=([1-9]\d{0,18}))?\Z')
_REST = '...'

Groups = tuple[tuple[str, ...], ...]


class Rearrangement(NamedTuple):
  """The rearrangement of an array of a known shape: a reshape, a transposition and another reshape.

  Attributes:
    split: sizes of the parts of the saved dimensions.
    order: part at each position of the result.
    groups: number of parts in each dimension of the saved array, and of the result.
  """

  split: tuple[int, ...]
  order: tuple[int, ...]
  groups: tuple[tuple[int, ...], tuple[int, ...]]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the result."""
    sizes = [self.split[part] for part in self.order]
    return tuple(math.prod(sizes[begin:end]) for begin, end in _ranges(self.groups[1]))

  def apply(self, array: Any) -> Any:
    """Rearranges an array of numpy or JAX."""
    return array.reshape(self.split).transpose(self.order).reshape(self.shape)

  def names(self, saved: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The logical names of the result. A dimension that was split or merged has none."""
    if saved is None:
      return None
    of_parts: dict[int, Any] = {
      begin: name
      for (begin, end), name in zip(_ranges(self.groups[0]), saved, strict=True)
      if end == begin + 1
    }
    return tuple(
      of_parts.get(self.order[begin]) if end == begin + 1 else None
      for begin, end in _ranges(self.groups[1])
    )

  def spec_before(self, entries: list[Any], sizes: dict[Any, int]) -> list[Any]:
    """The mesh axes of the saved array's dimensions, from those of the result.

    A dimension keeps the axes of its first part, if that part comes first in the result's dimension too:
    its shards are then whole blocks of the saved one. Other axes shard whichever saved dimension they divide, so
    that no device reads more than its share.

    Args:
      entries: mesh axes of each dimension of the result.
      sizes: size of each mesh axis.
    """
    firsts = {
      self.order[begin]: _axes(entry)
      for (begin, end), entry in zip(_ranges(self.groups[1]), entries, strict=True)
      if begin < end
    }
    saved: list[tuple[Any, ...]] = []
    for begin, end in _ranges(self.groups[0]):
      axes = firsts.get(begin, ()) if begin < end else ()
      fits = axes and self.split[begin] % math.prod(sizes[axis] for axis in axes) == 0
      saved.append(axes if fits else ())
    lengths = [math.prod(self.split[begin:end]) for begin, end in _ranges(self.groups[0])]
    used = {axis for axes in saved for axis in axes}
    for axis in [axis for entry in entries for axis in _axes(entry) if axis not in used]:
      for dim, length in enumerate(lengths):
        if length % math.prod(sizes[each] for each in (*saved[dim], axis)) == 0:
          saved[dim] = (*saved[dim], axis)
          break
    return [axes or None for axes in saved]


def _axes(entry: Any) -> tuple[Any, ...]:
  """The mesh axes of an entry of a spec."""
  if entry is None or not isinstance(entry, (str, tuple)):
    return ()
  return (entry,) if isinstance(entry, str) else entry


def _ranges(counts: tuple[int, ...]) -> list[tuple[int, int]]:
  ends = [sum(counts[: number + 1]) for number in range(len(counts))]
  return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Arrangement:
  """An arrangement, as it was written.

  Attributes:
    text: its text.
    saved, new: names of the parts of each dimension, before and after.
    sizes: sizes that the text gives, by name.
    has_rest: whether it begins with `...`.

  Raises:
    ValueError: the text is not an arrangement.
  """

  text: str
  saved: Groups = dataclasses.field(init=False)
  new: Groups = dataclasses.field(init=False)
  sizes: dict[str, int] = dataclasses.field(init=False, hash=False)
  has_rest: bool = dataclasses.field(init=False)

  def __post_init__(self):
    sides = self.text.split('->')
    expect(len(sides) == 2, 'it has no arrow ->, or several')
    sizes: dict[str, int] = {}
    rests, groups = zip(*(_side(side, sizes) for side in sides), strict=True)
    expect(rests[0] == rests[1], f'only one side begins with {_REST}')
    old, new = ([name for group in side for name in group] for side in groups)
    for names in (old, new):
      twice = sorted({name for name in names if names.count(name) > 1})
      expect(not twice, f'{", ".join(twice)} is on one side twice')
    apart = sorted(set(old) ^ set(new))
    expect(not apart, f'{", ".join(apart)} is on one side only')
    for field, value in zip(
      ('saved', 'new', 'sizes', 'has_rest'), (*groups, sizes, rests[0]), strict=True
    ):
      object.__setattr__(self, field, value)

  def of_shape(self, shape: tuple[int, ...]) -> Rearrangement:
    """The rearrangement of an array of this shape.

    Raises:
      ValueError: the shape does not fit.
    """
    rest = len(shape) - len(self.saved)
    expect(rest >= 0 if self.has_rest else rest == 0, f'it has {len(self.saved)} dimensions')
    sizes = dict(self.sizes)
    for group, length in zip(self.saved, shape[rest:], strict=True):
      _solve(group, length, sizes)
    parts = [name for group in self.saved for name in group]
    order = [rest + parts.index(name) for group in self.new for name in group]
    counts = tuple((*[1] * rest, *map(len, side)) for side in (self.saved, self.new))
    split = (*shape[:rest], *(sizes[name] for name in parts))
    return Rearrangement(split, (*range(rest), *order), (counts[0], counts[1]))


def _side(text: str, sizes: dict[str, int]) -> tuple[bool, Groups]:
  """Whether one side begins with `...`, and its groups; adds the sizes that it gives."""
  text = text.strip()
  has_rest = text.startswith(_REST)
  text = text.removeprefix(_REST)
  expect(not _GROUPS.sub('', text).strip(), 'its brackets do not match, or are nested')
  groups = []
  for match in _GROUPS.finditer(text):
    group = []
    for word in (match[1] if match[2] is None else match[2]).split():
      name = _NAME.match(word)
      expect(name is not None, f'{word!r} is not a name')
      if name is not None:
        group.append(name[1])
        given = int(name[2]) if name[2] else sizes.get(name[1])
        expect(given == sizes.get(name[1], given), f'{name[1]} has two sizes')
        sizes.update({name[1]: given} if given is not None else {})
    groups.append(tuple(group))
  return has_rest, tuple(groups)


def _solve(group: tuple[str, ...], length: int, sizes: dict[str, int]) -> None:
  """Adds the size of the open part of a dimension."""
  open_parts = [name for name in group if name not in sizes]
  expect(len(open_parts) < 2, f'the sizes of {" and ".join(open_parts)} are open')
  known = math.prod(sizes[name] for name in group if name in sizes)
  if open_parts:
    expect(length % known == 0, f'{length} is not divisible by {known}')
    sizes[open_parts[0]] = length // known
  else:
    expect(known == length, f'({" ".join(group)}) has {known} elements, and the dimension {length}')

"""Flax pairs: the changes that bridge a Linen state and an NNX state, leaf by leaf.

Leaves with one key (`flax_paths`) are a pair. Then come stacks: a scanned module on one side, a list of modules on the
other. Then recurrent cells, of which NNX has the gates in one array. Each leaf has one partner or none; a leaf without
one, and a key with several leaves, are left to the caller to report.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from flax_spmd._src.checkpoint.matching.flax_paths import GATES, ModulePath
from flax_spmd._src.checkpoint.storage.record import LeafRecord

Stacks = dict[str, str | tuple[str, int]]


class FlaxSide:
  """One side of a restore between Linen and NNX, and its leaves that have no partner yet.

  Args:
    paths: the divided path of each leaf.
    leaves: record of each leaf, by path.
  """

  def __init__(self, paths: Sequence[ModulePath], leaves: Mapping[str, LeafRecord]):
    self.leaves = leaves
    self.by_key: dict[tuple[str, ...], ModulePath] = {}
    self.twice: list[tuple[str, str]] = []
    for path in paths:
      first = self.by_key.setdefault(path.key, path)
      if first is not path:
        self.twice.append((first.path, path.path))

  def shape(self, path: ModulePath) -> tuple[int, ...]:
    """The shape of a leaf."""
    return self.leaves[path.path].shape


@dataclasses.dataclass
class FlaxPairs:
  """The pairs found so far.

  Attributes:
    saved, target: the two sides, with the leaves that have no partner yet.
    target_is_nnx: whether the target is the NNX side.
    paths: for each saved leaf, its path in the terms of the target; a leaf of a stack is below its number or name there.
    stacks, rearranged: arguments of `Changes`, in the same terms.
  """

  saved: FlaxSide
  target: FlaxSide
  target_is_nnx: bool
  paths: dict[str, str] = dataclasses.field(default_factory=dict)
  stacks: Stacks = dataclasses.field(default_factory=dict)
  rearranged: dict[str, str] = dataclasses.field(default_factory=dict)

  def find(self) -> None:
    """Finds all pairs."""
    for key in list(self.saved.by_key):
      if key in self.target.by_key:
        self.paths[self.saved.by_key.pop(key).path] = self.target.by_key.pop(key).path
    for single, stacked in ((self.saved, self.target), (self.target, self.saved)):
      for stack in _stacks(single, stacked):
        self._add_stack(stack, single, stacked)
    for name, gates in GATES:
      self._add_gates(name, gates)

  # -- stacks

  def _add_stack(self, stack: tuple[str, ...], single: FlaxSide, stacked: FlaxSide) -> None:
    """Pairs the leaves of a stacked module, those of optimizer state too."""
    layers: dict[tuple[str, ...], dict[int, tuple[ModulePath, int]]] = {}
    for key, path in single.by_key.items():
      for end in _ends(key, stack):
        whole = key[:end] + key[end + 1 :]
        if whole in stacked.by_key:
          layers.setdefault(whole, {})[int(key[end])] = path, end
    for whole, numbered in layers.items():
      count, shapes = len(numbered), {single.shape(path) for path, _ in numbered.values()}
      is_whole = sorted(numbered) == list(range(count)) and len(shapes) == 1
      if is_whole and _is_stack_of(stacked.shape(stacked.by_key[whole]), shapes.pop(), count):
        module = stacked.by_key.pop(whole)
        for number, (path, end) in numbered.items():
          del single.by_key[path.key]
          self._add_layer(module, path, end, number)

  def _add_layer(self, module: ModulePath, layer: ModulePath, end: int, number: int) -> None:
    """Adds a layer of a stacked module.

    Args:
      module: path of the stacked leaf.
      layer: path of the layer's leaf.
      end: position of the layer's number in its key.
      number: its number.
    """
    if module.path in self.target.leaves and layer.path in self.saved.leaves:
      cut = module.raw_end(end)
      names, last = module.below[:cut], str(number)
      self.paths[layer.path] = _joined(module.root, *names, last, *module.below[cut:])
      pattern = '{}'
    else:
      cut = layer.raw_end(end + 1)
      last, names = layer.below[cut - 1], layer.below[: cut - 1]
      pattern = '{}'
      if not last.isdecimal():
        name = last.removesuffix(f'_{number}')
        names, pattern = (*names, name), f'{name}_{{}}'
      self.paths[module.path] = _joined(layer.root, *names, *layer.below[cut:])
    if module.group == 'variable':
      above = names if pattern == '{}' else names[:-1]
      self.stacks['/'.join(names)] = _joined(*above, pattern)

  # -- recurrent cells

  def _add_gates(self, name: str, gates: Sequence[str]) -> None:
    """Pairs the leaves of cells in which NNX has a module for several gates."""
    nnx, linen = (self.target, self.saved) if self.target_is_nnx else (self.saved, self.target)
    for key, fused in list(nnx.by_key.items()):
      if key[-2:-1] != (name,):
        continue
      keys = [(*key[:-2], gate, key[-1]) for gate in gates]
      if not all(each in linen.by_key for each in keys):
        continue
      shapes = {linen.shape(linen.by_key[each]) for each in keys}
      shape = shapes.pop()
      if shapes or not shape or nnx.shape(fused) != (*shape[:-1], len(gates) * shape[-1]):
        continue
      del nnx.by_key[key]
      self._add_cell(fused, [linen.by_key.pop(each) for each in keys], name, gates)

  def _add_cell(
    self, fused: ModulePath, parts: Sequence[ModulePath], name: str, gates: Sequence[str]
  ) -> None:
    """Adds the array of several gates, and the array of each."""
    leaf = fused.below[-1]
    if self.target_is_nnx:
      cell, root = fused.below[:-2], fused.root
      for part, gate in zip(parts, gates, strict=True):
        self.paths[part.path] = _joined(root, *cell, gate if len(gates) > 1 else name, leaf)
    else:
      cell, root = parts[0].below[:-2], parts[0].root
      self.paths[fused.path] = _joined(root, *cell, name if len(gates) > 1 else gates[0], leaf)
    if len(gates) > 1 and fused.group == 'variable':
      module, count = _joined(*cell, name), len(gates)
      self.stacks[module] = _joined(*cell, f'{{{",".join(gates)}}}'), -2
      sides = ['... gates hidden', '... (gates hidden)']
      if not self.target_is_nnx:
        sides = [f'... (gates={count} hidden)', '... gates hidden']
      self.rearranged[f'(^|/){re.escape(module)}/'] = ' -> '.join(sides)


def _joined(*names: str) -> str:
  return '/'.join(filter(None, names))


def _stacks(single: FlaxSide, stacked: FlaxSide) -> list[tuple[str, ...]]:
  """The names of modules that are lists on one side and stacked on the other."""
  return list(
    dict.fromkeys(
      key[1:end]
      for key in single.by_key
      for end, part in enumerate(key)
      if key[0] == 'variable' and part.isdecimal() and key[:end] + key[end + 1 :] in stacked.by_key
    )
  )


def _ends(key: tuple[str, ...], stack: tuple[str, ...]) -> Iterator[int]:
  """The positions of numbers after the names of a stack; a variable begins with these."""
  starts = range(1, len(key) - len(stack)) if key[0] != 'variable' else (1,)
  for start in starts:
    end = start + len(stack)
    if key[start:end] == stack and end < len(key) and key[end].isdecimal():
      yield end


def _is_stack_of(stacked: tuple[int, ...], single: tuple[int, ...], count: int) -> bool:
  """Whether a shape has a further dimension for this many layers. A placeholder of one element has none."""
  axes = range(len(stacked))
  grown = any(stacked[axis] == count and stacked[:axis] + stacked[axis + 1 :] == single for axis in axes)
  return grown or stacked == single == (1,)

"""Flax paths: which leaf of a Linen state is which leaf of an NNX state, by the paths of their modules.

    Linen                                     NNX
    params/blocks_0/norm/scale                blocks/0/norm/scale          lists, below any root
    batch_stats/blocks_0/norm/mean            blocks/0/norm/mean           collections
    params/cell/if/kernel                     cell/if_/kernel              words of Python
    opt_state/0/mu/blocks_0/norm/scale        optimizer/opt_state/0/mu/blocks/0/norm/scale
    step                                      optimizer/step

Both become keys, and leaves of one key correspond. A key is a group (variable, optimizer state, or another part of the
state) and the names of modules from their root on. Names that have no counterpart are never guessed.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from flax_spmd._src.checkpoint.matching.optimizer_states import optimizer_of, state_fields
from flax_spmd._src.checkpoint.matching.routes import Side

_NUMBERED = re.compile(r'(.+)_(\d+)\Z')
# Modules of a cell in NNX, and those of which Linen has one for each gate, in order.
GATES = (
  ('dense_i', ('ii', 'if', 'ig', 'io')),  # OptimizedLSTMCell
  ('dense_h', ('hi', 'hf', 'hg', 'ho')),
  ('dense_i', ('ir', 'iz', 'in')),  # GRUCell
  ('dense_h', ('hr', 'hz', 'hn')),
  ('dense_i', ('i',)),  # SimpleCell
  ('dense_h', ('h',)),
)

Group = Literal['variable', 'optimizer', 'other']


class ModulePath(NamedTuple):
  """The path of a leaf, divided.

  Attributes:
    path: the whole path.
    group: the part of the state.
    root: path of the part, up to its first module or state; empty for the state itself.
    below: names below the root, as written.
    without: names among them that are no modules, as `params` in the moments of whole variables.
  """

  path: str
  group: Group
  root: str
  below: tuple[str, ...]
  without: tuple[str, ...] = ()

  @property
  def key(self) -> tuple[str, ...]:
    """The group and the names, in the same form for Linen and NNX."""
    return (self.group, *(part for parts in self._parts for part in parts))

  def raw_end(self, count: int) -> int:
    """The number of names below the root that make the first parts of the key, the group included."""
    ends = list(itertools.accumulate(map(len, self._parts), initial=1))
    return next(end for end, parts in enumerate(ends) if parts >= count)

  @property
  def _parts(self) -> list[tuple[str, ...]]:
    """The parts of the key that each name below the root makes."""
    return [() if name in self.without else _parts(name) for name in self.below]


def _parts(name: str) -> tuple[str, ...]:
  """The names of a module and its number: `blocks_0` is `blocks/0`, and `if_` is `if`."""
  numbered = _NUMBERED.match(name)
  if numbered:
    return numbered[1], str(int(numbered[2]))
  return (name[:-1] if name.endswith('_') and keyword.iskeyword(name[:-1]) else name,)


def linen_paths(side: Side, renamed: Sequence[str]) -> list[ModulePath]:
  """The divided paths of a Linen state.

  Args:
    side: its leaves and optimizer states.
    renamed: path of each leaf, after the renames that the caller gave.
  """
  optimizers = _optimizer_roots(side, renamed)
  parts = [tuple(path.split('/')) for path in renamed]
  start = _first_module(path for path, root in zip(parts, optimizers, strict=True) if root is None)
  parameters = {path[start:] for path in parts if path[start - 1 : start] == ('params',)}
  divided = []
  for text, path, optimizer in zip(renamed, parts, optimizers, strict=True):
    is_parameter = not start or path[start - 1 : start] == ('params',)
    if optimizer is not None:
      divided.append(_of_optimizer(text, optimizer, without=('params',)))
    elif is_parameter or (len(path) > start and path[start:] not in parameters):
      divided.append(ModulePath(text, 'variable', '/'.join(path[:start]), path[start:]))
    else:  # another part, such as averages of the parameters
      divided.append(ModulePath(text, 'other', '', path))
  return divided


def _first_module(variables: Iterable[tuple[str, ...]]) -> int:
  """The position of the first module in the paths of variables: after the collection, `params`."""
  found = [path for path in variables if 'params' in path[:-1]]
  start = min((path.index('params') + 1 for path in found), default=0)
  is_whole = any(path[start - 1 : start + 1] == ('params', 'params') for path in found)
  return start + 1 if is_whole else start  # the parameters of a `TrainState` may be all variables


def nnx_paths(side: Side, renamed: Sequence[str], linen: Iterable[ModulePath]) -> list[ModulePath]:
  """The divided paths of an NNX state. Its modules are below the root that has most of Linen's paths.

  Args:
    side: its leaves and optimizer states.
    renamed: path of each leaf, after the renames that the caller gave.
    linen: paths of the Linen state.
  """
  roots = _optimizer_roots(side, renamed)
  parts = [tuple(path.split('/')) for path in renamed]
  variables = [path for path, root in zip(parts, roots, strict=True) if root is None]
  known = {path.key for path in linen if path.group == 'variable'}
  nearly = known | {each for key in known for each in (*_without_number(key), *_fused(key))}
  candidates = dict.fromkeys(path[:end] for path in variables for end in range(len(path)))

  def score(root: tuple[str, ...]) -> tuple[int, int, int]:
    """The number of leaves below a root that Linen has too, and of those that differ in the number of a layer."""
    tails = (path[len(root) :] for path in variables if path[: len(root)] == root)
    keys = [ModulePath('', 'variable', '', tail).key for tail in tails]
    near = sum(key in nearly or not known.isdisjoint(_without_number(key)) for key in keys)
    return sum(key in known for key in keys), near, -len(root)

  root = max(candidates, key=score, default=())
  divided = []
  for text, path, optimizer in zip(renamed, parts, roots, strict=True):
    if optimizer is not None:
      divided.append(_of_optimizer(text, optimizer))
    elif path[: len(root)] == root:
      divided.append(ModulePath(text, 'variable', '/'.join(root), path[len(root) :]))
    else:
      divided.append(ModulePath(text, 'other', '', path))
  return divided


def _without_number(key: tuple[str, ...]) -> list[tuple[str, ...]]:
  """A key without one of its numbers, as a leaf of stacked modules has it."""
  return [key[:at] + key[at + 1 :] for at, part in enumerate(key) if part.isdecimal()]


def _fused(key: tuple[str, ...]) -> list[tuple[str, ...]]:
  """The keys in NNX of a leaf of a gate in Linen."""
  return (
    [(*key[:-2], name, key[-1]) for name, gates in GATES if key[-2] in gates] if len(key) > 2 else []
  )


def _optimizer_roots(side: Side, renamed: Sequence[str]) -> list[str | None]:
  """The path of the optimizer's state of each leaf; None for other leaves. The number of steps beside it belongs to it."""
  fields = state_fields(side.leaves, side.kinds)
  roots: list[str | None] = []
  for original, path in zip(side.leaves, renamed, strict=True):
    names = path.split('/')
    if 'opt_state' in names[:-1]:
      roots.append('/'.join(names[: names.index('opt_state') + 1]))
    else:
      root = optimizer_of(fields[original].state, side.kinds) if original in fields else None
      roots.append(root if root and path.startswith(f'{root}/') else None)
  steps = {(root.rpartition('/')[0] + '/step').lstrip('/') for root in roots if root is not None}
  return ['' if path in steps else root for path, root in zip(renamed, roots, strict=True)]


def _of_optimizer(path: str, root: str, without: tuple[str, ...] = ()) -> ModulePath:
  """The divided path of a leaf of an optimizer.

  Args:
    path: its path.
    root: path of the optimizer's state; empty for the number of steps.
    without: a name above the modules, as `params` in moments of whole variables.
  """
  if not root:
    return ModulePath(path, 'optimizer', path.rpartition('/')[0], ('step',))
  return ModulePath(path, 'optimizer', root, tuple(path[len(root) + 1 :].split('/')), without)

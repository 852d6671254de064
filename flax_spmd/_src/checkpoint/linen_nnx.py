"""Linen and NNX: the changes by which a checkpoint of one restores into a state of the other.

They are derived from the paths of both sides (`matching/flax_paths`), and are an ordinary `Changes`: print it, keep it in
the code, pass it to `restore`. Every leaf has a partner of its shape, or is in the error with those that have none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.checkpoint import targets
from flax_spmd._src.checkpoint.matching.allowed_changes import (
  NO_CHANGES,
  Changes,
  is_lossless,
  is_selected,
  may_be_missing,
  may_be_unused,
  renamed,
)
from flax_spmd._src.checkpoint.matching.derived_renames import derived_renames, shorter
from flax_spmd._src.checkpoint.matching.differences import differences
from flax_spmd._src.checkpoint.matching.flax_pairs import FlaxPairs, FlaxSide
from flax_spmd._src.checkpoint.matching.flax_paths import ModulePath, linen_paths, nnx_paths
from flax_spmd._src.checkpoint.matching.matcher import match
from flax_spmd._src.checkpoint.matching.routes import Side
from flax_spmd._src.checkpoint.preflight import mismatch_text, saved_side
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint
from flax_spmd._src.checkpoint.storage.record import LeafRecord, is_key
from flax_spmd._src.checkpoint.storage.store import path_text
from flax_spmd._src.multihost import joint
from flax_spmd._src.public import public
from flax_spmd.errors import CheckpointMismatchError, Problem


@public('flax_spmd.checkpoint')
def linen_nnx_changes(
  path: str | os.PathLike[str], target: Any, *, changes: Changes = NO_CHANGES
) -> Changes:
  r"""Derives the changes by which a checkpoint of a Linen model restores into an NNX model, or the reverse.

  Modules correspond if their names do: `blocks_0` in Linen is `blocks/0` in NNX, and a word of Python, such as `if`, has an
  underscore. Modules scanned in one and in a list in the other are `stacks`; the gates of recurrent cells, which NNX
  has in one array, are `rearranged` too. Moments of an optimizer follow their parameters, collections such as
  `batch_stats` are variables, and `step` is that of `nnx.Optimizer`. Streams of random numbers, which Linen lacks, keep
  the values of the target, or stay unused.

  Args:
    path: folder written by `save`, or a checkpoint of another format.
    target: state to restore into, as for `restore`. With NNX variables in it the checkpoint is Linen's; without, NNX's.
    changes: differences that are known. The renames are those of modules whose names differ, applied to saved paths first.

  Returns:
    Changes that are sufficient for `restore`, with those given.

  Raises:
    CheckpointMismatchError: leaves have no partner, or several, or one of another shape, dtype or name (lists all of them,
      with the renames to give).
    CheckpointError: the checkpoint cannot be opened, or the target is unusable, as for `restore`.

  Example:
    >>> from flax import nnx
    >>> layout = Layout({'data': 8})
    >>> checkpoint.save(tmp / 'linen', nn.Sequential([nn.Dense(4), nn.Dense(4)]).init(jax.random.key(0), np.ones((1, 8))), layout)
    >>> dense = lambda inputs, rngs: nnx.Linear(inputs, 4, rngs=rngs)
    >>> model = layout.init(lambda: nnx.Sequential(dense(8, rngs := nnx.Rngs(1)), dense(4, rngs)))
    >>> checkpoint.linen_nnx_changes(tmp / 'linen', model)
    Changes(renames={'^params/layers_(\\d+)/': 'layers/\\1/'})
  """
  with joint('linen_nnx_changes', f'The comparison with {path_text(path)}'):
    reader = open_checkpoint(path)
    prepared = targets.of_tree(target, changes, reader.record.leaves)
    variables = targets.variables_of(target, changes, reader.record.leaves)
    derivation = _Derivation(saved_side(reader, NO_CHANGES), prepared.side, variables, changes)
    derived = derivation.changes()
    problems = derivation.problems()
    if not problems:
      saved = saved_side(reader, derived)
      problems = differences(saved, prepared.side, match(saved, prepared.side, derived), derived)
    if problems:
      raise CheckpointMismatchError(mismatch_text(reader.path, problems))
    return derived


class _Derivation:
  """The changes between two states, and the leaves without a partner.

  Args:
    saved, target: the two sides.
    variables: the variable of NNX around each leaf of the target, by path.
    given: changes that are known.
  """

  def __init__(self, saved: Side, target: Side, variables: Mapping[str, Any], given: Changes):
    self._saved, self._target, self._variables, self._given = saved, target, variables, given
    self._renamed = {old: renamed(given, old) for old in saved.leaves}
    self._old = {new[0]: old for old, new in self._renamed.items()}
    first = [new[0] for new in self._renamed.values()]
    to = list(target.leaves)
    if variables:
      saved_paths = linen_paths(saved, first)
      target_paths = nnx_paths(target, to, saved_paths)
    else:
      target_paths = linen_paths(target, to)
      saved_paths = nnx_paths(saved, first, target_paths)
    self._saved_paths = {path.path: path for path in saved_paths}
    self._target_paths = {path.path: path for path in target_paths}
    leaves = {new: saved.leaves[old] for new, old in self._old.items()}
    self._pairs = FlaxPairs(
      FlaxSide(saved_paths, leaves), FlaxSide(target_paths, target.leaves), bool(variables)
    )
    self._pairs.find()
    self._paths = {self._old[new]: [path] for new, path in self._pairs.paths.items()}
    self._add_shared()
    self._left_saved = [self._old[path.path] for path in self._pairs.saved.by_key.values()]
    self._left_target = [path.path for path in self._pairs.target.by_key.values()]

  def _add_shared(self) -> None:
    """Adds the further paths of variables that are shared, and of leaves that the caller renamed to several paths."""
    by_variable: dict[int, list[str]] = {}
    for path, variable in self._variables.items():
      by_variable.setdefault(id(variable), []).append(path)
    left = {path.path: key for key, path in self._pairs.target.by_key.items()}
    for old, paths in self._paths.items():
      variable = self._variables.get(paths[0])
      further = [*self._renamed[old][1:], *(by_variable[id(variable)] if variable is not None else ())]
      for path in (path for path in further if path in left):
        paths.append(path)
        del self._pairs.target.by_key[left.pop(path)]

  def changes(self) -> Changes:
    """The changes that were given, completed."""
    given = self._given
    modules = {old: self._optimizer(old, paths[0]) for old, paths in self._paths.items()}
    renames = derived_renames(self._paths, {old: roots for old, roots in modules.items() if roots})
    random = [path for path in self._left_target if self._is_random(path)]
    unused = [path for path in self._left_saved if self._is_random_key(path)]
    derived = {
      'renames': renames,
      'rearranged': {**self._pairs.rearranged, **dict(given.rearranged)},
      'stacks': {**self._pairs.stacks, **dict(given.stacks)},
      'dtypes': self._casts(),
      'missing': _either(given.missing, random),
      'unused': _either(given.unused, unused),
    }
    return Changes(**vars(given) | derived)

  def _optimizer(self, old: str, new: str) -> tuple[str, str] | None:
    """The paths of an optimizer's state on both sides, for one of its leaves; None for other leaves."""
    saved = self._saved_paths[self._renamed[old][0]]
    roots = [path.root for path in self._target_paths.values() if path.group == 'optimizer']
    root = max((root for root in roots if root and new.startswith(f'{root}/')), key=len, default=None)
    is_state = saved.group == 'optimizer' and root is not None and old.startswith(f'{saved.root}/')
    return (saved.root, root or '') if is_state else None

  def _casts(self) -> Any:
    """The casts that were given, and that of the number of steps, which is unsigned in NNX."""
    given = self._given.dtypes
    dtypes = {
      old: (self._saved.leaves[old].dtype, self._target.leaves[paths[0]].dtype)
      for old, paths in self._paths.items()
      if paths[0] in self._target.leaves
    }
    casts = {
      cast
      for old, cast in dtypes.items()
      if old.rpartition('/')[2] == 'step'
      and self._saved_paths[self._renamed[old][0]].group == 'optimizer'
    }
    casts = {cast for cast in casts if set(cast) == {'int32', 'uint32'}}
    if not casts:
      return given
    if given == 'cast':
      casts |= {cast for cast in dtypes.values() if cast[0] != cast[1] and is_lossless(*cast)}
    return {**(dict(given) if isinstance(given, tuple) else {}), **dict(sorted(casts))}

  def _is_random(self, path: str) -> bool:
    """Whether a leaf of the target belongs to a stream of random numbers."""
    return path in self._variables and compat.is_random_state_type(type(self._variables[path]))

  def _is_random_key(self, path: str) -> bool:
    """Whether a saved leaf belongs to a stream of random numbers: a key, or the count beside one."""
    key = self._saved.leaves.get(f'{path.rpartition("/")[0]}/key'.lstrip('/'))
    last = path.rpartition('/')[2]
    return not self._variables and key is not None and is_key(key) and last in ('key', 'count')

  def problems(self) -> list[Problem]:
    """The leaves without a partner, and those with several."""
    given, problems = self._given, []
    saved = [
      old
      for old in self._left_saved
      if not may_be_unused(given, old)
      and not self._is_random_key(old)
      and is_selected(given, self._renamed[old][0])
    ]
    target = [
      path for path in self._left_target if not may_be_missing(given, path) and not self._is_random(path)
    ]
    fix = self._fix(saved, target)
    for pairs, where in ((self._pairs.saved.twice, 'checkpoint'), (self._pairs.target.twice, 'target')):
      for one, other in pairs:
        text = f'{one} and {other} in the {where} could both be one leaf of the other side.'
        problems.append(Problem(text, _SEVERAL))
    for old in saved:
      text = f'{old} ({self._saved.leaves[old]}) in the checkpoint has no partner in the target.'
      problems.append(Problem(text, fix))
    for path in target:
      text = f'{path} ({self._target.leaves[path]}) in the target has no partner in the checkpoint.'
      problems.append(Problem(text, fix))
    return problems

  def _fix(self, saved: Sequence[str], target: Sequence[str]) -> str:
    """The renames of modules that could be partners, as there is one of the same leaves on each side only."""
    olds = _modules((self._saved_paths[self._renamed[old][0]] for old in saved), self._saved_shapes())
    news = _modules(map(self._target_paths.__getitem__, target), self._target.leaves)
    renames = dict(
      _rename(one[0], other[0])
      for leaves, one in olds.items()
      if len(one) == 1 and len(other := news.get(leaves, ())) == 1
    )
    parts = []
    if saved and target:
      listed = dict(self._given.renames) | (renames or {'(^|/)old/': r'\1new/'})
      parts.append(
        ('if the modules are the same, ' if renames else 'for modules with other names, ')
        + f'pass changes=Changes(renames={listed!r})'
      )
    if target:
      parts.append("to keep the target's values, pass Changes(missing='regex')")
    if saved:
      parts.append("to leave saved leaves out, pass Changes(unused='regex')")
    return '; '.join(parts) + '.'

  def _saved_shapes(self) -> Mapping[str, LeafRecord]:
    return {new: self._saved.leaves[old] for new, old in self._old.items()}


_SEVERAL = 'restore the parts of the state one at a time, with Changes(only=...), or rename one with changes=Changes(renames=...).'


def _rename(old: str, new: str) -> tuple[str, str]:
  """A pattern and replacement of a module, or of the outermost module around it with another name."""
  olds, news = old.split('/'), new.split('/')
  while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
    del olds[-1], news[-1]
  return f'(^|/){re.escape("/".join(olds))}/', shorter(rf'\g<1>{"/".join(news)}/')


def _modules(paths: Iterable[ModulePath], leaves: Mapping[str, LeafRecord]) -> dict[Any, list[str]]:
  """The modules of variables, by the names and shapes of their leaves."""
  by_module: dict[str, list[Any]] = {}
  for path in paths:
    if path.group == 'variable' and len(path.below) > 1:
      leaf = path.below[-1], leaves[path.path].shape
      by_module.setdefault('/'.join(path.below[:-1]), []).append(leaf)
  modules: dict[Any, list[str]] = {}
  for module, each in by_module.items():
    modules.setdefault(frozenset(each), []).append(module)
  return modules


def _either(pattern: str | None, paths: Iterable[str]) -> str | None:
  """A pattern for what a pattern matches, and for these paths, with any number in the place of a number."""
  each = sorted({re.sub(r'(?<![A-Za-z0-9])\d+', r'\\d+', re.escape(path)) for path in paths})
  listed = [f'^({"|".join(each)})$'] if len(each) > 1 else [f'^{path}$' for path in each]
  return '|'.join(filter(None, [pattern, *listed])) or None

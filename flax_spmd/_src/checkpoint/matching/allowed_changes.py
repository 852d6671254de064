"""Allowed changes: the differences between a checkpoint and its restore target that the caller permits.

Nothing is converted implicitly. Every other difference is an error, which names the change to allow.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd.errors import CheckpointError, did_you_mean, problems_text

Dtypes = Literal['keep', 'cast'] | Mapping[str, str]


@set_module('flax_spmd.checkpoint')
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Changes:
  """The differences between a checkpoint and its restore target that a restore may bridge.

  Each argument allows one kind of difference; by default, none is allowed. Mesh, rules, boxes, and the position
  of an optimizer state in its chain may always differ.

  Args:
    renames: replacements of regular expressions in saved paths. The first pattern found in a path
      applies. `{'^opt_state/1/ema/': 'params/'}` restores averages as parameters. `stacks` and `only` refer
      to renamed paths, `unused` to paths as saved.
    stacks: layers stacked in one module on one side, as by `nn.scan`, and in a module each on the other:
      `{'layers': 'layers_{}'}`, where `{}` stands for the layer's number. If names and shapes leave the
      stacked dimension open, add it: `{'layers': ('layers_{}', 0)}`. Optimizer state follows its parameters.
    axes: replacements of logical names whose meaning is unchanged, old to new.
    moved: logical name, or names, of dimensions that may change position, as when a scan's axis changes.
      Optimizer state and unnamed leaves of the same modules follow.
    dtypes: `'keep'` allows no cast, `'cast'` allows casts between floats that lose no digits. A mapping
      allows the casts that it lists, lossy or not: `{'float32': 'bfloat16'}`.
    missing: regular expression. Target leaves whose paths it matches may be missing from the checkpoint, and
      keep their own values.
    unused: regular expression. Saved leaves whose paths it matches may be left unused.
    only: path of the part to restore, such as `'params'`. The result is that part alone.

  Raises:
    CheckpointError: an argument is invalid.

  Example:
    >>> checkpoint.Changes(renames={'^enc/': 'encoder/'}, dtypes='cast')
    Changes(renames={'^enc/': 'encoder/'}, dtypes='cast')
    >>> layout = Layout({'data': 8})
    >>> checkpoint.save(tmp / 'enc', {'enc': {'w': jnp.ones(8, 'bfloat16')}}, layout=layout)
    >>> target = layout.abstract(lambda: {'encoder': {'w': jnp.zeros(8)}})
    >>> changes = checkpoint.Changes(renames={'^enc/': 'encoder/'}, dtypes='cast')
    >>> checkpoint.restore(tmp / 'enc', target, changes=changes)['encoder']['w'].dtype
    dtype('float32')
  """

  renames: tuple[tuple[str, str], ...]
  stacks: tuple[tuple[str, str | tuple[str, int]], ...]
  axes: tuple[tuple[str, str], ...]
  moved: tuple[str, ...]
  dtypes: Literal['keep', 'cast'] | tuple[tuple[str, str], ...]
  missing: str | None
  unused: str | None
  only: str | None

  def __init__(
    self,
    *,
    renames: Mapping[str, str] | None = None,
    stacks: Mapping[str, str | tuple[str, int]] | None = None,
    axes: Mapping[str, str] | None = None,
    moved: str | Iterable[str] = (),
    dtypes: Dtypes = 'keep',
    missing: str | None = None,
    unused: str | None = None,
    only: str | None = None,
  ):
    _check_types(renames, stacks, axes, moved, missing, unused, only)
    values = {
      'renames': tuple(dict(renames or ()).items()),
      'stacks': tuple(dict(stacks or ()).items()),
      'axes': tuple(dict(axes or ()).items()),
      'moved': (moved,) if isinstance(moved, str) else tuple(sorted(set(moved))),
      'dtypes': _dtypes(dtypes),
      'missing': missing,
      'unused': unused,
      'only': only.strip('/') if only else None,
    }
    for name, value in values.items():
      object.__setattr__(self, name, value)
    _check_patterns(self.renames, missing, unused)
    for stacked, single in self.stacks:
      _check_stack(stacked, single)

  def __repr__(self) -> str:
    texts = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value == getattr(NO_CHANGES, field.name):
        continue
      if field.name == 'moved' and len(value) == 1:
        value = value[0]
      elif field.name != 'moved' and isinstance(value, tuple):
        value = dict(value)
      texts.append(f'{field.name}={value!r}')
    return f'Changes({", ".join(texts)})'


def _check_types(
  renames: Any, stacks: Any, axes: Any, moved: Any, missing: Any, unused: Any, only: Any
) -> None:
  """Raises CheckpointError, listing every argument of the wrong type."""
  given = {'renames': renames, 'stacks': stacks, 'axes': axes}
  wrong = [f'{name}={value!r}' for name, value in given.items() if not _is_mapping(value)]
  if not _is_strings((moved,) if isinstance(moved, str) else moved):
    wrong.append(f'moved={moved!r}')
  optional = {'missing': missing, 'unused': unused, 'only': only}
  wrong += [f'{name}={value!r}' for name, value in optional.items() if not isinstance(value, str | None)]
  if wrong:
    raise CheckpointError(
      f'Changes(...) does not take {", ".join(wrong)}.\n'
      'Fix: renames, stacks and axes are dicts with strings as keys, moved is a name or several, and missing, '
      'unused and only are strings.'
    )


def _is_mapping(value: Any) -> bool:
  return value is None or (isinstance(value, (Mapping, tuple)) and _is_strings(dict(value)))


def _is_strings(values: Any) -> bool:
  return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)


def _check_patterns(renames: Iterable[tuple[str, str]], missing: str | None, unused: str | None) -> None:
  """Raises CheckpointError, listing every regular expression that cannot be searched for or replaced."""
  problems = [problem_of('renames', pattern, replaced=True) for pattern, _ in renames]
  problems += [problem_of('missing', missing or ''), problem_of('unused', unused or '')]
  found = [problem for problem in problems if problem is not None]
  if found:
    raise CheckpointError(problems_text(found))


def _check_stack(stacked: str, single: Any) -> None:
  pattern = single[0] if isinstance(single, tuple) else single
  if not isinstance(pattern, str) or pattern.count('{}') != 1:
    raise CheckpointError(
      f'stacks={{{stacked!r}: {single!r}}} has no {{}} for the number of a layer, or several.\n'
      f"Fix: write {{}} once, where the number goes: stacks={{{stacked!r}: '{stacked}_{{}}'}}."
    )


def _dtypes(dtypes: Any) -> Any:
  if isinstance(dtypes, (Mapping, tuple)):
    casts = dict(dtypes)
    try:
      return tuple((jnp.dtype(a).name, jnp.dtype(b).name) for a, b in casts.items()) or 'keep'
    except TypeError as error:
      raise CheckpointError(
        f'dtypes={casts!r} contains an unknown dtype: {error}.\n'
        "Fix: write dtypes={'float32': 'bfloat16'}."
      ) from error
  if dtypes not in ('keep', 'cast'):
    raise CheckpointError(
      f"dtypes={dtypes!r} is neither 'keep', 'cast' nor a mapping of dtypes.\n"
      "Fix: write dtypes='cast'; for casts that lose digits, list them: dtypes={'float32': 'bfloat16'}."
    )
  return dtypes


NO_CHANGES = Changes()


# -- decisions


def is_selected(changes: Changes, path: str) -> bool:
  """Whether a path is in the part to restore."""
  only = changes.only
  return only is None or path == only or path.startswith(f'{only}/')


def check_selection(changes: Changes, paths: Iterable[str]) -> None:
  """Raises CheckpointError if none of a checkpoint's paths is in the part to restore."""
  paths = [renamed(changes, path) for path in paths]
  if not any(is_selected(changes, path) for path in paths):
    tops = dict.fromkeys(path.partition('/')[0] for path in paths)
    raise CheckpointError(
      f'The checkpoint has no part {changes.only!r}; its parts are {", ".join(tops)}.'
      f'{did_you_mean(changes.only or "", tops)}\n'
      'Fix: pass Changes(only=...) with one of these parts, or a path inside one.'
    )


def renamed(changes: Changes, path: str) -> str:
  """A saved path after the first rename that applies to it."""
  for pattern, replacement in changes.renames:
    result, count = re.subn(pattern, replacement, path, count=1)
    if count:
      return result.strip('/')
  return path


def renamed_axes(changes: Changes, names: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
  """Saved logical names, replaced by the target's."""
  new = dict(changes.axes)
  return None if names is None else tuple(new.get(name, name) for name in names)


def may_be_missing(changes: Changes, path: str) -> bool:
  """Whether a target leaf may keep its own value."""
  return changes.missing is not None and bool(searcher(changes.missing)(path))


def may_be_unused(changes: Changes, path: str) -> bool:
  """Whether a saved leaf may be left unused."""
  return changes.unused is not None and bool(searcher(changes.unused)(path))


def may_cast(changes: Changes, saved: str, target: str) -> bool:
  """Whether a saved dtype may be cast to the target's."""
  if isinstance(changes.dtypes, tuple):
    return (saved, target) in changes.dtypes
  return changes.dtypes == 'cast' and is_lossless(saved, target)


def is_lossless(saved: str, target: str) -> bool:
  """Whether one float dtype can represent every value of another.

  Example:
    >>> is_lossless('bfloat16', 'float32'), is_lossless('float32', 'bfloat16')
    (True, False)
  """
  one, two = jnp.dtype(saved), jnp.dtype(target)
  if not (jnp.issubdtype(one, jnp.floating) and jnp.issubdtype(two, jnp.floating)):
    return False
  a, b = jnp.finfo(one), jnp.finfo(two)
  return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp - a.nmant >= b.minexp - b.nmant


class Stack(NamedTuple):
  """One entry of `Changes.stacks`: layers stacked in one module, and the same layers in a module each.

  Attributes:
    stacked: path of the stacked module, or its last parts: `decoder/layers`.
    single: path of a single layer's module, with `{}` for its number: `decoder/layers_{}`.
    axis: stacked dimension; None: found by names and shapes.
  """

  stacked: str
  single: str
  axis: int | None = None

  @property
  def name(self) -> str:
    """The logical name given to an unnamed stacked dimension: the name of the module."""
    return self.stacked.rpartition('/')[2]

  def split(self, path: str) -> tuple[str, str] | None:
    """The parts of a path before and after the stacked module; None for a path outside of it."""
    match = re.search(f'(?:^|/)({re.escape(self.stacked)})(?:/|$)', path)
    return (path[: match.start(1)], path[match.end(1) :]) if match else None

  def number(self, path: str) -> tuple[str, int] | None:
    """The stacked path and the layer number of a single layer's path; None for another path."""
    before, after = (re.escape(part) for part in self.single.split('{}'))
    match = re.search(f'(?:^|/)({before}(\\d+){after})(?:/|$)', path)
    if not match:
      return None
    return path[: match.start(1)] + self.stacked + path[match.end(1) :], int(match[2])

  def single_path(self, path: str, number: int) -> str:
    """The path of a single layer's leaf."""
    before, after = self.split(path) or ('', '')
    return before + self.single.format(number) + after


def stacks_of(changes: Changes) -> tuple[Stack, ...]:
  """The entries of `Changes.stacks`."""
  return tuple(
    Stack(stacked.strip('/'), pattern.strip('/'), axis)
    for stacked, single in changes.stacks
    for pattern, axis in [single if isinstance(single, tuple) else (single, None)]
  )

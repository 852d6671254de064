"""Allowed changes: the differences between a checkpoint and its restore target that the caller permits.

Nothing is converted implicitly. Every other difference is an error, which names the change to allow.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from flax_spmd._src.checkpoint.matching.arrangements import Arrangement
from flax_spmd._src.checkpoint.storage.skeleton import ROOT
from flax_spmd._src.public import public
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd._src.text import plural, shown, value_text
from flax_spmd.errors import CheckpointError, Problem, did_you_mean, problems_text

_MARK = re.compile(r'\{([^{}]*)\}')  # the place of a layer's number, or the names of the layers
Dtypes = Literal['keep', 'cast'] | Mapping[str, str]


@public('flax_spmd.checkpoint')
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Changes:
  """The differences between a checkpoint and its restore target that a restore may bridge.

  Each argument allows one kind of difference; by default, none is allowed. Mesh, rules, boxes, and the position
  of an optimizer state in its chain may always differ.

  Args:
    renames: replacements of regular expressions in saved paths. The first pattern found in a path
      applies. `{'^opt_state/1/ema/': 'params/'}` restores averages as parameters. Several replacements, in a list,
      restore one array to several paths, as for tied weights. The arguments below refer to renamed paths, except
      `unused`, which refers to paths as saved.
    rearranged: dimensions that are split, reordered or merged, by regular expression; the first one found in a path
      applies. `{'/kernel$': 'out in -> in out'}` transposes, `'(heads=12 head) embed -> embed heads head'` splits a
      dimension first. Sizes that the saved shape leaves open are given, as `heads=12`; a leading `...` stands for
      further dimensions on both sides. It precedes `stacks`.
    stacks: layers stacked in one module on one side, as by `nn.scan`, and in a module each on the other:
      `{'layers': 'layers_{}'}`, where `{}` stands for the layer's number. Names in its place,
      `{'qkv': '{query,key,value}'}`, are those of parts that one array holds together; numbers, `'layers/{1,3,5}'`, are those
      of layers that do not count from 0. If names and shapes leave the
      stacked dimension open, add it: `{'layers': ('layers_{}', 0)}`. Several stacks of one array apply in order; the
      dimension of all but the last is then the first, unless it is given. Optimizer state follows its parameters.
    axes: replacements of logical names whose meaning is unchanged, old to new.
    moved: logical name, or names, of dimensions that may change position, as when a scan's axis changes.
      Optimizer state and unnamed leaves of the same modules follow.
    resized: logical name, or names, of dimensions that may have another size, as when a model grows: more layers, a larger
      vocabulary. The part that both sides have, from the first index on, is restored; the target keeps its own values of
      the rest. Optimizer state and unnamed leaves of the same modules follow.
    dtypes: `'keep'` allows no cast, `'cast'` allows casts between floats that lose no digits. A mapping
      allows the casts that it lists, lossy or not: `{'float32': 'bfloat16'}`.
    missing: regular expression. Target leaves whose paths it matches may be missing from the checkpoint, and
      keep their own values.
    unused: regular expression. Saved leaves whose paths it matches may be left unused. A leaf that `missing` and `unused`
      match may have another shape, as the head for other classes: the target keeps its own value.
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

  renames: tuple[tuple[str, str | tuple[str, ...]], ...]
  rearranged: tuple[tuple[str, str], ...]
  stacks: tuple[tuple[str, str | tuple[str, int]], ...]
  axes: tuple[tuple[str, str], ...]
  moved: tuple[str, ...]
  resized: tuple[str, ...]
  dtypes: Literal['keep', 'cast'] | tuple[tuple[str, str], ...]
  missing: str | None
  unused: str | None
  only: str | None

  def __init__(
    self,
    *,
    renames: Mapping[str, str | Sequence[str]] | None = None,
    rearranged: Mapping[str, str] | None = None,
    stacks: Mapping[str, str | tuple[str, int]] | None = None,
    axes: Mapping[str, str] | None = None,
    moved: str | Collection[str] = (),
    resized: str | Collection[str] = (),
    dtypes: Dtypes = 'keep',
    missing: str | None = None,
    unused: str | None = None,
    only: str | None = None,
  ):
    mappings = {'renames': renames, 'rearranged': rearranged, 'stacks': stacks, 'axes': axes}
    of_names = {'moved': _several(moved), 'resized': _several(resized)}
    _check_types(mappings, of_names)
    values = {
      'renames': tuple((old, _replacement(new)) for old, new in dict(renames or ()).items()),
      'rearranged': tuple(dict(rearranged or ()).items()),
      'stacks': tuple(dict(stacks or ()).items()),
      'axes': tuple(dict(axes or ()).items()),
      **{name: tuple(sorted(set(value))) for name, value in of_names.items()},
      'dtypes': _dtypes(dtypes),
      'missing': missing,
      'unused': unused,
      'only': only.strip('/') if only else None,
    }
    for name, value in values.items():
      object.__setattr__(self, name, value)
    _check_patterns(self, missing, unused)
    _check_arrangements(self.rearranged)
    for stacked, single in self.stacks:
      _check_stack(stacked, single)

  def __repr__(self) -> str:
    texts = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value == getattr(NO_CHANGES, field.name):
        continue
      if field.name in ('moved', 'resized'):
        value = value[0] if len(value) == 1 else value
      elif isinstance(value, tuple):
        value = dict(value)
      texts.append(f'{field.name}={value!r}')
    return f'Changes({", ".join(texts)})'


def _several(names: Any) -> Any:
  """The names of an argument. An iterator stays as it is, since it may have no end, and is then refused."""
  if isinstance(names, str):
    return (names,)
  return tuple(names) if isinstance(names, Collection) else names


def _check_types(mappings: Mapping[str, Any], of_names: Mapping[str, Any]) -> None:
  """Raises CheckpointError, listing every argument of the wrong type."""
  wrong = [f'{name}={value_text(value)}' for name, value in mappings.items() if not _is_mapping(value)]
  renames = mappings['renames']
  if _is_mapping(renames) and not all(map(_is_replacement, dict(renames or ()).values())):
    wrong.append(f'renames={value_text(renames)}')
  axes = mappings['axes']
  if _is_mapping(axes) and not is_strings(dict(axes or ()).values()):
    wrong.append(f'axes={value_text(axes)}')
  wrong += [f'{name}={value_text(value)}' for name, value in of_names.items() if not is_strings(value)]
  if wrong:
    raise CheckpointError(
      f'Changes(...) does not take {", ".join(wrong)}.\n'
      'Fix: renames, rearranged, stacks and axes are dicts of strings by name, and moved and resized are a name '
      'or a list of names.'
    )


def _replacement(new: Any) -> str | tuple[str, ...]:
  """A replacement, or several; one in a list is one."""
  several = (new,) if isinstance(new, str) else tuple(new)
  return several[0] if len(several) == 1 else several


def _is_replacement(new: Any) -> bool:
  return isinstance(new, str) or (isinstance(new, (list, tuple)) and is_strings(new) and bool(new))


def _is_mapping(value: Any) -> bool:
  return value is None or (_has_pairs(value) and is_strings(dict(value)))


def _has_pairs(value: Any) -> bool:
  """Whether this is a mapping, or a tuple of pairs; two letters are none."""
  if isinstance(value, Mapping):
    return True
  return isinstance(value, tuple) and all(
    isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
  )


def is_strings(values: Any) -> bool:
  """Whether this is a collection of strings. An iterator is none: it may have no end."""
  return isinstance(values, Collection) and all(isinstance(value, str) for value in values)


def _check_patterns(changes: Changes, missing: str | None, unused: str | None) -> None:
  """Raises CheckpointError, listing every regular expression that cannot be searched for or replaced."""
  problems = [problem_of('renames', pattern, replaced=True) for pattern, _ in changes.renames]
  problems += [problem_of('rearranged', pattern) for pattern, _ in changes.rearranged]
  problems += [problem_of('missing', missing or ''), problem_of('unused', unused or '')]
  found = [problem for problem in problems if problem is not None]
  found += [] if found else _wrong_templates(changes.renames)
  if found:
    raise CheckpointError(problems_text(found))


def _wrong_templates(renames: Iterable[tuple[str, Any]]) -> Iterable[Problem]:
  for pattern, new in renames:
    for template in (new,) if isinstance(new, str) else new:
      try:
        re.sub(pattern, template, '')
      except (re.error, IndexError) as error:
        yield Problem(
          f'renames: {value_text(template)} cannot replace {value_text(pattern)}: {error}.',
          r'refer to its groups as \1, \2 or \g<name>, and write \\ for one backslash.',
        )


def _check_arrangements(rearranged: Iterable[tuple[str, str]]) -> None:
  """Raises CheckpointError, listing every text that is not an arrangement."""
  problems = []
  for pattern, text in rearranged:
    try:
      Arrangement(text) if isinstance(text, str) else _refuse('it is not a text')
    except ValueError as error:
      fix = "write the saved dimensions, an arrow, and the new ones: 'out in -> in out'."
      problems.append(
        Problem(
          f'rearranged: {value_text(text)} for {value_text(pattern)} is not an arrangement: {error}.',
          fix,
        )
      )
  if problems:
    raise CheckpointError(problems_text(problems))


def _refuse(reason: str) -> None:
  raise ValueError(reason)


def _check_stack(stacked: str, single: Any) -> None:
  pattern, axis = single if isinstance(single, tuple) and len(single) == 2 else (single, None)
  if not isinstance(pattern, str) or not (axis is None or type(axis) is int):
    raise CheckpointError(
      f'stacks={{{value_text(stacked)}: {value_text(single)}}} is neither a path nor a path and a dimension.\n'
      f"Fix: write stacks={{{value_text(stacked)}: '{stacked}_{{}}'}}, or stacks={{{value_text(stacked)}: ('{stacked}_{{}}', 0)}}."
    )
  marks = _MARK.findall(pattern)
  if len(marks) != 1:
    raise CheckpointError(
      f'stacks={{{value_text(stacked)}: {value_text(single)}}} has no {{}} for the number of a layer, or several.\n'
      f"Fix: write {{}} once, where the number goes: stacks={{{value_text(stacked)}: '{stacked}_{{}}'}}."
    )
  labels = [label.strip() for label in marks[0].split(',')]
  fewest = 1 if labels[0].isdecimal() else 2  # there may be one layer
  if marks[0] and (
    len(set(labels)) < max(len(labels), fewest) or any(not x or '/' in x for x in labels)
  ):
    raise CheckpointError(
      f'stacks={{{value_text(stacked)}: {value_text(single)}}} does not name several different parts.\n'
      f"Fix: write their names in order: stacks={{{value_text(stacked)}: '{{query,key,value}}'}}."
    )


def _dtypes(dtypes: Any) -> Any:
  if _has_pairs(dtypes):
    casts = dict(dtypes)
    try:
      return tuple((jnp.dtype(a).name, jnp.dtype(b).name) for a, b in casts.items()) or 'keep'
    except TypeError as error:
      raise CheckpointError(
        f'dtypes={value_text(casts)} contains an unknown dtype: {shown(error)}.\n'
        "Fix: write dtypes={'float32': 'bfloat16'}."
      ) from error
  if not isinstance(dtypes, str) or dtypes not in ('keep', 'cast'):
    raise CheckpointError(
      f"dtypes={value_text(dtypes)} is neither 'keep', 'cast' nor a mapping of dtypes.\n"
      "Fix: write dtypes='cast'; for casts that lose digits, list them: dtypes={'float32': 'bfloat16'}."
    )
  return dtypes


NO_CHANGES = Changes()


def check_is_changes(changes: Any) -> None:
  """Raises `CheckpointError` if this is not a `Changes`."""
  if not isinstance(changes, Changes):
    raise CheckpointError(
      f"changes={value_text(changes)} is not a Changes.\nFix: write changes=Changes(renames={{'old': 'new'}}), or leave it out."
    )


def check_without_target(changes: Any, function: str, *takes: str) -> None:
  """Raises `CheckpointError`, listing every change that needs a target, which a function has not; it takes the named ones."""
  check_is_changes(changes)
  fields = vars(changes).items()
  others = [name for name, value in fields if name not in takes and value != getattr(NO_CHANGES, name)]
  if others:
    raise CheckpointError(
      f'{function} has no target, so Changes({"=..., ".join(others)}=...) cannot apply.\n'
      f'Fix: pass only {", ".join(takes[:-1])} and {takes[-1]}.'
    )


# -- decisions


def is_selected(changes: Changes, path: str) -> bool:
  """Whether a path is in the part to restore."""
  only = changes.only
  return only is None or path == only or path.startswith(f'{only}/')


def check_selection(changes: Changes, paths: Iterable[str]) -> None:
  """Raises CheckpointError if none of a checkpoint's paths is in the part to restore."""
  paths = [new for path in paths for new in renamed(changes, path)]
  if changes.only is not None and not any(is_selected(changes, path) for path in paths):
    tops = dict.fromkeys(path.partition('/')[0] for path in paths)
    raise CheckpointError(
      f'The checkpoint has no part {value_text(changes.only)}; its parts are {", ".join(tops)}.'
      f'{did_you_mean(changes.only, tops)}\n'
      'Fix: pass Changes(only=...) with one of these parts, or a path inside one.'
    )


def renamed(changes: Changes, path: str) -> tuple[str, ...]:
  """A saved path after the first rename that applies to it: one path, or several."""
  for pattern, new in changes.renames:
    several = (new,) if isinstance(new, str) else new
    results = [re.subn(pattern, replacement, path, count=1) for replacement in several]
    if results[0][1]:
      return tuple('/'.join(filter(None, result.split('/'))) or ROOT for result, _ in results)
  return (path,)


def arrangement_of(changes: Changes, path: str) -> Arrangement | None:
  """The arrangement of the saved leaf with this renamed path; None if it stays as it is."""
  for pattern, text in changes.rearranged:
    if searcher(pattern)(path):
      return _arrangement(text)
  return None


_arrangement = functools.lru_cache(maxsize=256)(Arrangement)


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


class LayerStack(NamedTuple):
  """One entry of `Changes.stacks`: layers stacked in one module, and the same layers in a module each.

  Attributes:
    stacked: path of the stacked module, or its last parts: `decoder/layers`.
    single: path of a single layer's module, with `{}` for its number or its name: `decoder/layers_{}`.
    axis: stacked dimension; None: found by names and shapes.
    labels: names of the layers, in order; None for layers with numbers.
  """

  stacked: str
  single: str
  axis: int | None = None
  labels: tuple[str, ...] | None = None

  @property
  def name(self) -> str:
    """The logical name given to an unnamed stacked dimension: the name of the module."""
    return self.stacked.rpartition('/')[2]

  @property
  def text(self) -> str:
    """The single layers' path as it was written."""
    return (
      self.single if self.labels is None else self.single.replace('{}', f'{{{",".join(self.labels)}}}')
    )

  def split(self, path: str) -> tuple[str, str] | None:
    """The parts of a path before and after the stacked module; None for a path outside of it."""
    match = re.search(f'(?:^|/)({re.escape(self.stacked)})(?:/|$)', path)
    return (path[: match.start(1)], path[match.end(1) :]) if match else None

  def number(self, path: str) -> tuple[str, int] | None:
    """The stacked path and the layer number of a single layer's path; None for another path."""
    before, after = (re.escape(part) for part in self.single.split('{}'))
    layer = '\\d+' if self.labels is None else '|'.join(map(re.escape, self.labels))
    match = re.search(f'(?:^|/)({before}({layer}){after})(?:/|$)', path)
    if not match:
      return None
    number = int(match[2]) if self.labels is None else self.labels.index(match[2])
    return path[: match.start(1)] + self.stacked + path[match.end(1) :], number

  def single_path(self, path: str, number: int) -> str:
    """The path of a single layer's leaf."""
    before, after = self.split(path) or ('', '')
    layer = number if self.labels is None else self.labels[number]
    return before + self.single.replace('{}', str(layer)) + after

  def given_axis(self, rank: int) -> int | None:
    """The given stacked dimension, counted from the first, of leaves of this rank; None if they have no such dimension."""
    return self.axis % rank if self.axis is not None and -rank <= self.axis < rank else None

  def axis_by_names(self, names: tuple[Any, ...] | None) -> int:
    """The stacked dimension of a leaf with these names: the one that is named like the module, or the first."""
    names = names or ()
    return names.index(self.name) if names.count(self.name) == 1 else 0

  def axis_problem(self, path: str, rank: int) -> Problem:
    """The problem of a leaf that has no such dimension."""
    text = f'{path}: it has {plural(rank, "dimension")} where {self.stacked} is stacked, and stacks gives dimension {self.axis}.'
    choice = f'Changes(stacks={{{self.stacked!r}: {self.text!r}}})'
    return Problem(text, f'give a dimension that all leaves of {self.stacked} have, or none: {choice}.')

  def is_layer(self, number: int) -> bool:
    """Whether there may be a layer of this number."""
    return self.labels is None or number < len(self.labels)


def stacks_of(changes: Changes) -> tuple[LayerStack, ...]:
  """The entries of `Changes.stacks`."""
  return tuple(
    _stack(stacked.strip('/'), pattern.strip('/'), axis)
    for stacked, single in changes.stacks
    for pattern, axis in [single if isinstance(single, tuple) else (single, None)]
  )


def _stack(stacked: str, pattern: str, axis: int | None) -> LayerStack:
  (mark,) = _MARK.findall(pattern)
  labels = tuple(label.strip() for label in mark.split(',')) if mark else None
  return LayerStack(stacked, _MARK.sub('{}', pattern), axis, labels)

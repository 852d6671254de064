"""Differences: every difference between a checkpoint and its target that no change allows.

Each is reported with the `Changes` that would allow it, if there is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_spmd._src.checkpoint.matching.allowed_changes import (
  Changes,
  is_lossless,
  may_be_missing,
  may_be_unused,
  may_cast,
  renamed,
  renamed_axes,
  stacks_of,
)
from flax_spmd._src.checkpoint.matching.matcher import SHOW, Matched
from flax_spmd._src.checkpoint.matching.optimizer_states import state_fields
from flax_spmd._src.checkpoint.matching.routes import Route, Side, nodes, record_of
from flax_spmd._src.checkpoint.storage.record import (
  NUMBERS,
  LeafRecord,
  dtype_of,
  is_key,
  key_implementation,
  raw_keys,
)
from flax_spmd._src.rules.path_patterns import searcher
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem, did_you_mean

_GUESSES = 40  # each guess is slow
_LEAVE_OUT = "to leave it out, pass Changes(unused='regex')."


def differences(saved: Side, target: Side, matched: Matched, changes: Changes) -> list[Problem]:
  """All differences, those of whole leaves first.

  Args:
    saved: leaves of the checkpoint.
    target: leaves of the target.
    matched: the two sides, matched.
    changes: differences that are allowed.
  """
  missing = [path for path in matched.missing if not may_be_missing(changes, path)]
  unused = [path for path in matched.unused if not may_be_unused(changes, path)]
  fix = (
    _root_fix(missing, unused, saved)
    or _level_fix(missing, saved, target)
    or _box_fix(missing, saved)
    or _tree_fix(missing, unused, saved, target, changes)
  )
  problems = list(matched.problems)
  for number, path in enumerate(missing):
    guess = _guess(path, target, saved, unused) if number < _GUESSES else ''
    problems.append(
      Problem(f'{path}: in the target ({_described(path, target)}), not in the checkpoint.{guess}', fix)
    )
  for path in unused:
    leaf = saved.leaves[path]
    if leaf.is_number and leaf.dtype not in NUMBERS:
      problems.append(Problem(f'{path}: {leaf}, which no target has.', _LEAVE_OUT))
    else:
      text = f'{path}: in the checkpoint ({_described(path, saved)}), not in the target.'
      problems.append(Problem(text, fix))
  for path, route in matched.routes.items():
    problems += _of_leaf(path, route, saved, target.leaves[path], changes)
  return [*problems, *_without_effect(saved, target, changes)] if problems else problems


def _without_effect(saved: Side, target: Side, changes: Changes) -> Iterator[Problem]:
  """Changes that apply to nothing. If there are differences, one of these may be mistyped."""
  sides = saved.leaves, target.leaves
  for stack in stacks_of(changes):
    if not any(stack.split(path) or stack.number(path) for side in sides for path in side):
      text = f'stacks: no path contains {stack.stacked!r} or {stack.text!r}.'
      yield Problem(text, SHOW)
  for pattern, _ in changes.renames if changes.only is not None else ():  # else it is reported anyway
    if not any(re.search(pattern, path) for path in saved.leaves):
      yield Problem(f'renames: {value_text(pattern)} matches no path of {changes.only}.', SHOW)
  paths = {new for path in saved.leaves for new in renamed(changes, path)}
  for pattern, _ in changes.rearranged:
    if not any(map(searcher(pattern), paths)):
      yield Problem(f'rearranged: {value_text(pattern)} matches no path of the checkpoint.', SHOW)
  names = {name for side in sides for leaf in side.values() for name in leaf.names or ()}
  texts = {name for name in names if isinstance(name, str)}
  for argument, given in (
    ('moved', changes.moved),
    ('resized', changes.resized),
    ('axes', [old for old, _ in changes.axes]),
  ):
    for name in given:
      if name not in texts:
        yield Problem(
          f'{argument}: no dimension is named {value_text(name)}.{did_you_mean(name, texts)}', SHOW
        )


# -- whole leaves


def _described(path: str, side: Side) -> str:
  """`float32[8,4] of ScaleByAdamState`."""
  kind = _state_kind(path, side)
  return f'{side.leaves[path]} of {kind}' if kind else str(side.leaves[path])


def _state_kind(path: str, side: Side) -> str | None:
  """The class name of the optimizer state that a leaf belongs to."""
  field = state_fields([path], side.kinds).get(path)
  return field.kind if field else None


def _guess(path: str, target: Side, saved: Side, unused: Sequence[str]) -> str:
  """A suggestion for a missing leaf's old path, preferably one of the same shape and dtype."""
  kind = _state_kind(path, target)
  others = [old for old in unused if old != path and _state_kind(old, saved) == kind]
  alike = [old for old in others if saved.leaves[old][:2] == target.leaves[path][:2]]
  return did_you_mean(path, alike or others)


def _root_fix(missing: Sequence[str], unused: Sequence[str], saved: Side) -> str | None:
  """The fix if all missing leaves are in one part of the checkpoint."""
  if not missing:
    return None
  for path in unused:
    root = path.removesuffix(missing[0])
    if root != path and root.endswith('/') and all(root + other in saved.leaves for other in missing):
      return f'the target is a part of the saved state: pass Changes(only={root.rstrip("/")!r}).'
  return None


def _level_fix(missing: Sequence[str], saved: Side, target: Side) -> str | None:
  """The fix if the target has one key above the saved tree, such as the name of an item of Orbax."""
  key, *others = {path.partition('/')[0] for path in target.leaves} or ['']
  below = {path.partition('/')[2] for path in missing}
  is_saved = below <= {path.removesuffix('/value') for path in saved.leaves}
  if others or not below or not is_saved or len(missing) < len(target.leaves):
    return None
  return f'the checkpoint has no level {key!r}: restore the part of the target that is below it.'


def _box_fix(missing: Sequence[str], saved: Side) -> str | None:
  """The fix if the checkpoint holds the missing leaves inside boxes, as other libraries save them."""
  if missing and all(f'{path}/value' in saved.leaves for path in missing):
    return "the checkpoint was saved with its boxes: pass Changes(renames={'/value$': ''})."
  return None


def _tree_fix(
  missing: Sequence[str], unused: Sequence[str], saved: Side, target: Side, changes: Changes
) -> str:
  single = {path: target.leaves[path] for path in missing}
  stacked = {path: saved.leaves[path] for path in unused}
  stack = None if changes.stacks else _stack_of(single, stacked) or _stack_of(stacked, single)
  if stack is not None:
    return (
      'layers are stacked on one side, single on the other: '
      f'pass Changes(stacks={{{stack[0]!r}: {stack[1]!r}}}).'
    )
  parts = []
  if missing and unused:
    parts.append("for renamed leaves, pass Changes(renames={'old': 'new'})")
  if missing:
    parts.append(
      "to keep the target's values of leaves that were not saved, pass Changes(missing='regex')"
    )
  if unused:
    parts.append("to leave saved leaves out, pass Changes(unused='regex')")
  return '; '.join(['restore into a state of the model and optimizer that was saved', *parts]) + '.'


def _stack_of(
  single: Mapping[str, LeafRecord], stacked: Mapping[str, LeafRecord]
) -> tuple[str, str] | None:
  """`('layers', 'layers_{}')`, if a leaf of `layers_0` has a counterpart in `layers` with one more dimension."""
  for path, leaf in single.items():
    for match in re.finditer(r'(?:^|/)([^/]*?)(_?)(\d+)(?=/|$)', path):
      whole = stacked.get(path[: match.start(1)] + match[1] + path[match.end() :])
      if match[1] and whole is not None and len(whole.shape) == len(leaf.shape) + 1:
        return match[1], f'{match[1]}{match[2]}{{}}'
  return None


# -- one leaf


def _of_leaf(
  path: str, route: Route, saved: Side, target: LeafRecord, changes: Changes
) -> Iterator[Problem]:
  """The differences between a target leaf and its converted sources."""
  for node in nodes(route):
    leaves = [(part.sources[0], record_of(part, saved.leaves)) for part in node.operands]
    first, one = leaves[0]
    for source, leaf in leaves[1:]:
      if leaf[:2] != one[:2] or not _agree(leaf.names, one.names):
        text = f'{path}: {source} ({leaf}) differs from {first} ({one}).'
        yield Problem(
          text, 'layers that differ cannot be stacked; save them with equal shapes and names.'
        )
  converted = record_of(route, saved.leaves)
  names = renamed_axes(changes, converted.names)
  if not _agree(names, target.names):
    yield _other_names(path, converted, names or (), target)
  elif is_key(converted) != is_key(target):
    text = f'{path}: {converted} in the checkpoint, {target} in the target.'
    yield Problem(text, _key_fix(converted, target))
  elif converted.shape != target.shape:
    as_many = math.prod(converted.shape) == math.prod(target.shape) > 1
    fix = (
      _ARRANGED_FIX
      if as_many and converted.names is None and not _has_names(saved)
      else _shape_fix(names, converted, target)
    )
    yield Problem(f'{path}: {converted} in the checkpoint, {target} in the target.', fix)
  elif converted.dtype != target.dtype:
    yield from _other_dtype(path, converted, target, changes)


def _shape_fix(names: tuple[Any, ...] | None, converted: LeafRecord, target: LeafRecord) -> str:
  """The fix of another shape; if only named dimensions have another size, the part that both sides have may be restored."""
  if len(converted.shape) != len(target.shape):
    return _LEAF_FIX
  unnamed = (None,) * len(target.shape)
  each = zip(converted.shape, target.shape, names or unnamed, target.names or unnamed, strict=True)
  resized = [one if two is None else two for a, b, one, two in each if a != b]
  if None in resized:
    return _LEAF_FIX
  given = Changes(resized=tuple(map(str, resized)))
  return f'{_SIZES}restore the part that both have: {given!r}; or {_KEEP}'


def _has_names(side: Side) -> bool:
  """Whether any leaf has names, as in checkpoints of this package; others may have other dimensions."""
  return any(leaf.names is not None for leaf in side.leaves.values())


def _key_fix(converted: LeafRecord, target: LeafRecord) -> str:
  """The fix of numbers that are not those of the keys on the other side."""
  keys = converted if is_key(converted) else target
  raw = raw_keys(keys._replace(shape=()))
  return (
    f'keys of {key_implementation(keys.dtype)} are the numbers {raw} each, and keep their bits only in an array of '
    'that implementation; create the key of the target as it was created for the save, with jax.random.key(..., impl=...).'
  )


def _agree(names: tuple[Any, ...] | None, target: tuple[Any, ...] | None) -> bool:
  """Whether the names are compatible: an unnamed dimension agrees with every name."""
  if names is None or target is None or len(names) != len(target):
    return True
  return all(None in (a, b) or a == b for a, b in zip(names, target, strict=True))


def _other_names(
  path: str, converted: LeafRecord, names: tuple[Any, ...], target: LeafRecord
) -> Problem:
  others = target.names or ()
  text = (
    f'{path}: {converted._replace(names=names).named} in the checkpoint, {target.named} in the target.'
  )
  if sorted(map(str, names)) == sorted(map(str, others)):
    moving = [name for name in names if _rest(names, name) == _rest(others, name)] or list(names)
    fix = f"to move the dimension to the target's position, pass Changes(moved={moving[0]!r})"
    return Problem(text, f'{fix}; if a name was wrong, pass Changes(axes={{old: new}}).')
  changed = {a: b for a, b in zip(names, others, strict=True) if a != b and None not in (a, b)}
  return Problem(
    text,
    f'if the names mean the same, pass Changes(axes={changed!r}); if not, correct the model.',
  )


def _rest(names: tuple[Any, ...], name: Any) -> list[Any]:
  return [other for other in names if other != name]


def _other_dtype(
  path: str, converted: LeafRecord, target: LeafRecord, changes: Changes
) -> Iterator[Problem]:
  text = f'{path}: {converted} in the checkpoint, {target} in the target.'
  if converted.is_number or target.is_number:
    yield from _of_number(path, converted, target, text)
  elif is_key(converted):
    key = f'jax.random.key(..., impl={key_implementation(converted.dtype)!r})'
    yield Problem(text, f'create the key of the target as that of the save, with {key}.')
  elif not may_cast(changes, converted.dtype, target.dtype):
    if is_lossless(converted.dtype, target.dtype):
      yield Problem(text, "to cast without loss, pass Changes(dtypes='cast').")
    else:
      cast = f'Changes(dtypes={{{converted.dtype!r}: {target.dtype!r}}})'
      yield Problem(text, f'this cast can lose digits; to allow it, pass {cast}.')


def _of_number(path: str, converted: LeafRecord, target: LeafRecord, text: str) -> Iterator[Problem]:
  """A Python number fits into an array of its kind that can represent it, and vice versa."""
  if _kind(converted) != _kind(target) or (converted.is_number and converted.dtype not in NUMBERS):
    yield Problem(text, _LEAF_FIX)
  elif (
    converted.value is not None and not target.is_number and not _holds(target.dtype, converted.value)
  ):
    yield Problem(
      f'{path}: {converted.value} does not fit into {target}.', 'give the target a wider dtype.'
    )


def _holds(dtype: str, value: Any) -> bool:
  """Whether a dtype can represent a Python number. A float may be rounded to float32."""
  if isinstance(value, bool):
    return True
  if isinstance(value, int):
    limits = jnp.iinfo(dtype_of(dtype))
    return int(limits.min) <= value <= int(limits.max)
  with np.errstate(over='ignore'):
    rounded = float(np.asarray(value).astype(dtype_of(dtype)))
  wide = jnp.finfo(dtype_of(dtype)).nmant >= 23
  return value != value or rounded == value or (wide and math.isfinite(rounded))


def _kind(leaf: LeafRecord) -> str:
  name = leaf.dtype.removeprefix('python.').rstrip('0123456789')
  return {'uint': 'int', 'bfloat': 'float'}.get(name, name)


_ARRANGED_FIX = (
  'give the model the sizes that it was saved with; if dimensions are in another order, split or merged, pass '
  "Changes(rearranged={'regex': 'out in -> in out'})."
)
_SIZES = 'give the model the sizes and dtypes that it was saved with; or '
_KEEP = "keep the target's value of another shape: Changes(missing='regex', unused='regex')."
_LEAF_FIX = _SIZES + _KEEP

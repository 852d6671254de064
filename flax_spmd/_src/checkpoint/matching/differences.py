"""Differences: everything in which a checkpoint and a target differ and no conversion was asked for.

Each is told with the argument of `restore` that would cover it, if there is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_spmd._src.checkpoint.matching.allowed_changes import Conversion, is_lossless
from flax_spmd._src.checkpoint.matching.matcher import Matched
from flax_spmd._src.checkpoint.matching.optimizer_states import places
from flax_spmd._src.checkpoint.matching.routes import Route, Side, after
from flax_spmd._src.checkpoint.storage.record import Leaf, dtype_of
from flax_spmd.errors import Problem, did_you_mean

_GUESSES = 40  # looking for what was meant takes a while


def differences(saved: Side, wanted: Side, matched: Matched, conversion: Conversion) -> list[Problem]:
  """All problems of a match, those of whole leaves first."""
  lacking = [path for path in matched.lacking if not conversion.keeps(path)]
  extra = [path for path in matched.extra if not conversion.leaves_out(path)]
  fix = (
    _root_fix(lacking, extra, saved)
    or _box_fix(lacking, saved)
    or _tree_fix(lacking, extra, saved, wanted, conversion)
  )
  found = list(matched.problems)
  for number, path in enumerate(lacking):
    guess = _guess(path, wanted, saved, extra) if number < _GUESSES else ''
    found.append(
      Problem(f'{path}: in the target ({_what(path, wanted)}), not in the checkpoint.{guess}', fix)
    )
  for path in extra:
    found.append(Problem(f'{path}: in the checkpoint ({_what(path, saved)}), not in the target.', fix))
  for path, route in matched.routes.items():
    found += _of_leaf(path, route, saved, wanted.leaves[path], conversion)
  return [*found, *_idle(saved, wanted, conversion)] if found else found


def _idle(saved: Side, wanted: Side, conversion: Conversion) -> Iterator[Problem]:
  """Arguments that are about nothing: where something does not fit, one of them may be mistyped."""
  sides = saved.leaves, wanted.leaves
  for stack in conversion.stacks:
    if not any(stack.split(path) or stack.number(path) for side in sides for path in side):
      yield Problem(f'stacks: no path has {stack.stacked!r} in it, nor {stack.single!r}.', _LOOK)
  names = {name for side in sides for leaf in side.values() for name in leaf.names or ()}
  texts = {name for name in names if isinstance(name, str)}
  for argument, given in (
    ('moved', sorted(conversion.moved)),
    ('axes', [old for old, _ in conversion.axes]),
  ):
    for name in given:
      if name not in texts:
        yield Problem(f'{argument}: no dimension is called {name!r}.{did_you_mean(name, texts)}', _LOOK)


_LOOK = 'look paths and names up with flax-spmd checkpoint show.'


# -- whole leaves


def _what(path: str, side: Side) -> str:
  """`float32[8,4] of ScaleByAdamState`."""
  kind = _state_kind(path, side)
  return f'{side.leaves[path]} of {kind}' if kind else str(side.leaves[path])


def _state_kind(path: str, side: Side) -> str | None:
  """The class of the optimizer's state that a leaf is in."""
  place = places([path], side.kinds).get(path)
  return place.kind if place else None


def _guess(path: str, wanted: Side, saved: Side, extra: Sequence[str]) -> str:
  """What it may have been called: first of all what has its shape and dtype."""
  kind = _state_kind(path, wanted)
  others = [old for old in extra if old != path and _state_kind(old, saved) == kind]
  alike = [old for old in others if saved.leaves[old][:2] == wanted.leaves[path][:2]]
  return did_you_mean(path, alike or others)


def _root_fix(lacking: Sequence[str], extra: Sequence[str], saved: Side) -> str | None:
  """What to say if all that is lacking is there, below a part of the checkpoint."""
  if not lacking:
    return None
  for path in extra:
    root = path.removesuffix(lacking[0])
    if root != path and root.endswith('/') and all(root + other in saved.leaves for other in lacking):
      return f'the target is a part of what was saved: pass only={root.rstrip("/")!r}.'
  return None


def _box_fix(lacking: Sequence[str], saved: Side) -> str | None:
  """What to say if the checkpoint has what is lacking in boxes, as others save them."""
  if lacking and all(f'{path}/value' in saved.leaves for path in lacking):
    return "the checkpoint was saved with its boxes; to look into them, pass renames={'/value$': ''}."
  return None


def _tree_fix(
  lacking: Sequence[str], extra: Sequence[str], saved: Side, wanted: Side, conversion: Conversion
) -> str:
  single = {path: wanted.leaves[path] for path in lacking}
  stacked = {path: saved.leaves[path] for path in extra}
  stack = None if conversion.stacks else _stack_of(single, stacked) or _stack_of(stacked, single)
  if stack is not None:
    return (
      f'one side has stacked layers, the other single ones: pass stacks={{{stack[0]!r}: {stack[1]!r}}}.'
    )
  parts = []
  if lacking and extra:
    parts.append("for leaves that were renamed, pass renames={'old': 'new'}")
  if lacking:
    parts.append("to keep the target's own values for what is not saved, missing='regex'")
  if extra:
    parts.append("to leave saved leaves out, unused='regex'")
  return '; '.join(['restore into a state of the model and optimizer that was saved', *parts]) + '.'


def _stack_of(single: Mapping[str, Leaf], stacked: Mapping[str, Leaf]) -> tuple[str, str] | None:
  """`('layers', 'layers_{}')`, if some paths have `layers_0` where others have `layers`, of one more dimension."""
  for path, leaf in single.items():
    for found in re.finditer(r'(?:^|/)([^/]*?)(_?)(\d+)(?=/|$)', path):
      whole = stacked.get(path[: found.start(1)] + found[1] + path[found.end() :])
      if found[1] and whole is not None and len(whole.shape) == len(leaf.shape) + 1:
        return found[1], f'{found[1]}{found[2]}{{}}'
  return None


# -- one leaf


def _of_leaf(
  path: str, route: Route, saved: Side, wanted: Leaf, conversion: Conversion
) -> Iterator[Problem]:
  """What does not fit between a wanted leaf and what it is made of."""
  leaves = [saved.leaves[source] for source in route.sources]
  for source, leaf in zip(route.sources, leaves, strict=True):
    if leaf[:2] != leaves[0][:2] or not _agree(leaf.names, leaves[0].names):
      text = f'{path}: {source} ({leaf}) is not like {route.sources[0]} ({leaves[0]}).'
      yield Problem(text, 'layers that differ cannot be stacked; make them alike first.')
  made = after(leaves[0], route, len(leaves))
  names = conversion.names(made.names)
  if not _agree(names, wanted.names):
    yield _other_names(path, made, names or (), wanted)
  elif made.shape != wanted.shape:
    yield Problem(f'{path}: {made} in the checkpoint, {wanted} in the target.', _LEAF_FIX)
  elif made.dtype != wanted.dtype:
    yield from _other_dtype(path, made, wanted, conversion)


def _agree(names: tuple[Any, ...] | None, wanted: tuple[Any, ...] | None) -> bool:
  """Whether names can mean the same: a dimension without a name agrees with every name."""
  if names is None or wanted is None or len(names) != len(wanted):
    return True
  return all(None in (a, b) or a == b for a, b in zip(names, wanted, strict=True))


def _other_names(path: str, made: Leaf, names: tuple[Any, ...], wanted: Leaf) -> Problem:
  text = f'{path}: {_named(made, names)} in the checkpoint, {_named(wanted, wanted.names or ())} in the target.'
  others = wanted.names or ()
  if sorted(map(str, names)) == sorted(map(str, others)):
    moving = [name for name in names if _rest(names, name) == _rest(others, name)] or list(names)
    fix = f'to move the dimension to where the target has it, pass moved={moving[0]!r}'
    return Problem(text, f'{fix}; if a name was wrong, pass axes={{old: new}}.')
  changed = {a: b for a, b in zip(names, others, strict=True) if a != b and None not in (a, b)}
  return Problem(text, f'if the names mean the same, pass axes={changed!r}; if not, mend the model.')


def _rest(names: tuple[Any, ...], name: Any) -> list[Any]:
  return [other for other in names if other != name]


def _named(leaf: Leaf, names: tuple[Any, ...]) -> str:
  """`float32[embed=8, mlp=16]`."""
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, leaf.shape, strict=True))
  return f'{leaf.dtype}[{", ".join(sizes)}]'


def _other_dtype(path: str, made: Leaf, wanted: Leaf, conversion: Conversion) -> Iterator[Problem]:
  text = f'{path}: {made} in the checkpoint, {wanted} in the target.'
  if made.is_number or wanted.is_number:
    yield from _of_number(path, made, wanted, text)
  elif 'key<' in made.dtype + wanted.dtype:
    yield Problem(text, _LEAF_FIX)
  elif not conversion.may_cast(made.dtype, wanted.dtype):
    if is_lossless(made.dtype, wanted.dtype):
      yield Problem(text, "to convert what can be without loss, pass dtypes='cast'.")
    else:
      named = f'dtypes={{{made.dtype!r}: {wanted.dtype!r}}}'
      yield Problem(text, f'digits are lost on the way; if that is meant, pass {named}.')


def _of_number(path: str, made: Leaf, wanted: Leaf, text: str) -> Iterator[Problem]:
  """A Python number fits an array of its kind that can hold it, and the other way round."""
  if _kind(made) != _kind(wanted):
    yield Problem(text, _LEAF_FIX)
  elif made.value is not None and not wanted.is_number and not _holds(wanted.dtype, made.value):
    yield Problem(f'{path}: {made.value} does not fit into {wanted}.', 'give the target a wider dtype.')


def _holds(dtype: str, value: Any) -> bool:
  """Whether an array can hold a Python number; a float may lose what float32 has not."""
  if isinstance(value, bool):
    return True
  if isinstance(value, int):
    limits = jnp.iinfo(dtype_of(dtype))
    return int(limits.min) <= value <= int(limits.max)
  with np.errstate(over='ignore'):
    there = float(np.asarray(value).astype(dtype_of(dtype)))
  wide = jnp.finfo(dtype_of(dtype)).nmant >= 23
  return value != value or there == value or (wide and math.isfinite(there))


def _kind(leaf: Leaf) -> str:
  name = leaf.dtype.removeprefix('python.').rstrip('0123456789')
  return {'uint': 'int', 'bfloat': 'float'}.get(name, name)


_LEAF_FIX = 'give the model the sizes and dtypes that it was saved with.'

"""Starting points of a search: the presets on every mesh, and tables built from the model's names.

The presets use common names. A model with other names (`hidden` for `mlp`), or with more of them
(`act_mlp` for the dimension of an activation), gets each preset a second time with its own names.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd import presets
from flax_spmd._src.rules.clauses import Fsdp, OptimizerOver
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.search.candidate import MIN_SIZE, Axis, Candidate, Choices
from flax_spmd._src.search.model_facts import ModelFacts
from flax_spmd._src.search.space import Space

PRESETS: Mapping[str, Callable[..., Rules]] = {
  name: getattr(presets, name)
  for name in (
    'data_parallel',
    'fsdp',
    'tensor_parallel',
    'fsdp_tensor_parallel',
    'sequence_parallel',
    'context_parallel',
    'expert_parallel',
    'zero1',
    'hybrid_fsdp',
  )
}
_SYNONYMS = {
  'mlp': {'mlp', 'hidden', 'ff', 'ffn', 'intermediate'},
  'heads': {'heads', 'qkv'},
  'vocab': {'vocab', 'vocabulary'},
  'length': {'length', 'sequence', 'seq'},
  'expert': {'expert', 'experts'},
}


class StartingPoint(NamedTuple):
  """A candidate to start from.

  Attributes:
    candidate: the candidate.
    preset: name of the preset that it is, or ''.
  """

  candidate: Candidate
  preset: str = ''


def starting_points(space: Space, limit: int) -> list[StartingPoint]:
  """Up to `limit` distinct legal starting points, presets first.

  If none is legal (as with more devices than sequences), axes that do not divide their dimensions are
  dropped. At the end are some under the other choices of the step's arguments, and with arrays in the host's memory.
  """
  first, *others = space.combinations
  host = space.constraints.host
  starts = _under(space, first, limit)
  each = max(1, limit // (len(others) + bool(host) + 1))
  chosen = [start for choices in others[: limit - 1] for start in _under(space, choices, each)]
  if host:
    chosen += [StartingPoint(start.candidate._replace(on_host=host)) for start in starts[:each]]
  return [*starts[: max(1, limit - len(chosen))], *chosen][:limit]


def _under(space: Space, choices: Choices, limit: int) -> list[StartingPoint]:
  """Up to `limit` starting points under a choice of the step's arguments."""
  chosen = lambda one: one._replace(choices=choices)
  points = _legal(space, lambda one: space.legal(chosen(one)), limit) or _legal(
    space, lambda one: space.legal(space.divisible(chosen(one))), limit
  )
  return [StartingPoint(candidate, name) for candidate, name in points.items()]


def _legal(
  space: Space, legal: Callable[[Candidate], Candidate | None], limit: int
) -> dict[Candidate, str]:
  """Up to `limit` legal candidates, with the name of their preset or ''."""
  points: dict[Candidate, str] = {}
  for table in (_presets, _adapted_presets):
    for axes in space.meshes():
      for name, candidate in table(space, axes):
        one = legal(candidate)
        if one is not None:
          points.setdefault(one, '' if _has_idle_axis(one) else name)
          if len(points) == limit:
            return points
  return points


def _has_idle_axis(candidate: Candidate) -> bool:
  """Whether an axis is unused, as in a preset for names that the model lacks."""
  return len({axis for over in candidate.used_axes for axis in over}) < len(candidate.axes)


def _presets(space: Space, axes: Sequence[Axis]) -> Iterator[tuple[str, Candidate]]:
  """Every preset on a mesh, with each axis in every role."""
  for name, preset in PRESETS.items():
    for roles in _roles(preset, len(axes)):
      yield name, _candidate(axes, preset(**roles), space.facts)


def _adapted_presets(space: Space, axes: Sequence[Axis]) -> Iterator[tuple[str, Candidate]]:
  """The presets with the model's names, and each of its names on an axis of its own."""
  synonyms = _synonyms(space.facts)
  for preset in PRESETS.values():
    for roles in _roles(preset, len(axes)):
      base = _candidate(axes, preset(**roles), space.facts, synonyms)
      for min_size in space.facts.min_sizes:
        yield '', base._replace(min_size=min_size)
  plain = Candidate(tuple(axes))
  for last, names in itertools.product(range(len(axes)), _families(space.facts)):
    rest = tuple(n for n in range(len(axes)) if n != last)
    split = plain
    for name in (*sorted(space.facts.batch), *names):
      split = split.with_name(name, rest if name in space.facts.batch else (last,))
    yield '', split
    yield '', split._replace(fsdp_axes=rest, min_size=space.facts.min_sizes[0])


def _roles(preset: Callable[..., Rules], count: int) -> Iterator[dict[str, str]]:
  """The axes of a mesh as arguments of a preset; the first argument takes the axes left over.

  An argument lists axes by number, as `'0,2'`. With too few axes, `expert_parallel` goes without tensor
  parallelism (`''`).
  """
  names = [name for name in inspect.signature(preset).parameters if name != 'min_size']
  names = sorted(names, key=lambda name: name not in ('data', 'replicate'))
  missing = {'model': ''} if 'expert' in names and len(names) > count else {}
  names = [name for name in names if name not in missing]
  if len(names) > count:
    return
  for chosen in itertools.permutations(range(count), len(names) - 1):
    rest = [str(n) for n in range(count) if n not in chosen]
    yield {**dict(zip(names, [','.join(rest), *map(str, chosen)], strict=True)), **missing}


def _candidate(
  axes: Sequence[Axis],
  rules: Rules,
  facts: ModelFacts,
  synonyms: Mapping[str, Sequence[str]] | None = None,
) -> Candidate:
  """The candidate of a preset's table, whose mesh axes are numbers."""
  candidate = Candidate(tuple(axes))
  for clause in rules:
    if isinstance(clause, Fsdp):
      candidate = candidate._replace(fsdp_axes=_numbers(clause.axes))
    elif isinstance(clause, OptimizerOver):
      candidate = candidate._replace(zero1_axes=_numbers(clause.axes))
    else:
      names = sorted(facts.batch) if clause[0] == 'batch' else [clause[0]]
      for name in [*names, *(synonyms or {}).get(clause[0], ())]:
        if name in facts.names:
          candidate = candidate.with_name(name, _numbers(clause[1]))
  return candidate._replace(min_size=MIN_SIZE)


def _numbers(axes: Any) -> tuple[int, ...]:
  if isinstance(axes, str):
    return tuple(int(number) for number in axes.split(',') if number)
  return tuple(number for axis in axes for number in _numbers(axis))


def _synonyms(facts: ModelFacts) -> dict[str, list[str]]:
  """For each name of the presets, the model's names with the same meaning."""
  words = {name: {*name.split('_')} for name in sorted(facts.names) if name not in facts.batch}
  return {
    usual: [name for name, parts in words.items() if parts & synonyms and name != usual]
    for usual, synonyms in _SYNONYMS.items()
  }


def _families(facts: ModelFacts) -> Iterator[tuple[str, ...]]:
  """Each name of a parameter, with the names of activations of the same sizes."""
  for name in sorted(facts.parameters):
    same = [
      other
      for other, sizes in sorted(facts.names.items())
      if {*sizes} - {1} == {*facts.names[name]} and other not in facts.parameters
    ]
    yield (name, *same)

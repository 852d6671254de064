"""Seeds: where a search begins, with the usual layouts on every mesh, and tables made from the model's names.

The presets know the names that most models have. A model with others (`hidden` for `mlp`), or with more
(`act_mlp` for the activation's dimension), gets each preset a second time with those names in.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd import presets
from flax_spmd._src.rules.clauses import Fsdp
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.search.candidate import MIN_SIZE, Axis, Candidate
from flax_spmd._src.search.model_facts import Facts
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
_ALIKE = {
  'mlp': {'mlp', 'hidden', 'ff', 'ffn', 'intermediate'},
  'heads': {'heads', 'qkv'},
  'vocab': {'vocab', 'vocabulary'},
  'length': {'length', 'sequence', 'seq'},
  'expert': {'expert', 'experts'},
}


class Seed(NamedTuple):
  """A candidate to begin with; `preset` is the name of the preset that it is, if it is one."""

  candidate: Candidate
  preset: str = ''


def seeds(space: Space, most: int) -> list[Seed]:
  """What a search begins with: legal, each once, presets first; at most so many.

  Where nothing is legal (more devices than sequences, say), the same without what does not divide.
  """
  found = _all(space, space.legal) or _all(space, lambda one: space.legal(space.mended(one)))
  return [Seed(candidate, name) for candidate, name in found.items()][:most]


def _all(space: Space, legal: Callable[[Candidate], Candidate | None]) -> dict[Candidate, str]:
  found: dict[Candidate, str] = {}
  for table in (_usual, _by_names):
    for axes in space.meshes():
      for name, candidate in table(space, axes):
        one = legal(candidate)
        if one is not None:
          found.setdefault(one, '' if _idle(one) else name)
  return found


def _idle(candidate: Candidate) -> bool:
  """Whether nothing lies over an axis: a preset for names that the model lacks."""
  return len({axis for over in candidate.used for axis in over}) < len(candidate.axes)


def _usual(space: Space, axes: Sequence[Axis]) -> Iterator[tuple[str, Candidate]]:
  """Every preset on a mesh, each of its axes in every role."""
  for name, preset in PRESETS.items():
    for roles in _roles(preset, len(axes)):
      yield name, _candidate(axes, preset(**roles), space.facts)


def _by_names(space: Space, axes: Sequence[Axis]) -> Iterator[tuple[str, Candidate]]:
  """The presets in the model's own words, and each of its names on an axis by itself."""
  alike = _words(space.facts)
  for preset in PRESETS.values():
    for roles in _roles(preset, len(axes)):
      base = _candidate(axes, preset(**roles), space.facts, alike)
      for least in space.facts.leasts:
        yield '', base._replace(least=least)
  plain = Candidate(tuple(axes))
  for last, names in itertools.product(range(len(axes)), _families(space.facts)):
    rest = tuple(n for n in range(len(axes)) if n != last)
    split = plain
    for name in (*sorted(space.facts.batch), *names):
      split = split.place(name, rest if name in space.facts.batch else (last,))
    yield '', split
    yield '', split._replace(fill=rest, least=space.facts.leasts[0])


def _roles(preset: Callable[..., Rules], count: int) -> Iterator[dict[str, str]]:
  """The axes of a mesh, as arguments of a preset: those that are left over go to the first one.

  An axis is called by its numbers, `'0,2'`; experts may do without tensor parallelism, `''`.
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
  axes: Sequence[Axis], rules: Rules, facts: Facts, alike: Mapping[str, Sequence[str]] | None = None
) -> Candidate:
  """A preset's table as a candidate; its mesh axes are numbers."""
  found = Candidate(tuple(axes))
  for clause in rules:
    if isinstance(clause, Fsdp):
      found = found._replace(fill=_numbers(clause.axes))
    elif isinstance(clause[1], Rules):
      found = found._replace(state=_numbers(clause[1].clauses[0].axes))
    else:
      own = sorted(facts.batch) if clause[0] == 'batch' else [clause[0]]
      for name in [*own, *(alike or {}).get(clause[0], ())]:
        found = found.place(name, _numbers(clause[1])) if name in facts.names else found
  return found._replace(least=MIN_SIZE)


def _numbers(axes: Any) -> tuple[int, ...]:
  if isinstance(axes, str):
    return tuple(int(number) for number in axes.split(',') if number)
  return tuple(number for axis in axes for number in _numbers(axis))


def _words(facts: Facts) -> dict[str, list[str]]:
  """The model's names that mean what a preset's name means, by that."""
  parts = {name: {*name.split('_')} for name in sorted(facts.names) if name not in facts.batch}
  return {
    usual: [name for name, words in parts.items() if words & alike and name != usual]
    for usual, alike in _ALIKE.items()
  }


def _families(facts: Facts) -> Iterator[tuple[str, ...]]:
  """Each name of a parameter, with the activations' names that have the same sizes."""
  for name in sorted(facts.parameters):
    same = [
      other
      for other, sizes in sorted(facts.names.items())
      if {*sizes} - {1} == {*facts.names[name]} and other not in facts.parameters
    ]
    yield (name, *same)

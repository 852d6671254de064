"""User constraints: conditions that every layout of a search meets.

Constraints refer to mesh axes by name, and so give names to axes: with `pin={'batch': 'data'}`, every
mesh of the search has an axis `data` of some size. Constraints that contradict the model, the target or
each other are reported together, before the search starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.hardware import Target, slices_problem
from flax_spmd._src.estimate.graph import prime_factors
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd._src.search.candidate import Axis, Candidate
from flax_spmd._src.search.model_facts import ModelFacts
from flax_spmd._src.text import parse_size, size_text, value_text
from flax_spmd.errors import Problem, SearchError, did_you_mean, raise_problems

MAX_AXES = 3  # of a mesh, unless the user passes one


class UserConstraints(NamedTuple):
  """The constraints of a search in normal form.

  Attributes:
    memory: bytes available to the step on each device.
    mesh: size per mesh axis, or None for any mesh.
    pin: axes that a logical name is sharded over; an empty tuple replicates it.
    forbid: axes that a logical name is never sharded over; None stands for every axis.
    batch_only: axes reserved for the batch.
    tensor: largest number of devices for tensor parallelism; 0 for no limit.
    host: path expressions of arrays that may be in the host's memory.
  """

  memory: int
  mesh: Mapping[str, int] | None = None
  pin: Mapping[str, tuple[str, ...]] = {}
  forbid: Mapping[str, tuple[str, ...] | None] = {}
  batch_only: tuple[str, ...] = ()
  tensor: int = 0
  host: tuple[str, ...] = ()

  @property
  def labels(self) -> tuple[str, ...]:
    """The mesh axes that the constraints name."""
    named = [*(self.mesh or ()), *(axis for axes in self.pin.values() for axis in axes)]
    named += [axis for axes in self.forbid.values() for axis in axes or ()]
    return tuple(dict.fromkeys([*named, *self.batch_only]))

  def numbers(self, axes: Sequence[Axis], labels: Iterable[str]) -> tuple[int, ...]:
    """The numbers of the axes with these labels."""
    by_label = {axis.label: number for number, axis in enumerate(axes)}
    return tuple(by_label[label] for label in labels if label in by_label)

  def pinned(self, candidate: Candidate) -> Candidate:
    """The candidate with every pinned name on its axes, ahead of names that compete with it."""
    pins = [(name, self.numbers(candidate.axes, axes)) for name, axes in self.pin.items()]
    rest = [rule for rule in candidate.name_rules if rule[0] not in self.pin]
    return candidate._replace(name_rules=tuple([rule for rule in pins if rule[1]] + rest))

  def allow(self, candidate: Candidate, facts: ModelFacts) -> bool:
    """Whether a candidate meets the constraints, memory aside."""
    reserved = self.numbers(candidate.axes, self.batch_only)
    others = [over for name, over in candidate.name_rules if name not in facts.batch]
    others += [over for *_, over in candidate.path_rules]
    others += [candidate.fsdp_axes, candidate.zero1_axes]
    if any(axis in reserved for over in others for axis in over):
      return False
    for name, labels in self.forbid.items():
      wrong = range(len(candidate.axes)) if labels is None else self.numbers(candidate.axes, labels)
      if any(axis in wrong for axis in candidate.axes_of(name)):
        return False
    if any(
      candidate.axes_of(name) != self.numbers(candidate.axes, axes) for name, axes in self.pin.items()
    ):
      return False
    return not self.tensor or self._within_limit(candidate, facts)

  def _within_limit(self, candidate: Candidate, facts: ModelFacts) -> bool:
    """Whether tensor parallelism stays within the limit."""
    batch = {axis for name, over in candidate.name_rules if name in facts.batch for axis in over}
    tensor = {
      axis for name, over in candidate.name_rules if name not in facts.batch for axis in over
    } - batch
    tensor |= {axis for *_, over in candidate.path_rules for axis in over} - batch
    if self.pin and tensor <= {n for n, axis in enumerate(candidate.axes) if axis.label}:
      return True  # the user pinned all of it
    return candidate.shards(tensor) <= self.tensor


def constraints_of(
  target: Target,
  facts: ModelFacts,
  memory: Any,
  mesh: Any,
  pin: Any,
  forbid: Any,
  batch_only: Any,
  tensor: Any,
  host: Any = (),
) -> UserConstraints:
  """Normalises and checks the arguments of `search`.

  Raises:
    SearchError: constraints that cannot be met; lists all of them.
  """
  several_nodes = target.per_node < target.devices
  _check_texts(host)
  constraints = UserConstraints(
    target.chip.memory if memory is None else _bytes(memory),
    None if mesh is None else _filled(_sizes(mesh), target.devices),
    {name: _axes(axes) for name, axes in (pin or {}).items()},
    {name: axes and _axes(axes) for name, axes in forbid.items()}
    if isinstance(forbid, Mapping)
    else dict.fromkeys(_axes(forbid)),
    _axes(batch_only),
    (target.per_node if several_nodes else 0) if tensor is None else tensor,
    tuple(dict.fromkeys(_axes(host))),
  )
  raise_problems([*_problems(constraints, target, facts)])
  return constraints


def axes_named(
  mesh: Any, pin: Mapping[str, Any] | None, batch_only: Any, devices: int
) -> dict[str, int]:
  """The mesh axes that every mesh of a search has, as its arguments name them; of size 1 unless they give the mesh.

  Example:
    >>> axes_named({'data': -1}, {'batch': ('data', 'fsdp'), 'norm': None}, 'data', 8)
    {'data': 8, 'fsdp': 1}
  """
  sizes = {} if mesh is None else _filled(_sizes(mesh), devices)
  named = [*_axes(batch_only), *(axis for axes in (pin or {}).values() for axis in _axes(axes))]
  return {**sizes, **{axis: 1 for axis in named if axis not in sizes}}


def _bytes(memory: int | str) -> int:
  try:
    size = parse_size(memory)
  except ValueError:
    size = 0
  if size:
    return size
  raise SearchError(
    f"memory={value_text(memory)} is not a size.\nFix: pass a positive number of bytes, or text such as '14GiB'."
  )


def _check_texts(host: Any) -> None:
  texts = host if isinstance(host, (list, tuple)) else (host,)
  if host is not None and not all(isinstance(text, str) for text in texts):
    raise SearchError(
      f'host: {value_text(host)} is no path expression, and no sequence of them.\n'
      "Fix: pass the paths of arrays that may be in the host's memory, such as host='^opt_state/'."
    )


def _axes(axes: Any) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _sizes(mesh: Any) -> dict[str, int]:
  return dict(mesh if isinstance(mesh, Mapping) else axis_sizes(mesh))


def _filled(mesh: dict[str, int], devices: int) -> dict[str, int]:
  """The mesh with -1 replaced by the number of devices left for that axis."""
  known = math.prod(size for size in mesh.values() if size != -1)
  left = max(1, devices // max(known, 1))
  return {name: left if size == -1 else size for name, size in mesh.items()}


def _problems(constraints: UserConstraints, target: Target, facts: ModelFacts) -> Iterator[Problem]:
  mesh = constraints.mesh
  if constraints.memory > target.chip.memory:
    yield Problem(
      f'The memory budget of {size_text(constraints.memory)} exceeds the '
      f'{size_text(target.chip.memory)} of one {target.chip.name}.',
      'pass a smaller memory, or omit it.',
      SearchError,
    )
  if mesh is not None and math.prod(mesh.values()) != target.devices:
    yield Problem(
      f'The mesh {dict(mesh)} has {math.prod(mesh.values())} devices, but {target.text} has '
      f'{target.devices}.',
      f'choose sizes whose product is {target.devices}; one of them may be -1.',
      SearchError,
    )
  elif mesh is not None and (problem := slices_problem(mesh, target)):
    yield Problem(*problem, SearchError)
  yield from _unknown(constraints, facts)
  yield from _contradictions(constraints, facts)
  yield from _impossible(constraints, target, facts)
  yield from _unmatched(constraints, facts)


def _unknown(constraints: UserConstraints, facts: ModelFacts) -> Iterator[Problem]:
  """Names that the model lacks, and axes that the mesh lacks."""
  for argument, names in (('pin', constraints.pin), ('forbid', constraints.forbid)):
    for name in names:
      if name not in facts.names:
        yield Problem(
          f'{argument}: the model has no name {value_text(name)}.{did_you_mean(name, facts.names)}',
          f'use one of its names: {", ".join(sorted(facts.names))}.'
          if facts.names
          else 'omit it; no dimension of the model has a name.',
          SearchError,
        )
  mesh = dict(constraints.mesh or {})
  for label in constraints.labels if mesh else ():
    if label not in mesh:
      yield Problem(
        f'The mesh {mesh} has no axis {value_text(label)}.{did_you_mean(label, mesh)}',
        f'use one of its axes: {", ".join(mesh)}.',
        SearchError,
      )


def _unmatched(constraints: UserConstraints, facts: ModelFacts) -> Iterator[Problem]:
  """Path expressions that are none, or match no array of the state."""
  for path in constraints.host:
    problem = problem_of('host', path)
    if problem:
      yield problem._replace(kind=SearchError)
    elif not any(searcher(path)(array) for array in facts.arrays):
      arrays = ', '.join(map(repr, facts.arrays[:3])) or 'none'
      yield Problem(
        f'host: no path of the {len(facts.arrays)} arrays of the state matches {value_text(path)}.',
        f'correct it; the paths begin with {arrays}.',
        SearchError,
      )


def _contradictions(constraints: UserConstraints, facts: ModelFacts) -> Iterator[Problem]:
  for name, axes in constraints.pin.items():
    forbidden = constraints.forbid.get(name, ())
    clash = axes if forbidden is None else [axis for axis in axes if axis in forbidden]
    if clash:
      yield _contradiction(f'pin shards {name!r} over {_listed(clash)}, which forbid rules out')
    if name not in facts.batch and any(axis in constraints.batch_only for axis in axes):
      reserved = [axis for axis in axes if axis in constraints.batch_only]
      yield _contradiction(
        f'pin shards {name!r} over {_listed(reserved)}, which batch_only reserves for the batch'
      )
    if len({*axes}) < len(axes):
      yield Problem(
        f'pin shards {value_text(name)} over {_listed(axes)}, which repeats an axis.',
        'list each axis once.',
        SearchError,
      )
  pins = [*constraints.pin.items()]
  for number, (name, axes) in enumerate(pins):
    for other, others in pins[:number]:
      both = [axis for axis in axes if axis in others]
      if both and frozenset((name, other)) in facts.together:
        yield _contradiction(
          f'pin shards {other!r} and {name!r} over {_listed(both)}, but both occur on one array'
        )


def _contradiction(text: str) -> Problem:
  return Problem(f'{text}.', 'remove one of the two constraints.', SearchError)


def _impossible(constraints: UserConstraints, target: Target, facts: ModelFacts) -> Iterator[Problem]:
  """More axes than a mesh can have, and pinned names whose sizes no mesh divides."""
  labels = constraints.labels
  if constraints.mesh is None and len(labels) > MAX_AXES:
    yield Problem(
      f'The constraints name {len(labels)} axes ({_listed(labels)}), but a search tries meshes of at '
      f'most {MAX_AXES} axes.',
      'name fewer axes, or pass a mesh.',
      SearchError,
    )
  elif constraints.mesh is None and len(labels) > len(prime_factors(target.devices)):
    yield Problem(
      f'The {target.devices} devices of {target.text} cannot form a mesh with the axes '
      f'{_listed(labels)}.',
      'name fewer axes, or pass a mesh, where an axis may have size 1.',
      SearchError,
    )
  for name, axes in constraints.pin.items():
    if name not in facts.names or not axes:
      continue
    shards = _possible_shards(constraints, target.devices, axes)
    if shards and not any(facts.divides(name, count) for count in shards):
      sizes = ', '.join(map(str, facts.names[name]))
      yield Problem(
        f'The name {value_text(name)} cannot be pinned to {_listed(axes)}: no mesh of {target.devices} devices '
        f'divides its sizes ({sizes}).',
        'pin it to other axes, or pad it.',
        SearchError,
      )


def _possible_shards(constraints: UserConstraints, devices: int, axes: Sequence[str]) -> list[int]:
  """Numbers of shards that these axes can give."""
  if constraints.mesh is not None:
    known = all(axis in constraints.mesh for axis in axes)
    return [math.prod(constraints.mesh[axis] for axis in axes)] if known else []
  return [n for n in range(2, devices + 1) if devices % n == 0 and len(prime_factors(n)) >= len(axes)]


def _listed(axes: Iterable[str]) -> str:
  return ', '.join(map(repr, axes))

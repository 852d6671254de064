"""Wishes: what the user asks of every layout that is tried.

A wish speaks of mesh axes by name, and so gives names to axes that have none yet: under
`pin={'batch': 'data'}` every mesh that is tried has an axis `data`, of any size. Wishes that cannot be
met, or not together, are found before anything is traced a second time, and all of them are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.search.candidate import Axis, Candidate
from flax_spmd._src.search.model_facts import Facts
from flax_spmd._src.text import parse_size, size_text
from flax_spmd.errors import Problem, SearchError, did_you_mean, raise_problems

MOST_AXES = 3  # of a mesh that is not fixed


class Wishes(NamedTuple):
  """What the user asks for, in one form.

  Attributes:
    memory: bytes that a device may need.
    mesh: size per axis, if it is fixed.
    pin: the axes that names have to lie over.
    forbid: the axes that names must not lie over; None is any.
    batch_only: axes that nothing but the batch lies over.
    tensor: over how many devices at most a product of matrices is cut, or 0.
  """

  memory: int
  mesh: Mapping[str, int] | None = None
  pin: Mapping[str, tuple[str, ...]] = {}
  forbid: Mapping[str, tuple[str, ...] | None] = {}
  batch_only: tuple[str, ...] = ()
  tensor: int = 0

  @property
  def labels(self) -> tuple[str, ...]:
    """The mesh axes that have a name."""
    named = [*(self.mesh or ()), *(axis for axes in self.pin.values() for axis in axes)]
    named += [axis for axes in self.forbid.values() for axis in axes or ()]
    return tuple(dict.fromkeys([*named, *self.batch_only]))

  def numbers(self, axes: Sequence[Axis], labels: Iterable[str]) -> tuple[int, ...]:
    """The numbers of axes by name."""
    by_label = {axis.label: number for number, axis in enumerate(axes)}
    return tuple(by_label[label] for label in labels if label in by_label)

  def pinned(self, candidate: Candidate) -> Candidate:
    """The candidate with every pinned name in its place, and before those that compete with it."""
    own = [(name, self.numbers(candidate.axes, axes)) for name, axes in self.pin.items()]
    rest = [pair for pair in candidate.placed if pair[0] not in self.pin]
    return candidate._replace(placed=tuple([pair for pair in own if pair[1]] + rest))

  def allow(self, candidate: Candidate, facts: Facts, per_node: int) -> bool:
    """Whether a candidate is as the user wants it, but for memory."""
    kept = self.numbers(candidate.axes, self.batch_only)
    others = [over for name, over in candidate.placed if name not in facts.batch]
    others += [over for *_, over in candidate.paths] + [candidate.fill, candidate.state]
    if any(axis in kept for over in others for axis in over):
      return False
    for name, labels in self.forbid.items():
      wrong = range(len(candidate.axes)) if labels is None else self.numbers(candidate.axes, labels)
      if any(axis in wrong for axis in candidate.over(name)):
        return False
    if any(
      candidate.over(name) != self.numbers(candidate.axes, axes) for name, axes in self.pin.items()
    ):
      return False
    return not self.tensor or self._within(candidate, facts, per_node)

  def _within(self, candidate: Candidate, facts: Facts, per_node: int) -> bool:
    """Whether no product of matrices is cut over more devices than it may be."""
    batch = {axis for name, over in candidate.placed if name in facts.batch for axis in over}
    cut = {axis for name, over in candidate.placed if name not in facts.batch for axis in over} - batch
    cut |= {axis for *_, over in candidate.paths for axis in over} - batch
    if self.pin and cut <= {n for n, axis in enumerate(candidate.axes) if axis.label}:
      return True  # all of it is what the user asked for
    return candidate.size(cut) <= self.tensor


def wishes_of(
  target: Target,
  facts: Facts,
  memory: Any,
  mesh: Any,
  pin: Any,
  forbid: Any,
  batch_only: Any,
  tensor: Any,
) -> Wishes:
  """What the user asks for, checked.

  Raises:
    SearchError: everything that is wrong with it.
  """
  nodes = not target.chip.torus and target.topology[0] > 1
  found = Wishes(
    target.chip.memory if memory is None else _bytes(memory),
    None if mesh is None else _filled(_sizes(mesh), target.devices),
    {name: _axes(axes) for name, axes in (pin or {}).items()},
    {name: axes and _axes(axes) for name, axes in forbid.items()}
    if isinstance(forbid, Mapping)
    else dict.fromkeys(_axes(forbid)),
    _axes(batch_only),
    (target.topology[-1] if nodes else 0) if tensor is None else tensor,
  )
  raise_problems([*_problems(found, target, facts)])
  return found


def _bytes(memory: int | str) -> int:
  try:
    return parse_size(memory)
  except ValueError:
    raise SearchError(f"memory={memory!r} is not a size.\nFix: write bytes, or '14GiB'.") from None


def _axes(axes: Any) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _sizes(mesh: Any) -> dict[str, int]:
  return dict(mesh if isinstance(mesh, Mapping) else axis_sizes(mesh))


def _filled(mesh: dict[str, int], devices: int) -> dict[str, int]:
  """With -1 replaced by what the others leave."""
  known = math.prod(size for size in mesh.values() if size != -1)
  return {name: devices // max(known, 1) if size == -1 else size for name, size in mesh.items()}


def _problems(wishes: Wishes, target: Target, facts: Facts) -> Iterator[Problem]:
  if wishes.memory > target.chip.memory:
    yield Problem(
      f'The budget of {size_text(wishes.memory)} is larger than the memory of a {target.chip.name}, '
      f'{size_text(target.chip.memory)}.',
      'ask for less, or leave memory out.',
      SearchError,
    )
  if wishes.mesh is not None and math.prod(wishes.mesh.values()) != target.devices:
    yield Problem(
      f'The mesh {dict(wishes.mesh)} has {math.prod(wishes.mesh.values())} devices, {target.text} has '
      f'{target.devices}.',
      f'choose sizes whose product is {target.devices}; one may be -1.',
      SearchError,
    )
  yield from _strange(wishes, facts)
  yield from _contradictions(wishes, facts)
  yield from _nowhere(wishes, target, facts)


def _strange(wishes: Wishes, facts: Facts) -> Iterator[Problem]:
  """Names that the model lacks, axes that the mesh lacks."""
  for what, given in (('pin', wishes.pin), ('forbid', wishes.forbid)):
    for name in given:
      if name not in facts.names:
        yield Problem(
          f'{what}: the model has no name {name!r}.{did_you_mean(name, facts.names)}',
          f'its names are {", ".join(sorted(facts.names)) or "none"}.',
          SearchError,
        )
  mesh = dict(wishes.mesh or {})
  for label in wishes.labels if mesh else ():
    if label not in mesh:
      yield Problem(
        f'There is no axis {label!r} in the mesh {mesh}.{did_you_mean(label, mesh)}',
        f'its axes are {", ".join(mesh)}.',
        SearchError,
      )


def _contradictions(wishes: Wishes, facts: Facts) -> Iterator[Problem]:
  for name, axes in wishes.pin.items():
    banned = wishes.forbid.get(name, ())
    clash = axes if banned is None else [axis for axis in axes if axis in banned]
    if clash:
      yield _contradiction(f'pin lays {name!r} over {_listed(clash)}, and forbid keeps it off there')
    if name not in facts.batch and any(axis in wishes.batch_only for axis in axes):
      only = [axis for axis in axes if axis in wishes.batch_only]
      yield _contradiction(
        f'pin lays {name!r} over {_listed(only)}, and batch_only keeps that for the batch'
      )
    if len({*axes}) < len(axes):
      yield _contradiction(f'pin lays {name!r} over {_listed(axes)}, which names an axis twice')
  pins = [*wishes.pin.items()]
  for number, (name, axes) in enumerate(pins):
    for other, others in pins[:number]:
      both = [axis for axis in axes if axis in others]
      if both and frozenset((name, other)) in facts.together:
        yield _contradiction(
          f'pin lays {other!r} and {name!r} over {_listed(both)}, and one array has both'
        )


def _contradiction(text: str) -> Problem:
  return Problem(f'{text}.', 'take one of the two back.', SearchError)


def _nowhere(wishes: Wishes, target: Target, facts: Facts) -> Iterator[Problem]:
  """Pinned names that no mesh divides, and more axes than there can be."""
  count = len(wishes.labels)
  if wishes.mesh is None and count > MOST_AXES:
    yield Problem(
      f'The axes {_listed(wishes.labels)} are {count}, and meshes of up to {MOST_AXES} are tried.',
      'name fewer axes, or fix the mesh.',
      SearchError,
    )
  elif wishes.mesh is None and count > _factors(target.devices):
    yield Problem(
      f'{target.text} has {target.devices} devices, which do not make the axes {_listed(wishes.labels)}.',
      'name fewer axes, or fix the mesh; there, an axis may have one device.',
      SearchError,
    )
  for name, axes in wishes.pin.items():
    if name not in facts.names or not axes:
      continue
    least = _least(wishes, target.devices, axes)
    if least and not any(facts.divides(name, pieces) for pieces in least):
      sizes = ', '.join(map(str, facts.names[name]))
      yield Problem(
        f'The name {name!r} has no legal place: its sizes ({sizes}) are not divided by {_listed(axes)} of '
        f'any mesh of {target.devices} devices.',
        'pin it to other axes, or pad it.',
        SearchError,
      )


def _least(wishes: Wishes, devices: int, axes: Sequence[str]) -> list[int]:
  """Into how many pieces these axes may cut."""
  if wishes.mesh is not None:
    known = all(axis in wishes.mesh for axis in axes)
    return [math.prod(wishes.mesh[axis] for axis in axes)] if known else []
  return [n for n in range(2, devices + 1) if devices % n == 0 and _factors(n) >= len(axes)]


def _factors(number: int) -> int:
  """How many prime factors there are."""
  found, factor = 0, 2
  while number > 1:
    while number % factor == 0:
      number, found = number // factor, found + 1
    factor += 1
  return found


def _listed(axes: Iterable[str]) -> str:
  return ', '.join(map(repr, axes))

"""Moved axes of unnamed leaves: inferred from the named leaves of the same module.

The scan of a module moves the stacked dimension of all its leaves, named or not. A leaf of an optimizer moves
like its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flax_spmd._src.checkpoint.matching.optimizer_states import ParameterIndex
from flax_spmd._src.checkpoint.matching.routes import Route, Side
from flax_spmd.errors import Problem


def inferred_moves(
  routes: Mapping[str, Route | None], saved: Side, target: Side
) -> tuple[dict[str, Route], list[Problem]]:
  """Routes for unnamed leaves of scanned modules whose named leaves move.

  A leaf is ambiguous if its shape allows both positions and no leaf beside it is named; that is a problem.

  Args:
    routes: routes of the target leaves, by path.
    saved: leaves of the checkpoint.
    target: leaves of the target.

  Returns:
    The changed routes, and the ambiguous leaves.
  """
  moves = {path: route.order for path, route in routes.items() if route and route.step == 'move'}
  if not moves:
    return {}, []
  index = ParameterIndex(target)
  modules = {parent(index.parameter_of(path)): order for path, order in moves.items()}
  scanned = scanned_folders(moves, target, index)
  orders = {
    top: {moves[path] for path in moves if index.parameter_of(path).startswith(top)} for top in scanned
  }
  inferred, ambiguous = {}, []
  for path, route in routes.items():
    if not route or route.step != 'same':
      continue
    old, new = saved.leaves[route.sources[0]], target.leaves[path]
    parameter = index.parameter_of(path)
    order = modules.get(parent(parameter))
    inside = next((top for top in scanned if parameter.startswith(top)), None)
    if None not in (old.names, new.names) or (order is None and inside is None):
      continue
    if len(new.shape) != len(old.shape):
      continue
    known = orders.get(inside or '', set())
    possible = _moves_of_rank(order or modules[scanned[inside or '']], known, len(new.shape))
    fitting = [each for each in possible if tuple(old.shape[d] for d in each) == new.shape]
    stays = tuple(range(len(new.shape)))
    if order is None and new.shape == old.shape and fitting:
      fitting = [stays, *fitting]
    chosen = dict.fromkeys(fitting or possible[:1])
    if len(chosen) > 1:
      text = f'{path}: {new} is unnamed, and its shape does not show whether it has moved.'
      ambiguous.append(Problem(text, _AMBIGUOUS))
    elif chosen and stays not in chosen and (order or fitting or new.shape != old.shape):
      inferred[path] = Route(route.sources, 'move', order=next(iter(chosen)))
  return inferred, ambiguous


def scanned_folders(moves: Iterable[str], target: Side, index: ParameterIndex) -> dict[str, str]:
  """The largest folders in which every named leaf moves, each with the module of one of those leaves.

  Args:
    moves: paths of the leaves that move.
    target: leaves of the target.
    index: their parameters.
  """
  movers = {index.parameter_of(path) for path in moves}
  stay = {
    f'{folder}/'
    for path, leaf in target.leaves.items()
    if leaf.names is not None and any(leaf.names) and index.parameter_of(path) not in movers
    for folder in folders(index.parameter_of(path))
  }
  scanned = {}
  for path in movers:
    free = [folder for folder in folders(path) if f'{folder}/' not in stay]
    if free:
      scanned[f'{free[0]}/'] = parent(path)
  return scanned


def folders(path: str) -> list[str]:
  """The folders of `a/b/c`: `a` and `a/b`."""
  names = path.split('/')[:-1]
  return ['/'.join(names[: n + 1]) for n in range(len(names))]


def parent(path: str) -> str:
  """The path of the module that a leaf is in."""
  return path.rpartition('/')[0]


def _moves_of_rank(
  order: tuple[int, ...], known: Iterable[tuple[int, ...]], rank: int
) -> list[tuple[int, ...]]:
  """The moves that an array of another rank may make beside one that moves by `order`.

  A last dimension may be counted from either end (a scan along axis 2, or -1), unless the orders of others show which.
  """
  size = len(order)
  apart = [(to, at) for to, at in enumerate(order) if to != at]
  farthest = max(abs(to - at) for to, at in apart)
  moves = [
    (to_end, at_end)
    for to, at in apart
    if abs(to - at) == farthest
    for to_end in (to, -1)[: 1 + (to == size - 1)]
    for at_end in (at, -1)[: 1 + (at == size - 1)]
  ]
  shown = [move for move in moves if all(_moved(*move, len(other)) == other for other in known)]
  of_rank = (_moved(*move, rank) for move in shown or moves)
  return [*dict.fromkeys(filter(None, of_rank))]


def _moved(to: int, at: int, rank: int) -> tuple[int, ...] | None:
  """The order of dimensions after one moves; None if the array lacks these dimensions."""
  to, at = (rank - 1 if position < 0 else position for position in (to, at))
  if max(to, at) >= rank:
    return None
  stay = [d for d in range(rank) if d != at]
  return (*stay[:to], at, *stay[to:])


_AMBIGUOUS = (
  'name it in the model before saving; or keep the old axis, and transpose the leaf after the restore.'
)

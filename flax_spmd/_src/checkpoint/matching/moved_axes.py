"""Following: leaves without names, whose dimensions move with those of the other leaves of their module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flax_spmd._src.checkpoint.matching.optimizer_states import Owners
from flax_spmd._src.checkpoint.matching.routes import Route, Side
from flax_spmd.errors import Problem


def followers(
  routes: Mapping[str, Route | None], saved: Side, wanted: Side
) -> tuple[dict[str, Route], list[Problem]]:
  """Leaves without names, of scanned modules whose other leaves are moved: their dimension moves likewise.

  The scan of a module moves that of all its leaves. A leaf of an optimizer does what its parameter does.
  Where the shape fits either way and nothing beside the leaf tells, that is a problem.
  """
  moves = {path: route.order for path, route in routes.items() if route and route.step == 'move'}
  if not moves:
    return {}, []
  owners = Owners(wanted)
  orders = {_parent(owners.of(path)): order for path, order in moves.items()}
  scanned = _scanned(moves, wanted, owners)
  found, unclear = {}, []
  for path, route in routes.items():
    if not route or route.step != 'same':
      continue
    old, new = saved.leaves[route.sources[0]], wanted.leaves[path]
    owner = owners.of(path)
    order = orders.get(_parent(owner))
    inside = next((top for top in scanned if owner.startswith(top)), None)
    if None not in (old.names, new.names) or (order is None and inside is None):
      continue
    shorter = _shortened(order or orders[scanned[inside or '']], len(new.shape))
    if shorter is None:
      continue
    if order is None and new.shape == old.shape:
      if tuple(old.shape[d] for d in shorter) == new.shape:
        unclear.append(Problem(f'{path}: {new} has no names, so it may have moved or not.', _UNCLEAR))
    else:
      found[path] = Route(route.sources, 'move', order=shorter)
  return found, unclear


def _scanned(moves: Iterable[str], wanted: Side, owners: Owners) -> dict[str, str]:
  """The largest folders around what moves in which all that has names moves; and where, in each."""
  movers = {owners.of(path) for path in moves}
  stay = {
    f'{folder}/'
    for path, leaf in wanted.leaves.items()
    if leaf.names is not None and any(leaf.names) and owners.of(path) not in movers
    for folder in _folders(owners.of(path))
  }
  found = {}
  for path in movers:
    free = [folder for folder in _folders(path) if f'{folder}/' not in stay]
    if free:
      found[f'{free[0]}/'] = _parent(path)
  return found


def _folders(path: str) -> list[str]:
  """`a/b/c` is in `a`, `a/b`."""
  names = path.split('/')[:-1]
  return ['/'.join(names[: n + 1]) for n in range(len(names))]


def _parent(path: str) -> str:
  return path.rpartition('/')[0]


def _shortened(order: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
  """A move of one dimension, for an array of another rank; None if it has not got these dimensions."""
  apart = [(to, at) for to, at in enumerate(order) if to != at]
  to, at = max(apart, key=lambda pair: abs(pair[0] - pair[1]))
  if max(to, at) >= rank:
    return None
  stay = [d for d in range(rank) if d != at]
  return (*stay[:to], at, *stay[to:])


_UNCLEAR = 'give it names in the model before it is saved; or keep the old axis, and transpose it after the restore.'

"""Loading: reads what the routes say, verifies it, and makes of it what is wanted.

Leaves are read straight to where the result goes: a stacked leaf that is taken apart is read with the
sharding of its parts. Conversions run on the devices, one stacked leaf at a time, and let go of each
saved leaf when it has been used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.checkpoint.matching.routes import Route
from flax_spmd._src.checkpoint.storage.readers import Source
from flax_spmd._src.checkpoint.storage.record import NUMBERS, Leaf, dtype_of
from flax_spmd._src.checkpoint.storage.verification import damaged, raise_damaged
from flax_spmd.errors import CheckpointError


def load(
  source: Source,
  values: Mapping[str, Any],
  routes: Mapping[str, Route],
  *,
  verify: bool = True,
  memory: int | None = None,
) -> list[Any]:
  """The wanted leaves, in the order of `values`.

  Args:
    source: the checkpoint.
    values: what is wanted, by path, as in `Target`.
    routes: where each comes from.
    verify: whether checksums are compared.
    memory: bytes that may be on their way at once.

  Raises:
    CheckpointDamagedError: it cannot be read, or is not as it was written.
    CheckpointError: what came is not what was asked for.
  """
  leaves = source.record.leaves
  asked: dict[str, Any] = {}
  for path, route in routes.items():
    for saved in route.sources:
      if leaves[saved].value is None:
        asked.setdefault(saved, _abstract(leaves[saved], route, values[path]))
  read = source.read(asked, memory)
  if verify:
    raise_damaged(source.path, damaged(read, leaves))
  read |= {path: leaf.value for path, leaf in leaves.items() if leaf.value is not None}
  made = _made(values, routes, read)
  _check(source, values, made)
  return [made[path] for path in values]


def _abstract(leaf: Leaf, route: Route, wanted: Any) -> Any:
  """How a saved leaf is asked for: as it was saved, where it is needed."""
  if leaf.dtype in NUMBERS:
    return NUMBERS[leaf.dtype]
  sharding = getattr(wanted, 'sharding', None)
  if isinstance(sharding, NamedSharding) and route.step != 'same':
    sharding = NamedSharding(
      sharding.mesh,
      _spec_before(sharding.spec, route, len(leaf.shape)),
      memory_kind=sharding.memory_kind,
    )
  return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=sharding)


def _spec_before(spec: PartitionSpec, route: Route, rank: int) -> PartitionSpec:
  """The spec of a saved leaf whose parts or whole will have `spec`; the stacked dimension is whole."""
  entries = list(spec) + [None] * (rank + 1 - len(spec))
  if route.step == 'unstack':
    entries.insert(route.axis, None)
  elif route.step == 'stack':
    del entries[route.axis]
  elif route.step == 'move':
    entries = [entries[route.order.index(d)] for d in range(rank)]
  return PartitionSpec(*entries[:rank])


def _made(
  values: Mapping[str, Any], routes: Mapping[str, Route], read: dict[str, Any]
) -> dict[str, Any]:
  """What is wanted, out of what was read; `read` is emptied on the way."""
  users: dict[str, int] = {}
  for route in routes.values():
    for saved in route.sources:
      users[saved] = users.get(saved, 0) + 1
  siblings = _siblings(routes)
  made: dict[str, Any] = {}
  for path, route in routes.items():
    if path in made:
      continue
    if route.step == 'keep':
      made[path] = values[path]
      continue
    together = siblings[route[:3]] if route.step == 'unstack' else [path]
    parts = [_own(read[saved], users[saved] > len(together)) for saved in route.sources]
    made |= zip(
      together,
      _convert(parts, [routes[p] for p in together], [values[p] for p in together]),
      strict=True,
    )
    for saved in route.sources:
      users[saved] -= len(together)
      if not users[saved]:
        del read[saved]
  return made


def _own(part: Any, shared: bool) -> Any:
  """A leaf that nobody else gets: a step that donates one would take the others with it."""
  return jnp.copy(part) if shared and isinstance(part, jax.Array) else part


def _siblings(routes: Mapping[str, Route]) -> dict[Any, list[str]]:
  """Wanted leaves that are parts of one saved leaf along one dimension, together."""
  found: dict[Any, list[str]] = {}
  for path, route in routes.items():
    found.setdefault(route[:3], []).append(path)
  return found


def _convert(parts: Sequence[Any], routes: Sequence[Route], wanted: Sequence[Any]) -> list[Any]:
  """One or several wanted leaves, out of the saved leaves that they have in common."""
  shardings = tuple(getattr(value, 'sharding', None) for value in wanted)
  if _is_there(parts[0], wanted[0], routes[0]):
    return [parts[0]]
  if any(sharding is None for sharding in shardings) or not all(isinstance(p, jax.Array) for p in parts):
    return [_on_host(parts, route, value) for route, value in zip(routes, wanted, strict=True)]
  dtypes = tuple(str(value.dtype) for value in wanted)
  return _program(tuple(_without_sources(routes)), dtypes, shardings)(parts)


def _is_there(part: Any, wanted: Any, route: Route) -> bool:
  """Whether a leaf needs nothing done."""
  dtype = getattr(wanted, 'dtype', None)
  return route.step == 'same' and dtype is not None and getattr(part, 'dtype', None) == dtype


def _without_sources(routes: Sequence[Route]) -> list[Route]:
  """What is done, without the paths, so that equal conversions share one program."""
  return [route._replace(sources=()) for route in routes]


@functools.lru_cache(maxsize=256)
def _program(routes: tuple[Route, ...], dtypes: tuple[str, ...], shardings: tuple[Any, ...]) -> Any:
  def convert(parts: Sequence[jax.Array]) -> list[jax.Array]:
    made = [_step(parts, route, jnp) for route in routes]
    return [
      m if str(m.dtype) == dtype else m.astype(dtype) for m, dtype in zip(made, dtypes, strict=True)
    ]

  return jax.jit(convert, out_shardings=list(shardings))


def _step(parts: Sequence[Any], route: Route, xp: Any) -> Any:
  """A route's step, in numpy or JAX."""
  if route.step == 'stack':
    return xp.stack(parts, route.axis)
  if route.step == 'unstack':
    return parts[0][(slice(None),) * route.axis + (route.number,)]
  return xp.transpose(parts[0], route.order) if route.step == 'move' else parts[0]


def _on_host(parts: Sequence[Any], route: Route, wanted: Any) -> Any:
  """A leaf of numpy, a Python number, or an array out of one of these."""
  made = _step([np.asarray(part) for part in parts], route, np)
  if not hasattr(wanted, 'dtype'):
    return type(wanted)(made.item())
  made = _cast(made, wanted.dtype)
  sharding = getattr(wanted, 'sharding', None)
  return made if sharding is None else jax.device_put(made, sharding)


def _cast(made: np.ndarray, dtype: Any) -> np.ndarray:
  """An array of another dtype; a Python number, whose value was not known before, has to fit."""
  cast = made.astype(dtype)
  if made.dtype.kind == 'i' and made.ndim == 0 and int(cast) != int(made):
    raise CheckpointError(
      f'The number {made} does not fit into {dtype}.\nFix: give the target a wider dtype.'
    )
  return cast


def _check(source: Source, values: Mapping[str, Any], made: Mapping[str, Any]) -> None:
  """What comes out is what was asked for, leaf by leaf, or nothing comes out."""
  wrong = [path for path, wanted in values.items() if not _as_asked(made.get(path), wanted)]
  if wrong:
    raise CheckpointError(
      f'The checkpoint {source.path} was read, but these leaves are not as asked for: {", ".join(wrong)}.\n'
      'Fix: please report this; the state was not handed out.'
    )


def _as_asked(made: Any, wanted: Any) -> bool:
  if not hasattr(wanted, 'dtype'):
    return type(made) is type(wanted)
  if not hasattr(made, 'dtype') or made.shape != wanted.shape or made.dtype != wanted.dtype:
    return False
  sharding = getattr(wanted, 'sharding', None)
  if sharding is None:
    return isinstance(made, np.ndarray)
  return isinstance(made, jax.Array) and made.sharding.is_equivalent_to(sharding, made.ndim)

"""Conversions: the leaves of a restore, or of an export, from the saved leaves that their routes name.

They run on the devices, one stacked leaf at a time, and free each saved leaf after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_spmd._src.checkpoint.matching.routes import Route, evaluated
from flax_spmd._src.data.host_values import placed
from flax_spmd.errors import CheckpointError


def converted_leaves(
  values: Mapping[str, Any], routes: Mapping[str, Route], leaves: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
  """The target's leaves with their paths. Slices of one saved leaf come together.

  Args:
    values: target leaves by path. An abstract one without a sharding may get any.
    routes: route of each, by path.
    leaves: saved leaves by path; each is removed after its last use.
  """
  uses: dict[str, int] = {}
  for route in routes.values():
    for saved in route.sources:
      uses[saved] = uses.get(saved, 0) + 1
  for together in converted_together(routes):
    path, route = together[0], routes[together[0]]
    if route.step == 'keep':
      yield path, values[path]
      continue
    may_alias = route.step not in ('stack', 'unstack')
    parts = [
      _unshared(leaves[saved], may_alias and uses[saved] > len(together))
      for saved in dict.fromkeys(route.sources)
    ]
    results = _convert(parts, [routes[p] for p in together], [values[p] for p in together])
    # Programs run behind: without waiting, the host would enqueue all of them, with all of their arguments.
    jax.block_until_ready([result for result in results if isinstance(result, jax.Array)])
    for saved in route.sources:
      uses[saved] -= len(together)
      if not uses[saved]:
        leaves.pop(saved, None)
    del parts
    while results:
      yield together[-len(results)], results.pop(0)


def converted_together(routes: Mapping[str, Route]) -> Iterator[list[str]]:
  """The paths of leaves that are converted at once, in the order of `converted_leaves`."""
  siblings = _siblings(routes)
  done: set[str] = set()
  for path, route in routes.items():
    if path not in done:
      together = siblings[_sibling_key(route)] if route.step == 'unstack' else [path]
      done.update(together)
      yield together


def _unshared(leaf: Any, shared: bool) -> Any:
  """A copy of a leaf with further uses: donating or changing one result must not change another."""
  if not shared or not isinstance(leaf, (jax.Array, np.ndarray)):
    return leaf
  return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf.copy()


def _siblings(routes: Mapping[str, Route]) -> dict[Any, list[str]]:
  """Target leaves that are slices of one saved leaf along one dimension, by sources, step and axis."""
  siblings: dict[Any, list[str]] = {}
  for path, route in routes.items():
    siblings.setdefault(_sibling_key(route), []).append(path)
  return siblings


def _sibling_key(route: Route) -> Route:
  return route._replace(layer=0, order=())


def _convert(parts: Sequence[Any], routes: Sequence[Route], targets: Sequence[Any]) -> list[Any]:
  """One or several target leaves, from the saved leaves that they share, each of which comes once."""
  shardings = tuple(getattr(target, 'sharding', None) for target in targets)
  if _is_unchanged(parts[0], targets[0], routes[0]):
    return [_placed(parts[0], targets[0])]
  own = targets[0] if routes[0].step == 'resize' and hasattr(targets[0], '__array__') else None
  on_devices = all(isinstance(part, jax.Array) for part in parts)
  placed = [*(getattr(part, 'sharding', None) for part in parts), *shardings]
  orders = {device_order(each) for each in placed if each is not None}
  if on_devices and len(orders) > 1 and all(part.is_fully_addressable for part in parts):
    # Layers go to the stages of a pipeline, say.
    parts, on_devices = [_as_numpy(part) for part in parts], False
  if isinstance(own, jax.Array) and not on_devices:
    parts, on_devices = [np.asarray(part).astype(own.dtype) for part in parts], True
  if not on_devices or not all(hasattr(target, 'sharding') for target in targets):
    return [_on_host(parts, route, target) for route, target in zip(routes, targets, strict=True)]
  dtypes = tuple(str(target.dtype) for target in targets)
  numbers: dict[str, str] = {}
  numbered = tuple(_numbered(route, numbers) for route in routes)
  return _program(numbered, dtypes, shardings)(parts, own)


def device_order(sharding: Any) -> tuple[Any, ...]:
  """The devices of a sharding, in the order of its mesh. The arrays of one program have them in one order."""
  mesh = getattr(sharding, 'mesh', None)
  return tuple(sharding.device_set if mesh is None else mesh.devices.flat)


def _is_unchanged(part: Any, target: Any, route: Route) -> bool:
  """Whether a leaf needs no conversion."""
  dtypes = [str(getattr(leaf, 'dtype', None)) for leaf in (part, target)]  # numpy takes None for float64
  return route.step == 'same' and dtypes[0] == dtypes[1] != 'None'


def _placed(part: Any, target: Any) -> Any:
  """A leaf as its target is placed. It was read for the first of its targets; tied ones may have other shardings."""
  sharding = getattr(target, 'sharding', None)
  if isinstance(target, (np.ndarray, np.generic)):
    return np.array(part) if isinstance(part, jax.Array) else part
  if sharding is None:
    return part
  is_placed = isinstance(part, jax.Array) and part.sharding.is_equivalent_to(sharding, part.ndim)
  if is_placed:
    return part
  is_shared = isinstance(part, jax.Array) and not part.is_fully_addressable
  return jax.device_put(part, sharding) if is_shared else placed(part, sharding)


def _numbered(route: Route, numbers: dict[str, str]) -> Route:
  """A route with numbers as its sources, so that equal conversions share a compiled program."""
  sources = tuple(numbers.setdefault(source, str(len(numbers))) for source in route.sources)
  return route._replace(sources=sources, parts=tuple(_numbered(part, numbers) for part in route.parts))


@functools.lru_cache(maxsize=256)
def _program(routes: tuple[Route, ...], dtypes: tuple[str, ...], shardings: tuple[Any, ...]) -> Any:
  def convert(parts: Sequence[jax.Array], own: jax.Array | None) -> list[jax.Array]:
    results = [evaluated(route, lambda source: parts[int(source)], jnp, own) for route in routes]
    return [
      x if str(x.dtype) == dtype else x.astype(dtype) for x, dtype in zip(results, dtypes, strict=True)
    ]

  return jax.jit(convert, out_shardings=list(shardings))


def _on_host(parts: Sequence[Any], route: Route, target: Any) -> Any:
  """A conversion to or from a numpy array or a Python number."""
  leaves = dict(zip(dict.fromkeys(route.sources), parts, strict=True))
  of_keys = any(map(_is_key, parts))
  result = evaluated(route, lambda source: _as_numpy(leaves[source]), jnp if of_keys else np, target)
  if not hasattr(target, 'dtype'):
    return type(target)(result.item())
  result = _as_numpy(result) if _is_key(result) else _cast(np.asarray(result), target.dtype)
  return placed(result, getattr(target, 'sharding', None))


def _as_numpy(leaf: Any) -> Any:
  """A leaf as a numpy array; typed keys, which numpy lacks, on a device of this process."""
  return jax.device_put(leaf, jax.local_devices()[0]) if _is_key(leaf) else np.asarray(leaf)


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(getattr(leaf, 'dtype', None), jax.dtypes.prng_key)


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """An array of another dtype. A Python number has to fit; its value may be unknown before the read."""
  cast = array.astype(dtype)
  if array.dtype.kind == 'i' and array.ndim == 0 and int(cast) != int(array):
    raise CheckpointError(
      f'The number {array} does not fit into {dtype}.\nFix: give the target a wider dtype.'
    )
  return cast

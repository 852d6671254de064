"""Key arrays over several processes: typed PRNG keys, transferred as their numbers.

`jax.device_put` refuses keys for devices of other processes, and takes numbers. A key is an array of numbers with one
dimension more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat


def put_all(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
  """`jax.device_put` of all leaves at once, keys for devices of several processes included."""
  number_shardings = {
    at: of_numbers(sharding, leaf.ndim)
    for at, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    if _is_refused(leaf, sharding)
  }
  plain = [
    jax.random.key_data(leaf) if at in number_shardings else leaf for at, leaf in enumerate(leaves)
  ]
  results = jax.device_put(plain, [number_shardings.get(at, each) for at, each in enumerate(shardings)])
  return [
    as_keys(result, leaf, sharding) if at in number_shardings else result
    for at, (result, leaf, sharding) in enumerate(zip(results, leaves, shardings, strict=True))
  ]


def of_numbers(sharding: NamedSharding, rank: int) -> NamedSharding:
  """The sharding of the numbers of keys with so many dimensions."""
  spec = PartitionSpec(*sharding.spec, *[None] * (1 + rank - len(sharding.spec)))
  return sharding.update(spec=spec)


def as_keys(numbers: jax.Array, like: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Keys of the implementation and shape of others, from their numbers.

  Args:
    numbers: their numbers, sharded as `of_numbers(sharding, like.ndim)`.
    like: the others.
    sharding: sharding of the result.
  """
  impl = jax.random.key_impl(like)
  shards = [jax.random.wrap_key_data(shard.data, impl=impl) for shard in numbers.addressable_shards]
  return compat.from_shards(like, sharding, shards)


def _is_refused(leaf: Any, sharding: Any) -> bool:
  is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return is_key and isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable

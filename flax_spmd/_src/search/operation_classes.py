"""Operation classes: an estimate and a compiled program compared operation by operation.

    traffic = compared(estimated, compiled)
    traffic['lookups']        # bytes on the wire: (estimated, compiled)

Both sides report collectives with the operation and the source line that need them. Compilers combine collectives and
move them, so their reports differ in places where the traffic does not. A compiled collective is therefore attributed to
an estimated one where there is one like it, then by its source line, and only then by the name of its operation. One that
is combined of several operations has the line of one of them, and the names of all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from flax_spmd._src.hlo.counts import Collective, Counts

_LIKE = 0.02  # largest relative difference of two collectives that are taken for the same
_CLASSES = {
  'gather': 'lookups',
  'scatter': 'lookups',
  'take': 'lookups',
  'dynamic_gather': 'lookups',
  'conv': 'convolutions',
  'sort': 'sorts',
  'argsort': 'sorts',
  'top_k': 'sorts',
  'cumsum': 'reductions',
  'reduce': 'reductions',
  'argm': 'reductions',
  'select_and': 'reductions',
  'fft': 'factorisations',
  'cholesky': 'factorisations',
  'triangular': 'factorisations',
}
_OTHERS = 'products'
_NO_OPERATION = re.compile(r'^(reduce_precision|convert_element_type|scatter_sharding)')

ClassTraffic = dict[str, tuple[float, float]]
"""Bytes on the wire by class of operation: estimated and compiled."""


def class_of(one: Collective) -> str:
  """The class of the operation that needs a collective.

  Products include everything that is sharded like one: parameters, constraints, elementwise operations.

  Example:
    >>> one = Collective('all-reduce', ('data',), 8, 4.0, 1, 7.0, 'f32', 'jit(step)/jvp(M)/jit(_take)/scatter-add', '')
    >>> class_of(one), class_of(one._replace(op='dot_general', times=4))
    ('lookups', 'products in loops')
  """
  found = _class_of_operation(one.op)
  return f'{found} in loops' if one.times > 1 else found


@functools.lru_cache(maxsize=4096)
def _class_of_operation(op: str) -> str:
  """The class by the path of an operation."""
  words = [word for word in re.split(r'[/:()]', op) if word]
  last = words[-1] if words else ''
  known = '' if _NO_OPERATION.match(last) else last
  return next((name for start, name in _CLASSES.items() if known.startswith(start)), _OTHERS)


def compared(estimated: Counts, compiled: Counts) -> ClassTraffic:
  """The traffic of each class, as estimated and as compiled."""
  sums: dict[str, list[float]] = {}
  left, unmatched = list(compiled.collectives), []
  for one in estimated.collectives:
    pair = sums.setdefault(class_of(one), [0.0, 0.0])
    pair[0] += one.wire
    like = next((other for other in left if _is_like(one, other)), None)
    if like is None:
      unmatched.append(one)
    else:
      left.remove(like)
      pair[1] += like.wire
  for other in left:
    for name, share in _shares(other, unmatched).items():
      sums.setdefault(name, [0.0, 0.0])[1] += share * other.wire
  return {name: (one, two) for name, (one, two) in sums.items()}


def _is_like(one: Collective, other: Collective) -> bool:
  """Whether two collectives have the same kind and axes, and about the same traffic."""
  same = one.kind == other.kind and set(one.axes) == set(other.axes)
  return same and abs(one.wire - other.wire) <= _LIKE * max(one.wire, other.wire)


def _shares(other: Collective, unmatched: Sequence[Collective]) -> dict[str, float]:
  """The classes of a compiled collective: those of the estimated ones at its source line, or its own."""
  here = [one for one in unmatched if one.source == other.source and one.source]
  here = [one for one in here if one.kind == other.kind] or here
  total = sum(one.wire for one in here)
  if not total:
    return {class_of(other): 1.0}
  combined = other.op.split(':') if ':' in other.op and other.wire > total else ()
  parts = {class_of(other._replace(op=op)) for op in combined}
  elsewhere = sorted(parts - {class_of(one) for one in here})
  whole = other.wire if elsewhere else total
  shares = {name: (1 - total / whole) / len(elsewhere) for name in elsewhere}
  for one in here:
    shares[class_of(one)] = shares.get(class_of(one), 0.0) + one.wire / whole
  return shares

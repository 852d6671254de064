"""Host: `host(...)` around a clause stores the arrays that it decides in the memory of the host.

`host` changes nothing about the way in which arrays are sharded; `array_resolver` asks the clause inside. A table
keeps that clause, and the index of those with `host`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses.annotation_rule import AnnotationRule
from flax_spmd._src.rules.clauses.base import Clause, ReadTable, kind_of_toml
from flax_spmd._src.rules.clauses.name_rule import is_pair
from flax_spmd._src.rules.toml_values import read_axes
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem

HOST_MEMORY = 'pinned_host'


@dataclass(frozen=True, repr=False)
class Host(Clause):
  """The result of `host(...)`: a clause, or the target of a pair, whose arrays are in the host's memory."""

  inner: Any

  form = 'host(...)'
  toml_head = 'host'
  toml_keys = frozenset({'host'})
  toml_form = '{host = {...}}'

  def __repr__(self) -> str:
    return f'host({self.inner!r})'

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes of the clause inside."""
    return self.inner.mesh_axes if isinstance(self.inner, Clause) else ()

  @classmethod
  def from_toml(cls, entry: Mapping[str, Any], read_table: ReadTable) -> Any:
    """The clause inside, with `host` around it."""
    inner = entry['host']
    if isinstance(inner, list) and len(inner) == 2 and isinstance(inner[0], str):
      return cls((inner[0], read_axes(inner[1])))
    if not isinstance(inner, dict):
      raise ValueError('host stands around a rule')
    return cls(kind_of_toml(inner).from_toml(inner, read_table))


def without_host(written: Any, as_table: Any) -> tuple[Any, bool]:
  """A clause as it is without `host`, and whether it has one: around itself, or around the target of a pair.

  Args:
    written: the clause that a user wrote.
    as_table: function from a clause, or several, to a table.
  """
  if isinstance(written, Host):
    return without_host(written.inner, as_table)[0], True
  if not is_pair(written) or not isinstance(written[1], Host):
    return written, False
  target = without_host(written[1], as_table)[0]
  if callable(target) or isinstance(target, Clause) or is_pair(target):
    target = as_table(target)
  return (written[0], target), True


def host_problems(index: int, written: Any, clause: Clause | None) -> Iterator[Problem]:
  """The problem of `host` around something that decides about no array in memory."""
  if isinstance(clause, AnnotationRule):
    yield Problem(
      f'Rule {index} {value_text(written)} has host(...) for an annotation, whose values are in a program, not in memory.',
      'remove host; a policy of jax.checkpoint moves activations, such as save_and_offload_only_these_names.',
    )
  elif clause is None:
    yield Problem(
      f'Rule {index} is {value_text(written)}, and host(...) is around no rule.',
      "write host(fsdp('data')), host(('embed', 'data')), or ('^opt_state/', host(...)) with a PartitionSpec, a "
      'table or a rule.',
    )


@public('flax_spmd')
def host(clause: Any) -> Host:
  """A clause whose arrays are in the host's memory (`pinned_host`) between steps, sharded as without `host`.

  Functions of `layout.jit` move these arrays to the device before the step and back after it, and donation reuses
  their memory. An array is on the host if such a clause owns it, or shards one of its dimensions. Arrays of
  one element and random keys stay on the device.

  Args:
    clause: any clause; a table; or, in a pair, its PartitionSpec, mesh axes, table or clause.

  Example:
    >>> rules = (('^opt_state/', host(fsdp('data', min_size=1))), fsdp('data', min_size=1))
    >>> layout = Layout({'data': 8}, rules)
    >>> state = layout.shard({'opt_state': {'mu': np.ones(8)}, 'params': np.ones(8)})
    >>> state['opt_state']['mu'].sharding.memory_kind, state['params'].sharding.memory_kind
    ('pinned_host', 'device')
  """
  return Host(clause)

"""Axes with options: the form of clauses that are written as a function, `fsdp('data', min_size=1024)`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from flax_spmd._src.rules.clauses.base import Clause, Idle, ReadTable, repeated_axes
from flax_spmd._src.rules.decisions import Axes, Reason, axis_names
from flax_spmd._src.rules.toml_values import axes_text, quoted, read_axes
from flax_spmd._src.text import plain_strings
from flax_spmd.errors import Problem, RulesError


@dataclasses.dataclass(frozen=True, repr=False)
class AxesWithOptions(Clause):
  """A clause with mesh axes and options, the fields of a dataclass: a number of elements, and in the last one names.

  Its `toml_head` is the name of the function that users write.

  Attributes:
    names_of: of what the names in its last field are.
  """

  axes: Axes
  min_size: int = 2**20

  names_of: ClassVar[str]

  @classmethod
  def of(cls, axes: Any, min_size: Any = min_size, **others: Any) -> Self:
    """The clause of the arguments of its function.

    Raises:
      RulesError: an argument is of the wrong kind.
    """
    field = dataclasses.fields(cls)[-1]
    names = others.get(field.name, field.default)
    names = (names,) if isinstance(names, str) else names
    axes, min_size = as_axes(axes), int(min_size) if isinstance(min_size, np.integer) else min_size
    right = {
      f'axes={axes!r}': are_axes(axes),
      f'min_size={min_size!r}': is_count(min_size),
      f'{field.name}={names!r}': _are_strings(names),
    }
    if not all(right.values()):
      raise RulesError(
        f'{cls.toml_head}(...) does not take {", ".join(text for text in right if not right[text])}.\n'
        'Fix: axes is a mesh axis or a tuple of them, min_size a number of elements, '
        f'{field.name} a tuple of {cls.names_of}.'
      )
    return cls(axes, min_size, **{field.name: tuple(names)})

  @classmethod
  def from_toml(cls, entry: Mapping[str, Any], read_table: ReadTable) -> Any:
    """The axes, with the options."""
    options = dict(entry)
    return cls.of(read_axes(options.pop(str(cls.toml_head))), **options)

  def __repr__(self) -> str:
    options = [f'{name}={value!r}' for name, value in self._options().items()]
    return f'{self.toml_head}({", ".join([repr(self.axes), *options])})'

  def _options(self) -> dict[str, Any]:
    """The options that differ from their defaults."""
    fields = dataclasses.fields(self)[1:]
    values = {field.name: getattr(self, field.name) for field in fields}
    return {field.name: values[field.name] for field in fields if values[field.name] != field.default}

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes that it shards dimensions over."""
    return axis_names(self.axes)

  def problems(self, index: int) -> Iterator[Problem]:
    """A mesh axis that occurs twice."""
    yield from repeated_axes(index, self)

  def idle(self, paths: Sequence[str], reasons: Counter[Reason]) -> Idle | None:
    """The reasons for which it skipped arrays: `3 x small (min_size=1048576), 1 x not numbers`."""
    listed = [
      f'{count} x {reason}' + (f' (min_size={self.min_size})' if reason == 'small' else '')
      for reason, count in reasons.items()
    ]
    return Idle(f'decided nothing{": " if listed else ""}{", ".join(listed)}.')

  def toml(self, indent: str) -> str:
    """`fsdp = "data", min_size = 1024`."""
    options = [f'{name} = {quoted(value)}' for name, value in self._options().items()]
    return ', '.join([f'{self.toml_head} = {axes_text(self.axes)}', *options])


def as_axes(axes: Any) -> Any:
  """The mesh axes that a user wrote, with a tuple for a list."""
  return plain_strings(tuple(axes) if isinstance(axes, list) else axes)


def are_axes(axes: Any) -> bool:
  """Whether this is a mesh axis, or a tuple of at least one."""
  return isinstance(axes, str) or (axes != () and _are_strings(axes))


def _are_strings(value: Any) -> bool:
  """Whether this is a tuple or list of strings."""
  return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)


def is_count(value: Any) -> bool:
  """Whether this is a number of elements."""
  return isinstance(value, int) and not isinstance(value, bool)

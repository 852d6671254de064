"""Axes with options: the form of clauses that are written as a function, `fsdp('data', min_size=1024)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flax_spmd._src.rules.clauses.base import Clause, repeated_axes
from flax_spmd._src.rules.decisions import Axes, axis_names
from flax_spmd._src.rules.toml_values import axes_text, quoted
from flax_spmd.errors import Problem, RulesError


@dataclasses.dataclass(frozen=True, repr=False)
class AxesWithOptions(Clause):
  """A clause with mesh axes and options, the fields of a dataclass.

  Its `toml_head` is the name of the function that users write.
  """

  axes: Axes

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

  def toml(self, indent: str) -> str:
    """`fsdp = "data", min_size = 1024`."""
    options = [f'{name} = {quoted(value)}' for name, value in self._options().items()]
    return ', '.join([f'{self.toml_head} = {axes_text(self.axes)}', *options])


def check_arguments(function: str, fix: str, arguments: Mapping[str, tuple[Any, bool]]) -> None:
  """Raises `RulesError` for the arguments of a clause's function that are of the wrong kind.

  Args:
    function: name of the function.
    fix: the right kinds.
    arguments: value per argument, and whether it is right.
  """
  wrong = [f'{name}={value!r}' for name, (value, right) in arguments.items() if not right]
  if wrong:
    raise RulesError(f'{function}(...) does not take {", ".join(wrong)}.\nFix: {fix}')


def as_axes(axes: Any) -> Any:
  """The mesh axes that a user wrote, with a tuple for a list."""
  return tuple(axes) if isinstance(axes, list) else axes


def are_axes(axes: Any) -> bool:
  """Whether this is a mesh axis, or a tuple of at least one."""
  return isinstance(axes, str) or (axes != () and are_strings(axes))


def are_strings(value: Any) -> bool:
  """Whether this is a tuple or list of strings."""
  return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)


def as_count(value: Any) -> Any:
  """The number of elements that a user wrote, with an integer for a number of NumPy."""
  return int(value) if isinstance(value, np.integer) else value


def is_count(value: Any) -> bool:
  """Whether this is a number of elements."""
  return isinstance(value, int) and not isinstance(value, bool)

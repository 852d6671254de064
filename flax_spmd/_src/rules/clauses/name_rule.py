"""Name rules: `('hidden', 'model')` shards the dimensions of one logical name over mesh axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flax_spmd._src.rules.clauses.base import Clause, Idle, repeated_axes
from flax_spmd._src.rules.decisions import UNCONSTRAINED, Axes, Reason, axis_names
from flax_spmd._src.rules.toml_values import axes_text, quoted
from flax_spmd.errors import Problem


@dataclass(frozen=True, repr=False)
class NameRule(Clause):
  """A logical name and its mesh axes; `Rules.resolve` applies all of a table together, as Flax does."""

  name: str
  axes: Axes

  form = "('logical name', mesh axes)"

  def __post_init__(self):
    object.__setattr__(self, 'axes', _frozen(self.axes))

  @classmethod
  def parse(cls, written: Any) -> Self | None:
    """A pair of a name and axes; names that begin with `@` are annotations."""
    if not is_pair(written) or written[0].startswith('@') or not _is_axes(written[1]):
      return None
    return cls(*written)

  @property
  def written(self) -> tuple[str, Axes]:
    """The pair, which is also the form that Flax takes."""
    return self.name, self.axes

  def __repr__(self) -> str:
    return repr(self.written)

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes of the name."""
    return axis_names(self.axes)

  def problems(self, index: int) -> Iterator[Problem]:
    """A mesh axis that occurs twice."""
    yield from repeated_axes(index, self)

  def idle(self, paths: Sequence[str], reasons: Counter[Reason]) -> Idle | None:
    """No finding of its own: names of activations do not occur in a state."""
    return None

  def toml_entry(self, indent: str) -> str:
    """A pair: `["hidden", "model"]`."""
    return f'[{quoted(self.name)}, {axes_text(self.axes)}]'


def is_pair(written: Any) -> bool:
  """Whether this is a tuple or list of a string and something else."""
  return isinstance(written, (tuple, list)) and len(written) == 2 and isinstance(written[0], str)


def _is_axes(axes: Any) -> bool:
  return axes is None or axes is UNCONSTRAINED or _are_names(axes)


def _are_names(axes: Any, depth: int = 3) -> bool:
  """Whether this is a mesh axis, or a sequence of mesh axes, which may be nested, up to a depth."""
  if isinstance(axes, str) or not depth:
    return isinstance(axes, str)
  return isinstance(axes, (tuple, list)) and all(_are_names(entry, depth - 1) for entry in axes)


def _frozen(axes: Any) -> Any:
  """Axes as a hashable value in one spelling: sequences become one flat tuple, no axes become None."""
  return axis_names(tuple(axes)) or None if isinstance(axes, (tuple, list)) else axes

"""Function rules: any function `leaf -> PartitionSpec | None`, where None leaves the array to other rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import flax.linen as nn
from jax.sharding import Mesh

from flax_spmd._src.rules.clauses.base import Clause, Leaf, OwningClause


@dataclass(frozen=True, repr=False)
class FunctionRule(OwningClause):
  """A function that receives a `Leaf`. It is called once for each distinct array of a tree."""

  function: Callable[[Leaf], Any]

  form = 'a function of a leaf'
  reads = frozenset({'path', 'dtype', 'optimizer'})

  @classmethod
  def parse(cls, written: Any) -> Self | None:
    """A function of one argument, or another object that can be called; not a class, a mesh or a module, nor one that makes rules."""
    if isinstance(written, _NO_FUNCTIONS) or not callable(written) or _makes_rules(written):
      return None
    return cls(written) if _takes_one_argument(written) else None

  @property
  def written(self) -> Callable[[Leaf], Any]:
    """The function."""
    return self.function

  def __repr__(self) -> str:
    return repr(self.function)

  def target(self, leaf: Leaf) -> Any:
    """The result of the function."""
    return self.function(leaf)

  def toml(self, indent: str) -> str:
    """Raises: a function has no text form."""
    raise ValueError('it is a function')


_NO_FUNCTIONS = (type, Clause, Mesh, nn.Module)  # but callable


def _makes_rules(function: Callable[..., Any]) -> bool:
  """Whether a function is `fsdp`, `presets.zero1` or the like, which has not been called."""
  return getattr(function, '__module__', None) in ('flax_spmd', 'flax_spmd.presets')


def _takes_one_argument(function: Callable[..., Any]) -> bool:
  try:
    inspect.signature(function).bind(None)
  except TypeError:
    return False
  except ValueError:  # a builtin without a signature
    pass
  return True

"""Public objects: the module that they are shown with, and the types of their simple arguments.

A number from a command line or a file is often text. `save(..., overwrite='False')` would overwrite, as text is true.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from flax_spmd._src.text import value_text
from flax_spmd.errors import ArgumentTypeError

T = TypeVar('T', bound=Callable[..., Any])


def public(name: str, unchecked: Sequence[str] = ()) -> Callable[[T], T]:
  """A decorator for a class or function that users import from the module `name`.

  A call of it, or of a public method, raises ArgumentTypeError for each argument of another type than its annotation, if that
  is of numbers, text and None. A whole float is a legitimate integer: it is passed on as one.

  Args:
    name: the module.
    unchecked: the parameters that the function, or the methods of the class, check themselves, with a better fix.

  Example:
    >>> Layout.__module__, Layout.init.__qualname__
    ('flax_spmd', 'Layout.init')
  """

  def decorate(decorated: T) -> T:
    decorated.__module__ = name
    if not isinstance(decorated, type):
      return _checked(decorated, decorated.__name__, unchecked)
    for attribute, value in [*vars(decorated).items()]:
      shown = f'{decorated.__name__}.{attribute}'
      if attribute == '__init__':
        decorated.__init__ = _checked(value, decorated.__name__, unchecked)
      elif not attribute.startswith('_') and isinstance(value, (classmethod, staticmethod)):
        setattr(decorated, attribute, type(value)(_checked(value.__func__, shown, unchecked)))
      elif not attribute.startswith('_') and isinstance(value, types.FunctionType):
        setattr(decorated, attribute, _checked(value, shown, unchecked))
    return cast(T, decorated)

  return decorate


class _Parameter(NamedTuple):
  """A parameter whose annotation is of numbers, text and None.

  Attributes:
    name: its name.
    position: its number among positional arguments.
    types: the names of its types.
    exact: its types, and that of `_NOT_GIVEN`.
  """

  name: str
  position: int
  types: frozenset[str]
  exact: frozenset[type]

  @property
  def words(self) -> str:
    """`an integer or None`."""
    *first, last = (text for name, (_, text) in _TYPES.items() if name in self.types)
    return f'{", ".join(first)} or {last}' if first else last

  def accepts(self, value: Any) -> bool:
    """Whether a value has one of its types. Numbers of NumPy and JAX have, too."""
    is_number = not isinstance(value, (str, bytes)) and getattr(value, 'ndim', 0) == 0
    is_integer = hasattr(value, '__index__') and np.issubdtype(getattr(value, 'dtype', int), np.integer)
    is_flag = is_number and getattr(value, 'dtype', type(value)) in (bool, np.dtype(bool))
    return (
      (value is None and 'None' in self.types)
      or (isinstance(value, str) and 'str' in self.types)
      or (is_number and 'float' in self.types and not is_flag and hasattr(value, '__float__'))
      or (is_number and 'int' in self.types and not is_flag and (is_integer or _is_whole(value)))
      or ('bool' in self.types and (is_flag or type(value) is int))
    )

  def passed_on(self, value: Any) -> Any:
    """The value that the function gets."""
    return int(value) if _is_whole(value) and not self.types & {'float', 'bool'} else value

  def fix(self, value: Any) -> str:
    """The argument that the caller may have meant."""
    try:
      meant = ast.literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, ValueError):
      meant = value
    return f'{self.name}={meant}' if self.accepts(meant) else f'{self.name} as {self.words}'


_TYPES = {
  'bool': (bool, 'True or False'),
  'int': (int, 'an integer'),
  'float': (float, 'a number'),
  'str': (str, 'text'),
  'None': (type(None), 'None'),
}
_SIMPLE = re.compile('({0})( [|] ({0}))*'.format('|'.join(_TYPES)))
_LITERAL = re.compile(r'Literal\[[^\]]*\]')  # a function checks itself which of the texts it is
_NOT_GIVEN = object()


def _is_whole(value: Any) -> bool:
  return isinstance(value, (float, np.floating)) and value.is_integer()


def _parameters(function: Callable[..., Any]) -> Iterator[_Parameter]:
  """The parameters of a function whose annotations are of numbers, text and None."""
  for position, one in enumerate(inspect.signature(function).parameters.values()):
    annotation = _LITERAL.sub('str', str(one.annotation))
    if _SIMPLE.fullmatch(annotation):
      names = frozenset(annotation.split(' | '))
      exact = frozenset(_TYPES[each][0] for each in names) | {object}
      yield _Parameter(one.name, sys.maxsize if one.kind is one.KEYWORD_ONLY else position, names, exact)


def _checked(function: T, name: str, unchecked: Sequence[str] = ()) -> T:
  """A function that checks the types of its simple arguments first."""
  parameters = [one for one in _parameters(function) if one.name not in unchecked]
  if not parameters:
    return function

  @functools.wraps(function)
  def checked(*args: Any, **kwargs: Any) -> Any:
    for one in parameters:
      given = args[one.position] if one.position < len(args) else kwargs.get(one.name, _NOT_GIVEN)
      if type(given) not in one.exact:
        accepted, kwargs = _accepted(name, parameters, args, kwargs)
        return function(*accepted, **kwargs)
    return function(*args, **kwargs)

  return cast(T, checked)


def _accepted(
  name: str, parameters: Sequence[_Parameter], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
  """The arguments of a call, whole floats as integers.

  Raises:
    ArgumentTypeError: some have other types; lists all of them.
  """
  args, kwargs, wrong = [*args], {**kwargs}, list[tuple[_Parameter, Any]]()
  for one in parameters:
    place: Any = (args, one.position) if one.position < len(args) else (kwargs, one.name)
    among, key = place
    if key not in kwargs and among is kwargs:
      continue
    if one.accepts(among[key]):
      among[key] = one.passed_on(among[key])
    else:
      wrong.append((one, among[key]))
  if wrong:
    texts = (
      f'{one.name} is {value_text(value)}, of type {type(value).__name__}' for one, value in wrong
    )
    fixes = (one.fix(value) for one, value in wrong)
    raise ArgumentTypeError(f'{name}: {"; ".join(texts)}.\nFix: pass {", ".join(fixes)}.')
  return args, kwargs

"""Tree paths: `params/layers/wi` for a key path."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey


def path_string(path: KeyPath) -> str:
  """`params/layers/wi` for a key path.

  Example:
    >>> path_string(jax.tree_util.tree_leaves_with_path({'params': {'w': 1}})[0][0])
    'params/w'
  """
  return '/'.join([_TEXT[type(entry)](entry) for entry in path]) or _ROOT


class _Texts(dict[type, Callable[[Any], str]]):
  """How each kind of key is written; other libraries' kinds are learnt as they come."""

  def __missing__(self, kind: type) -> Callable[[Any], str]:
    self[kind] = lambda entry: str(key_value(entry))
    return self[kind]


_TEXT = _Texts({GetAttrKey: operator.attrgetter('name'), DictKey: lambda entry: str(entry.key)})


_ROOT = '(root)'


def key_value(entry: Any) -> Any:
  """A path's entry as the plain key, name or position that it stands for."""
  read = _READ.get(type(entry))
  return entry if read is None else read(entry)


_READ: Mapping[type, Callable[[Any], Any]] = {
  DictKey: operator.attrgetter('key'),
  FlattenedIndexKey: operator.attrgetter('key'),
  GetAttrKey: operator.attrgetter('name'),
  SequenceKey: operator.attrgetter('idx'),
}

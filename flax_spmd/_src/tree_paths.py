"""Tree paths: JAX key paths as text such as `params/layers/wi`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey

ROOT_PATH = '(root)'


def path_string(path: KeyPath) -> str:
  """Writes a key path with slashes: `params/layers/wi`.

  Example:
    >>> path_string(jax.tree_util.tree_leaves_with_path({'params': {'w': 1}})[0][0])
    'params/w'
  """
  return '/'.join([KEY_TEXT[type(entry)](entry) for entry in path]) or ROOT_PATH


def key_value(entry: Any) -> Any:
  """The key, name or position in an entry of a key path; an entry of an unknown type as it is."""
  value_of = _VALUE_OF.get(type(entry))
  return entry if value_of is None else value_of(entry)


_VALUE_OF: Mapping[type, Callable[[Any], Any]] = {
  DictKey: operator.attrgetter('key'),
  FlattenedIndexKey: operator.attrgetter('key'),
  GetAttrKey: operator.attrgetter('name'),
  SequenceKey: operator.attrgetter('idx'),
}


class _KeyText(dict[type, Callable[[Any], str]]):
  """A function per type of path entry that writes it; other libraries' types are added on first use."""

  def __missing__(self, kind: type) -> Callable[[Any], str]:
    self[kind] = lambda entry: str(key_value(entry))
    return self[kind]


KEY_TEXT = _KeyText({GetAttrKey: operator.attrgetter('name'), DictKey: lambda entry: str(entry.key)})

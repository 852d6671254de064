"""Bounded search: regular expressions searched for in a time that is polynomial in the text.

    search = bounded_search('(a+)+$')
    search('a' * 40 + 'b')    # False, at once; `re` takes hours

`re` tries one way to match after the other, and an expression such as `(a+)+$` has exponentially many. Only
whether there is a match matters for a path. So all ways are followed together: a set of positions, the bits
of one integer, passes through the expression, and each part turns the positions at which it may begin into
those at which it may end. A star over one kind of character is a single addition (MatchStar, Cameron et al.,
"Bitwise data parallelism in regular expression matching", PACT 2014).

The standard library's own parser reads the expression, and its matcher decides about single characters and
anchors; their modules have been `re._parser` and `re._compiler` since Python 3.11.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

_parser: Any = importlib.import_module('re._parser')
_compiler: Any = importlib.import_module('re._compiler')

Ends = Callable[[int, '_Text'], int]  # positions at which a part begins -> positions at which it ends

_ONE_CHARACTER = {'LITERAL', 'NOT_LITERAL', 'ANY', 'IN', 'RANGE', 'CATEGORY'}
_TYPICAL_LENGTH = 100  # characters of a path
MOST_WAYS = 10**8  # to match such a path, before the search has to be bounded


class UnboundedError(ValueError):
  """An expression with a construct that depends on the way in which another part matched."""


def ways(pattern: str) -> int:
  """About how many ways `re` may have to try before it finds that a path does not match.

  Example:
    >>> ways('.*attn/(q|k)/kernel$'), ways('(a+)+$') > MOST_WAYS
    (101, True)
  """
  return _ways(_parser.parse(pattern))


def bounded_search(pattern: str) -> Callable[[str], bool]:
  """A function with the truth value of `re.search(pattern, text)`.

  Raises:
    UnboundedError: the expression has a backreference, or an atomic or possessive group.
  """
  parsed = _parser.parse(pattern)
  ends = _sequence(list(parsed), _Flags(parsed.state, 0, 0))
  return lambda text: ends((2 << len(text)) - 1, _Text(text)) != 0


class _Text:
  """A text, the positions of each of its characters, and the results that are remembered in its search."""

  def __init__(self, text: str):
    self.text = text
    self.memo: dict[Any, int] = {}
    self.positions: dict[str, int] = {}
    for at, character in enumerate(text):
      self.positions[character] = self.positions.get(character, 0) | 1 << at

  def remembered(self, key: Any, compute: Callable[[], int]) -> int:
    """The result of `compute`, which is called once per key."""
    if key not in self.memo:
      self.memo[key] = compute()
    return self.memo[key]


class _Flags:
  """The flags that apply to a part, such as IGNORECASE in `(?i:...)`."""

  def __init__(self, state: Any, added: int, removed: int):
    self._state, self._added, self._removed = state, added, removed

  def inside(self, added: int, removed: int) -> _Flags:
    """The flags inside a group that adds and removes some."""
    return _Flags(self._state, (self._added & ~removed) | added, (self._removed & ~added) | removed)

  def compiled(self, node: Any) -> Any:
    """The compiled expression of a part alone."""
    alone = _parser.SubPattern(self._state, [node])
    group = (_parser.SUBPATTERN, (None, self._added, self._removed, alone))
    return _compiler.compile(_parser.SubPattern(self._state, [group]), self._state.flags)


def _ways(nodes: Any) -> int:
  return reduce(lambda total, node: min(total * _ways_of(node), MOST_WAYS**2), nodes, 1)


def _ways_of(node: Any) -> int:
  kind, value = str(node[0]), node[1]
  if kind == 'BRANCH':
    return sum(map(_ways, value[1]))
  if kind == 'SUBPATTERN':
    return _ways(value[3])
  if kind in ('ASSERT', 'ASSERT_NOT', 'GROUPREF_EXISTS'):
    inner = value[1:] if kind == 'GROUPREF_EXISTS' else (value[1],)
    return max(_ways(each) for each in inner if each is not None)
  if kind == 'ATOMIC_GROUP':
    return _ways(value)
  if not kind.endswith('_REPEAT'):
    return 1
  least, most = value[0], min(int(value[1]), _TYPICAL_LENGTH)
  each = _ways(value[2])
  return min(max(most - least, 0) + 1, MOST_WAYS) * (
    1 if each == 1 else min(each ** min(most, 60), MOST_WAYS**2)
  )


def _sequence(nodes: Any, flags: _Flags) -> Ends:
  parts = [_part(node, flags) for node in nodes]
  return lambda starts, text: reduce(lambda at, part: part(at, text) if at else 0, parts, starts)


def _part(node: Any, flags: _Flags) -> Ends:
  kind, value = str(node[0]), node[1]
  if kind in _ONE_CHARACTER:
    return _character(node, flags)
  if kind == 'AT':
    return _anchor(node, flags)
  make = _PARTS.get(kind)
  if make is None:
    raise UnboundedError(kind.lower())
  return make(value, flags)


def _hits(node: Any, flags: _Flags) -> Callable[[_Text], int]:
  """The positions of the characters that a part of one character matches."""
  match = flags.compiled(node).fullmatch

  @functools.cache
  def is_hit(character: str) -> bool:
    return match(character) is not None

  def positions(text: _Text) -> int:
    return sum(at for character, at in text.positions.items() if is_hit(character))

  return lambda text: text.remembered(match, lambda: positions(text))


def _character(node: Any, flags: _Flags) -> Ends:
  hits = _hits(node, flags)
  return lambda starts, text: (starts & hits(text)) << 1


def _anchor(node: Any, flags: _Flags) -> Ends:
  match = flags.compiled(node).match

  def positions(text: _Text) -> int:
    return sum(1 << at for at in range(len(text.text) + 1) if match(text.text, at))

  return lambda starts, text: starts & text.remembered(match, lambda: positions(text))


def _group(value: Any, flags: _Flags) -> Ends:
  _, added, removed, nodes = value
  return _sequence(nodes, flags.inside(added, removed))


def _branch(value: Any, flags: _Flags) -> Ends:
  branches = [_sequence(nodes, flags) for nodes in value[1]]
  return lambda starts, text: reduce(lambda ends, branch: ends | branch(starts, text), branches, 0)


def _repeat(value: Any, flags: _Flags) -> Ends:
  least, most, nodes = value
  if most == _parser.MAXREPEAT and len(nodes) == 1 and str(nodes[0][0]) in _ONE_CHARACTER:
    return _repeated_character(least, nodes[0], flags)
  body = _sequence(nodes, flags)

  def ends(starts: int, text: _Text) -> int:
    at = starts
    for _ in range(least):
      before, at = at, body(at, text)
      if at in (0, before):  # any further repetition gives the same
        break
    reached = new = at
    for _ in range(most - least if most != _parser.MAXREPEAT else len(text.text) + 1):
      new = body(new, text) & ~reached
      if not new:
        break
      reached |= new
    return reached

  return lambda starts, text: text.remembered((ends, starts), lambda: ends(starts, text))


def _repeated_character(least: int, node: Any, flags: _Flags) -> Ends:
  hits = _hits(node, flags)

  def ends(starts: int, text: _Text) -> int:
    for _ in range(least):
      starts = (starts & hits(text)) << 1
      if not starts:
        return 0
    where = hits(text)
    return (((starts & where) + where) ^ where) | starts

  return ends


def _assertion(value: Any, flags: _Flags, holds: bool) -> Ends:
  direction, nodes = value
  body = _sequence(nodes, flags)
  width = nodes.getwidth()[0] if direction < 0 else 0  # of a look behind, which has one width

  def at(position: int, text: _Text) -> bool:
    if direction > 0:
      return body(1 << position, text) != 0
    return position >= width and bool(body(1 << (position - width), text) >> position & 1)

  def ends(starts: int, text: _Text) -> int:
    positions = (p for p in range(len(text.text) + 1) if starts >> p & 1)
    return sum(1 << p for p in positions if at(p, text) == holds)

  return ends


_PARTS: Mapping[str, Callable[[Any, _Flags], Ends]] = {
  'SUBPATTERN': _group,
  'BRANCH': _branch,
  'MAX_REPEAT': _repeat,
  'MIN_REPEAT': _repeat,
  'ASSERT': lambda value, flags: _assertion(value, flags, True),
  'ASSERT_NOT': lambda value, flags: _assertion(value, flags, False),
  'FAILURE': lambda value, flags: lambda starts, text: 0,
}

"""Path patterns: the first of many regular expressions that matches a path, found quickly."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flax_spmd.errors import Problem


def compiled(index: int, pattern: str) -> re.Pattern[str] | Problem:
  """The compiled regular expression of a path rule, or the problem with it."""
  try:
    return re.compile(pattern)
  except re.error as error:
    return Problem(
      f'Rule {index}: {pattern!r} is not a regular expression: {error}.',
      'correct it; it is searched for in paths such as params/layers/wi.',
    )


class PathMatcher:
  """Finds the first of many regular expressions that matches a path.

  Most expressions contain a piece of plain text that is part of every match. Looking for that text first is
  much faster than a search with every expression.
  """

  def __init__(self, patterns: Sequence[re.Pattern[str]]):
    self._patterns = [(plain_text(pattern), pattern.search) for pattern in patterns]

  def first(self, path: str) -> int | None:
    """The position of the first pattern that matches `path`."""
    for index, (plain, search) in enumerate(self._patterns):
      if plain in path and search(path):
        return index
    return None


def plain_text(pattern: re.Pattern[str]) -> str:
  """The longest text that every match of the pattern contains, as far as a simple reading shows.

  Example:
    >>> plain_text(re.compile('^attn_[0-9]+/(q|k)?/kernels*$'))
    '/kernel'
  """
  text = pattern.pattern
  if pattern.flags & (re.IGNORECASE | re.VERBOSE) or _OBSCURE.search(text):
    return ''
  text = _GROUP.sub('.', text)
  if re.search('[(|]', text):
    return ''
  return max(_NOT_PLAIN.split(text), key=len)


# Parts of an expression that the simple reading could misread.
_OBSCURE = re.compile(r'\(\?|\\[][()|\\xuUN0-9]|\[\^?\]|\[[^]]*[()|[]')


_GROUP = re.compile(r'\([^()]*\)')


# A class or a character with its quantifier; the rest of an expression matches itself.
_NOT_PLAIN = re.compile(r'(?:\[[^]]*\]|\\.|.)(?:[*?]|\{[^}]*\})[?+]?|\[[^]]*\]|\\.|[.^$+]', re.DOTALL)

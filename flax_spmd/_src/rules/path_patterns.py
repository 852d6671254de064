"""Path patterns: the first of many regular expressions that matches a path, found quickly."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flax_spmd.errors import Problem


def compiled(index: int, pattern: str) -> re.Pattern[str] | Problem:
  """A path rule's regular expression, or what is wrong with it."""
  try:
    return re.compile(pattern)
  except re.error as error:
    return Problem(
      f'Rule {index}: {pattern!r} is no regular expression: {error}.',
      'correct it; it is searched for in paths such as params/layers/wi.',
    )


class PathMatcher:
  """Finds the first of many regular expressions that is found in a path.

  Most expressions have a piece of plain text in them that every match contains; looking for that first
  is much faster than searching with each.
  """

  def __init__(self, patterns: Sequence[re.Pattern[str]]):
    self._patterns = [(plain_text(pattern), pattern.search) for pattern in patterns]

  def first(self, path: str) -> int | None:
    """The position of the first pattern that is found in `path`."""
    for index, (plain, search) in enumerate(self._patterns):
      if plain in path and search(path):
        return index
    return None


def plain_text(pattern: re.Pattern[str]) -> str:
  """The longest text that is in everything the pattern matches, as far as is plain to see.

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


# What this simple reading of an expression could take for something else.
_OBSCURE = re.compile(r'\(\?|\\[][()|\\xuUN0-9]|\[\^?\]|\[[^]]*[()|[]')


_GROUP = re.compile(r'\([^()]*\)')


# A class, a character or what stands for one, with what says how often; the rest is itself.
_NOT_PLAIN = re.compile(r'(?:\[[^]]*\]|\\.|.)(?:[*?]|\{[^}]*\})[?+]?|\[[^]]*\]|\\.|[.^$+]', re.DOTALL)

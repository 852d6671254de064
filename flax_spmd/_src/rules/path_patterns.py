"""Path patterns: the first of many regular expressions that matches a path, found quickly."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from flax_spmd._src.rules.bounded_search import MOST_WAYS, UnboundedError, bounded_search, ways
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem

Search = Callable[[str], object]


@functools.lru_cache(maxsize=4096)
def searcher(pattern: str) -> Search:
  """A function that tells whether a path matches, in a time that is polynomial in the path.

  Raises:
    re.error, OverflowError, RecursionError: it is not a regular expression, or one that is too large.
    UnboundedError: the search may take exponential time.
  """
  search = re.compile(pattern).search
  return search if ways(pattern) <= MOST_WAYS else bounded_search(pattern)


def problem_of(subject: str, pattern: str, *, replaced: bool = False) -> Problem | None:
  """The problem with a regular expression for paths, if there is one.

  Args:
    subject: its name in the message.
    pattern: the expression.
    replaced: whether a match is replaced by another text, so that only `re` can search for it.
  """
  if not isinstance(pattern, str):
    return Problem(
      f'{subject}: {value_text(pattern)} is not a text.', 'pass a regular expression for paths.'
    )
  try:
    searcher(pattern)
  except UnboundedError as error:
    return Problem(
      f'{subject}: a search for {value_text(pattern)} may take exponential time, because it has nested repetitions and '
      f'a construct of the kind {error}.',
      'write it without backreferences and possessive groups, or without a repetition inside a repetition.',
    )
  except (re.error, OverflowError, RecursionError) as error:
    return Problem(
      f'{subject}: {value_text(pattern)} is not a regular expression: {error}.',
      'correct it; it is searched for in paths such as params/layers/wi.',
    )
  if replaced and ways(pattern) > MOST_WAYS:
    return Problem(
      f'{subject}: a replacement of {value_text(pattern)} may take exponential time, because it has nested repetitions.',
      'write it without a repetition inside a repetition.',
    )
  return None


class PathMatcher:
  """Finds the first of many regular expressions that matches a path.

  Most expressions contain a piece of plain text that is part of every match. Looking for that text first is
  much faster than a search with every expression.
  """

  def __init__(self, patterns: Sequence[str]):
    self._patterns = [(plain_text(re.compile(pattern)), searcher(pattern)) for pattern in patterns]

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

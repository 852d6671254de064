r"""Derived renames: the few patterns for `Changes.renames` that rename the paths of a list of pairs.

    params/blocks_0/up/kernel   blocks/0/up/kernel
    params/blocks_1/up/kernel   blocks/1/up/kernel      '^params/blocks_(\d+)/': 'blocks/\1/'
    params/embed/embedding      embed/embedding         '^params/': ''

A pattern replaces the first names of paths, up to those in which a pair agrees, with any numbers in the place of numbers.
Every pair is tried; paths that the patterns would rename in another way have patterns of their own, which come first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flax_spmd._src.checkpoint.matching.allowed_changes import Changes, renamed

Renames = dict[str, str | list[str]]


def derived_renames(
  paths: Mapping[str, Sequence[str]], optimizers: Mapping[str, tuple[str, str]]
) -> Renames:
  """Patterns for `Changes.renames`.

  Args:
    paths: the new paths of each saved path.
    optimizers: for each saved path of optimizer state, the optimizer's saved path and its new one.
  """
  exact: Renames = {
    f'^{re.escape(old)}$': [*map(_literal, new)] for old, new in paths.items() if len(new) > 1
  }
  votes = Counter(
    pattern
    for old, new in paths.items()
    if len(new) == 1 and (pattern := _prefix(old, new[0], optimizers.get(old)))
  )
  chosen: dict[str, str] = {}
  for (pattern, replacement), _ in votes.most_common():
    chosen.setdefault(pattern, replacement)
  general = dict(sorted(chosen.items(), key=lambda item: (-item[0].count('/'), -len(item[0]), item[0])))
  exact |= _exceptions(paths, exact | general)
  return exact | general


def _exceptions(paths: Mapping[str, Sequence[str]], renames: Renames) -> Renames:
  """A pattern for each path that others rename wrongly; one for several, if they have the last name in common."""
  changes = Changes(renames=renames)
  found: Renames = {}
  for old, new in paths.items():
    if renamed(changes, old) != tuple(new):
      pattern, replacement = _by_last_name(old, new[0])
      shared = Changes(renames={pattern: replacement})
      others = [each for each in paths if re.search(pattern, each)]
      if any(renamed(shared, each) != tuple(paths[each]) for each in others):
        pattern, replacement = f'^{re.escape(old)}$', _literal(new[0])
      found[pattern] = replacement
  return found


def _by_last_name(old: str, new: str) -> tuple[str, str]:
  """The pattern and replacement of the first name of paths, for all paths with one last name."""
  head, _, tail = old.partition('/')
  new_head, _, new_tail = new.partition('/')
  if tail != new_tail or '/' not in tail:
    return f'^{re.escape(old)}$', _literal(new)
  last = tail.rpartition('/')[2]
  return f'^{re.escape(head)}/(.+)/{re.escape(last)}$', rf'{_literal(new_head)}/\1/{_literal(last)}'


def _prefix(old: str, new: str, optimizer: tuple[str, str] | None) -> tuple[str, str] | None:
  """The pattern and replacement of the first names of a path; None for equal paths."""
  if old == new:
    return None
  olds, news = old.split('/'), new.split('/')
  while len(olds) > 1 and news and olds[-1] == news[-1]:
    del olds[-1], news[-1]
  if olds[-1:] == old.split('/')[-1:]:
    return f'^{re.escape(old)}$', _literal(new)
  return _generalised(olds, news, optimizer) or (
    f'^{re.escape("/".join(olds))}/',
    _literal('/'.join([*news, ''])),
  )


def _generalised(
  olds: list[str], news: list[str], optimizer: tuple[str, str] | None
) -> tuple[str, str] | None:
  """A prefix with patterns for its numbers, and for the field of an optimizer; None if its numbers change."""
  before, after, fields = '', '', 0
  if optimizer is not None:
    roots = [len(root.split('/')) if root else 0 for root in optimizer]
    if len(olds) > roots[0] and len(news) >= roots[1]:
      state, new_state = olds[roots[0] :], news[roots[1] :]
      fields = _agreeing(state, new_state)
      if fields and fields < len(state):
        before, after = re.escape(optimizer[0]) + '/(.+)/', _literal(optimizer[1]) + r'/\1/'
        olds, news = state[fields:], new_state[fields:]
      else:
        fields = 0
  numbers = [re.findall(_NUMBER, '/'.join(names)) for names in (olds, news)]
  common = min(map(len, numbers))  # a root may have a number of its own
  if common and numbers[0][-common:] != numbers[1][-common:]:
    return None
  pattern = _with_numbers('/'.join(olds), len(numbers[0]) - common, lambda _: r'(\d+)', re.escape)
  start = 2 if fields else 1
  replacement = _with_numbers(
    '/'.join([*news, '']), len(numbers[1]) - common, lambda number: rf'\g<{start + number}>', _literal
  )
  return f'^{before}{pattern}/', shorter(after + replacement)


_NUMBER = r'(?<![A-Za-z0-9])\d+'  # `a/0` and `a_0`, not `a0`


def _with_numbers(
  text: str, skipped: int, number: Callable[[int], str], other: Callable[[str], str]
) -> str:
  """A text with functions applied to its numbers, but for the first ones, and to everything else."""
  parts = re.split(f'({_NUMBER})', text)
  return ''.join(
    number(index // 2 - skipped) if index % 2 and index // 2 >= skipped else other(part)
    for index, part in enumerate(parts)
  )


def shorter(replacement: str) -> str:
  r"""`\1` in the place of `\g<1>` where no digit follows."""
  return re.sub(r'\\g<(\d)>(?!\d)', r'\\\1', replacement)


def _agreeing(one: Sequence[str], other: Sequence[str]) -> int:
  """The number of first names in which two paths agree."""
  pairs = zip(one, other, strict=False)
  return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _literal(text: str) -> str:
  return text.replace('\\', r'\\')

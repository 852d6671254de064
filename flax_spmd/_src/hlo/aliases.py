"""Aliases: the parameters of a compiled program whose memory its results reuse."""

from __future__ import annotations

import re

_ALIAS = re.compile(r'\{[\d, ]*\}: \((\d+), \{([\d, ]*)\}, \w+-alias\)')


def reused_parameters(text: str) -> frozenset[int]:
  """The numbers of the parameters that share memory with a result: donated arguments that are reused.

  Example:
    >>> reused_parameters('HloModule f, input_output_alias={ {0}: (1, {}, may-alias) }, num_partitions=8')
    frozenset({1})
  """
  header = text.partition('\n')[0]
  # TPUs take many arguments as one tuple, of which the second number is the element.
  return frozenset(int(element or number) for number, element in _ALIAS.findall(header))

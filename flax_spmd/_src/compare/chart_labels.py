"""Chart labels: the lines of a long name, the width of text, and the ticks of an axis."""

from __future__ import annotations

import math
import textwrap

LINE = 17  # pixels from one line of text to the next
_CHARACTER = 8.0  # pixels, of the widest usual characters of a 13 px font
_WIDEST, _MOST_LINES = 44, 3  # characters of a line, lines of a name


def name_lines(name: str) -> list[str]:
  """A name in lines that fit beside a chart; the end of a very long one is left out.

  Example:
    >>> name_lines('data=8,model=4: batch=data heads,mlp=model fsdp=data')
    ['data=8,model=4: batch=data heads,mlp=model', 'fsdp=data']
  """
  return textwrap.wrap(name, _WIDEST, max_lines=_MOST_LINES, placeholder=' …') or ['']


def text_width(text: str) -> float:
  """The width of a line of text in pixels, rather too large than too small."""
  return _CHARACTER * len(text)


def free_place(x: float, y: float, text: str, taken: list[tuple[float, float]], step: float) -> float:
  """The height at which a short text beside a dot overlaps no other, and marks it as taken.

  Args:
    x, y: the wanted place, in pixels.
    text: the text, from `x` to the right.
    taken: places of the texts so far; the new one is appended.
    step: pixels from one height to try to the next.

  Example:
    >>> taken = []
    >>> [free_place(10, 50, '1', taken, 14), free_place(12, 51, '2', taken, 14), free_place(40, 50, '3', taken, 14)]
    [50, 64, 50]
  """
  width = text_width(text) + 4
  near = [height for other, height in taken if abs(x - other) < width]
  for height in sorted(near, reverse=step < 0):
    y = height + step if abs(y - height) < abs(step) else y
  taken.append((x, y))
  return y


def ticks(most: float, unit: float = 1.0) -> list[float]:
  """Four to ten round values from 0 to `most`.

  Args:
    most: the largest value, above 0.
    unit: the values are round in this unit, such as 2**30 for bytes.

  Example:
    >>> ticks(0.047)
    [0.0, 0.01, 0.02, 0.03, 0.04]
    >>> [value / 2**30 for value in ticks(80 * 2**30, 2**30)]
    [0.0, 20.0, 40.0, 60.0, 80.0]
  """
  power = 10.0 ** math.floor(math.log10(most / unit))
  parts = (0.1, 0.2, 0.5, 1, 2)
  step = next(part * power for part in parts if most / unit / (part * power) < 7)
  count = math.floor(most / unit / step + 1e-9)
  return [round(number * step, 12) * unit for number in range(count + 1)]


def size_unit(most: float) -> float:
  """The binary unit in which sizes up to `most` are written: 2**30 for GiB."""
  return 1024.0 ** max(0, math.floor(math.log(max(most, 1), 1024)))

"""Lines: drawings made of lines of characters, in the terminal, by `rich` in colour, and in notebooks as SVG."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
  from rich.text import Text

WIDTH = 100  # characters


class Part(Protocol):
  """Characters of a line, with a background colour if they belong to a cell."""

  @property
  def text(self) -> str: ...

  @property
  def colour(self) -> str: ...


class Lines(abc.ABC):
  """An object that is drawn as lines of characters: `str` returns text, notebooks show SVG, `rich` prints in colour."""

  @property
  @abc.abstractmethod
  def svg(self) -> str:
    """The SVG document."""

  @abc.abstractmethod
  def _lines(self, width: int) -> Iterable[Sequence[Part]]:
    """The lines, at most as wide as a number of characters where possible."""

  def text(self, width: int = WIDTH) -> str:
    """The drawing as characters.

    Args:
      width: width in characters. A wider grid is shortened in the middle; a longer timeline wraps into bands.
    """
    return '\n'.join(''.join(part.text for part in line).rstrip() for line in self._lines(width))

  def __repr__(self) -> str:
    return self.text()

  def _repr_svg_(self) -> str:
    return self.svg

  def _repr_html_(self) -> str:
    return f'<div style="overflow-x: auto">{self.svg}</div>'

  def __rich_console__(self, console: Any, options: Any) -> Iterable[Text]:
    from rich.text import Text  # 20 ms to import

    for line in self._lines(options.max_width):
      text = Text(no_wrap=True, overflow='crop')
      for part in line:
        text.append(part.text, f'#111111 on {part.colour}' if part.colour else '')
      yield text

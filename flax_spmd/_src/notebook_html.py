"""Notebook HTML: elements of which values make the HTML that a notebook shows for them (`_repr_html_`).

They need no style but the notebook's own, and show wherever a notebook is shown. A viewer that runs no scripts, such as
GitHub, shows tables without their filter.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_ROWS = 2000  # in a notebook, which saves them in its file
_MANY_ROWS = 8  # that have a filter
_REPORT_HEIGHT = 600  # pixels
_FILTER = (
  '<input type="search" placeholder="filter rows" aria-label="filter rows" oninput="for (const row of '
  'this.nextElementSibling.firstChild.tBodies[0].rows) row.hidden = '
  '!row.textContent.toLowerCase().includes(this.value.toLowerCase())">'
)


def safe(text: Any) -> str:
  """Text with HTML's special characters escaped."""
  return html.escape(str(text))


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table of cells that are HTML, aligned to the left; its first `MOST_ROWS` rows, and the number of others.

  Above many rows is a field: rows that contain its text stay, by folded content too.
  """
  align = ' style="text-align: left; vertical-align: top; padding: 2px 1em 2px 0"'
  head = ''.join(f'<th{align}>{safe(title)}</th>' for title in titles)
  rows = list(rows)
  lines = (''.join(f'<td{align}>{cell}</td>' for cell in row) for row in rows[:MOST_ROWS])
  body = ''.join(f'<tr>{line}</tr>' for line in lines)
  others = (
    f'<p>and {len(rows) - MOST_ROWS} more, which print shows.</p>' if len(rows) > MOST_ROWS else ''
  )
  search = _FILTER if len(rows) > _MANY_ROWS else ''
  table = f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
  return f'{search}<div style="overflow-x: auto">{table}</div>{others}'


def bullets(lines: Iterable[Any]) -> str:
  """A list of texts; '' if there are none."""
  items = ''.join(f'<li>{safe(line)}</li>' for line in lines)
  return f'<ul style="overflow-wrap: anywhere">{items}</ul>' if items else ''


def preformatted(text: Any) -> str:
  """A text with its line breaks and spaces."""
  return f'<pre style="overflow-x: auto">{safe(text)}</pre>'


def collapsed(summary: Any, content: str) -> str:
  """HTML that a click on a text unfolds."""
  return f'<details><summary>{safe(summary)}</summary>{content}</details>'


def collapsed_page(summary: Any, page: str) -> str:
  """A whole HTML page, with its own style and scripts, that a click on a text unfolds."""
  frame = f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {_REPORT_HEIGHT}px; border: 0"></iframe>'
  return collapsed(summary, frame)


def written_page(page: str, path: str | os.PathLike[str] | None) -> str:
  """A whole HTML page, after it is written to a file if there is a path."""
  if path is not None:
    Path(path).write_text(page, encoding='utf-8')
  return page

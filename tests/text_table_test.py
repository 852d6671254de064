"""Text tables: the same lines as `rich` prints, and no line wider than the console."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flax_spmd._src.text_table import TextTable

CELLS = st.text(
  st.characters(codec='utf-8', exclude_categories=['C', 'Z', 'M'], exclude_characters='│'), max_size=30
)
ROWS = st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=6)


def printed(table, width=200, **options):
  file = io.StringIO()
  Console(file=file, width=width, force_jupyter=False, **options).print(table)
  return file.getvalue()


@given(ROWS)
@example([['params/w', '数据', 'embed → data (0)']])
def test_rich_prints_the_same_table(rows):
  theirs = Table()
  for name in ('path', 'array'):
    theirs.add_column(name)
  theirs.add_column('per device', justify='right')
  for row in rows:
    theirs.add_row(*map(Text, row))
  ours = TextTable(('path', 'array', 'per device'), rows)
  assert printed(ours) == printed(theirs)


@given(ROWS, st.integers(24, 80))
def test_no_line_is_wider_than_the_console_and_no_character_is_lost(rows, width):
  lines = printed(TextTable(('path', 'array', 'size'), rows), width).splitlines()
  assert {cell_len(line) for line in lines} == {cell_len(lines[0])}
  assert cell_len(lines[0]) <= width
  body = [line[1:-1].split('│') for line in lines[:-1] if line[0] == '│']
  for column in range(3):
    found = ''.join(cells[column].strip() for cells in body)
    assert found == ''.join(row[column] for row in rows)


def test_the_widest_columns_give_way():
  rows = [['x' * 60, 'y' * 30, '1 KiB']]
  lines = printed(TextTable(('path', 'array', 'size'), rows), 50).splitlines()
  assert [len(part) for part in lines[0].split('┳')] == [20, 19, 8]
  assert [len(line) for line in lines] == [49] * len(lines)


def test_a_console_without_unicode_gets_other_borders():
  class Ascii(io.StringIO):
    encoding = 'ascii'

  file = Ascii()
  Console(file=file, width=40).print(TextTable(('a', 'b'), [['1', '2']]))
  assert file.getvalue().isascii()


@pytest.mark.parametrize('count', [0, 1])
def test_the_titles_are_bold(count):
  text = printed(TextTable(('a', 'b'), [['1', '2']] * count), force_terminal=True)
  assert text.count('\x1b[1m') == 1

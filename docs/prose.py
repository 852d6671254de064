"""Prints how plain the prose is: three habits of translated English, per 1,000 words.

    python docs/prose.py              # docstrings of the package
    python docs/prose.py README.md    # the prose of pages: without code, tables' rules and links' targets
    python docs/prose.py --list       # each place of the three, as file:line

* noun clauses with *what* ("what is read"), where English has a noun;
* *lie*, *lies*, *lay*, *laid*, *lying*, for arrays that are sharded or replicated;
* *says*, *tells*, *hears* and their forms, of code that returns, raises or reports.

Code is not counted: lines of examples, and words between backticks.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
HABITS = {
  'what-clauses': re.compile(r'\bwhat\b(?!\?)', re.I),
  'lie, laid': re.compile(r'\b(lie|lies|lay|lays|laid|lain|lying)\b', re.I),
  'say, tell, hear': re.compile(
    r'\b(say|says|said|saying|tell|tells|told|telling|hear|hears|heard|hearing)\b', re.I
  ),
}


class Prose(NamedTuple):
  """A piece of prose, and where its first line stands."""

  file: Path
  line: int
  text: str


def docstrings(folder: Path) -> Iterator[Prose]:
  """Every docstring of a package, without its examples and its code."""
  for file in sorted(folder.rglob('*.py')):
    for node in ast.walk(ast.parse(file.read_text())):
      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = node.body[0] if node.body else None
        value = (
          first.value.value
          if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
          else None
        )
        if isinstance(first, ast.Expr) and isinstance(value, str):
          yield Prose(file, first.lineno, without_code(value))


def page(file: Path) -> Prose:
  """A page of Markdown, without its code."""
  text = re.sub(r'^(```|~~~).*?^\1', _blank, file.read_text(), flags=re.M | re.S)
  return Prose(file, 1, without_code(re.sub(r'\]\([^)]*\)', ']', text)))


def without_code(text: str) -> str:
  """Prose without examples, indented code and words between backticks; lines stay where they are."""
  text = re.sub(r'^ *(>>>|\.\.\.) .*(\n(?! *(>>>|\.\.\.)|\s*$).*)*', _blank, text, flags=re.M)
  text = re.sub(r'(?<=\n\n)((?: {4,}.*\n)+)(?=\n|\Z)', _code_block, text)
  return re.sub(r'(`+)[^`]*\1', _blank, text)


def _code_block(found: re.Match[str]) -> str:
  return found[0] if re.match(r' +\w+[^\n]*: ', found[0]) else _blank(found)


def _blank(found: re.Match[str]) -> str:
  return '\n' * found[0].count('\n')


def words(text: str) -> int:
  """How many words a text has."""
  return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def main() -> None:
  """Prints the rates of the files that are named, or of the package."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('files', nargs='*', type=Path, help='pages or folders (default: the package)')
  parser.add_argument('--list', action='store_true', help='print every place')
  options = parser.parse_args()
  pieces: list[Prose] = []
  for file in options.files or [ROOT / 'flax_spmd']:
    if file.suffix == '.md':
      pieces.append(page(file))
    else:
      pieces += (
        docstrings(file) if file.is_dir() else (p for p in docstrings(file.parent) if p.file == file)
      )
  total = sum(words(piece.text) for piece in pieces)
  print(f'{total:,} words')
  for name, habit in HABITS.items():
    places = [(piece, match) for piece in pieces for match in habit.finditer(piece.text)]
    print(f'{name:16} {len(places):5}  {1000 * len(places) / max(total, 1):5.1f} in 1,000 words')
    for piece, match in places if options.list else ():
      before, after = piece.text[: match.start()], piece.text[match.end() :]
      near = f'{before[-30:]}{match[0]}{after[:40]}'.replace('\n', ' ')
      print(f'  {piece.file}:{piece.line + before.count(chr(10))}: {near}')


if __name__ == '__main__':
  main()

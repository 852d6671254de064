"""The command line `flax-spmd demo | checkpoint | explain | compare | report | search | targets`.

Exit codes: 0; 1 for a verdict, such as a layout that needs more memory than a limit; 2 for a wrong argument or file;
3 for an exception of the user's own code, with the frames in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from flax_spmd.cli import checkpoint, demo, explore, search, user_errors
from flax_spmd.errors import FlaxSpmdError


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit code.

  Example:
    >>> main(['checkpoint', 'show', str(tmp / 'nothing')])
    2
  """
  parser = argparse.ArgumentParser(
    prog='flax-spmd', description='Logical-axis partitioning for Flax Linen.'
  )
  parser.add_argument('--version', action='version', version=f'flax_spmd {version("flax-spmd")}')
  commands = parser.add_subparsers(required=True)
  demo.add_to(commands)
  checkpoint.add_to(commands)
  explore.add_to(commands)
  search.add_to(commands)
  options = parser.parse_args(arguments)
  try:
    return options.run(options)
  except FlaxSpmdError as error:
    print(error, file=sys.stderr)
    return 2
  except Exception as error:
    text = user_errors.user_error_text(error, getattr(options, 'model', ('',))[0])
    if text is None:
      raise
    print(text, file=sys.stderr, end='')
    return 3

"""The command line `flax-spmd demo | checkpoint | explain | compare | report | search | targets`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from flax_spmd.cli import checkpoint, demo, explore, search
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

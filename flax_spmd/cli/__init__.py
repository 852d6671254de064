"""The command line `flax-spmd demo | checkpoint | explain | compare | report | search | targets`.

Exit codes: 0; 1 for a verdict, such as a layout that needs more memory than a limit; 2 for a wrong argument or file;
3 for an exception of the user's own code, with the frames in it; 141 if nobody reads the output any more, as in
`flax-spmd targets | head -1`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib.metadata import version

from flax_spmd.cli import checkpoint, demo, explore, search, user_errors
from flax_spmd.errors import FlaxSpmdError

_NO_READER = 141  # as shells have it for a process that SIGPIPE ends


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
    code = options.run(options)
    sys.stdout.flush()
    return code
  except FlaxSpmdError as error:
    print(error, file=sys.stderr)
    return 2
  except BrokenPipeError:
    if _is_read():
      raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout as it ends
    return _NO_READER
  except Exception as error:
    text = user_errors.user_error_text(error, getattr(options, 'model', ('',))[0])
    if text is None:
      raise
    print(text, file=sys.stderr, end='')
    return 3


def _is_read() -> bool:
  """Whether stdout is no pipe without a reader."""
  poll = select.poll()
  poll.register(1, 0)
  return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))

"""`flax-spmd demo`: train under one layout, save, restore under another, continue, compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flax_spmd.cli.devices import emulate


def add_to(commands: Any) -> None:
  """Adds the command to a parser."""
  demo = commands.add_parser(
    'demo',
    help='train under one layout, save, restore under another, continue, compare',
    description="Train a small transformer on Python's documentation, on the available accelerators "
    'or on 8 emulated devices. The exit code is 1 if the two runs differ.',
  )
  demo.add_argument('--steps', type=_positive, default=80, help='training steps (default 80)')
  demo.add_argument('--keep', type=Path, metavar='FOLDER', help='keep the checkpoint in this folder')
  demo.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
  emulate(8)
  from rich.console import Console

  from flax_spmd.demo.run import run
  from flax_spmd.demo.training import TrainingConfig

  return 0 if run(TrainingConfig(steps=options.steps), Console(), options.keep) else 1


def _positive(text: str) -> int:
  number = int(text)
  if number < 4:
    raise argparse.ArgumentTypeError('at least 4 steps, two under each layout')
  return number

"""The command line: `flax-spmd demo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='flax-spmd', description='Logical-axis partitioning for Flax Linen.'
  )
  commands = parser.add_subparsers(dest='command', required=True)
  demo = commands.add_parser(
    'demo',
    help='train under one layout, save, restore under another, train on, compare',
    description='Trains a small transformer on the documentation inside Python, on the accelerators '
    'that are here or on 8 emulated devices. Exits with 1 if the two runs differ.',
  )
  demo.add_argument('--steps', type=_positive, default=80, help='training steps (default 80)')
  demo.add_argument('--keep', type=Path, metavar='FOLDER', help='keep the checkpoint in this folder')
  options = parser.parse_args(arguments)
  return _demo(options.steps, options.keep)


def _demo(steps: int, folder: Path | None) -> int:
  _emulate_devices(8)
  from rich.console import Console  # after the devices are set: importing must not start JAX

  from flax_spmd.demo.run import run
  from flax_spmd.demo.training import Plan

  return 0 if run(Plan(steps=steps), Console(), folder) else 1


def _emulate_devices(count: int) -> None:
  """Where there is no accelerator, makes JAX show this many CPU devices."""
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', count)


def _positive(text: str) -> int:
  number = int(text)
  if number < 4:
    raise argparse.ArgumentTypeError('at least 4 steps, two under each layout')
  return number


if __name__ == '__main__':
  sys.exit(main())

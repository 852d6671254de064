"""Evaluates every new checkpoint of a run on held-out text, under a layout of its own, while the run continues."""

import argparse
from pathlib import Path

from data import Windows, read
from model import LENGTH, loss_of

import flax_spmd as spmd
from flax_spmd import checkpoint, errors

ROWS = 128


def evaluate(args):
  """Prints the loss of the averaged parameters of each step, until the last one."""
  layout = spmd.Layout.from_toml(args.layout.read_text())
  text = Windows(read(args.text), LENGTH + 1, held_out=True)
  tokens = layout.shard(text[:ROWS], ('batch', None))
  loss = layout.jit(loss_of)
  with checkpoint.Manager(args.run, layout, read_only=True) as manager:
    for step in manager.follow(timeout=args.timeout, every=0.5):
      try:
        _, params = manager.restore(step=step, changes=checkpoint.Changes(only='ema'))
      except errors.CheckpointNotFoundError:  # the run has removed it meanwhile
        continue
      print(f'step {step}  held-out loss {float(loss(params, tokens)):.5f}', flush=True)
      if step >= args.last:
        return


def main(arguments=None):
  """Evaluates."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  here = Path(__file__).parent
  add('--run', type=Path, default=Path('runs/bytes'), help='the folder of the checkpoints')
  add('--layout', type=Path, default=here / 'layouts' / 'serving.toml', help='a TOML file')
  add('--text', type=Path, help='the file of the run')
  add('--last', type=int, default=100, help='the last step of the run')
  add('--timeout', type=float, default=600, help='seconds to wait for a step')
  evaluate(parser.parse_args(arguments))


if __name__ == '__main__':
  main()

"""Writes a model to serve: the averaged parameters in bfloat16, an empty cache, and the decoding step as a program."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from model import LENGTH, NAMES, Decoder

import flax_spmd as spmd
from flax_spmd import checkpoint

DTYPE = jnp.bfloat16
TEMPERATURE = 0.7


def create_cache(rows):
  """The empty caches of attention, for this number of texts."""
  return Decoder(decode=True, dtype=DTYPE).init(jax.random.key(0), jnp.zeros((rows, LENGTH), jnp.int32))[
    'cache'
  ]


def decode(params, cache, tokens, key):
  """Reads one byte of every text, int32 (batch, 1); returns the next one, drawn at random, and the cache."""
  model = Decoder(decode=True, dtype=DTYPE)
  logits, changed = model.apply({'params': params, 'cache': cache}, tokens, mutable=['cache'])
  scaled = logits.astype(jnp.float32) / TEMPERATURE
  return jax.random.categorical(key, scaled).astype(jnp.int32), changed['cache']


def publish(args):
  """Writes the newest step of a run."""
  layout = spmd.Layout.from_toml(args.layout.read_text())
  changes = checkpoint.Changes(only='ema', dtypes={'float32': 'bfloat16'})
  with checkpoint.Manager(args.run, layout, read_only=True) as manager:
    step, params = manager.restore(changes=changes)
  cache = layout.init(spmd.names_for(create_cache, NAMES), args.rows, boxed=False)
  tokens = layout.shard(jnp.zeros((args.rows, 1), jnp.int32), ('batch', None))
  checkpoint.save(args.to / 'params', params, layout, overwrite=True)
  checkpoint.save(args.to / 'cache', cache, layout, overwrite=True)
  step_fn = layout.jit(decode, donate_argnums=1)
  checkpoint.save_program(args.to / 'decode.program', step_fn, params, cache, tokens, jax.random.key(0))
  print(f'step {step} is in {args.to}')


def main(arguments=None):
  """Publishes."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  here = Path(__file__).parent
  add('--run', type=Path, default=Path('runs/bytes'), help='the folder of the checkpoints')
  add('--to', type=Path, default=Path('served'), help='the folder to write to')
  add('--layout', type=Path, default=here / 'layouts' / 'serving.toml', help='a TOML file')
  add('--rows', type=int, default=4, help='texts that are completed together')
  publish(parser.parse_args(arguments))


if __name__ == '__main__':
  main()

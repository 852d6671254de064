"""Completes the lines of standard input with a published model, whose code it does not need.

echo 'The with statement' | python serve.py --model served
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

from flax_spmd import checkpoint


def complete(decode, params, cache, prompts, length, key):
  """The prompts, and the bytes that follow them, up to a length.

  Args:
    decode: the decoding step.
    params, cache: its first arguments; the cache is donated.
    prompts: texts, at most as many as the cache has rows.
    length: bytes of the results, at most those of the cache.
    key: random key.
  """
  given = [prompt.encode()[: length - 1] for prompt in prompts]
  text = np.zeros((cache_rows(cache), length), np.int32)
  for row, prompt in zip(text, given, strict=False):
    row[: len(prompt)] = list(prompt)
  sizes = np.array([len(prompt) for prompt in given] + [1] * (len(text) - len(given)))
  for at in range(length - 1):
    tokens, cache = decode(params, cache, text[:, at : at + 1], jax.random.fold_in(key, at))
    drawn = at + 1 >= sizes
    text[drawn, at + 1] = np.asarray(tokens)[drawn, 0]
  return [bytes(row.tolist()).decode(errors='replace') for row in text[: len(given)]]


def cache_rows(cache):
  """The number of texts that a cache is for."""
  return max(leaf.shape[0] for leaf in jax.tree.leaves(cache) if leaf.ndim)


def serve(args):
  """Completes texts, as many as the cache has rows at a time."""
  decode = checkpoint.load_program(args.model / 'decode.program')
  params, cache = (
    checkpoint.restore(args.model / name, mesh=decode.mesh) for name in ('params', 'cache')
  )
  key = jax.random.key(args.seed)
  prompts = [line.rstrip('\n') for line in sys.stdin]
  for start in range(0, len(prompts), cache_rows(cache)):
    some = prompts[start : start + cache_rows(cache)]
    empty = jax.tree.map(jax.numpy.copy, cache)
    for text in complete(decode, params, empty, some, args.length, key):
      print(text, flush=True)


def main(arguments=None):
  """Serves."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  add = parser.add_argument
  add('--model', type=Path, default=Path('served'), help='the folder that publish.py has written')
  add('--length', type=int, default=60, help='bytes of each text, with its prompt')
  add('--seed', type=int, default=0)
  serve(parser.parse_args(arguments))


if __name__ == '__main__':
  main()

"""Trains a LLaMA-class decoder on the bytes of a text file, under a layout from a TOML file.

    python train.py --layout layouts/fsdp.toml --run runs/first
    python train.py --model 8b --batch 64 --length 4096 --compare h100:64

A run that is started again goes on from its newest checkpoint, under whichever layout and on however
many processes.
"""

import argparse
import dataclasses
import pydoc_data.topics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model import SIZES, Llama

import flax_spmd as spmd
from flax_spmd import checkpoint, explore

PLACEMENT = ('batch', None)  # of tokens: sequences are sharded, positions are not
PREEMPTED = 143  # exit status after SIGTERM: the scheduler should start the job again


# -- model and step: independent of any mesh


def create_state(model, tx):
  """A fresh state."""
  params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, tokens):
  """One step on int32 (batch, length + 1); returns the state and the loss in nats per token."""

  def loss_fn(params):
    logits = state.apply_fn({'params': params}, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss


def optimizer(args):
  """AdamW, with a warm-up, a cosine and clipping."""
  rate = optax.warmup_cosine_decay_schedule(
    0.0, args.learning_rate, args.warmup, args.steps, args.learning_rate / 10
  )
  adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
  return optax.chain(optax.clip_by_global_norm(1.0), adamw)


# -- data: each process reads the rows that its own devices hold


def batches(file, steps, shape, rows):
  """These rows of each step's batch, as int32.

  A batch depends only on the number of its step. So a continued run reads the same batches, and no iterator
  has to be saved.
  """
  text = np.memmap(file, np.uint8, 'r')
  sequences, length = shape
  for step in steps:
    starts = np.random.default_rng(step).integers(0, len(text) - length + 1, sequences)[rows]
    yield text[starts[:, None] + np.arange(length)].astype(np.int32)


# -- running


def train(args, model, tx, shape):
  """Trains from the newest checkpoint, if there is one, until the last step or SIGTERM."""
  layout = spmd.Layout.from_toml(args.layout.read_text())
  step = layout.jit(train_step, donate_argnums=0)
  with checkpoint.Manager(args.run, layout, every=args.save_every) as manager:
    done, state = manager.resume(create_state, model, tx)
    say(spmd.explain(layout, state), f'\n{done} of {args.steps} steps are done')
    rows, _ = layout.local_indices(jax.ShapeDtypeStruct(shape, jnp.int32), PLACEMENT)
    local = batches(args.data, range(done, args.steps), shape, rows)
    ready = spmd.prefetch(local, lambda rows: layout.local_to_global(rows, PLACEMENT))
    since, begin = done, time.perf_counter()
    for number, tokens in enumerate(ready, done + 1):
      state, loss = step(state, tokens)
      if number % args.log_every == 0 or number == done + 1:
        loss = float(loss)  # waits for the step
        rate = (number - since) * args.batch * args.length / (time.perf_counter() - begin)
        say(f'step {number}  loss {loss:.5f}  {rate:,.0f} tokens/s')
        since, begin = number, time.perf_counter()
      manager.save(number, state, force=number == args.steps)
      if manager.preempted:
        say(f'SIGTERM: saved step {number}')
        sys.exit(PREEMPTED)


def say(*text):
  """Prints, in the first process only."""
  if jax.process_index() == 0:
    print(*text, flush=True)


def compare(args, model, tx, shape):
  """Compares the layouts in the folder that have the size of the target."""
  devices = explore.parse_target(args.compare).devices
  files = sorted(args.layout.parent.glob('*.toml'))
  layouts = {file.stem: spmd.Layout.from_toml(file.read_text(), devices=devices) for file in files}
  layouts = {name: layout for name, layout in layouts.items() if layout.mesh.size == devices}
  tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
  step = explore.TrainStep(train_step, create_state, tokens, args=(model, tx), placements=PLACEMENT)
  print(spmd.compare(step, layouts, args.compare, show=True))


def search(args, model, tx, shape):
  """Searches for the best layout for a target, and saves it beside the others."""
  tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
  step = explore.TrainStep(train_step, create_state, tokens, args=(model, tx), placements=PLACEMENT)
  result = spmd.search(step, args.search, show=True)
  print(result)
  result.to_toml(args.layout.with_name('best.toml'))


def parse(arguments):
  """The flags."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  add = parser.add_argument
  here = Path(__file__).parent
  add('--layout', type=Path, default=here / 'layouts' / 'fsdp.toml', help='a TOML file')
  add('--model', choices=SIZES, default='tiny')
  add('--dtype', default='bfloat16', help='dtype of computations; parameters are float32')
  add('--data', type=Path, default=pydoc_data.topics.__file__, help='any file')
  add('--run', type=Path, default=Path('runs/llama'), help='the folder of the checkpoints')
  add('--steps', type=int, default=200)
  add('--batch', type=int, default=32, help='sequences, over all processes')
  add('--length', type=int, default=128, help='tokens per sequence')
  add('--learning-rate', type=float, default=3e-3)
  add('--warmup', type=int, default=10, help='steps')
  add('--save-every', type=int, default=50, help='steps')
  add('--log-every', type=int, default=10, help='steps')
  add('--distributed', action='store_true', help='run as several processes, with addresses found by JAX')
  add('--coordinator', help="host:port of the first process, where JAX can't find it")
  add('--processes', type=int, help='number of processes, likewise')
  add('--process', type=int, help='index of this process, likewise')
  add('--compare', metavar='TARGET', help="compare the layouts in the folder for 'h100:64', say")
  add('--search', metavar='TARGET', help='search for a layout, likewise')
  return parser.parse_args(arguments)


def main(arguments=None):
  """Trains, compares or searches."""
  args = parse(arguments)
  if args.distributed:
    jax.distributed.initialize(
      args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=30
    )
  model = Llama(dataclasses.replace(SIZES[args.model], dtype=args.dtype))
  run = compare if args.compare else search if args.search else train
  run(args, model, optimizer(args), (args.batch, args.length + 1))


if __name__ == '__main__':
  main()

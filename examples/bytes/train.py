"""Trains the decoder on the bytes of a file, under a layout from a TOML file.

A run that is started again goes on from its newest checkpoint, with the batch after the last one, under whichever layout and on
however many processes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from data import Batches, Windows, grain_batches, read
from flax.training.train_state import TrainState
from model import LENGTH, NAMES, create_params, loss_of
from publish import create_cache, decode
from serve import complete

import flax_spmd as spmd
from flax_spmd import checkpoint

PREEMPTED = 143  # exit status after SIGTERM: the scheduler should start the job again


class State(TrainState):
  """The state of a run: parameters, their average (EMA), the optimizer's state, the key of dropout."""

  ema: Any
  key: jax.Array


def create_state(tx):
  """A fresh state."""
  params = create_params()
  return State.create(apply_fn=None, params=params, tx=tx, ema=params, key=jax.random.key(1))


def optimizer(steps):
  """AdamW, with a warm-up, a cosine and clipping."""
  rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps, 1e-3)
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def train_step(state, tokens):
  """One step on int32 (batch, length + 1); returns the state and the loss in nats per byte."""
  key = jax.random.fold_in(state.key, state.step)
  loss, grads = jax.value_and_grad(loss_of)(state.params, tokens, key)
  state = state.apply_gradients(grads=grads)
  return state.replace(ema=optax.incremental_update(state.params, state.ema, 0.1)), loss


def train(args):
  """Trains from the newest checkpoint, if there is one, until the last step or SIGTERM."""
  layout = spmd.Layout.from_toml(args.layout.read_text())
  samples = args.sample_every and jax.process_count() == 1  # a server has devices of its own
  serving = spmd.Layout.from_toml(args.serving.read_text()) if samples else None
  loader = grain_batches if args.grain else Batches
  data = loader(Windows(read(args.text), LENGTH + 1), args.batch, layout.data_shard('batch'))
  step = layout.jit(train_step, donate_argnums=0)
  with checkpoint.Manager(args.run, layout, every=args.save_every) as manager:
    done, state = manager.resume(
      spmd.names_for(create_state, NAMES),
      optimizer(args.steps),
      data=data,
      data_from=lambda states: states[0],  # a position counts batches of all processes
    )
    say(f'{done} of {args.steps} steps are done, over {dict(layout.mesh.shape)}')
    ready = spmd.prefetch(data, lambda rows: layout.local_to_global(rows, ('batch', None)))
    for number, tokens in zip(range(done + 1, args.steps + 1), ready, strict=False):
      state, loss = step(state, tokens)
      if number % args.log_every == 0:
        say(f'step {number}  loss {float(loss):.5f}')
      manager.save(number, state, data=data, force=number == args.steps)
      if manager.preempted:
        say(f'SIGTERM: saved step {number}')
        sys.exit(PREEMPTED)
      if serving and number % args.sample_every == 0:
        params = layout.reshard(state.ema, serving, dtype='bfloat16')
        say(sample(params, serving, args.prompt))


def sample(params, serving, prompt):
  """A text of the averaged parameters on the devices for serving."""
  cache = serving.init(spmd.names_for(create_cache, NAMES), 1)
  step = serving.jit(decode, donate_argnums=1)
  [text] = complete(step, params, cache, [prompt], LENGTH, jax.random.key(0))
  return text


def say(text):
  """Prints, in the first process only."""
  if jax.process_index() == 0:
    print(text, flush=True)


def parse(arguments):
  """The flags."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  add = parser.add_argument
  here = Path(__file__).parent
  add('--run', type=Path, default=Path('runs/bytes'), help='the folder of the checkpoints')
  add('--layout', type=Path, default=here / 'layouts' / 'fsdp.toml', help='a TOML file')
  add('--text', type=Path, help="any file; default: the reference of Python's language")
  add('--steps', type=int, default=100)
  add('--batch', type=int, default=24, help='windows, over all processes')
  add('--save-every', type=int, default=25, help='steps')
  add('--log-every', type=int, default=10, help='steps')
  add('--sample-every', type=int, default=100, help='steps; 0 for no samples')
  add('--prompt', default='The ', help='the beginning of samples')
  add('--serving', type=Path, default=here / 'layouts' / 'serving.toml', help='layout of samples')
  add('--grain', action='store_true', help='load batches with Grain')
  add('--distributed', action='store_true', help='run as several processes, with addresses found by JAX')
  add('--coordinator', help="host:port of the first process, where JAX can't find it")
  add('--processes', type=int, help='number of processes, likewise')
  add('--process', type=int, help='index of this process, likewise')
  return parser.parse_args(arguments)


def main(arguments=None):
  """Trains."""
  args = parse(arguments)
  if args.distributed:
    jax.distributed.initialize(
      args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=30
    )
  train(args)


if __name__ == '__main__':
  main()

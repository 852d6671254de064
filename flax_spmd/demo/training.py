"""Training: a state, a step, and a loop with a progress bar, all independent of the mesh."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import make_mesh
from flax_spmd.demo.model import Transformer
from flax_spmd.demo.text import batches


class TrainingConfig(NamedTuple):
  """Configuration of a training run.

  Attributes:
    steps: number of steps.
    batch: sequences per batch.
    length: bytes per sequence.
    learning_rate: peak learning rate.
  """

  steps: int = 80
  batch: int = 32
  length: int = 64
  learning_rate: float = 6e-3


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
  """AdamW with gradient clipping, warm-up and cosine decay."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.steps // 5, config.steps, 1e-4
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


def create_state(
  key: jax.Array, tokens: jax.Array, model: Transformer, tx: optax.GradientTransformation
) -> TrainState:
  """A new training state; only the shape of `tokens` matters."""
  return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens)['params'], tx=tx)


def train_step(state: TrainState, window: jax.Array) -> tuple[TrainState, jax.Array]:
  """One step on windows of shape (batch, length + 1); returns the state and the loss in nats per byte."""

  def loss_fn(params):
    logits = state.apply_fn({'params': params}, window[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss


class Trainer(NamedTuple):
  """A layout, and the training step compiled under it."""

  layout: Layout
  step: Any
  title: str

  @classmethod
  def under(cls, layout: Layout, title: str) -> Trainer:
    """A trainer for a layout; its step donates the state."""
    return cls(layout, layout.jit(train_step, donate_argnums=0), title)


def train(
  trainer: Trainer, state: Any, data: np.ndarray, config: TrainingConfig, steps: range, console: Console
) -> tuple[Any, dict[int, float]]:
  """Trains from step `steps.start` up to `steps.stop`.

  Returns:
    The state, and the loss of each step.
  """
  losses: dict[int, jax.Array] = {}
  windows = batches(data, config.batch, config.length, start=steps.start)
  columns = [TextColumn('{task.description}'), BarColumn(), TextColumn('{task.completed}/{task.total}')]
  columns += [
    TextColumn('{task.fields[shown]}'),
    TimeRemainingColumn(),
  ]
  with Progress(*columns, console=console) as progress:
    bar = progress.add_task(trainer.title, total=len(steps), shown='')
    begin = None
    for number in steps:
      batch = trainer.layout.shard(next(windows), ('batch', None))
      state, loss = trainer.step(state, batch)
      losses[number] = loss
      begin = begin or (time.perf_counter(), number)
      done = number - begin[1]
      speed = done * config.batch * config.length / (time.perf_counter() - begin[0])
      progress.update(bar, advance=1, shown=f'loss {float(loss):.3f}  {speed:,.0f} tokens/s')
  return state, {number: float(loss) for number, loss in losses.items()}


def sample(state: Any, prompt: np.ndarray, count: int, temperature: float = 0.8) -> np.ndarray:
  """Samples a continuation of `prompt`: int32 (length,) to int32 (length + count,).

  A single sequence cannot be sharded over the batch, so it runs on one device.
  """
  one = Layout(make_mesh({'single': 1}))
  length = len(prompt)

  @one.jit
  def write(params, text, key):
    def extend(at, text):
      window = jax.lax.dynamic_slice(text, (at - length,), (length,))
      logits = state.apply_fn({'params': params}, window[None])[0, -1]
      token = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
      return jax.lax.dynamic_update_slice(text, token.astype(text.dtype)[None], (at,))

    return jax.lax.fori_loop(length, length + count, extend, text)

  text = np.pad(np.asarray(prompt, np.int32), (0, count))
  return np.asarray(write(one.shard(state.params), one.shard(text), jax.random.key(0)))

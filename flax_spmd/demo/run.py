"""The run: train half-way under one layout, save, restore under another, train on, and compare."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flax_spmd import checkpoint
from flax_spmd._src.explanation import explain
from flax_spmd._src.layout import Layout
from flax_spmd.demo.model import Transformer
from flax_spmd.demo.text import corpus, decode
from flax_spmd.demo.training import Plan, Trainer, create_state, optimizer, sample, train

REPLICATED = tuple(
  (name, None) for name in ('layers', 'length', 'embed', 'three', 'head', 'ngram', 'vocab')
)
TENSOR_RULES = (
  ('batch', 'data'),
  ('heads', 'model'),
  ('mlp', 'model'),
  ('ngram', 'model'),
  ('vocab', 'model'),
  *REPLICATED,
)
FSDP_RULES = (
  ('batch', 'fsdp'),
  ('ngram', 'fsdp'),
  ('mlp', 'fsdp'),
  ('embed', 'fsdp'),
  ('heads', None),
  *REPLICATED,
)
NOISE = 2e-3
PROMPT = 20_000  # where in the text the sample starts


def run(
  plan: Plan, console: Console, folder: Path | None = None, model: Transformer | None = None
) -> bool:
  """Runs the demo; returns whether both ways of training ended with the same losses.

  Args:
    plan: how long to train.
    console: where to print.
    folder: where the checkpoint goes; default: a temporary folder, removed at the end.
    model: the model; its sizes are powers of two.
  """
  if folder is None:
    with tempfile.TemporaryDirectory() as temporary:
      return run(plan, console, Path(temporary), model)
  data, model, tx = corpus(), model or Transformer(), optimizer(plan)
  tensor, fsdp = layouts(jax.device_count())
  making = (create_state, jax.random.key(0), jnp.zeros((plan.batch, plan.length), jnp.int32), model, tx)
  half, whole = range(plan.steps // 2), range(plan.steps // 2, plan.steps)

  _title(console, f'1. Born sharded, under data + tensor parallelism ({_devices()})')
  state = tensor.init(*making)
  console.print(explain(tensor, state.params))

  _title(console, f'2. Half of the training, on {len(data):,} bytes of the Python documentation')
  tensor_trainer, fsdp_trainer = Trainer.under(tensor, 'tensor'), Trainer.under(fsdp, 'fsdp  ')
  state, first = train(tensor_trainer, state, data, plan, half, console)

  _title(console, '3. Saved under that layout, restored under another: FSDP, on another mesh')
  checkpoint.save(folder / 'half', state, layout=tensor)
  restored = checkpoint.restore(folder / 'half', fsdp.abstract(*making))
  console.print(_moved(tensor, fsdp, state, restored))

  _title(console, '4. The other half, under each of the two')
  other, restored_losses = train(fsdp_trainer, restored, data, plan, whole, console)
  state, losses = train(tensor_trainer, state, data, plan, whole, console)

  _title(console, '5. Are they the same run?')
  largest = max(abs(losses[n] - restored_losses[n]) for n in whole)
  console.print(_comparison(plan, {**first, **losses}, {**first, **restored_losses}))
  console.print(f'largest difference {largest:.1e} nats per byte (float noise: below {NOISE:.0e})')

  _title(console, '6. What it writes')
  prompt = data[PROMPT : PROMPT + plan.length]
  text = decode(sample(other, prompt, 240))
  console.print(Text.assemble((text[: plan.length], 'dim'), text[plan.length :]))
  return largest < NOISE


def layouts(devices: int) -> tuple[Layout, Layout]:
  """Data + tensor parallelism, and FSDP, over as many devices as there are.

  Example:
    >>> layouts(8)
    (Layout({'data': 2, 'model': 4}, ...), Layout({'fsdp': 8}, ...))
  """
  size = 2 ** (devices.bit_length() - 1)  # the model's sizes are powers of two
  model = min(4, size)
  return (
    Layout({'data': size // model, 'model': model}, TENSOR_RULES, unmatched='error'),
    Layout({'fsdp': size}, FSDP_RULES, unmatched='error'),
  )


def _moved(before: Layout, after: Layout, state: Any, restored: Any) -> Table:
  """One array of each kind, where it lay and where it lies."""
  table = Table('path', 'saved as', 'restored as', 'per device')
  kinds = {}
  for old, new in zip(before.rows(state), after.rows(restored), strict=True):
    if old.names is not None and len(old.shape) > 1:
      kinds.setdefault((old.path.split('/')[0], old.names), (old, new))
  for old, new in list(kinds.values())[:8]:
    sizes = f'{old.bytes_per_device / 1024:.3g} -> {new.bytes_per_device / 1024:.3g} KiB'
    table.add_row(*map(Text, (old.path, str(old.spec), str(new.spec), sizes)))
  return table


def _comparison(plan: Plan, losses: dict[int, float], restored: dict[int, float]) -> Table:
  table = Table('step', 'uninterrupted', 'saved and restored', 'difference')
  table.columns[0].justify = 'right'
  for number in sorted({*range(0, plan.steps, max(1, plan.steps // 10)), plan.steps - 1}):
    difference = abs(losses[number] - restored[number])
    shown = 'same run' if number < plan.steps // 2 else f'{difference:.1e}'
    table.add_row(str(number), f'{losses[number]:.4f}', f'{restored[number]:.4f}', shown)
  return table


def _title(console: Console, text: str) -> None:
  console.print()
  console.rule(Text(text, 'bold'), align='left')


def _devices() -> str:
  device = jax.devices()[0]
  emulated = ', emulated' if device.platform == 'cpu' else ''
  return f'{jax.device_count()} x {device.device_kind}{emulated}'

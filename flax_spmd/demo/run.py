"""The run of the demo: train under one layout, save, restore under another, continue, and compare."""

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
from flax_spmd._src.text import size_text
from flax_spmd.demo.model import Transformer
from flax_spmd.demo.text import corpus, decode
from flax_spmd.demo.training import Trainer, TrainingConfig, create_state, optimizer, sample, train

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
PROMPT = 20_000  # position in the text where the sample starts


def run(
  config: TrainingConfig, console: Console, folder: Path | None = None, model: Transformer | None = None
) -> bool:
  """Runs the demo.

  Args:
    config: configuration of the training.
    console: console to print to.
    folder: folder of the checkpoint; default: a temporary folder, removed at the end.
    model: model whose sizes are powers of two; default: `Transformer()`.

  Returns:
    Whether the losses of the two runs agree.
  """
  if folder is None:
    with tempfile.TemporaryDirectory() as temporary:
      return run(config, console, Path(temporary), model)
  data, model, tx = corpus(), model or Transformer(), optimizer(config)
  tensor, fsdp = layouts(jax.device_count())
  tokens = jnp.zeros((config.batch, config.length), jnp.int32)
  create = (create_state, jax.random.key(0), tokens, model, tx)
  first_half, second_half = (
    range(config.steps // 2),
    range(config.steps // 2, config.steps),
  )

  _title(console, f'1. Sharded from the start, with data + tensor parallelism ({_devices()})')
  state = tensor.init(*create)
  console.print(explain(tensor, state.params))

  _title(console, f'2. Half of the training, on {len(data):,} bytes of the Python documentation')
  tensor_trainer, fsdp_trainer = Trainer.under(tensor, 'tensor'), Trainer.under(fsdp, 'fsdp  ')
  state, first = train(tensor_trainer, state, data, config, first_half, console)

  _title(console, '3. Saved under that layout, restored under another: FSDP, on another mesh')
  checkpoint.save(folder / 'half', state, layout=tensor)
  restored = checkpoint.restore(folder / 'half', fsdp.abstract(*create))
  console.print(_resharded(tensor, fsdp, state, restored))

  _title(console, '4. The other half, under each of the two layouts')
  other, restored_losses = train(fsdp_trainer, restored, data, config, second_half, console)
  state, losses = train(tensor_trainer, state, data, config, second_half, console)

  _title(console, '5. The two runs compared')
  largest = max(abs(losses[n] - restored_losses[n]) for n in second_half)
  console.print(_comparison(config, {**first, **losses}, {**first, **restored_losses}))
  console.print(f'largest difference {largest:.1e} nats per byte (float noise: below {NOISE:.0e})')

  _title(console, '6. A sample of its text')
  prompt = data[PROMPT : PROMPT + config.length]
  text = decode(sample(other, prompt, 240))
  console.print(Text.assemble((text[: config.length], 'dim'), text[config.length :]))
  return largest < NOISE


def layouts(devices: int) -> tuple[Layout, Layout]:
  """Two layouts: data + tensor parallelism, and FSDP, over a power of two of the devices.

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


def _resharded(before: Layout, after: Layout, state: Any, restored: Any) -> Table:
  """One array of each kind, with its sharding before and after."""
  table = Table('path', 'saved as', 'restored as', 'per device')
  kinds = {}
  for old, new in zip(before.rows(state), after.rows(restored), strict=True):
    if old.names is not None and len(old.shape) > 1:
      kinds.setdefault((old.path.split('/')[0], old.names), (old, new))
  for old, new in list(kinds.values())[:8]:
    sizes = f'{size_text(old.bytes_per_device)} -> {size_text(new.bytes_per_device)}'
    table.add_row(*map(Text, (old.path, str(old.spec), str(new.spec), sizes)))
  return table


def _comparison(config: TrainingConfig, losses: dict[int, float], restored: dict[int, float]) -> Table:
  table = Table('step', 'uninterrupted', 'saved and restored', 'difference')
  table.columns[0].justify = 'right'
  for number in sorted({*range(0, config.steps, max(1, config.steps // 10)), config.steps - 1}):
    difference = abs(losses[number] - restored[number])
    shown = 'same run' if number < config.steps // 2 else f'{difference:.1e}'
    table.add_row(str(number), f'{losses[number]:.4f}', f'{restored[number]:.4f}', shown)
  return table


def _title(console: Console, text: str) -> None:
  console.print()
  console.rule(Text(text, 'bold'), align='left')


def _devices() -> str:
  device = jax.devices()[0]
  emulated = ', emulated' if device.platform == 'cpu' else ''
  return f'{jax.device_count()} x {device.device_kind}{emulated}'

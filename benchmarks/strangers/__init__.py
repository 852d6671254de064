"""Strangers: training steps written in as many ways as people write them, for `search.py --only strangers`.

Each module is one model, and shares no code with the others. It has `create()`, the state; `step(state, batch)`; and
`BATCH`, the shapes of the batch. Widths are those of real models. Layers are few, so that a compilation takes seconds.
"""

import importlib

from flax_spmd.explore import TrainStep

MODELS = (
  'accumulation',
  'adafactor',
  'gpt2',
  'gqa',
  'lstm',
  'mamba',
  'moe_einsum',
  'moe_sort',
  'resnet',
  't5',
  'unet',
  'unrolled',
)


def train_step(model: str) -> TrainStep:
  """The step of one model."""
  module = importlib.import_module(f'{__name__}.{model}')
  return TrainStep(module.step, module.create, module.BATCH)

"""MaxDiffusion's UNet of Stable Diffusion: names on some parameters and activations, under its own rule table."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import optax
import sources
from case import Case, entry
from jax.sharding import PartitionSpec

SIZES = {
  'sample_size': 8, 'block_out_channels': (32, 64), 'layers_per_block': 1, 'cross_attention_dim': 32,
  'down_block_types': ('CrossAttnDownBlock2D', 'DownBlock2D'), 'up_block_types': ('UpBlock2D', 'CrossAttnUpBlock2D'),
  'attention_head_dim': 4,
}  # fmt: skip
MESHES = {
  'MaxDiffusion UNet': {'data': 2, 'fsdp': 4, 'context': 1, 'tensor': 1},
  'MaxDiffusion UNet, tensor': {'data': 2, 'fsdp': 2, 'context': 1, 'tensor': 2},
}
SETTINGS = {  # of its configuration, for latents that are cached
  'train_text_encoder': False, 'dataset_type': 'tf', 'cache_latents_text_encoder_outputs': True, 'max_grad_norm': 1.0,
  'timestep_bias': {'strategy': 'none'}, 'snr_gamma': -1.0,
}  # fmt: skip


def _rules() -> tuple[tuple[str, str | tuple[str, ...]], ...]:
  """The table of its `base_xl.yml`."""
  import yaml

  text = (sources.checkout('maxdiffusion') / 'src/maxdiffusion/configs/base_xl.yml').read_text()
  table = yaml.safe_load(text)['logical_axis_rules']
  return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in table)


def _unet(mesh: dict[str, int]) -> Case:
  sources.importable('maxdiffusion', 'src')
  import torch.nn  # noqa: F401 (a stand-in: it converts weights)
  from maxdiffusion.utils import import_utils

  import_utils._torch_version = '2.0'  # that of a stand-in is unknown
  from maxdiffusion import max_utils
  from maxdiffusion.models.unet_2d_condition_flax import FlaxUNet2DConditionModel
  from maxdiffusion.schedulers.scheduling_ddpm_flax import FlaxDDPMScheduler
  from maxdiffusion.trainers.stable_diffusion_trainer import _train_step

  rules = _rules()
  tx = optax.adamw(1e-3)
  scheduler = FlaxDDPMScheduler()
  config = SimpleNamespace(**SETTINGS, logical_axis_rules=rules)

  def weights(model):
    return partial(model.init_weights, jax.random.key(0))

  def of_mesh(mesh):
    model = FlaxUNet2DConditionModel(**SIZES, mesh=mesh)
    pipeline = SimpleNamespace(unet=model, scheduler=scheduler)

    def step(state, batch):
      params = {'scheduler': scheduler.create_state()}
      state, _, metrics, _ = _train_step(
        state, None, None, batch, jax.random.key(1), pipeline, params, config
      )
      return state, metrics['scalar']['learning/loss']

    return lambda: max_utils.init_train_state(model, tx, weights(model)), step

  def partitioner(abstract_state, mesh):
    del abstract_state
    model = FlaxUNet2DConditionModel(**SIZES, mesh=mesh)
    return max_utils.get_abstract_state(model, tx, config, mesh, weights(model))[2]

  random = np.random.default_rng(0)
  batch = {
    'pixel_values': random.normal(size=(8, 4, 8, 8)).astype('float32'),
    'input_ids': random.normal(size=(8, 4, 32)).astype('float32'),
  }
  return Case(
    None,
    None,
    batch,
    mesh=mesh,
    rules=rules,
    batch_spec=PartitionSpec(('data', 'fsdp', 'context', 'tensor')),
    of_mesh=of_mesh,
    partitioner=partitioner,
  )


for _name, _mesh in MESHES.items():
  entry(
    _name,
    'maxdiffusion',
    environment='maxtext',
    annotated='`with_logical_partitioning`',
    changes='the model made for `layout.mesh`',
  )(partial(_unet, _mesh))

"""Cost of a layout per training step: none, because the compiled program is the same.

A small scanned transformer is trained twice: through `layout.jit`, and written by hand with a NamedSharding
at every constraint and `in_shardings` and `out_shardings` for `jax.jit`. Both donate their state. The
benchmark compares the optimised programs, line by line, and the step times.

Unboxing inside a program constrains the parameter, as in Flax. So the hand-written counterpart of a boxed
state constrains parameters where they are used, and that of an unboxed state only activations. These two
are compared with each other too: under a scan, XLA no longer recognises a constrained slice of a parameter
as a slice, and keeps a second copy of it for the backward pass.

Before the comparison, information about the origin of the programs is removed: metadata, the module's name,
tables of source files and stack frames, and the outputs that the partitioner was free to shard (it has
already run). Values are renumbered in order, because XLA's numbers count values that earlier passes removed.
"""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from harness import WALL, Figure, Target, at_most, equal, exact, measure, ratio
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reporting import report

import flax_spmd as spmd

Names = tuple[str, ...]

EMBED, HEADS, HEAD, MLP, LAYERS, VOCAB = 128, 4, 32, 512, 4, 256
TOKENS = np.arange(16 * 65, dtype=np.int32).reshape(16, 65) % VOCAB
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('heads', 'model'), ('mlp', 'model')))


class Annotation(NamedTuple):
  """Sharding annotations of a model: functions for its initializers, parameters and activations."""

  init: Callable[[Any, Names], Any]
  param: Callable[[Any, Names], Any]
  value: Callable[[Any, Names], Any]


def unchanged(x: Any, names: Names) -> Any:
  return x


def constrained(x: Any, names: Names) -> Any:
  return jax.lax.with_sharding_constraint(x, NamedSharding(LAYOUT.mesh, BY_HAND[names]))


NAMES = Annotation(spmd.with_logical_partitioning, unchanged, spmd.with_logical_constraint)
VALUES_BY_HAND = Annotation(unchanged, unchanged, constrained)
ALL_BY_HAND = Annotation(unchanged, constrained, constrained)

BY_HAND = {
  ('batch', 'length', 'embed'): P('data', None, None),
  ('batch', 'length', 'mlp'): P('data', None, 'model'),
  ('batch', 'length', 'heads', 'head'): P('data', None, 'model', None),
  ('batch', 'length', 'vocab'): P('data', None, None),
  ('vocab', 'embed'): P(None, None),
  ('embed', 'three', 'heads', 'head'): P(None, None, 'model', None),
  ('heads', 'head', 'embed'): P('model', None, None),
  ('embed', 'mlp'): P(None, 'model'),
  ('mlp', 'embed'): P('model', None),
}
STATE_BY_HAND = {
  'table': P(None, None),
  'blocks': {
    'qkv': P(None, None, None, 'model', None),
    'out': P(None, 'model', None, None),
    'up': P(None, None, 'model'),
    'down': P(None, 'model', None),
  },
}


class Block(nn.Module):
  """Attention and MLP: one layer of `nn.scan`."""

  annotation: Annotation

  @nn.compact
  def __call__(self, x, _):
    constrain = self.annotation.value
    x = x + self.attention(x)
    up = _weight(self, 'up', ('embed', 'mlp'), (EMBED, MLP))
    down = _weight(self, 'down', ('mlp', 'embed'), (MLP, EMBED))
    y = constrain(nn.gelu(x @ up), ('batch', 'length', 'mlp'))
    return constrain(x + y @ down, ('batch', 'length', 'embed')), None

  def attention(self, x):
    qkv = _weight(self, 'qkv', ('embed', 'three', 'heads', 'head'), (EMBED, 3, HEADS, HEAD))
    out = _weight(self, 'out', ('heads', 'head', 'embed'), (HEADS, HEAD, EMBED))
    q, k, v = jnp.moveaxis(jnp.einsum('ble,ethd->blthd', x, qkv), 2, 0)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    y = self.annotation.value(y, ('batch', 'length', 'heads', 'head'))
    return jnp.einsum('blhd,hde->ble', y, out)


class Model(nn.Module):
  """Tokens to logits, with a tied embedding."""

  annotation: Annotation

  @nn.compact
  def __call__(self, tokens):
    table = _weight(self, 'table', ('vocab', 'embed'), (VOCAB, EMBED))
    stack = nn.scan(
      Block,
      length=LAYERS,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x = self.annotation.value(table[tokens], ('batch', 'length', 'embed'))
    x, _ = stack(self.annotation, name='blocks')(x, None)
    return self.annotation.value(x @ table.T, ('batch', 'length', 'vocab'))


def _weight(module, name: str, names: Names, shape: tuple[int, ...]):
  init = module.annotation.init(nn.initializers.normal(0.02), names)
  return module.annotation.param(module.param(name, init, shape), names)


def create_state(model, key, tokens):
  params = model.init(key, tokens)['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def train_step(state, tokens):
  def loss_of(params):
    logits = state.apply_fn({'params': params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_of)(state.params)
  return state.apply_gradients(grads=grads), loss


def figures() -> list[Figure]:
  runs = {
    'boxed': by_name(boxed=True),
    'boxed by hand': by_hand(ALL_BY_HAND),
    'unboxed': by_name(boxed=False),
    'unboxed by hand': by_hand(VALUES_BY_HAND),
  }
  compiled = {name: run.step.lower(run.state, run.tokens).compile() for name, run in runs.items()}
  programs = {name: normalised(program.as_text()) for name, program in compiled.items()}
  arms = {name: run.once for name, run in runs.items()}
  rounds = measure(arms, rounds=101, warm_up=3, clock=WALL)
  return [
    _unlike('boxed state: lines that differ', programs, 'boxed', 'boxed by hand', at_most(0)),
    _unlike('boxed=False: lines that differ', programs, 'unboxed', 'unboxed by hand', at_most(0)),
    ratio('boxed state: time of a step', rounds, 'boxed', 'boxed by hand', equal(1.0)),
    ratio('boxed=False: time of a step', rounds, 'unboxed', 'unboxed by hand', equal(1.0)),
    ratio('constrained parameters: time of a step', rounds, 'boxed', 'unboxed by hand'),
    _memory('constrained parameters: temporary memory', compiled, 'boxed', 'unboxed by hand'),
  ]


class Run:
  """A step and its state, which every call donates and replaces."""

  def __init__(self, step, state, tokens):
    self.step, self.state, self.tokens = step, state, tokens

  def once(self):
    self.state, loss = self.step(self.state, self.tokens)
    jax.block_until_ready((self.state, loss))


def by_name(*, boxed: bool) -> Run:
  tokens = LAYOUT.shard(TOKENS, ('batch', None))
  state = LAYOUT.init(create_state, Model(NAMES), jax.random.key(0), tokens, boxed=boxed)
  return Run(LAYOUT.jit(train_step, donate_argnums=0), state, tokens)


def by_hand(annotation: Annotation) -> Run:
  create = functools.partial(create_state, Model(annotation), jax.random.key(0), TOKENS)
  state, batch = _state_by_hand(jax.eval_shape(create)), NamedSharding(LAYOUT.mesh, P('data', None))
  out = (state, NamedSharding(LAYOUT.mesh, P()))
  step = jax.jit(train_step, in_shardings=(state, batch), out_shardings=out, donate_argnums=0)
  return Run(step, jax.jit(create, out_shardings=state)(), jax.device_put(TOKENS, batch))


def _state_by_hand(abstract: TrainState) -> Any:
  """The state's shardings by hand: parameters, Adam's moments and two counters."""
  params = jax.tree.map(lambda spec: NamedSharding(LAYOUT.mesh, spec), STATE_BY_HAND)
  replicated = NamedSharding(LAYOUT.mesh, P())
  adam, rest = abstract.opt_state
  adam = adam._replace(count=replicated, mu=params, nu=params)
  return abstract.replace(step=replicated, params=params, opt_state=(adam, rest))


def normalised(hlo: str) -> list[str]:
  """The lines of an optimised program, without information about its origin."""
  code = '\n'.join(_without_tables(hlo.splitlines()))
  for pattern, replacement in _PROVENANCE.items():
    code = re.sub(pattern, replacement, code)
  order: dict[str, str] = {}
  return re.sub(r'%[\w.\-]+', lambda match: order.setdefault(match[0], f'%{len(order)}'), code).split(
    '\n'
  )


_PROVENANCE = {
  r',? *metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}': '',
  r',? *stack_frame_id=\d+': '',
  r'(?m)^HloModule [^,\s]+': 'HloModule',
  r',? *allow_spmd_sharding_propagation_to_(?:parameters|output)=\{[^}]*\}': '',
}
_TABLES = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')


def _without_tables(lines: Sequence[str]) -> Iterator[str]:
  """Drops the tables of source positions: a title each, and lines that begin with a number."""
  in_table = False
  for line in lines:
    in_table = line in _TABLES or (in_table and (not line or line[0].isdigit()))
    if not in_table and line:
      yield line


def _unlike(name: str, programs, ours: str, theirs: str, target: Target) -> Figure:
  """Number of lines that only one of the two programs has."""
  compared = difflib.unified_diff(programs[theirs], programs[ours], n=0, lineterm='')
  count = sum(line[:1] in ('+', '-') for line in list(compared)[2:])
  return exact(name, count, 'lines', target)


def _memory(name: str, compiled, ours: str, theirs: str) -> Figure:
  sizes = [compiled[arm].memory_analysis().temp_size_in_bytes for arm in (ours, theirs)]
  return exact(name, sizes[0] / sizes[1], 'x')


if __name__ == '__main__':
  report('step', figures)

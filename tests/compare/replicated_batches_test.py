"""The finding of `compare` that constraints replicate the batch, since the table has another name for it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import TrainStep, compare


@pytest.fixture(params=[spmd.with_logical_constraint, nn.with_logical_constraint])
def train_step(request):
  def step(w, x):
    y = request.param(x @ w, ('act_batch', 'act_emb'))
    return w - 0.1 * y.sum(), request.param(w, ('act_emb',)).sum()

  return TrainStep(step, lambda: jnp.ones((64, 16)), jax.ShapeDtypeStruct((32, 64), jnp.float32))


def findings(train_step, mesh, rules):
  [outcome] = compare(train_step, [spmd.Layout(spmd.abstract_mesh(mesh), rules)], 'cpu:8')
  return [text for text in outcome.program.findings if 'constraints' in text]


@pytest.mark.parametrize(
  ('mesh', 'over', 'text'),
  [({'data': 8}, 'data', 'data'), ({'data': 4, 'fsdp': 2}, ('data', 'fsdp'), 'data+fsdp')],
)
def test_constraints_that_replicate_the_batch_are_reported_with_the_rule_that_mends_it(
  train_step, mesh, over, text
):
  [found] = findings(train_step, mesh, (('batch', over),))
  line = found.partition(' at ')[2].partition('. Fix')[0]
  assert found == (
    f"constraints replicate the batch, which is sharded over {text}: no rule for 'act_batch' in 1 constraint, "
    f"such as ('act_batch', 'act_emb') at {line}. Fix: add the rule ('act_batch', {over!r})."
  )
  assert line.startswith('replicated_batches_test.py:')
  assert findings(train_step, mesh, (('batch', over), ('act_batch', over))) == []
  assert findings(train_step, mesh, (('batch', None),)) == []

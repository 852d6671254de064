"""The finding that constraints replicate the batch, since the table has another name for it: of `compare` and `layout.jit`."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd.explore import TrainStep, compare

pytestmark = pytest.mark.usefixtures('forked_compilers')


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


class Dense(nn.Module):
  """A layer as MaxText writes it, whose activations have names of their own."""

  constrain: object
  names: tuple

  @nn.compact
  def __call__(self, x):
    kernel = nn.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    y = nn.Dense(64, kernel_init=kernel, use_bias=False)(x)
    return self.constrain(jnp.tanh(y), self.names) if self.names else y


def messages(names, rules, batch, constrain=nn.with_logical_constraint, **options):
  """The warnings of two plans of a training step of `Dense`."""
  layout = spmd.Layout({'data': 4, 'fsdp': 2}, rules)
  model = Dense(constrain, names)
  w = layout.init(model.init, jax.random.key(0), jnp.ones((1, 32)))
  if isinstance(batch, tuple):
    batch = layout.shard(batch[0], batch[1])

  def step(w, batch):
    loss = lambda w: jnp.mean(model.apply(w, batch))
    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w)), loss(w)

  step = layout.jit(step, **options)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for rows in (batch, jnp.concatenate([batch, batch])):
      step.plan_of(w, rows)
  return [str(each.message) for each in caught]


X = np.ones((16, 32), np.float32)
TABLE = (('batch', ('data', 'fsdp')), ('embed', None), ('mlp', None))
MAXTEXT = ('activation_batch', 'activation_mlp')


@pytest.mark.parametrize('constrain', [spmd.with_logical_constraint, nn.with_logical_constraint])
@pytest.mark.parametrize('batch', [X, (X, ('batch',))])
def test_a_step_whose_constraints_replicate_the_batch_is_named_once(constrain, batch):
  [text] = messages(MAXTEXT, TABLE, batch, constrain=constrain)
  line = text.partition(' at ')[2].partition('. Fix')[0]
  assert text == (
    'step: every device computes all examples of the batch:\n'
    "  constraints replicate the batch, which is sharded over data+fsdp: no rule for 'activation_batch' in 1 constraint, "
    f"such as ('activation_batch', 'activation_mlp') at {line}. Fix: add the rule ('activation_batch', ('data', 'fsdp'))."
  )
  assert line.startswith('replicated_batches_test.py:')


@pytest.mark.parametrize(
  ('case', 'names', 'rules', 'batch'),
  [
    ('its rule', MAXTEXT, (*TABLE, ('activation_batch', ('data', 'fsdp'))), X),
    ('its rule without axes', MAXTEXT, (*TABLE, ('activation_batch', None)), X),
    ('over the same axes elsewhere', MAXTEXT, (*TABLE, ('activation_mlp', ('data', 'fsdp'))), X),
    ('the usual name', ('batch', 'activation_mlp'), TABLE, X),
    ('no name', (None, 'activation_mlp'), TABLE, X),
    ('no rule for a batch', MAXTEXT, (('embed', 'fsdp'), ('mlp', None)), X),
    ('replicated by the caller', MAXTEXT, TABLE, (X, (None,))),
    (
      'of parameters as long as the batch',
      (),
      (('batch', ('data', 'fsdp')), ('mlp', None)),
      np.ones((32, 32)),
    ),
  ],
)
def test_steps_that_are_not_named(case, names, rules, batch):
  del case
  assert messages(names, rules, batch) == []


def test_a_step_that_decides_itself_is_not_named():
  assert messages(MAXTEXT, TABLE, X, constrain_batch=False) == []


@pytest.mark.parametrize(('name', 'count'), [('positions', 0), ('kv_batch', 1)])
def test_another_dimension_of_the_size_of_the_batch(name, count):
  """A table of positions, in a step whose activations are sharded; a name of the batch counts all the same."""
  layout = spmd.Layout({'data': 8}, (('batch', 'data'),))
  w = layout.init(lambda: jnp.ones((32, 64)))

  def step(w, x):
    y = spmd.with_logical_constraint(x @ w, ('batch', 'embed'))
    return w - y.sum(), y * spmd.with_logical_constraint(jnp.ones((16, 64)), (name, 'embed'))

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    layout.jit(step)(w, X)
  assert len(caught) == count


def test_an_explanation_has_the_constraints_of_the_trace_for_its_plan():
  """`explain` plans inside of a record of its own."""
  layout = spmd.Layout({'data': 8}, (('batch', 'data'),))
  w = layout.init(lambda: jnp.ones((32, 64)))
  step = layout.jit(lambda w, x: spmd.with_logical_constraint(x @ w, ('rows', None)))
  with pytest.warns(UserWarning, match='every device computes all examples'):
    explained = step.explain(w, X)
  assert [each.unmatched for each in explained.constraints] == [('rows',)]

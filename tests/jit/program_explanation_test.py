"""`layout.jit(f).explain(*args)` over real programs: what the compiler made of a plan."""

import json
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import errors

Box = spmd.LogicallyPartitioned
layout = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
FSDP = spmd.fsdp('data', min_size=1)


def create():
  up = Box(jnp.ones((8, 16)), ('embed', 'hidden'))
  down = Box(jnp.ones((16, 8)), ('hidden', 'embed'))
  return {'params': {'up': up, 'down': down}}


def loss_of(params, x):
  params = spmd.unbox(params)
  hidden = spmd.with_logical_constraint(x @ params['up'], ('batch', 'hidden'))
  return jnp.mean((hidden @ params['down']) ** 2)


def step(state, x):
  loss, grads = jax.value_and_grad(loss_of)(state['params'], x)
  return {'params': jax.tree.map(lambda w, g: w - 0.1 * g, state['params'], grads)}, loss


def batch_of(layout, size=4):
  return layout.shard(np.ones((size, 8), np.float32), ('batch', None))


def specs(rows):
  return {row.path: row.actual.spec for row in rows}


def kinds(explanation):
  """The collectives, each once."""
  return sorted({(one.collective.kind, *one.collective.axes) for one in explanation.collectives})


def moved(explanation):
  """The collectives that move arguments, and those that produce results."""
  return {
    (one.collective.kind, *one.collective.axes, *one.arguments, *one.results)
    for one in explanation.collectives
    if one.arguments or one.results
  }


def test_data_parallel():
  data = spmd.Layout({'data': 8}, (('batch', 'data'), ('hidden', None), ('embed', None)))
  state = data.init(create)
  explanation = data.jit(step, donate_argnums=0).explain(state, batch_of(data, 8))
  assert explanation.devices == 8
  assert specs(explanation.arguments) == {
    'argument 0/params/down': P(None, None),
    'argument 0/params/up': P(None, None),
    'argument 1': P('data', None),
  }
  assert kinds(explanation) == [('all-reduce', 'data')]
  assert not moved(explanation)
  assert not explanation.findings
  assert explanation.sent == sum(explanation.by_kind.values()) > 2 * 7 / 8 * 2 * 8 * 16 * 4
  weights = explanation.row('argument 0/params/up')
  assert weights.donated and weights.reused and weights.bytes_per_device == 8 * 16 * 4


def test_tensor_parallel():
  state = layout.init(create)
  explanation = layout.jit(step).explain(state, batch_of(layout))
  rows = [(row.path, row.actual.spec, row.pinned) for row in explanation.results]
  assert rows == [
    ('result 0/params/down', P('model', None), True),
    ('result 0/params/up', P(None, 'model'), True),
    ('result 1', P(), False),
  ]
  assert explanation.row('result 1').source == 'compiler'
  assert kinds(explanation) == [('all-reduce', 'data'), ('all-reduce', 'model')]
  assert str(explanation.second_call) == 'second call, with result 0 as argument 0: no compilation'
  assert not explanation.findings


def test_fsdp_gathers_its_arguments():
  data = spmd.Layout({'data': 8}, (('batch', 'data'), FSDP))
  state = data.init(lambda: {'up': jnp.ones((8, 16)), 'down': jnp.ones((16, 8))})

  def forward(state, x):
    hidden = spmd.with_logical_constraint(x @ state['up'], ('batch', None))
    return spmd.with_logical_constraint(hidden @ state['down'], ('batch', None))

  explanation = data.jit(forward).explain(state, batch_of(data, 1024))
  assert moved(explanation) == {
    ('all-gather', 'data', 'argument 0/up'),
    ('all-gather', 'data', 'argument 0/down'),
  }
  [gather] = explanation.moved_by('argument 0/up')
  assert (gather.collective.bytes, gather.collective.wire) == (64, 7 * 64)


def test_layers_of_a_scan_are_gathered_from_their_stack():
  data = spmd.Layout({'data': 8}, (('batch', 'data'),))
  layers = data.shard(np.ones((3, 8, 8), np.float32), P(None, 'data'))

  def forward(layers, x):
    def layer(x, w):
      return spmd.with_logical_constraint(jnp.tanh(x @ w), ('batch', None)), None

    return jax.lax.scan(layer, x, layers)[0]

  [gather] = data.jit(forward).explain(layers, batch_of(data, 1024)).collectives
  assert (gather.collective.kind, gather.collective.times) == ('all-gather', 3)
  assert gather.arguments == ('argument 0',)


def test_a_path_rule_that_owns_a_boxed_array():
  """It is used as it is stored: as the rule shards it, not as its names do."""
  ruled = layout.replace(rules=(('up$', P('model', None)), *layout.rules))
  state = ruled.init(create)
  explanation = ruled.jit(lambda state: jax.tree.map(lambda w: 2 * w, spmd.unbox(state))).explain(state)
  assert explanation.row('argument 0/params/up').actual.spec == P('model', None)
  assert not explanation.collectives


def test_a_state_of_another_layout_is_moved_in_every_first_step():
  other = layout.replace(rules=(('batch', 'data'), ('embed', 'model')))
  explanation = layout.jit(lambda state: jax.tree.map(lambda w: 2 * w, state)).explain(
    other.init(create)
  )
  assert moved(explanation) == {
    ('all-to-all', 'model', 'argument 0/params/down'),
    ('all-to-all', 'model', 'argument 0/params/up'),
  }
  assert explanation.findings == (
    "compiles again: argument 0/params/down is passed as P(None, 'model'), result params/down is P('model', None)",
    "compiles again: argument 0/params/up is passed as P('model', None), result params/up is P(None, 'model')",
  )


def test_a_result_that_is_stored_otherwise_than_computed():
  x = layout.shard(np.ones((8, 16), np.float32), ('batch', None))
  explanation = layout.jit(lambda x: jnp.tanh(x), out_rules=P()).explain(x)
  assert moved(explanation) == {('all-gather', 'data', 'result')}


class Perceptron(nn.Module):
  @nn.compact
  def __call__(self, x):
    hidden = nn.with_logical_constraint(nn.Dense(16)(x), ('batch', 'hiden'))
    return nn.with_logical_constraint(nn.Dense(8)(hidden), ('batch', None))


def test_flax_constraints_and_a_misspelt_name():
  variables = layout.init(Perceptron().init, jax.random.key(0), jnp.ones((1, 8)))
  explanation = layout.jit(Perceptron().apply).explain(variables, batch_of(layout))
  asked = [(one.by, one.names, one.spec, one.shape, one.module) for one in explanation.constraints]
  assert asked == [
    ('flax', ('batch', 'hiden'), P('data', None), (4, 16), 'the top module'),
    ('flax', ('batch', None), P('data', None), (4, 8), 'the top module'),
  ]
  assert not explanation.without_effect
  [finding] = explanation.findings
  assert finding.startswith(
    "no rule for 'hiden', replicated: Flax's ('batch', 'hiden') as P('data', None), the top module, "
    'program_explanation_test.py:'
  )


def test_a_constraint_that_a_policy_skips():
  x = batch_of(layout)
  skip = spmd.RulesFallback.NO_CONSTRAINT
  ours = layout.jit(lambda x: spmd.with_logical_constraint(x, ('btch', None), fallback=skip)).explain(x)
  flax = layout.jit(lambda x: nn.with_logical_constraint(x, ('btch', None), fallback=skip)).explain(x)
  assert [one.dropped for one in (*ours.constraints, *flax.constraints)] == ["no rule for 'btch'"] * 2
  assert [one.by for one in (*ours.without_effect, *flax.without_effect)] == ['flax_spmd', 'flax']


def test_constraints_without_any_effect():
  """No rules for names, no rule for an annotation, open in every dimension, written per shard."""
  x = batch_of(layout)

  def reasons(fn, of=layout):
    return [one.dropped for one in of.jit(fn).explain(x).constraints]

  named = spmd.Layout(layout.mesh)
  assert reasons(lambda x: spmd.with_logical_constraint(x, ('batch',)), named) == [
    'there are no rules for names'
  ]
  assert reasons(lambda x: spmd.with_sharding_annotation(x, 'activations')) == [
    'there is no rule for this annotation'
  ]
  assert reasons(lambda x: spmd.constrain(x, P(P.UNCONSTRAINED))) == [
    'it leaves every dimension to the compiler'
  ]

  def inner(x):
    return spmd.with_logical_constraint(x, ('batch', None))

  per_shard = jax.shard_map(inner, mesh=layout.mesh, in_specs=P('data'), out_specs=P('data'))
  assert reasons(per_shard) == ['a program under shard_map is written per shard']


def test_a_program_on_one_device():
  def constant(x):
    nn.with_logical_constraint(x, ('batch', None))
    return 1.0

  explanation = layout.jit(constant).explain(np.ones((8, 8)))
  [request] = explanation.without_effect
  assert explanation.devices == 1
  assert explanation.findings == (
    'the program runs on 1 device of 8',
    f"without effect: Flax's ('batch', None) as P('data', None), {request.source} "
    '(the program runs on one device)',
  )


def test_a_program_that_was_traced_before_is_explained_in_full():
  x = batch_of(layout)
  jitted = layout.jit(lambda x: spmd.with_logical_constraint(2 * x, ('batch', None)))
  jitted(x)
  assert len(jitted.explain(x).constraints) == len(jitted.explain(x).constraints) == 1
  np.testing.assert_array_equal(jitted(x), 2 * np.ones((4, 8)))


def test_static_parts_of_the_result_that_every_trace_makes_anew():
  """As the optimizer of a train state."""

  def create_state(x):
    return TrainState.create(apply_fn=None, params={'w': jnp.tanh(x)}, tx=optax.adam(1e-3))

  jitted = layout.jit(create_state)
  for _ in range(2):
    explanation = jitted.explain(np.ones((8, 4), np.float32))
    assert 'result params/w' in {array.path for array in explanation.results}
  np.testing.assert_array_equal(jitted(np.ones((8, 4), np.float32)).params['w'], np.tanh(np.float32(1)))


def test_placements_of_arguments():
  jitted = layout.jit(lambda w, x: x @ w, in_rules=(P(None, 'model'), ('batch', None)))
  explanation = jitted.explain(np.ones((8, 16), np.float32), np.ones((4, 8), np.float32))
  rows = [(row.path, row.actual.spec, row.source) for row in explanation.arguments]
  assert rows == [
    ('argument 0', P(None, 'model'), 'in_rules'),
    ('argument 1', P('data', None), 'in_rules'),
  ]


def test_arguments_of_every_kind():
  """Static, unused, by name, a key, a number, an array that the function closes over."""
  table = layout.shard(np.arange(16, dtype=np.float32).reshape(2, 8), P('data'))

  def fn(x, times, unused, *, key, scale):
    return times * scale * (x + jax.random.normal(key, x.shape)) @ table.T

  jitted = layout.jit(fn, static_argnames='times')
  explanation = jitted.explain(batch_of(layout), 3, np.ones(5), key=jax.random.key(0), scale=2.0)
  rows = {row.path: (row.source, row.sharding) for row in explanation.arguments}
  assert rows == {
    'argument 0': ('as passed', "P('data', None)"),
    'argument 1': ('compiler', 'not used'),
    'argument key': ('compiler', 'P()'),
    'argument scale': ('compiler', 'P()'),
  }
  assert explanation.row('argument 1').bytes_per_device == 0
  assert not explanation.second_call.fed_back


def test_abstract_arguments():
  state, x = layout.init(create), batch_of(layout)
  abstract = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), (state, x)
  )
  jitted = layout.jit(step, donate_argnums=0)
  assert str(jitted.explain(*abstract)) == str(jitted.explain(state, x))
  assert jax.tree.leaves(state)[0].is_deleted() is False  # nothing ran


def test_a_donated_argument_that_no_result_can_reuse():
  total = layout.jit(lambda w, x: (x @ w).sum(), donate_argnums=0)
  explanation = total.explain(layout.replicate(jnp.ones((8, 8))), batch_of(layout))
  assert explanation.findings == ('argument 0 is donated, but no result reuses it',)


def test_text():
  state, x = layout.init(create), batch_of(layout)

  def dampen(state, x):
    return jax.tree.map(lambda w: 0.9 * w, state), {'mean': x.mean(1)}

  explanation = layout.jit(dampen, donate_argnums=0, out_rules=(None, P())).explain(state, x)
  [gather] = explanation.collectives
  assert str(explanation) == dedent(f"""\
    dampen on 8 of 8 devices, {{'data': 2, 'model': 4}}
    ┏━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
    ┃ path                   ┃ array         ┃ sharding         ┃ from               ┃ moved by             ┃ per device ┃
    ┡━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━┩
    │ argument 0/params/down │ float32[16,8] │ P('model', None) │ as passed, donated │                      │      128 B │
    │ argument 0/params/up   │ float32[8,16] │ P(None, 'model') │ as passed, donated │                      │      128 B │
    │ argument 1             │ float32[4,8]  │ P('data', None)  │ as passed          │                      │       64 B │
    │ result 0/params/down   │ float32[16,8] │ P('model', None) │ names              │                      │      128 B │
    │ result 0/params/up     │ float32[8,16] │ P(None, 'model') │ names              │                      │      128 B │
    │ result 1/mean          │ float32[4]    │ P()              │ out_rules          │ all-gather over data │       16 B │
    └────────────────────────┴───────────────┴──────────────────┴────────────────────┴──────────────────────┴────────────┘
    1 collective, 8 B sent by each device
      {gather}
    0 constraints, 0 without effect
    second call, with result 0 as argument 0: no compilation""")
  assert str(gather).startswith('all-gather over data (2): 1 x 8 B f32, 8 B sent, for result 1/mean')


def test_equal_layers_are_one_row():
  layers = [layout.replicate({'w': jnp.ones((8, 8))}) for _ in range(300)]
  explanation = layout.jit(lambda layers: jax.tree.map(lambda w: 2 * w, layers)).explain(layers)
  assert len(explanation.records()) == 600
  table = [line.split(maxsplit=4) for line in str(explanation).splitlines() if line.startswith('│')]
  assert [line[1:4] for line in table] == [['300', 'x', 'argument'], ['result', '│', '300']]
  assert table[0][4].split()[0] == '0/*/w'
  doubled = layout.jit(lambda layers: [2 * layer['w'] for layer in layers]).explain(layers)
  table = [line for line in str(doubled).splitlines() if line.startswith('│')]
  assert [line.split()[1:5] for line in table] == [
    ['300', 'x', 'argument', '0/*/w'],
    ['300', 'x', 'result', '*'],
  ]


def test_records_and_json():
  explanation = layout.jit(step).explain(layout.init(create), batch_of(layout))
  first, *_, last = explanation.records()
  assert first == {
    'path': 'argument 0/params/down',
    'shape': (16, 8),
    'dtype': 'float32',
    'planned': "P('model', None)",
    'actual': "P('model', None)",
    'pinned': True,
    'source': 'as passed',
    'donated': False,
    'reused': False,
    'bytes_per_device': 128,
    'collectives': (),
  }
  assert (last['path'], last['planned'], last['actual']) == ('result 1', None, 'P()')
  content = json.loads(explanation.to_json())
  assert [one['path'] for one in content['arrays']] == [one['path'] for one in explanation.records()]
  assert content['second_call'] == {
    'fed_back': [['result 0', 'argument 0']],
    'changes': [],
    'refused': [],
    'compiles': False,
  }
  assert content['by_kind'] == explanation.by_kind


def test_mistakes():
  jitted = layout.jit(loss_of)
  with pytest.raises(errors.LayoutError) as caught:
    jitted.explain(layout.init(create)['params'], batch_of(layout)).row('argument 0/uq')
  assert str(caught.value) == dedent("""\
    There is no array 'argument 0/uq' among the arguments and results of loss_of. Did you mean 'argument 0/up'?
    Fix: pass a path from the table.""")
  abstract = spmd.Layout(spmd.abstract_mesh({'data': 8}))
  with pytest.raises(errors.MeshError) as caught:
    abstract.jit(loss_of).explain(jax.ShapeDtypeStruct((8,), jnp.float32))
  assert str(caught.value) == dedent("""\
    explain compiles the program, but the mesh {'data': 8} is abstract.
    Fix: use a concrete mesh, layout.replace(mesh=make_mesh(...)), or explore.compare.""")

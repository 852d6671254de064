"""Explanations: the table of a tree, its totals, and the reasons for one array."""

import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.explanation import explain_plan


def box(shape, *names, dtype=jnp.float32):
  return spmd.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), names)


TREE = {
  'params': {
    'kernel': box((16, 64), 'embed', 'mlp'),
    'table': spmd.Partitioned(jax.ShapeDtypeStruct((512, 16), jnp.bfloat16), (('data', 'model'), None)),
    'bias': jnp.ones(3),
  },
  'step': 0,
}


@pytest.fixture(scope='module')
def explanation():
  layout = spmd.Layout(
    {'data': 2, 'model': 4}, (('batch', 'data'), ('mlp', 'model'), ('embed', 'model'))
  )
  return spmd.explain(layout, TREE)


def test_rows(explanation):
  rows = {row.path: row for row in explanation.rows}
  assert list(rows) == ['params/bias', 'params/kernel', 'params/table', 'step']
  kernel = rows['params/kernel']
  assert (kernel.shape, kernel.dtype, kernel.names, kernel.spec) == (
    (16, 64),
    jnp.float32,
    ('embed', 'mlp'),
    P(None, 'model'),
  )
  assert (kernel.bytes, kernel.bytes_per_device) == (4096, 1024)
  assert kernel.decisions[0].skipped[0].reason == 'taken'
  assert (rows['params/table'].bytes, rows['params/table'].bytes_per_device) == (16384, 2048)
  assert (rows['step'].shape, rows['step'].bytes) == ((), 4)
  assert explanation.bytes_per_device == 1024 + 2048 + 12 + 4


def test_text(explanation):
  text = '\n'.join(line.rstrip() for line in str(explanation).splitlines() if line.strip())
  assert (
    text
    == dedent("""\
    Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('mlp', 'model'), ('embed', 'model')))
    ┏━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
    ┃ path          ┃ array            ┃ sharded over (rule)    ┃ per device ┃
    ┡━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━┩
    │ params/bias   │ float32[3]       │ replicated             │       12 B │
    │ params/kernel │ float32[16,64]   │ embed, mlp → model (1) │      1 KiB │
    │ params/table  │ bfloat16[512,16] │ data+model, -          │      2 KiB │
    │ step          │ int32[]          │ replicated             │        4 B │
    └───────────────┴──────────────────┴────────────────────────┴────────────┘
    4 arrays, 20 KiB in all, 3.02 KiB per device, 4.11 KiB in copies
    params: 3 arrays, 20 KiB in all, 3.01 KiB per device, 4.08 KiB in copies
    step: 1 array, 4 B in all, 4 B per device, 28 B in copies
    over 'data': 1 array, 16 KiB in all, 2 KiB per device, 0 B in copies
    over 'model': 2 arrays, 20 KiB in all, 3 KiB per device, 4 KiB in copies
    - name 'embed' is replicated: the axes of rule 2 ('embed', 'model') went to another dimension (1 array: params/kernel).""")
  )


def test_totals(explanation):
  assert explanation.by_collection['params'] == (3, 20492, 3084, 4180, 0)
  assert explanation.by_axis['data'] == (1, 16384, 2048, 0, 0)
  kernel = explanation.row('params/kernel')
  assert (kernel.copies, kernel.replicated_bytes) == (2, 4096)


def test_why_names_the_deciding_rules_and_the_skipped_ones(explanation):
  assert explanation.why('params/kernel') == dedent("""\
    params/kernel: float32[16,64] as P(None, 'model'), 1 KiB per device
      dim 0, 'embed' (16): replicated, no rule decided
        rule 2 ('embed', 'model') skipped: 'model' taken by another dimension
      dim 1, 'mlp' (64): model, by rule 1 ('mlp', 'model')""")
  assert explanation.why('params/table') == dedent("""\
    params/table: bfloat16[512,16] as P(('data', 'model'), None), 2 KiB per device
      dim 0, 512: data x model, from the box
      dim 1, 16: replicated, no rule decided""")
  assert explanation.why('params/bias') == dedent("""\
    params/bias: float32[3] as P(), 12 B per device
      replicated: it has no names, and no rule applies to it""")


def test_why_of_rules_for_whole_arrays():
  rules = (
    ('bias$', P('model')),
    ('^opt', spmd.Rules(('w', P(None, 'model')))),
    spmd.fsdp('data', min_size=64),
  )
  tree = {'bias': jnp.ones(8), 'opt': {'w': jnp.ones((8, 16))}, 'w': jnp.ones((8, 16)), 'n': jnp.ones(4)}
  explanation = spmd.explain(spmd.Layout({'data': 2, 'model': 4}, rules), tree)
  assert '\n'.join(map(explanation.why, ('bias', 'opt/w', 'w', 'n'))) == dedent("""\
    bias: float32[8] as P('model',), 8 B per device
      decided as a whole by rule 0 ('bias$', P('model',))
      dim 0, 8: model, by rule 0 ('bias$', P('model',))
      rule 2 fsdp('data', min_size=64) skipped: small
    opt/w: float32[8,16] as P(None, 'model'), 128 B per device
      decided as a whole by rule 1.0 ('w', P(None, 'model'))
      dim 0, 8: replicated, by rule 1.0 ('w', P(None, 'model'))
      dim 1, 16: model, by rule 1.0 ('w', P(None, 'model'))
    w: float32[8,16] as P(None, 'data'), 256 B per device
      dim 0, 8: replicated, no rule decided
      dim 1, 16: data, by rule 2 fsdp('data', min_size=64)
    n: float32[4] as P(), 16 B per device
      replicated: it has no names, and no rule applies to it
      rule 2 fsdp('data', min_size=64) skipped: small""")


def test_an_unknown_path(explanation):
  with pytest.raises(spmd.errors.LayoutError) as caught:
    explanation.why('params/kernl')
  assert str(caught.value) == dedent("""\
    There is no array 'params/kernl' in this tree of 4 arrays. Did you mean 'params/kernel'?
    Fix: pass a path from the table.""")


def test_json_and_records(explanation):
  described = json.loads(explanation.to_json())
  assert described['mesh'] == {'data': 2, 'model': 4}
  assert described['by_axis']['data']['bytes_per_device'] == 2048
  kernel = described['arrays'][1]
  assert kernel['spec'] == [[], ['model']] and kernel['bytes_per_device'] == 1024
  assert kernel['decisions'][0]['skipped'] == [{'rule': '2', 'reason': 'taken', 'axes': ['model']}]
  record = explanation.records()[1]
  assert record['path'] == 'params/kernel' and record['rules'] == (None, '1') and record['copies'] == 2
  assert [finding['kind'] for finding in described['findings']] == ['conflict']


def test_the_picture_of_one_array(explanation):
  drawing = explanation.draw('params/kernel')
  assert [one.devices for one in drawing.slices] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_not_sharded_enough():
  layout = spmd.Layout(spmd.abstract_mesh({'data': 64, 'model': 8}), (('mlp', 'model'),))
  tree = {f'w{i}': box((1024, 1024 * i), 'embed', 'mlp') for i in range(1, 8)} | {
    'small': box((8,), 'mlp')
  }
  [finding] = layout.check(tree).of('replicated')
  assert finding.text == (
    'not sharded enough, bytes per device: w7 3.5 MiB (even: 56 KiB), w6 3 MiB (even: 48 KiB), '
    'w5 2.5 MiB (even: 40 KiB), w4 2 MiB (even: 32 KiB), w3 1.5 MiB (even: 24 KiB).'
  )
  assert finding.paths == ('w7', 'w6', 'w5', 'w4', 'w3') and not finding.suspicious


def test_abstract_trees_on_abstract_meshes():
  layout = spmd.Layout(spmd.abstract_mesh({'data': 1024, 'model': 64}), (('mlp', ('data', 'model')),))
  tree = {'w': box((2**16, 2**20), 'embed', 'mlp')}
  assert spmd.explain(layout, tree).bytes_per_device == 4 * 2**20


def test_keys_and_other_dtypes():
  layout = spmd.Layout({'data': 8}, ())
  tree = {'key': jax.random.key(0), 'flag': True, 'int4': jnp.ones(8, jnp.int8), 'f': 1.5}
  rows = {row.path: row for row in spmd.explain(layout, tree).rows}
  assert rows['flag'].bytes == 1 and rows['f'].bytes == 4
  assert rows['key'].shape == ()


RULES = (('embed', 'data'), ('mlp', 'model'))


def make(**arrays):
  return lambda: {
    name: spmd.LogicallyPartitioned(jnp.ones(shape), ('embed', 'mlp')) for name, shape in arrays.items()
  }


def test_a_state_of_another_layout_is_shown_where_it_is():
  one = spmd.Layout({'data': 2, 'model': 4}, RULES)
  other = spmd.Layout({'data': 8}, (('embed', None), ('mlp', None)))
  state = one.init(make(w=(64, 128)))
  explanation = spmd.explain(other, state)
  [row] = explanation.rows
  assert row.spec == P(None, None) and row.stored == one.sharding(state)['w']
  assert row.deviation.kind == 'mesh'
  text = (
    "1 array not on the planned mesh (w: planned P(None, None), stored as P('data', 'model') on "
    "{'data': 2, 'model': 4}). Fix: move them with layout.shard(tree), or plan an abstract tree with this layout."
  )
  [finding] = explanation.findings.suspicious
  assert finding == ('not as planned', text, ('w',), True)
  assert other.check(state).suspicious == explanation.findings.suspicious
  assert "embed, mlp [stored as P('data', 'model') on {'data': 2, 'model': 4}]" in str(explanation)
  assert explanation.why('w').splitlines()[1] == (
    "  not as planned: stored as P('data', 'model') on {'data': 2, 'model': 4}"
  )
  described = json.loads(explanation.to_json())['arrays'][0]
  assert (described['stored'], described['deviation']) == (
    "P('data', 'model') on {'data': 2, 'model': 4}",
    'mesh',
  )


def test_the_fix_of_the_finding_mends_it():
  one = spmd.Layout({'data': 2, 'model': 4}, RULES)
  other = spmd.Layout({'data': 4, 'model': 2}, RULES)
  state = one.init(make(w=(8, 16)))
  assert other.check(state).of('not as planned')
  assert not other.check(other.shard(state)).of('not as planned')
  assert other.check(one.abstract(make(w=(8, 16)))).of('not as planned')
  assert not other.check(other.abstract(make(w=(8, 16)))).of('not as planned')


def test_arguments_in_the_wrong_order():
  layout = spmd.Layout({'data': 8}, (('embed', 'data'),))
  with pytest.raises(spmd.errors.LayoutError) as caught:
    spmd.explain({'w': jnp.ones(8)}, layout)
  assert str(caught.value) == (
    'The first argument of explain is of type dict, not a Layout.\nFix: write explain(layout, tree).'
  )


def test_a_state_without_boxes_is_explained_by_its_plan():
  """Its names are not in it: to move it where it is planned without them would replicate it."""
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  plan = layout.plan(make(w=(8, 16)), boxed=False)
  [finding] = layout.check(plan.init()).of('not as planned')
  assert finding.text == (
    "1 array not sharded as planned (w: planned P(), stored as P('data', 'model')). "
    'Fix: a state without boxes has its names in its plan, which explains it: layout.plan(create, ...).explain(state). '
    'layout.shard(tree) would replicate arrays without names or rules.'
  )
  assert not plan.explain(plan.init()).findings.of('not as planned')


def test_offenders_are_listed_as_patterns():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  layers = {f'layers_{i}': make(wi=(8, 16), wo=(16, 8))() for i in range(32)}
  state = layout.shard(layers, P('data'))
  [finding] = layout.check(state).of('not as planned')
  assert finding.text == (
    '64 arrays not sharded as planned (layers_{0..31}/wi: planned '
    "P('data', 'model'), stored as P('data',); layers_{0..31}/wo: planned P('data', 'model'), "
    "stored as P('data',)). Fix: move them with layout.shard(tree), or plan an abstract tree with this layout."
  )
  assert len(finding.paths) == 64


def test_copies_of_an_offender_are_named():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  create = lambda: TrainState.create(apply_fn=None, params=make(w=(8, 16))(), tx=optax.adam(1e-3))
  finding = layout.check(layout.shard(create(), P())).suspicious[0]
  assert finding.text.startswith(
    "3 arrays not sharded as planned (params/w and opt_state/0/{mu,nu}/...: planned P('data', 'model'), "
  )
  assert finding.paths == ('params/w', 'opt_state/0/mu/w', 'opt_state/0/nu/w')


def test_many_kinds_of_offenders_are_counted():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  state = layout.shard(make(a=(8, 8), b=(8, 16), c=(8, 24), d=(8, 32), e=(8, 40))(), P())
  [finding] = layout.check(state).of('not as planned')
  assert "; d: planned P('data', 'model'), stored as P(); 1 more). Fix: " in finding.text


def test_a_plan_of_names_with_a_state_without_boxes():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  boxed = jax.eval_shape(make(w=(8, 16)))
  state = layout.shard({'w': jnp.ones((8, 16), jnp.bfloat16)}, P('data'))
  [row] = explain_plan(layout, boxed, state).rows
  assert (row.names, row.spec, row.dtype) == (('embed', 'mlp'), P('data', 'model'), jnp.bfloat16)
  assert row.deviation.text == "stored as P('data',)"
  [row] = explain_plan(layout, boxed).rows
  assert (row.dtype, row.stored, row.deviation) == (jnp.float32, None, None)


def test_a_plan_with_a_state_of_another_structure():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  with pytest.raises(spmd.errors.LayoutError) as caught:
    explain_plan(layout, jax.eval_shape(make(w=(8, 16))), {'w': 1, 'b': 2})
  assert str(caught.value) == dedent("""\
    The plan is of 1 array, the state has 2.
    Fix: pass a state of the planned structure.""")


@given(
  st.builds(
    np.zeros,
    st.sampled_from([(), (8,), (8, 16), (2, 8, 4)]),
    st.one_of(
      hypothesis_numpy.boolean_dtypes(),
      hypothesis_numpy.integer_dtypes(endianness='='),
      hypothesis_numpy.unsigned_integer_dtypes(endianness='='),
      hypothesis_numpy.floating_dtypes(endianness='=', sizes=(16, 32, 64)),
      hypothesis_numpy.complex_number_dtypes(endianness='=', sizes=(64, 128)),
    ),
  ),
  st.sampled_from([True, 1, -3, 1.5, 2j]),
)
def test_bytes_are_those_on_the_device(array, number):
  layout = spmd.Layout({'data': 2, 'model': 4}, spmd.fsdp('model', min_size=1))
  tree = {'array': array, 'number': number}
  stored = layout.shard(tree)
  rows = {row.path: row for row in spmd.explain(layout, tree).rows}
  for path, on_device in stored.items():
    row = rows[path]
    shard = on_device.addressable_shards[0].data
    assert (row.dtype, row.bytes, row.bytes_per_device) == (
      on_device.dtype,
      on_device.nbytes,
      shard.nbytes,
    )
  again = {row.path: row.dtype for row in spmd.explain(layout, stored).rows}
  assert again == {path: row.dtype for path, row in rows.items()}


def test_an_array_with_64_bits_keeps_them():
  with jax.enable_x64(True):
    wide = jnp.ones((8, 16), jnp.float64)
  [row] = spmd.explain(spmd.Layout({'data': 8}), wide).rows
  assert (row.dtype, row.bytes) == (jnp.dtype('float64'), 1024)


def layered(count, **sizes):
  """A TrainState of Adam with equal layers."""
  layer = {
    'attention': {name: box((64, 8, 16), 'embed', 'heads', None) for name in ('q', 'k', 'v')},
    'wi': box((64, 256), 'embed', 'mlp'),
    'bias': jax.ShapeDtypeStruct((64,), jnp.float32),
    **{name: box((64, size), 'embed', 'mlp') for name, size in sizes.items()},
  }
  params = {'embedding': box((512, 64), 'vocab', 'embed')} | {f'layers_{i}': layer for i in range(count)}
  create = lambda params: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
  return jax.eval_shape(create, params)


def test_equal_layers_and_copies_are_one_row():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  explanation = spmd.explain(layout, layered(32))
  assert [(fold.count, fold.path, fold.copies) for fold in explanation.folded] == [
    (1, 'step', ''),
    (3, 'params/embedding', 'opt_state/0/{mu,nu}/embedding'),
    (96, 'params/layers_{0..31}/attention/k', 'opt_state/0/{mu,nu}/layers_{0..31}/attention/k'),
    (96, 'params/layers_{0..31}/attention/q', 'opt_state/0/{mu,nu}/layers_{0..31}/attention/q'),
    (96, 'params/layers_{0..31}/attention/v', 'opt_state/0/{mu,nu}/layers_{0..31}/attention/v'),
    (96, 'params/layers_{0..31}/bias', 'opt_state/0/{mu,nu}/layers_{0..31}/bias'),
    (96, 'params/layers_{0..31}/wi', 'opt_state/0/{mu,nu}/layers_{0..31}/wi'),
    (1, 'opt_state/0/count', ''),
  ]
  wi = explanation.folded[-2]
  assert (wi.bytes, wi.bytes_per_device) == (96 * 64 * 256 * 4, 96 * 64 * 256 * 4 // 8)
  assert len(explanation.rows) == 2 + 3 * (1 + 32 * 5)
  assert sum(fold.count for fold in explanation.folded) == len(explanation.rows)
  text = str(explanation)
  assert len(text.splitlines()) < 40
  [line] = [line for line in text.splitlines() if '/wi ' in line]
  assert [cell.strip() for cell in line.split('│')[1:3]] == [
    'params/layers_{0..31}/wi and opt_state/0/{mu,nu}/...',
    '96 x float32[64,256]',
  ]
  folded = json.loads(explanation.to_json())['folded'][-2]
  assert folded == {
    'path': 'params/layers_{0..31}/wi',
    'copies': 'opt_state/0/{mu,nu}/layers_{0..31}/wi',
    'count': 96,
    'first': 'params/layers_0/wi',
    'bytes': 6291456,
    'bytes_per_device': 786432,
  }


def test_a_pattern_of_the_table_is_accepted_as_a_path():
  layout = spmd.Layout({'data': 2, 'model': 4}, RULES)
  explanation = spmd.explain(layout, layered(3))
  pattern = 'params/layers_{0..2}/wi'
  assert explanation.why(pattern) == explanation.why('params/layers_0/wi')
  assert explanation.why('opt_state/0/mu/layers_2/wi').startswith('opt_state/0/mu/layers_2/wi: ')
  assert explanation.draw(pattern).shape == (64, 256)


def test_layers_are_no_collections():
  w = jax.ShapeDtypeStruct((8,), jnp.float32)
  layers = {f'layers_{i}': w for i in range(3)}
  assert 'layers_1:' not in str(spmd.explain(spmd.Layout({'data': 8}), layers))

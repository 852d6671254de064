"""Explanations: the table of a tree, its totals, and the reasons for one array."""

import json
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd


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
  assert explanation.by_collection['params'] == (3, 20492, 3084, 4180)
  assert explanation.by_axis['data'] == (1, 16384, 2048, 0)
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

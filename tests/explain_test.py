"""The table of a tree: its text, and its rows."""

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
  assert text == dedent("""\
    Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('mlp', 'model'), ('embed', 'model')))
    ┏━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
    ┃ path          ┃ array            ┃ laid over (rule)       ┃ per device ┃
    ┡━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━┩
    │ params/bias   │ float32[3]       │ replicated             │       12 B │
    │ params/kernel │ float32[16,64]   │ embed, mlp → model (1) │      1 KiB │
    │ params/table  │ bfloat16[512,16] │ data+model, -          │      2 KiB │
    │ step          │ int32[]          │ replicated             │        4 B │
    └───────────────┴──────────────────┴────────────────────────┴────────────┘
    4 arrays, 20 KiB in all, 3.02 KiB per device
    - name 'embed' is replicated: the axes of rule 2 ('embed', 'model') went to another dimension (1 array: params/kernel).
    - rules that decided nothing in this tree: 0 ('batch', 'data'), 2 ('embed', 'model').""")


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

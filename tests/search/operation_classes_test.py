"""Classes of operations: traffic of an estimate and of a compiled program, whatever a compiler combines or renames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.search.operation_classes import class_of, compared

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all')
OPS = (
  'dot_general',
  'gather',
  'jit(f)/jvp(M)/jit(_take)/scatter-add',
  'sort',
  "state.params['w'].value",
  '',
)
LINES = ('model.py:1', 'model.py:2', '')


@st.composite
def collectives(draw):
  one = [draw(st.sampled_from(choices)) for choices in (KINDS, OPS, LINES)]
  return made(one[0], draw(st.floats(1.0, 1e9)), one[1], one[2], draw(st.sampled_from((1, 4))))


def made(kind, wire, op='dot_general', line='model.py:1', times=1, axes=('data',)):
  return Collective(kind, axes, 8, wire, times, wire, 'f32', op, line)


def counts(*ones):
  return Counts(0.0, 0.0, ones, (), ())


@given(st.lists(collectives(), max_size=8), st.lists(collectives(), max_size=8))
def test_all_traffic_is_in_one_class(one, other):
  sums = compared(counts(*one), counts(*other)).values()
  for index, side in enumerate((one, other)):
    assert sum(pair[index] for pair in sums) == pytest.approx(sum(each.wire for each in side))


@given(st.lists(collectives(), max_size=8), st.randoms())
def test_an_estimate_agrees_with_a_program_that_names_its_operations_otherwise(one, order):
  compiled = [each._replace(op='', source='') for each in one]
  order.shuffle(compiled)
  sums = compared(counts(*one), counts(*compiled))
  assert all(two == pytest.approx(one, rel=0.03 * 8) for one, two in sums.values())


@pytest.mark.parametrize(
  ('op', 'name'),
  [
    ('jit(step)/transpose(jvp(M))/Embed_0/jit(_take)/scatter-add', 'lookups'),
    ('jit(step)/jvp(M)/while/body/layers/up/dot_general', 'products'),
    ('gather', 'lookups'),
    ('convolution', 'convolutions'),
    ('jit(step)/jvp(R)/conv_general_dilated', 'convolutions'),
    ('jit(step)/jit(argsort)/sort', 'sorts'),
    ('jit(step)/top_k', 'sorts'),
    ('jit(step)/reduce_sum', 'reductions'),
    ('jit(step)/convert_element_type', 'products'),
    ("state.params['w'].value", 'products'),
    ('layers/(k/dot_general:v/dot_general)', 'products'),
    ('', 'products'),
  ],
)
def test_names_of_operations(op, name):
  assert class_of(made('all-reduce', 1.0, op)) == name
  assert class_of(made('all-reduce', 1.0, op, times=8)) == f'{name} in loops'


def test_a_sum_that_leaves_its_loop_counts_where_it_was_estimated():
  estimated = counts(made('all-reduce', 800.0, times=8))
  compiled = counts(made('all-reduce', 100.0))
  assert compared(estimated, compiled) == {'products in loops': (800.0, 100.0)}


def test_combined_lines_count_in_the_class_of_their_own_operation():
  estimated = counts(made('all-reduce', 50.0), made('all-reduce', 70.0, 'gather', 'model.py:2'))
  compiled = counts(made('all-reduce', 120.0, 'scatter-add', 'model.py:9'))
  assert compared(estimated, compiled) == {'products': (50.0, 0.0), 'lookups': (70.0, 120.0)}


@pytest.mark.parametrize('gathered', [(), (made('all-gather', 8.0, 'broadcast_in_dim'),)])
def test_one_that_is_combined_of_two_has_the_classes_of_both(gathered):
  """As of tied embeddings and positions under `fsdp`: the line is that of the smaller one."""
  estimated = counts(
    made('all-reduce', 492.0, line='model.py:2'), made('reduce-scatter', 8.0, 'reduce'), *gathered
  )
  compiled = counts(
    made('reduce-scatter', 254.0, 'transpose(jvp(M))/(reduce_sum:embed.attend/dot_general)'), *gathered
  )
  more = sum(one.wire for one in gathered)
  assert compared(estimated, compiled) == {
    'products': (492.0 + more, 246.0 + more),
    'reductions': (8.0, 8.0),
  }

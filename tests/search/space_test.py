"""Candidates, their canonical form, the search space, starting points and user constraints."""

import functools
import math
from textwrap import dedent

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.search.candidate import Axis, Candidate, canonical, layout_of, rules_of, text_of
from flax_spmd._src.search.model_facts import ModelFacts, PathKind, facts_of
from flax_spmd._src.search.space import Space, factorisations
from flax_spmd._src.search.starts import PRESETS, starting_points
from flax_spmd._src.search.user_constraints import constraints_of
from flax_spmd.errors import SearchError
from flax_spmd.explore import TrainStep, parse_target

BATCH = frozenset({'batch'})
NAMES = {
  'batch': (64,),
  'length': (128,),
  'embed': (96,),
  'mlp': (256,),
  'act_mlp': (1, 256),
  'odd': (7,),
}
PARAMETERS = frozenset({'embed', 'mlp', 'odd'})
TOGETHER = frozenset(
  map(frozenset, [('embed', 'mlp'), ('batch', 'length'), ('batch', 'act_mlp'), ('length', 'act_mlp')])
)
FACTS = ModelFacts(NAMES, PARAMETERS, TOGETHER, BATCH, (2**20, 1))


def space(target='h100:64', facts=FACTS, memory=None, choices=(), **constraints):
  hardware = parse_target(target)
  options = {'mesh': None, 'pin': None, 'forbid': (), 'batch_only': (), 'tensor': None} | constraints
  return Space(facts, constraints_of(hardware, facts, memory, **options), hardware, dict(choices))


def one(*sizes, **fields):
  rules = tuple((name, tuple(axes)) for name, axes in fields.pop('rules', {}).items())
  return Candidate(tuple(Axis(size) for size in sizes), rules, **fields)


# -- a candidate as a layout


def test_a_candidate_as_a_layout():
  candidate = one(
    4, 8, 2, rules={'batch': (0, 1), 'mlp': (2,)}, fsdp_axes=(1,), choices=(('remat', 'full'),)
  )
  layout = layout_of(candidate, BATCH)
  assert dict(layout.mesh.shape) == {'replica': 4, 'data': 8, 'model': 2}
  assert layout.rules == spmd.Rules(('batch', ('replica', 'data')), ('mlp', 'model'), spmd.fsdp('data'))
  text = 'replica=4,data=8,model=2: batch=replica,data mlp=model fsdp=data remat=full'
  assert text_of(candidate, BATCH) == text


def test_axes_for_the_optimizer_are_added_to_those_of_the_names():
  candidate = one(8, 8, rules={'batch': (0,), 'mlp': (1,)}, zero1_axes=(0,), min_size=1)
  over = spmd.optimizer_over('data', min_size=1)
  rules = spmd.Rules(('batch', 'data'), ('mlp', 'model'), over)
  assert rules_of(candidate, BATCH) == rules


def test_a_candidate_with_paths():
  candidate = one(8, 8, rules={'batch': (0,)}, path_rules=(('(^|/)wi$', 2, 1, (1,)),))
  assert rules_of(candidate, BATCH) == spmd.Rules(('batch', 'data'), ('(^|/)wi$', P(None, 'model')))
  assert text_of(candidate, BATCH) == 'data=8,model=8: batch=data (^|/)wi$[1]=model'


def test_axes_are_named_by_their_use():
  mesh = lambda candidate: [*layout_of(candidate, BATCH).mesh.shape]
  assert mesh(one(2, 2, 2, rules={'batch': (0,), 'expert': (1,), 'length': (2,)})) == [
    'data',
    'expert',
    'context',
  ]
  assert mesh(one(2, 2, 2, rules={'batch': (0,), 'mlp': (1,), 'heads': (2,)})) == [
    'data',
    'model',
    'model_2',
  ]
  assert mesh(one(2, 2, 2, rules={'batch': (0,)}, fsdp_axes=(1,))) == ['replica', 'fsdp', 'idle']
  labelled = Candidate((Axis(2), Axis(4, 'model')), (('batch', (1,)), ('mlp', (0,))))
  assert mesh(labelled) == ['model_2', 'model']


# -- canonical form


def spelled(candidate, together=TOGETHER, per_node=8, exchange=True):
  return canonical(candidate, together, per_node, exchange)


def test_axes_that_are_used_together_are_merged():
  split = one(8, 4, 2, rules={'batch': (0,), 'mlp': (1, 2)}, fsdp_axes=(0,))
  assert spelled(split) == one(8, 8, rules={'batch': (0,), 'mlp': (1,)}, fsdp_axes=(0,))
  turned = one(8, 4, 2, rules={'batch': (0,), 'mlp': (2, 1)})
  assert spelled(turned, exchange=False).axes == turned.axes  # not in the other order,
  assert spelled(turned) == spelled(split._replace(fsdp_axes=()))  # unless the order has no effect
  assert spelled(one(1, 8, rules={'batch': (1,)})) == one(8, rules={'batch': (0,)})
  assert spelled(one(4, 2)) == one(8)
  assert spelled(one(1)) == one(1)


def test_order_counts_where_names_compete():
  first = one(8, 8, rules={'mlp': (1,), 'embed': (1,)})
  other = one(8, 8, rules={'embed': (1,), 'mlp': (1,)})
  assert spelled(first) != spelled(other)
  assert spelled(first, frozenset()) == spelled(other, frozenset())
  apart = one(8, 8, rules={'mlp': (1,), 'embed': (0,)})
  assert spelled(apart) == spelled(one(8, 8, rules={'embed': (0,), 'mlp': (1,)}))


def test_axes_within_a_node_are_equivalent():
  one_way, other = (
    one(2, 4, rules={'batch': (0,), 'mlp': (1,)}),
    one(4, 2, rules={'batch': (1,), 'mlp': (0,)}),
  )
  assert spelled(one_way) == spelled(other)
  assert spelled(one_way, exchange=False) != spelled(other, exchange=False)
  across = one(8, 8, rules={'batch': (0,), 'mlp': (1,)}), one(8, 8, rules={'batch': (1,), 'mlp': (0,)})
  assert spelled(across[0]) != spelled(across[1])  # one of the two leaves the node


def test_min_size_is_ignored_without_fsdp():
  assert spelled(one(8, rules={'batch': (0,)}, min_size=1)) == one(8, rules={'batch': (0,)})


def axes_of(count):
  some = st.integers(1, count).flatmap(
    lambda many: st.permutations(range(count)).map(lambda p: p[:many])
  )
  return st.one_of(st.just(()), some.map(tuple))


@st.composite
def candidates(draw):
  sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3))
  over = axes_of(len(sizes))
  rules = draw(st.dictionaries(st.sampled_from(sorted(NAMES)), over.filter(bool)))
  options = {'fsdp_axes': draw(over), 'zero1_axes': draw(over)}
  return one(*sizes, rules=rules, **options, min_size=draw(st.sampled_from([1, 2**20])))


@given(candidates(), st.sampled_from([1, 4, 8, 512]), st.booleans())
@settings(max_examples=150)
def test_the_canonical_form_is_stable(candidate, per_node, exchange):
  once = spelled(candidate, per_node=per_node, exchange=exchange)
  assert spelled(once, per_node=per_node, exchange=exchange) == once
  assert once.devices == candidate.devices
  shards = lambda one: sorted((name, one.shards(over)) for name, over in one.name_rules)
  assert [pair for pair in shards(candidate) if pair[1] > 1] == [
    pair for pair in shards(once) if pair[1] > 1
  ]


# -- the space


def test_meshes():
  assert (
    factorisations(8, 3) == [(2, 2, 2)] and factorisations(7, 2) == [] and factorisations(7, 1) == [(7,)]
  )
  sizes = [tuple(axis.size for axis in axes) for axes in space().meshes()]
  assert len(sizes) == 16 and sizes[0] == (64,) and all(math.prod(one) == 64 for one in sizes)
  assert space('h100:1').meshes() == [(Axis(1),)]
  fixed = space(mesh={'data': -1, 'model': 8})
  assert fixed.meshes() == [(Axis(8, 'data'), Axis(8, 'model'))]
  assert space(mesh=spmd.abstract_mesh({'data': 8, 'model': 8})).meshes() == fixed.meshes()
  pinned = space('h100:8', pin={'mlp': 'tensor'}).meshes()
  assert len(pinned) == 1 + 2 * 2 + 1 * 3
  assert all([axis.label for axis in axes].count('tensor') == 1 for axes in pinned)


def all_moves(where, candidate):
  return [one for change in where.coordinates(candidate) for one in change]


def test_moves_are_legal_and_canonical():
  where = space()
  start = where.legal(one(8, 8, rules={'batch': (0,), 'mlp': (1,)}, fsdp_axes=(0,)))
  moves = all_moves(where, start)
  assert len(moves) > 40
  for candidate in moves:
    assert candidate.devices == 64 and where.legal(candidate) == candidate != start
    layout_of(candidate, BATCH)
  assert any(len(one.axes) == 3 for one in moves) and any(one.zero1_axes for one in moves)
  assert not any(one.axes_of('odd') for one in moves)  # 7 is not divided by anything
  swapped = where.legal(one(8, 8, rules={'batch': (1,), 'mlp': (0,)}, fsdp_axes=(1,)))
  assert swapped != start and swapped in moves


def test_related_names_move_together():
  where = space()
  start = where.legal(one(8, 8, rules={'batch': (0,)}, fsdp_axes=(1,)))
  assert any(
    c.axes_of('length') == c.axes_of('embed') == () != c.axes_of('batch')
    for c in all_moves(where, start)
  )
  both = where.legal(one(8, 8, rules={'batch': (0,), 'mlp': (1,), 'act_mlp': (1,)}, fsdp_axes=(0,)))
  assert any(not c.axes_of('mlp') and not c.axes_of('act_mlp') for c in all_moves(where, both))


def test_precedence_moves():
  where = space('h100:8')
  start = where.legal(one(8, rules={'embed': (0,), 'mlp': (0,)}))
  assert where.legal(one(8, rules={'mlp': (0,), 'embed': (0,)})) in all_moves(where, start)


def test_choices_are_tried():
  where = space('h100:8', choices={'remat': ('none', 'full')})
  start = where.legal(one(8, rules={'batch': (0,)}))
  assert start.choices == (('remat', 'none'),)
  assert start._replace(choices=(('remat', 'full'),)) in all_moves(where, start)


def test_sizes_under_a_choice():
  half = {'batch': (32,), 'mlp': (256,)}
  choices = {'width': (1, 2)}
  under = lambda chosen: FACTS if chosen == (('width', 1),) else FACTS._replace(names=half)
  of_choice = space(choices=choices)._replace(facts_under=under)
  over_64 = Candidate((Axis(64),), (('batch', (0,)),))
  legal = lambda one, width: of_choice.legal(one._replace(choices=(('width', width),)))
  assert legal(over_64, 1) and of_choice.legal(over_64) == legal(over_64, 1)
  assert legal(over_64, 2) is None
  over_32 = Candidate((Axis(2), Axis(32)), (('batch', (1,)), ('embed', (0,))))
  assert legal(over_32, 1) and legal(over_32, 2) is None  # it has no such name
  assert of_choice.divisible(over_32._replace(choices=(('width', 2),))).name_rules == (('batch', (1,)),)


def test_the_batch_may_be_a_later_dimension():
  create = lambda: {'w': jnp.ones((4, 4))}
  batch = {'time': jax.ShapeDtypeStruct((6, 16, 4), jnp.float32)}
  placements = {'time': ('length', 'batch', None)}
  facts = facts_of(TrainStep(lambda state, x: state, create, batch, placements=placements))
  assert facts.batch == {'batch'}


@pytest.mark.parametrize('name', ['act_batch', 'activation_batch', 'decode_batch_no_exp'])
def test_presets_shard_the_batch_under_each_of_its_names(name):
  sizes = NAMES | {name: (1, 64), 'batch_norm': (96,)}
  train_step = TrainStep(None, unnamed, jax.ShapeDtypeStruct((64, 96), jnp.float32))
  facts = facts_of(train_step, {}, sizes, PARAMETERS | {'batch_norm'}, TOGETHER)
  assert facts.batch == {'batch', name}  # a name of parameters is no batch
  starts = starting_points(space(facts=facts), 40)
  assert 'data_parallel' in {start.preset for start in starts}
  assert all(start.candidate.axes_of('batch') == start.candidate.axes_of(name) for start in starts)


def test_fsdp_without_effect_is_dropped():
  where = space('h100:8', FACTS._replace(min_sizes=(1,)))
  assert not where.legal(one(8, rules={'batch': (0,)}, fsdp_axes=(0,))).fsdp_axes
  assert where.legal(one(8, rules={'batch': (0,)}, fsdp_axes=(0,), min_size=1)).fsdp_axes == (0,)


def test_tensor_parallelism_stays_within_a_node():
  wide = one(4, 16, rules={'batch': (0,), 'mlp': (1,)})
  assert space().legal(wide) is None
  assert space(tensor=16).legal(wide) and space(tensor=0).legal(wide)
  assert space('v5e:8x8').legal(wide)  # a torus has no nodes
  assert space(pin={'mlp': 'model'}).legal(Candidate((Axis(4), Axis(16, 'model')), (('batch', (0,)),)))
  assert space().legal(one(64, rules={'batch': (0,), 'embed': ()}, fsdp_axes=(0,)))


def test_constraints_are_met():
  only = space(batch_only='data')
  axes = Axis(8, 'data'), Axis(8)
  assert only.legal(Candidate(axes, (('batch', (0,)), ('mlp', (1,)))))
  for wrong in (
    Candidate(axes, (('mlp', (0,)),)),
    Candidate(axes, fsdp_axes=(0,)),
    Candidate(axes, zero1_axes=(0, 1)),
  ):
    assert only.legal(wrong) is None
  assert space(forbid=['mlp']).legal(one(8, 8, rules={'mlp': (1,)})) is None
  some = space(forbid={'mlp': 'data'})
  assert some.legal(Candidate(axes, (('mlp', (1,)),))) and not some.legal(
    Candidate(axes, (('mlp', (0,)),))
  )
  pinned = space(pin={'mlp': 'model', 'embed': None})
  legal = pinned.legal(Candidate((Axis(8), Axis(8, 'model')), (('batch', (0,)), ('mlp', (0,)))))
  assert (legal.axes_of('mlp'), legal.axes_of('embed')) == ((1,), ())
  assert all(one.axes_of('mlp') for one in all_moves(pinned, legal))
  assert not any(one.axes_of('embed') for one in all_moves(pinned, legal))


# -- starting points


def test_presets_are_starting_points():
  names = dict.fromkeys(('batch', 'length', 'vocab', 'mlp', 'heads', 'expert'), (64,))
  facts = FACTS._replace(names=names, parameters=frozenset({'mlp'}))
  presets = {
    start.preset: rules_of(start.candidate, BATCH)
    for start in starting_points(space(facts=facts, tensor=0), 10**6)
  }
  assert {*presets} == {*PRESETS, ''}
  tables = [
    rules_of(start.candidate, BATCH) for start in starting_points(space(facts=facts, tensor=0), 10**6)
  ]
  same = lambda rules: lambda table: sorted(map(repr, table)) == sorted(map(repr, rules))
  for rules in (
    spmd.presets.fsdp(),
    spmd.presets.fsdp_tensor_parallel(),
    spmd.presets.zero1(),
    spmd.presets.hybrid_fsdp(shard='data'),
    spmd.presets.sequence_parallel(),
    spmd.presets.context_parallel(),
  ):
    assert any(map(same(rules), tables)), rules


def test_presets_are_adapted_to_the_models_names():
  points = [start.candidate for start in starting_points(space(), 10**6)]
  assert any(one.axes_of('mlp') == one.axes_of('act_mlp') != () for one in points)
  assert len(starting_points(space(), 5)) == 5


def test_starting_points_for_a_small_batch():
  facts = FACTS._replace(names=NAMES | {'batch': (4,)})
  points = [start.candidate for start in starting_points(space('h100:4096', facts), 50)]
  assert points and all(one.shards(one.axes_of('batch')) <= 4 for one in points)


def unnamed():
  return {'params': {'wi': jnp.ones((64, 128)), 'wo': jnp.ones((128, 64)), 'bias': jnp.ones(8)}}


def test_a_model_without_names_has_paths():
  facts = facts_of(TrainStep(None, unnamed, jax.ShapeDtypeStruct((16, 64), jnp.float32)))
  assert facts.paths == (PathKind('(^|/)wi$', ((64, 128),)), PathKind('(^|/)wo$', ((128, 64),)))
  assert (facts.names, facts.batch, facts.min_sizes) == ({'batch': (16,)}, BATCH, (1,))
  where = space('h100:8', facts)
  moves = all_moves(where, where.legal(one(8, rules={'batch': (0,)})))
  assert any(c.path_rules == (('(^|/)wo$', 2, 0, (0,)),) for c in moves) and any(
    c.fsdp_axes for c in moves
  )


def own_keys():
  params = unnamed()['params']
  return (
    params,
    {'statistics': jnp.ones(8)},
    optax.adafactor(1e-2, min_dim_size_to_factor=8).init(params),
  )


def modules():
  class Model(nnx.Module):
    def __init__(self):
      self.wi, self.wo = nnx.Param(jnp.ones((64, 128))), nnx.Param(jnp.ones((128, 64)))
      self.table = nnx.Variable(jnp.ones((8, 8)))

  model = Model()
  return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize('create', [own_keys, modules])
def test_paths_of_parameters_in_states_of_other_forms(create):
  facts = facts_of(TrainStep(None, create, jax.ShapeDtypeStruct((16, 64), jnp.float32)))
  assert facts.paths == (PathKind('(^|/)wi$', ((64, 128),)), PathKind('(^|/)wo$', ((128, 64),)))


def many():
  return {'params': {f'block_{n}': {'w': jnp.ones((8, 8))} for n in range(20)}}


def test_paths_that_differ_in_numbers_are_one_kind():
  facts = facts_of(TrainStep(None, many, jax.ShapeDtypeStruct((16, 8), jnp.float32)))
  assert [kind.pattern for kind in facts.paths] == [r'(^|/)block_\d+/w$']


def test_names_of_a_state():
  def create(x):
    return {'w': spmd.LogicallyPartitioned(jnp.ones((x.shape[0], 256)), ('embed', 'mlp'))}

  batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)
  facts = facts_of(TrainStep(None, create, batch, (jnp.ones(64),), ('rows', None)))
  assert facts.names == {'embed': (64,), 'mlp': (256,), 'rows': (16,)}
  assert facts.batch == {'rows'} and facts.together == {frozenset({'embed', 'mlp'})}
  assert facts.min_sizes == (2**14, 1)[:1]


# -- constraints that cannot be met


def wrong(text, **constraints):
  with pytest.raises(SearchError) as caught:
    space(**constraints)
  assert str(caught.value) == dedent(text).strip()


def test_a_budget_larger_than_the_chip():
  wrong(
    """
    The memory budget of 100 GiB exceeds the 79.1 GiB of one h100.
    Fix: pass a smaller memory, or omit it.
    """,
    memory='100GiB',
  )
  wrong(
    """
    memory='much' is not a size.
    Fix: pass a positive number of bytes, or text such as '14GiB'.
    """,
    memory='much',
  )


def test_a_name_that_the_model_lacks():
  wrong(
    """
    pin: the model has no name 'embd'. Did you mean 'embed'?
    forbid: the model has no name 'heads'.
    Fix: use one of its names: act_mlp, batch, embed, length, mlp, odd.
    """,
    pin={'embd': None},
    forbid=['heads'],
  )


def test_a_pinned_name_that_no_mesh_divides():
  wrong(
    """
    The name 'odd' cannot be pinned to 'model': no mesh of 64 devices divides its sizes (7).
    Fix: pin it to other axes, or pad it.
    """,
    pin={'odd': 'model'},
  )


def test_contradictory_pins():
  wrong(
    """
    pin shards 'mlp' over 'model', which forbid rules out.
    pin shards 'mlp' over 'data', which batch_only reserves for the batch.
    pin shards 'mlp' and 'embed' over 'model', but both occur on one array.
    Fix: remove one of the two constraints.
    """,
    pin={'mlp': ('data', 'model'), 'embed': 'model'},
    forbid={'mlp': 'model'},
    batch_only='data',
  )


def test_impossible_meshes():
  wrong(
    """
    The mesh {'data': 4, 'model': 8} has 32 devices, but h100:64 has 64.
    The mesh {'data': 4, 'model': 8} has no axis 'modle'. Did you mean 'model'?
    Fix: choose sizes whose product is 64; one of them may be -1.
    Fix: use one of its axes: data, model.
    """,
    mesh={'data': 4, 'model': 8},
    pin={'mlp': 'modle'},
  )
  wrong(
    """
    The constraints name 4 axes ('a', 'b', 'c', 'd'), but a search tries meshes of at most 3 axes.
    Fix: name fewer axes, or pass a mesh.
    """,
    batch_only=('a', 'b', 'c', 'd'),
  )
  wrong(
    """
    The 2 devices of h100:2 cannot form a mesh with the axes 'a', 'b'.
    Fix: name fewer axes, or pass a mesh, where an axis may have size 1.
    """,
    target='h100:2',
    batch_only=('a', 'b'),
  )


def test_sizes_as_text():
  parsed = functools.partial(space, 'h100:8')
  assert (
    parsed(memory='60GiB').constraints.memory
    == 60 * 2**30
    == parsed(memory=60 * 2**30).constraints.memory
  )


def test_a_repeated_axis():
  wrong(
    """
    pin shards 'mlp' over 'model', 'model', which repeats an axis.
    Fix: list each axis once.
    """,
    pin={'mlp': ('model', 'model')},
  )

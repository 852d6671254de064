"""Commit protocol: every interleaving keeps its promises, and each rule is needed."""

import pytest

from tests.checkpoint.protocol_model import FILES, Actor, Broken, Head, Rules, State, World, explore

NEW = World()
OLD = World(
  Head('gen-old', None, 'old'), frozenset(('gen-old', file) for file in FILES), named=frozenset({'gen-old'})
)
EARLIER = Rules()  # names


def save(name, rules, **more):
  generation = f'gen-{name}' if rules.unique_generation_names else 'gen-1'
  return Actor(name, 'save', more.pop('at', 'put_intent'), generation, **more)


def overwrites_and_reader(rules):
  return State(
    OLD._replace(intents=frozenset({'A', 'B'})),
    (
      save('A', rules, at='read_head'),
      save('B', rules, at='read_head'),
      Actor('reader', 'read', 'look'),
    ),
  )


def lost_answers(rules):
  return State(OLD, (save('A', rules, faulty=True, beats=True), save('B', rules)))


def first_saves_and_sweep(rules):
  return State(
    NEW, (save('A', rules, overwrite=False), save('B', rules), Actor('sweep', 'sweep', 'list_intents'))
  )


def failing_first_save_and_sweep(rules):
  sweeps = [Actor(name, 'sweep', 'list_intents') for name in ('sweep1',)]
  return State(NEW, (save('A', rules, faulty=True), *sweeps))


def deletion(rules):
  return State(
    OLD._replace(intents=frozenset({'A'})),
    (
      Actor('D', 'delete', 'put_intent'),
      save('A', rules, at='read_head'),
      Actor('reader', 'read', 'look'),
    ),
  )


def read_only(rules):
  return State(OLD, (save('A', rules), save('B', rules), Actor('reader', 'read_only', 'look')))


def disk(rules):
  return State(
    OLD._replace(disk=True), (save('A', rules, faulty=True), save('B', rules))
  )


def new_on_disk(rules):
  return State(
    NEW._replace(disk=True, entry=False), (save('A', rules, faulty=True, made=True), save('B', rules))
  )


SCENARIOS = [
  overwrites_and_reader, lost_answers, first_saves_and_sweep, failing_first_save_and_sweep, deletion, read_only, disk, new_on_disk
]


@pytest.mark.parametrize('scenario', SCENARIOS)
def test_every_interleaving_keeps_the_promises(scenario):
  print(explore(scenario(Rules()), Rules()))


@pytest.mark.parametrize('rule', Rules._fields)
def test_every_rule_is_needed(rule):
  rules = Rules()._replace(**{rule: False})
  found = []
  for scenario in SCENARIOS:
    try:
      explore(scenario(rules), rules)
    except Broken as e:
      found.append((scenario.__name__, str(e)))
  for x in found:
    print(*x)
  assert found

"""Commit protocol: no interleaving breaks a promise, and every rule is needed for one."""

import pytest

from tests.checkpoint.protocol_model import (
  FILES,
  PROGRAM,
  Actor,
  Broken,
  Head,
  Rules,
  State,
  World,
  explore,
)

pytestmark = pytest.mark.new_jax  # it uses no JAX

NEW = World()
OLD = World(
  Head('gen-old', None, 'old'),
  frozenset(('gen-old', file) for file in FILES),
  named=frozenset({'gen-old'}),
)


def save(name, rules, **more):
  generation = f'gen-{name}' if rules.unique_generation_names else 'gen-1'
  return Actor(name, 'save', 'read_head', generation, **more)


def reader(kind='read'):
  return Actor('reader', kind, 'look')


def sweep(name='sweep'):
  return Actor(name, 'sweep', 'list_intents')


def deletion(**more):
  return Actor('deletion', 'delete', 'read_head', **more)


LOST = OLD._replace(head=None, lost='gen-old')

SCENARIOS = {
  'overwrites': lambda rules: State(OLD, (save('A', rules), save('B', rules), reader())),
  'read-only reader': lambda rules: State(
    OLD, (save('A', rules), save('B', rules), reader('read_only'))
  ),
  'lost answers': lambda rules: State(
    OLD, (save('A', rules, faulty=True, beats=True), save('B', rules))
  ),
  'first saves': lambda rules: State(
    NEW, (save('A', rules, overwrite=False), save('B', rules, overwrite=False), sweep())
  ),
  'failing first save': lambda rules: State(NEW, (save('A', rules, faulty=True), sweep())),
  'lost HEAD': lambda rules: State(LOST, (save('A', rules, faulty=True), save('B', rules), sweep())),
  'deletion': lambda rules: State(OLD, (deletion(), save('A', rules), reader())),
  'disk': lambda rules: State(
    OLD._replace(disk=True), (save('A', rules, faulty=True), save('B', rules))
  ),
  'new folder on a disk': lambda rules: State(
    NEW._replace(disk=True, entry=False), (save('A', rules, faulty=True, made=True), save('B', rules))
  ),
  'deletion on a disk': lambda rules: State(
    OLD._replace(disk=True), (deletion(faulty=True), sweep(), reader('read_only'))
  ),
}

LARGE = {
  'deletion, sweep and save': lambda rules: State(
    OLD, (save('A', rules), deletion(), sweep(), reader('read_only'))
  ),
  'failing first saves': lambda rules: State(
    NEW, (save('A', rules, faulty=True), save('B', rules), sweep())
  ),
  'two failing writers on a disk': lambda rules: State(
    OLD._replace(disk=True), (save('A', rules, faulty=True), save('B', rules, faulty=True))
  ),
  'three writers': lambda rules: State(OLD, (save('A', rules), save('B', rules), save('C', rules))),
}

# Each rule, with a scenario in which something breaks without it.
NEEDED = {
  'conditional_take': ('overwrites', 'lost update: B replaces gen-A by gen-old'),
  'conditional_commit': ('overwrites', 'HEAD names gen-A without MANIFEST'),
  'conditional_release': ('lost answers', 'lost update: A replaces gen-A by gen-old'),
  'conditional_removal_of_head': ('first saves', 'lost update: sweep replaces gen-B by None'),
  'unique_generation_names': ('overwrites', 'HEAD names gen-1 without MANIFEST'),
  'manifest_before_head': ('overwrites', 'HEAD names gen-A without MANIFEST'),
  'garbage_listed_before_take': ('overwrites', 'HEAD names gen-B without a'),
  'garbage_removed_after_take': ('overwrites', 'HEAD names gen-A without MANIFEST'),
  'generation_of_head_kept': ('overwrites', 'HEAD names gen-old without MANIFEST'),
  'release_names_the_old': ('lost answers', 'HEAD names gen-A without MANIFEST'),
  'pins_respected': ('overwrites', "reader loses ('gen-old', 'a') under its pin"),
  'second_look': ('overwrites', "reader loses ('gen-old', 'a') under its pin"),
  'last_look': ('read-only reader', 'reader returns arrays with holes'),
  'manifest_removed_first': ('read-only reader', 'reader returns arrays with holes'),
  'unanswered_commit_looked_up': ('lost answers', 'HEAD names gen-A without MANIFEST'),
  'fence_before_own_removal': ('lost answers', 'HEAD names gen-A without MANIFEST'),
  'superseded_commit_left_alone': ('disk', 'HEAD names gen-A without MANIFEST'),
  'intent_before_take': ('first saves', 'litter after a sweep'),
  'intent_removed_last': ('first saves', 'litter after a sweep'),
  'unnamed_before_removal': ('deletion', 'HEAD names gen-old without MANIFEST'),
  'unname_durable': ('deletion on a disk', 'HEAD names gen-old without MANIFEST'),
  'synced_before_commit': ('disk', 'HEAD names gen-A without MANIFEST'),
  'errors_of_sync_raised': ('disk', 'HEAD names gen-A without MANIFEST'),
  'take_durable': ('disk', 'HEAD names gen-old without MANIFEST'),
  'commit_durable': ('new folder on a disk', 'a power cut removes a save that has returned'),
  'failed_commit_repeated': ('new folder on a disk', 'a power cut removes a save that has returned'),
  'folders_above_synced': (
    'new folder on a disk',
    'a power cut removes the folder of a save that has returned',
  ),
  'found_kept_until_commit': ('lost HEAD', 'gen-old, whose HEAD is lost, goes before another is saved'),
  'second_look_for_lost': ('first saves', 'litter after a sweep'),
}


def test_no_interleaving_breaks_a_promise():
  """Scenarios take every step. Of two saves both succeed, or one of them, if no write fails."""
  explored = {name: explore(scenario(Rules()), Rules()) for name, scenario in SCENARIOS.items()}
  assert all(one.states > 1000 for one in explored.values())
  assert set().union(*(one.places for one in explored.values())) == {*PROGRAM, 'finished'}
  saved = {named - {'gen-old'} for named in explored['overwrites'].ends}
  assert saved == {frozenset({'gen-A'}), frozenset({'gen-B'}), frozenset({'gen-A', 'gen-B'})}


@pytest.mark.exhaustive
@pytest.mark.parametrize('scenario', LARGE)
def test_no_interleaving_of_more_actors_breaks_a_promise(scenario):
  assert explore(LARGE[scenario](Rules()), Rules()).states > 10000


@pytest.mark.parametrize('rule', NEEDED)
def test_a_promise_breaks_without_the_rule(rule):
  scenario, promise = NEEDED[rule]
  rules = Rules()._replace(**{rule: False})
  with pytest.raises(Broken) as broken:
    explore(SCENARIOS[scenario](rules), rules)
  assert str(broken.value).startswith(promise)
  assert len(str(broken.value).splitlines()) > 3  # the steps that lead there


def test_every_rule_is_left_out_once():
  assert set(NEEDED) == set(Rules._fields)

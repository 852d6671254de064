"""No dependence on history: a call gives what it gives in a fresh process, whatever the process did before."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.history.fresh_processes import FreshProcesses
from tests.history.history import Process, alphabet, history, surprises

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(scope='module')
def fresh():
  processes = FreshProcesses()
  yield processes
  processes.close()


@pytest.fixture(scope='module', autouse=True)
def compiled_programs_are_kept(tmp_path_factory):
  """Histories that forget their functions compile them again and again; the fresh processes do not use this cache."""
  new = {
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('programs')),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  old = {name: getattr(jax.config, name) for name in new}
  for values in (new, old):
    compilation_cache.reset_cache()
    for name, value in values.items():
      jax.config.update(name, value)
    if values is new:
      yield
  compilation_cache.reset_cache()


def check(fresh, groups, seeds):
  calls = [call for group in groups for call in group]
  outcomes = fresh.outcomes(calls)
  assert sum(outcomes[call].is_error for call in calls) < len(calls) / 3
  process = Process(outcomes)
  for seed in seeds:
    assert list(process.differences(history(seed, groups))) == [], f'in the history of seed {seed}'


@pytest.mark.slow
@pytest.mark.parametrize('count', [15, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_random_histories(fresh, count):
  check(fresh, alphabet(seed=0, functions=6, others=4), range(count))


@pytest.mark.slow
@pytest.mark.parametrize('part', [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_new_call_in_several_threads_after_many_of_another(fresh, part):
  groups = [
    group
    for group in alphabet(seed=part, functions=4, others=0)
    if {call[0] for call in group} <= {'step', 'keyword', 'arrays'}
  ]
  assert groups
  process = Process(fresh.outcomes(call for group in groups for call in group))
  for group in groups:
    assert list(process.differences(surprises(group))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize('part', range(10))
def test_two_thousand_histories(fresh, part):
  check(fresh, alphabet(seed=part, functions=10, others=8), range(200 * part, 200 * part + 200))

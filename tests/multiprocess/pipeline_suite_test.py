"""The tests of pipelines that compare with `jax.jit`, over two processes: every process runs all of them, in order."""

import pytest

from tests.processes import ROOT, run_processes
from tests.versions import ON_NEW_JAX

SOURCE = """
import os
import pytest

class Outcomes:
  def __init__(self):
    self.passed, self.failed = 0, []

  def pytest_runtest_logreport(self, report):
    self.passed += report.when == 'call' and report.passed
    if report.failed:
      self.failed.append(f'{report.nodeid}: {report.longreprtext[-2000:]}')

os.chdir(@root@)
assert len(jax.devices()) == 8  # before conftest.py asks for as many in each process
outcomes = Outcomes()
options = ['-q', '-x', '-m', '', '-k', @names@, '-p', 'no:cacheprovider', '--capture=sys']  # messages of an abort stay
pytest.main([*options, 'tests/pipeline/@file@'], plugins=[outcomes])
report([outcomes.passed, outcomes.failed])
"""


@pytest.mark.parametrize(
  ('file', 'names'),
  [
    pytest.param('reductions_test.py', 'not (place_with_decides or maximum)', marks=ON_NEW_JAX),
    pytest.param(
      'nnx_models_test.py', 'not zero_bubble', marks=ON_NEW_JAX
    ),  # its biases stay on their ranks
    *(
      pytest.param(file, names, marks=pytest.mark.exhaustive)
      for file, names in (
        ('reductions_test.py', 'maximum'),
        ('nnx_models_test.py', ''),
        ('models_test.py', ''),
        ('loops_test.py', 'not (examples_stay or debug)'),  # which see the programs of all processes
        ('optimizers_test.py', ''),
        ('arguments_test.py', 'not (nothing_else or other_devices or two_pipelines or train_then)'),
      )
    ),
  ],
)
def test_equals_jit_over_two_processes(file, names):
  source = (
    SOURCE.replace('@root@', repr(str(ROOT))).replace('@names@', repr(names)).replace('@file@', file)
  )
  first, second = (result.value for result in run_processes(source, processes=2, devices=4, timeout=500))
  assert first[1] == second[1] == []
  assert first[0] == second[0] > 2

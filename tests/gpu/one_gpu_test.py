"""The programs of `programs.py` on a GPU of this machine, one after the other; skipped where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flax_spmd._src.compare.compilation import has_wheel

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
  not shutil.which('nvidia-smi') or not has_wheel('cuda'), reason='no GPU, or no JAX for it'
)


def run(name, folder, **variables):
  """Runs a program on the GPU, or on what `variables` choose."""
  hidden = ('JAX_PLATFORMS', 'XLA_FLAGS')
  plain = {key: value for key, value in os.environ.items() if key not in hidden}
  paths = os.pathsep.join([str(ROOT), *filter(None, [plain.get('PYTHONPATH')])])
  environment = plain | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'PYTHONPATH': paths} | variables
  command = [sys.executable, '-m', 'tests.gpu.programs', name, str(folder)]
  ended = subprocess.run(
    command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=600
  )
  assert not ended.returncode, ended.stderr[-3000:]


@pytest.mark.parametrize(
  'name', ['readme', 'donated', 'host_memory', 'cudnn', 'compilers', 'safetensors']
)
def test_a_program_runs_on_a_gpu(name, tmp_path):
  run(name, tmp_path)


def test_what_a_gpu_saves_is_restored_on_a_cpu_and_back(tmp_path):
  for one, other in (('cuda', 'cpu'), ('cpu', 'cuda')):
    folder = tmp_path / one
    folder.mkdir()
    run('save_all', folder, JAX_PLATFORMS=one)
    run('restore_all', folder, JAX_PLATFORMS=other)

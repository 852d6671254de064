r"""Runs every guide as a script, as it would run for a reader; a failed assert in a cell fails here.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
      pytest -p no:cacheprovider -s guides/run_guides.py

A guide is a MyST markdown file with `{code-cell}` blocks. It runs in a process of its own, because
devices are set up once per process.
"""

import subprocess
import sys
import time
from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).parent
GUIDES = [path for path in sorted(FOLDER.glob('*.md')) if '```{code-cell}' in path.read_text('utf-8')]
TIMEOUT = 300  # seconds
TAIL = 40  # lines of a failed guide's stderr


def test_there_are_guides():
  """A run without a guide would pass and mean nothing."""
  assert GUIDES, f'{FOLDER} has no *.md file with code cells'


@pytest.mark.parametrize('guide', GUIDES, ids=lambda guide: guide.stem)
def test_guide_runs(guide: Path, tmp_path: Path):
  """The guide, as a script, ends without an error."""
  script = tmp_path / f'{guide.stem}.py'
  script.write_text(jupytext.writes(jupytext.read(guide), fmt='py:percent'), 'utf-8')
  start = time.perf_counter()
  done = subprocess.run(
    [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
  )
  print(f'\n{guide.name}: {time.perf_counter() - start:.1f} s')
  if done.returncode:
    tail = '\n'.join(done.stderr.splitlines()[-TAIL:])
    pytest.fail(f'{guide.name} ended with code {done.returncode}:\n{tail}', pytrace=False)

"""The README's example runs as it stands."""

import re
from pathlib import Path

from jax.sharding import PartitionSpec

ROOT = Path(__file__).parent.parent


def test_the_example_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
  assert len(blocks) == 1
  names = {'__name__': 'readme'}
  exec(compile(blocks[0], 'README.md', 'exec'), names)
  assert 'hidden → model (1)' in capsys.readouterr().out
  assert names['state'].params['w1'].value.sharding.spec == PartitionSpec('fsdp', None)
  assert (tmp_path / 'checkpoints' / '1').is_dir()


def test_the_two_commands_come_first():
  text = (ROOT / 'README.md').read_text()
  commands = re.findall(r'^pip install nox && nox -s \w+', text, re.MULTILINE)
  assert commands == ['pip install nox && nox -s demo', 'pip install nox && nox -s tests']
  assert text.index(commands[0]) < text.index('```python')

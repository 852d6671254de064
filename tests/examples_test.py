"""The examples: the trainer and its launch scripts."""

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from jax._src.clusters import ClusterEnv, K8sCluster

from flax_spmd import checkpoint

FOLDER = Path(__file__).parent.parent / 'examples' / 'llama'
LAYOUTS = FOLDER / 'layouts'
SMALL = ['--batch=8', '--length=16', '--steps=1000', '--warmup=5', '--log-every=1', '--dtype=float32']
LAST = 12  # the step after which a run gets SIGTERM
TIMEOUT = 900  # seconds, for a job that is stuck
LOSS_LINE = re.compile(r'step (\d+)  loss (\d+\.\d+)')

# Of losses printed with five digits, of 10 steps in float32: sums are taken in another order.
TOLERANCE = 1e-4


@pytest.fixture(scope='module')
def trainer():
  """The trainer, as a module."""
  sys.path.insert(0, str(FOLDER))
  yield importlib.import_module('train')
  sys.path.remove(str(FOLDER))
  for name in ('train', 'model'):
    del sys.modules[name]


def train(trainer, monkeypatch, run, layout, until):
  """Runs the trainer until SIGTERM, which comes during a step; returns its losses, by step."""
  losses = {}

  def record(*text, flush):
    match = LOSS_LINE.match(str(text[0]))
    if match:
      losses[int(match[1])] = float(match[2])
    if until in losses:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(trainer, 'print', record, raising=False)
  with pytest.raises(SystemExit) as ended:
    trainer.main([f'--run={run}', f'--layout={LAYOUTS / layout}.toml', *SMALL])
  assert ended.value.code == 143
  return losses


def close(some, others, steps):
  """Whether two runs have the same losses."""
  np.testing.assert_allclose(
    [some[step] for step in steps], [others[step] for step in steps], atol=TOLERANCE
  )
  return True


@pytest.fixture(scope='module')
def undisturbed(trainer, tmp_path_factory):
  """The losses of a run of one process, on eight devices."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    return train(trainer, monkeypatch, tmp_path_factory.mktemp('run'), 'fsdp', LAST)


@pytest.fixture(scope='module')
def stopped(trainer, tmp_path_factory):
  """The folder of a run that was stopped after three steps, and its losses."""
  run = tmp_path_factory.mktemp('run')
  with pytest.MonkeyPatch.context() as monkeypatch:
    return run, train(trainer, monkeypatch, run, 'fsdp', 3)


@pytest.mark.slow
def test_it_learns_and_resumes_after_sigterm(trainer, undisturbed, stopped, monkeypatch, tmp_path):
  assert undisturbed[LAST] < undisturbed[1] - 0.3
  folder, before = stopped
  assert checkpoint.verify(folder / '3') == [] and list(before) == [1, 2, 3]
  run = shutil.copytree(folder, tmp_path / 'run')
  after = train(trainer, monkeypatch, run, 'fsdp', LAST)
  assert before | after == undisturbed and min(after) == 4


@pytest.mark.slow
def test_it_resumes_under_another_layout(trainer, undisturbed, stopped, monkeypatch, tmp_path):
  run = shutil.copytree(stopped[0], tmp_path / 'run')
  after = train(trainer, monkeypatch, run, 'fsdp_tensor', LAST)
  assert list(after) == list(range(4, LAST + 1)) and close(after, undisturbed, after)


def test_processes_read_the_rows_of_their_devices(trainer):
  """Any subset of rows, from any step on, belongs to the same batches."""
  whole = list(trainer.batches(trainer.__file__, range(3), (8, 16), np.arange(8)))
  assert whole[0].shape == (8, 16) and whole[0].dtype == np.int32
  assert not np.array_equal(whole[0], whole[1])
  some = list(trainer.batches(trainer.__file__, range(1, 3), (8, 16), np.array([2, 5])))
  np.testing.assert_array_equal(some, [batch[[2, 5]] for batch in whole[1:]])
  text = Path(trainer.__file__).read_bytes()
  assert all(bytes(row.tolist()) in text for row in whole[0])


@pytest.mark.slow
@pytest.mark.old_jax
def test_layouts_are_compared_for_absent_hardware(trainer, capsys):
  trainer.main(['--batch=8', '--length=16', '--compare=cpu:4'])
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert [row[:2] for row in rows if row[:1] in (['fsdp'], ['fsdp_tensor'])] == [
    ['fsdp', 'yes'],
    ['fsdp_tensor', 'yes'],
  ]  # without 'single', which is not a layout for four devices


# -- several processes


@pytest.mark.slow
def test_several_processes_train_as_one_does(undisturbed, tmp_path):
  """Two processes of the local launcher begin the run, and two SLURM tasks resume it."""
  run = [f'--run={tmp_path / "run"}', f'--layout={LAYOUTS / "fsdp_tensor.toml"}', *SMALL]
  local = [sys.executable, FOLDER / 'launch_local.py', '--processes=2', '--devices=4']
  begun = until_sigterm([*local, *run], 3)
  slurm = Slurm(tmp_path / 'bin', tasks=2)
  resumed = until_sigterm(['bash', FOLDER / 'launch_slurm.sbatch', *run], max(begun) + 3, slurm)
  assert min(begun) == 1 and min(resumed) == max(begun) + 1
  assert slurm.was_requeued()
  both = begun | resumed
  assert min(resumed) < LAST and close(both, undisturbed, both.keys() & undisturbed)


class Slurm:
  """An emulation of SLURM for a job script: its variables, `srun` and `scontrol`.

  This `srun` starts the tasks with the variables that SLURM sets, forwards signals to them, and exits with
  the largest of their exit statuses.
  """

  SRUN = """#!{python}
import os, signal, subprocess, sys
own = {{'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '{tasks}'}}
each = [{{'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)}} for i in range({tasks})]
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | own | one) for one in each]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
with open({pid!r}, 'w') as file:
  file.write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""

  def __init__(self, folder, tasks):
    folder.mkdir()
    self.pid, self.queue = folder / 'pid', folder / 'queue'
    self._write(folder / 'srun', self.SRUN.format(python=sys.executable, tasks=tasks, pid=str(self.pid)))
    self._write(folder / 'scontrol', f'#!/bin/sh\necho "$@" > {self.queue}\n')
    self._write(folder / 'python', f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    self.environment = {
      'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}',
      'SLURM_JOB_ID': str(job_with_a_free_port()),
    }

  def _write(self, path, text):
    path.write_text(text)
    path.chmod(0o755)

  def was_requeued(self):
    arguments = self.queue.read_text().split() if self.queue.exists() else []
    return arguments == ['requeue', self.environment['SLURM_JOB_ID']]


def job_with_a_free_port():
  """A job number from which JAX computes a port that is free."""
  for port in range(61440 + os.getpid() % 4000, 65536):
    with socket.socket() as free:
      if free.connect_ex(('127.0.0.1', port)):
        return port - 61440 + 4096
  raise AssertionError('no free port')


def until_sigterm(command, after, slurm=None):
  """Runs a job until SIGTERM, which comes after a step; returns the losses, by step."""
  small = {'JAX_NUM_CPU_DEVICES': '4', 'XLA_FLAGS': '--xla_backend_optimization_level=0'}
  environment = os.environ | small | (slurm.environment if slurm else {})
  losses, lines = {}, []
  with subprocess.Popen(
    command,
    env=environment,
    cwd=FOLDER.parent.parent,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  ) as job:
    limit = threading.Timer(TIMEOUT, os.killpg, (job.pid, signal.SIGKILL))
    limit.start()
    for line in job.stdout:
      lines.append(line)
      if match := LOSS_LINE.search(line):
        losses[int(match[1])] = float(match[2])
        if int(match[1]) == after:
          os.kill(int(slurm.pid.read_text()) if slurm else job.pid, signal.SIGTERM)
    limit.cancel()
  assert job.returncode == 143, ''.join(lines)
  return losses


def test_a_failed_job_is_not_requeued(tmp_path):
  slurm = Slurm(tmp_path / 'bin', tasks=1)
  command = ['bash', FOLDER / 'launch_slurm.sbatch', '--model=none']
  job = subprocess.run(
    command, env=os.environ | slurm.environment, cwd=FOLDER.parent.parent, capture_output=True
  )
  assert job.returncode == 2 and b"invalid choice: 'none'" in job.stderr
  assert not slurm.was_requeued()


def test_jax_knows_its_place_in_a_slurm_job(monkeypatch):
  """JAX reads the variables that sbatch and srun set for the options of the script."""
  options = re.findall(
    r'^#SBATCH --(\S+)=(\S+)$', (FOLDER / 'launch_slurm.sbatch').read_text(), re.MULTILINE
  )
  requested = dict(options)
  each = int(requested['ntasks-per-node'])
  srun = {
    'SLURM_JOB_ID': '4242',
    'SLURM_STEP_NODELIST': 'gpu[007-008]',
    'SLURM_NTASKS': str(int(requested['nodes']) * each),
    'SLURM_PROCID': str(each + 3),
    'SLURM_LOCALID': '3',
  }
  for name, value in srun.items():
    monkeypatch.setenv(name, value)
  cluster = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 300)
  assert cluster == (f'gpu007:{4242 % 4096 + 61440}', 16, 11, [3])
  assert (
    requested['gpus-per-node'] == requested['ntasks-per-node']
  )  # [3] is the GPU of the task's own number


class Api:
  """An emulation of the Kubernetes API for a manifest; rejects requests that its role does not allow."""

  def __init__(self, manifest):
    self.manifest = {one['kind']: one for one in manifest}
    name = self.manifest['JobSet']['metadata']['name']
    [replicated] = self.manifest['JobSet']['spec']['replicatedJobs']
    assert replicated['replicas'] == 1  # JAX counts the pods of one job
    spec = replicated['template']['spec']
    labels = {'jobset.sigs.k8s.io/jobset-name': name}
    job = f'{name}-{replicated["name"]}-0'  # as JobSet calls it
    self.job = SimpleNamespace(
      metadata=SimpleNamespace(name=job, labels=labels),
      spec=SimpleNamespace(parallelism=spec['parallelism']),
    )
    owner = SimpleNamespace(kind='Job', controller=True)
    self.pod = SimpleNamespace(
      metadata=SimpleNamespace(labels=labels | {'job-name': job}, owner_references=[owner])
    )
    self.account = spec['template']['spec']['serviceAccountName']

  def may(self, verb, group, resource):
    binding, role = self.manifest['RoleBinding'], self.manifest['Role']
    assert binding['roleRef']['name'] == role['metadata']['name']
    assert self.account in [subject['name'] for subject in binding['subjects']]
    assert any(
      verb in rule['verbs'] and group in rule['apiGroups'] and resource in rule['resources']
      for rule in role['rules']
    )

  def list_namespaced_pod(self, namespace, field_selector):
    self.may('list', '', 'pods')
    return SimpleNamespace(items=[self.pod])

  def read_namespaced_job(self, name, namespace):
    self.may('get', 'batch', 'jobs')
    assert name == self.job.metadata.name
    return self.job


@pytest.fixture
def manifest():
  return list(yaml.safe_load_all((FOLDER / 'launch_kubernetes.yaml').read_text()))


def test_jax_knows_its_place_in_a_kubernetes_job(manifest, monkeypatch):
  """JAX's own cluster detection, with an API that reports the objects that JobSet creates from the manifest."""
  for name in ('_pod', '_job', '_controller'):
    vars(K8sCluster)[name].__func__.cache_clear()
  api = Api(manifest)
  monkeypatch.setattr(K8sCluster, '_namespace', classmethod(lambda cls: 'default'))
  monkeypatch.setattr(K8sCluster, '_core_api', api, raising=False)
  monkeypatch.setattr(K8sCluster, '_batch_api', api, raising=False)
  monkeypatch.setattr(K8sCluster, '_ApiException', RuntimeError, raising=False)
  monkeypatch.setenv('HOSTNAME', 'localhost')
  monkeypatch.setenv('JOB_COMPLETION_INDEX', '1')
  assert K8sCluster.get_coordinator_address(None, None) == 'llama-host-0-0.llama:55527'
  assert (K8sCluster.get_process_count(), K8sCluster.get_process_id()) == (2, 1)


def test_a_preempted_kubernetes_job_is_restarted(manifest, trainer):
  jobset = manifest[-1]['spec']
  job = jobset['replicatedJobs'][0]['template']['spec']
  [rule] = job['podFailurePolicy']['rules']
  assert rule == {'action': 'FailJob', 'onExitCodes': {'operator': 'In', 'values': [trainer.PREEMPTED]}}
  [restart] = jobset['failurePolicy']['rules']
  assert restart['action'] == 'RestartJobSetAndIgnoreMaxRestarts'
  assert restart['onJobFailureReasons'] == ['PodFailurePolicy']
  assert job['template']['spec']['restartPolicy'] == 'Never'  # what a podFailurePolicy asks for
  assert job['completions'] == job['parallelism']


def test_the_manifest_runs_the_trainer(manifest, trainer):
  [container] = manifest[-1]['spec']['replicatedJobs'][0]['template']['spec']['template']['spec'][
    'containers'
  ]
  python, file, *flags = container['command']
  assert python == 'python' and (FOLDER.parent.parent / file).samefile(trainer.__file__)
  assert trainer.parse(flags).distributed

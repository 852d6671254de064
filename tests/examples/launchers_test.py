"""The launchers of clusters: JAX finds its place in their jobs, and a job that has lost a process goes on with fewer."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from jax._src.clusters import ClusterEnv, K8sCluster

from flax_spmd import checkpoint
from tests.examples.jobs import EXAMPLES, ROOT, Kubernetes, Slurm, run_until, until_sigterm


def test_a_failed_job_is_not_requeued(tmp_path):
  slurm = Slurm(tmp_path / 'bin', tasks=1)
  command = ['bash', EXAMPLES / 'launch_slurm.sbatch', EXAMPLES / 'llama' / 'train.py', '--model=none']
  job = subprocess.run(command, env=os.environ | slurm.environment, cwd=ROOT, capture_output=True)
  assert job.returncode == 2 and b"invalid choice: 'none'" in job.stderr
  assert not slurm.was_requeued()


def test_jax_knows_its_place_in_a_slurm_job(monkeypatch):
  """JAX reads the variables that sbatch and srun set for the options of the script."""
  options = re.findall(
    r'^#SBATCH --(\S+)=(\S+)$', (EXAMPLES / 'launch_slurm.sbatch').read_text(), re.MULTILINE
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
  return list(yaml.safe_load_all((EXAMPLES / 'launch_kubernetes.yaml').read_text()))


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
  assert python == 'python' and (ROOT / file).samefile(trainer.__file__)
  assert trainer.parse(flags).distributed


# -- a process that is killed

BYTES = [
  EXAMPLES / 'bytes' / 'train.py',
  '--steps=1000',
  '--save-every=2',
  '--log-every=1',
  '--sample-every=0',
]
TOLERANCE = 1e-3  # of losses with five digits, of 9 steps in float32: sums are taken in another order


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The losses of one process with three devices that nobody disturbs."""
  run = [sys.executable, *BYTES, f'--run={tmp_path_factory.mktemp("run")}']
  return until_sigterm(run, 9)


class UnderSlurm:
  """The job script, with some tasks of one device each."""

  def __init__(self, folder, processes, run):
    self._slurm = Slurm(folder, processes, devices=1)
    script = ['bash', EXAMPLES / 'launch_slurm.sbatch', *BYTES, f'--run={run}']
    self.commands = [(script, self._slurm.environment)]

  def kill_one(self, jobs):
    """Kills a task that is not the first."""
    os.kill(self._slurm.pids()[-1], signal.SIGKILL)

  def stop(self, jobs):
    """What SLURM does before the time is up."""
    os.kill(self._slurm.pids()[0], signal.SIGTERM)


class UnderKubernetes:
  """The manifest's command in some pods of one device each."""

  def __init__(self, folder, processes, run):
    [*_, manifest] = yaml.safe_load_all((EXAMPLES / 'launch_kubernetes.yaml').read_text())
    template = manifest['spec']['replicatedJobs'][0]['template']['spec']['template']
    _, _, distributed, *_ = template['spec']['containers'][0]['command']
    command = [sys.executable, *BYTES, distributed, f'--run={run}']
    pods = Kubernetes(folder, processes, devices=1)
    self.commands = [(command, each) for each in pods.environments]

  def kill_one(self, jobs):
    """Kills a pod that is not the first."""
    jobs[-1].kill()

  def stop(self, jobs):
    """What Kubernetes does before it evicts pods."""
    for job in jobs:
      job.terminate()


@pytest.mark.exhaustive
@pytest.mark.parametrize('cluster', [UnderSlurm, UnderKubernetes])
def test_a_job_that_lost_a_process_goes_on_with_three(cluster, undisturbed, tmp_path):
  run = tmp_path / 'run'
  four = cluster(tmp_path / 'four', 4, run)
  lost = run_until(four.commands, 5, four.kill_one)
  assert lost.code not in (0, 143) and min(lost.losses) == 1, lost.output
  saved = checkpoint.ls(run)
  three = cluster(tmp_path / 'three', 3, run)
  resumed = run_until(three.commands, 9, three.stop)
  assert resumed.code == 143, resumed.output
  newest = max(int(step.path.name) for step in saved)
  assert f"{newest} of 1000 steps are done, over {{'data': 3}}" in resumed.output
  assert newest in (2, 4) and min(resumed.losses) == newest + 1
  both = lost.losses | resumed.losses
  np.testing.assert_allclose(
    [both[step] for step in sorted(undisturbed)], list(undisturbed.values()), atol=TOLERANCE
  )

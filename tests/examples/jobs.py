"""Jobs of several processes on this machine: a trainer under emulations of SLURM and of Kubernetes.

The variables that these systems set are real, and JAX reads them. `srun`, `scontrol` and Kubernetes' client are scripts of this module.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from tests.processes import QUICKLY_COMPILED

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / 'examples'
TIMEOUT = 900  # seconds, for a job that is stuck
LOSS_LINE = re.compile(r'step (\d+)  loss (\d+\.\d+)')


class Slurm:
  """An emulation of SLURM for a job script: its variables, `srun` and `scontrol`.

  This `srun` starts the tasks with the variables that SLURM sets, forwards signals to them, and exits with
  the largest of their exit statuses.

  Args:
    folder: folder for its commands.
    tasks: number of tasks.
    devices: number of devices of each task.
  """

  SRUN = """#!{python}
import os, signal, subprocess, sys
own = {{'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '{tasks}'}}
each = [{{'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)}} for i in range({tasks})]
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | own | one) for one in each]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
with open({pids!r}, 'w') as file:
  file.write(' '.join(str(pid) for pid in [os.getpid(), *(task.pid for task in tasks)]))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

  def __init__(self, folder, tasks, devices=4):
    folder.mkdir()
    self._pids, self._queue = folder / 'pids', folder / 'queue'
    self._write(
      folder / 'srun', self.SRUN.format(python=sys.executable, tasks=tasks, pids=str(self._pids))
    )
    self._write(folder / 'scontrol', f'#!/bin/sh\necho "$@" > {self._queue}\n')
    self._write(folder / 'python', f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    self.environment = {
      'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}',
      'SLURM_JOB_ID': str(job_with_a_free_port()),
      'JAX_NUM_CPU_DEVICES': str(devices),
    }

  def _write(self, path, text):
    path.write_text(text)
    path.chmod(0o755)

  def pids(self):
    """The numbers of the processes: of `srun`, and of each task."""
    return list(map(int, self._pids.read_text().split()))

  def was_requeued(self):
    """Whether the job has asked to be queued again."""
    arguments = self._queue.read_text().split() if self._queue.exists() else []
    return arguments == ['requeue', self.environment['SLURM_JOB_ID']]


class Kubernetes:
  """An emulation of Kubernetes for the pods of a job: its variables, and the client with which JAX asks about the job.

  Args:
    folder: folder for the client.
    pods: number of pods.
    devices: number of devices of each pod.
  """

  CLIENT = """
from types import SimpleNamespace as Object
from jax._src.clusters import K8sCluster

K8sCluster._namespace = classmethod(lambda cls: 'default')  # a file in every pod
pod = Object(metadata=Object(labels={{'job-name': 'job'}}))
job = Object(spec=Object(parallelism={pods}), metadata=Object(name='job', labels={{}}))
config = Object(load_incluster_config=lambda: None)
client = Object(
  CoreV1Api=lambda: Object(list_namespaced_pod=lambda namespace, field_selector: Object(items=[pod])),
  BatchV1Api=lambda: Object(read_namespaced_job=lambda name, namespace: job),
  exceptions=Object(ApiException=RuntimeError),
)
"""

  def __init__(self, folder, pods, devices=4):
    (folder / 'kubernetes').mkdir(parents=True)
    (folder / 'kubernetes' / '__init__.py').write_text(self.CLIENT.format(pods=pods))
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    shared = {
      'PYTHONPATH': f'{folder}{os.pathsep}{ROOT}',
      'JAX_NUM_CPU_DEVICES': str(devices),
      'KUBERNETES_SERVICE_HOST': '10.0.0.1',
      'HOSTNAME': 'localhost',
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',  # in place of the DNS
    }
    self.environments = [shared | {'JOB_COMPLETION_INDEX': str(pod)} for pod in range(pods)]


def job_with_a_free_port():
  """A job number from which JAX computes a port that is free."""
  for port in range(61440 + os.getpid() % 4000, 65536):
    with socket.socket() as free:
      if free.connect_ex(('127.0.0.1', port)):
        return port - 61440 + 4096
  raise AssertionError('no free port')


class Ended(NamedTuple):
  """A job that has ended: its exit status, its losses by step, and its output."""

  code: int
  losses: dict
  output: str


def run_until(commands, after, act):
  """Runs the processes of a job, and acts when the loss of a step is printed.

  Args:
    commands: pairs of a command and its further environment. The first process prints the losses.
    after: number of the step.
    act: function of the processes.

  Returns:
    How the job ended; the status is the largest.
  """
  cpu = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': QUICKLY_COMPILED}
  losses, lines = {}, []
  with contextlib.ExitStack() as stack:
    jobs = [
      stack.enter_context(
        subprocess.Popen(
          command,
          env=os.environ | cpu | environment,
          cwd=ROOT,
          stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
          stderr=subprocess.STDOUT,
          text=True,
          start_new_session=True,
        )
      )
      for number, (command, environment) in enumerate(commands)
    ]
    limit = threading.Timer(TIMEOUT, lambda: [os.killpg(job.pid, signal.SIGKILL) for job in jobs])
    limit.start()
    for line in jobs[0].stdout:
      lines.append(line)
      if match := LOSS_LINE.search(line):
        losses[int(match[1])] = float(match[2])
        if int(match[1]) == after:
          act(jobs)
    codes = [job.wait() for job in jobs]
    limit.cancel()
  return Ended(max(code if code >= 0 else 128 - code for code in codes), losses, ''.join(lines))


def until_sigterm(command, after, slurm=None):
  """Runs a job until SIGTERM, which comes after a step; returns the losses, by step."""
  environment = slurm.environment if slurm else {'JAX_NUM_CPU_DEVICES': '4'}

  def stop(jobs):
    os.kill(slurm.pids()[0] if slurm else jobs[0].pid, signal.SIGTERM)

  ended = run_until([(command, environment)], after, stop)
  assert ended.code == 143, ended.output
  return ended.losses

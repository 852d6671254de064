"""A cluster to try things on: several processes on one machine, each with some emulated devices.

    python launch_local.py --processes 2 --devices 4 llama/train.py --layout llama/layouts/fsdp_tensor.toml

Flags after the script are passed on to it. SIGTERM is passed on to every process.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

GRACE = 30  # seconds for the others once a process has ended badly: they may wait for it in vain


def command(script, process, processes, port):
  """The command of one process, with the addresses that JAX finds itself on a real cluster."""
  where = [f'--coordinator=127.0.0.1:{port}', f'--processes={processes}', f'--process={process}']
  return [sys.executable, *script, '--distributed', *where]


def free_port():
  """A port for the coordinator."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def wait(children):
  """The first exit status that is not 0, once all have ended."""
  deadline = None
  while any(child.poll() is None for child in children):
    if deadline is None and any(child.returncode for child in children):
      deadline = time.monotonic() + GRACE
    if deadline is not None and time.monotonic() > deadline:
      for child in children:
        child.kill()
    time.sleep(0.1)
  return next((child.returncode for child in children if child.returncode), 0)


def main():
  """Starts the processes, and ends as they do."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--processes', type=int, default=2)
  parser.add_argument('--devices', type=int, default=4, help='of each process')
  parser.add_argument('script', nargs=argparse.REMAINDER, help='the trainer, and its flags')
  args = parser.parse_args()
  devices = {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(args.devices)}
  port = free_port()
  children = [
    subprocess.Popen(command(args.script, process, args.processes, port), env=os.environ | devices)
    for process in range(args.processes)
  ]
  signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
  sys.exit(wait(children))


if __name__ == '__main__':
  main()

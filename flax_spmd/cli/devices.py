"""Devices of a command: the available accelerators, or emulated ones."""

from __future__ import annotations

import os

import jax


def emulate(count: int) -> None:
  """Emulates this many CPU devices, for machines without accelerators."""
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', count)

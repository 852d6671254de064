"""Devices for a command: the accelerators that are here, or emulated ones."""

from __future__ import annotations

import os

import jax


def emulate(count: int) -> None:
  """Where there is no accelerator, makes JAX show this many CPU devices."""
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', count)

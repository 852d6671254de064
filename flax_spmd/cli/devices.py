"""Devices of a command: CPUs, emulated where several are needed, so that accelerators are left to a training run."""

from __future__ import annotations

import os

import jax


def on_cpus() -> None:
  """Uses CPUs only, unless the variable `JAX_PLATFORMS` is set, which JAX has read by the time that a command starts."""
  if not getattr(jax.config, 'jax_platforms', None):  # an attribute without a type before JAX 0.12
    jax.config.update('jax_platforms', 'cpu')


def emulate(count: int) -> None:
  """Emulates this many CPU devices, for machines without accelerators."""
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', count)

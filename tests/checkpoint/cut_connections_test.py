"""Connections that break in the middle of a body: what a client asks again for, and what it must not take for the whole."""

import socket
import threading
import urllib.parse

import jax
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint
from tests.cutting_proxy import CuttingProxy, places_of

LAYOUT = spmd.Layout({'data': 8}, (('a', 'data'),))


@pytest.fixture
def proxy(server, monkeypatch):
  """A proxy before the server of a bucket, which this process uses."""
  with CuttingProxy(server.url) as proxy:
    for name in ('AWS_ENDPOINT_URL', 'STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL'):
      monkeypatch.setenv(name, proxy.url)
    yield proxy


def state(number):
  w = np.random.default_rng(number).standard_normal((64, 64)).astype(np.float32)
  return LAYOUT.shard({'w': spmd.LogicallyPartitioned(w, ('a', None))})


def assert_state(restored, number):
  assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state(number))))


def test_broken_answers_and_requests(server, proxy):
  """In the body of a request of a save, and of an answer of a restore: the client repeats what was broken."""
  path = f'{server.bucket}/run/1'
  checkpoint.save(path, state(1), LAYOUT)
  proxy.cut('requests', places_of(5000, 1, 1))
  checkpoint.save(path, state(2), LAYOUT, overwrite=True)
  assert proxy.cuts == 1
  proxy.cut('answers', places_of(9000, 1, 1))
  assert_state(checkpoint.restore(path), 2)
  assert proxy.cuts == 1
  proxy.calm()
  assert checkpoint.verify(path) == []


def test_a_request_cut_in_its_headers_is_not_served(server):
  """By the servers of these tests: an object would be empty, or a condition be lost."""
  address = urllib.parse.urlsplit(server.url)
  with socket.create_connection((address.hostname, address.port)) as connection:
    connection.sendall(b'DELETE /bucket/run/1/HEAD HTTP/1.1\r\nHost: x\r\nIf-Match: "0')
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100) == b''
  assert server.requests == []


def test_a_proxy_that_has_ended_accepts_nothing():
  """Its thread would take connections of a later server, whose socket has got the same number."""
  before = set(threading.enumerate())
  with CuttingProxy('http://127.0.0.1:9'):
    assert set(threading.enumerate()) - before
  assert set(threading.enumerate()) <= before

"""Requests: how many a bucket gets for a save and for a restore, and that none of them asks for the same object twice."""

from collections import Counter

import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint

LAYOUT = spmd.Layout({'data': 8}, (('a', 'data'),))


def state(leaves):
  return LAYOUT.shard(
    {f'w{i}': spmd.LogicallyPartitioned(jnp.full((8, 4), float(i)), ('a', None)) for i in range(leaves)}
  )


@pytest.fixture
def used(server):
  """The URL of a bucket that this process has saved to."""
  checkpoint.save(f'{server.bucket}/first', state(1), LAYOUT)
  return server.bucket


def of(server, call):
  """The requests of a call."""
  server.requests.clear()
  call()
  return list(server.requests)


def reads(requests):
  """How often each object, or part of it, was read or listed."""
  return Counter(
    (request.path, request.query.get('prefix'), request.query.get('alt'), request.headers.get('range'))
    for request in requests
    if request.method == 'GET'
  )


def test_a_save(server, used):
  """Most of them are Orbax's, which looks for its files by name; none is for each array."""
  few = of(server, lambda: checkpoint.save(f'{used}/few', state(2), LAYOUT))
  many = of(server, lambda: checkpoint.save(f'{used}/many', state(30), LAYOUT))
  assert len(few) <= 85 and len(many) <= 85


def test_a_restore(server, used):
  for name, leaves in (('few', 2), ('many', 30)):
    checkpoint.save(f'{used}/{name}', state(leaves), LAYOUT)
  for name in ('few', 'many'):
    requests = of(server, lambda name=name: checkpoint.restore(f'{used}/{name}'))
    pages = [request for request in requests if 'pageToken' in request.query]  # of seven names, in tests
    assert len(requests) - len(pages) <= 16
    again = {path for (path, prefix, *_), count in reads(requests).items() if count > 1 and not prefix}
    assert {path.rpartition('/')[2] for path in again} == {'HEAD', 'MANIFEST'}  # before and after


def test_what_is_shown_is_read_once(server, used):
  requests = of(server, lambda: checkpoint.show(f'{used}/first'))
  assert [request.path.rpartition('/')[2] for request in requests] == ['HEAD', 'MANIFEST']

"""The texts of errors, in one place for all tests."""

import pytest


def text_of(kind, fn, *args, **kwargs):
  """The text of the error of this kind that a call raises."""
  with pytest.raises(kind) as caught:
    fn(*args, **kwargs)
  return str(caught.value)

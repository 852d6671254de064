"""Versions of installed packages."""

import importlib.metadata


def installed_version(package: str) -> str:
  """The version of a package; '' if it is not installed, as when this one runs from its source.

  Example:
    >>> installed_version('jax') != '', installed_version('no-such-package')
    (True, '')
  """
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ''

"""Of tests that there are too many of, each JAX runs its share; `nox -s exhaustive` runs the others."""

import jax
import pytest

_NEW = jax.__version_info__ >= (0, 11)

ON_NEW_JAX = () if _NEW else (pytest.mark.exhaustive,)
ON_OLD_JAX = (pytest.mark.exhaustive,) if _NEW else ()

"""`python -m flax_spmd.cli`: the command line, if the script `flax-spmd` is not on the PATH."""

import sys

from flax_spmd.cli import main

if __name__ == '__main__':
  sys.exit(main())

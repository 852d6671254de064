"""`python -m flax_spmd.cli`: the command line where its script is not on the PATH."""

import sys

from flax_spmd.cli import main

if __name__ == '__main__':
  sys.exit(main())

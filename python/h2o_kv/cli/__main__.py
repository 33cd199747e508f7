"""`python -m h2o_kv.cli` is `h2o-kv`."""

import sys

from h2o_kv_cli import main

if __name__ == "__main__":
    sys.exit(main())

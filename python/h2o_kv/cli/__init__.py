"""The commands of `h2o-kv` that need the library; the program itself is `h2o_kv_cli`.

A command's module has `DESCRIPTION`, `add_arguments(parser)` and `main(args)`, which returns the
exit status: 0, or 2 for a mistake of the user, told in one line.
"""

from h2o_kv_cli import Parser, UserError, main, write_json

__all__ = ["Parser", "UserError", "main", "write_json"]

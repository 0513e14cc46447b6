"""Metadata and dependencies of relattn; tool configuration is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

REQUIREMENTS = [
    "absl-py>=2.5",
    "array_record>=0.8",
    "chex>=0.1.92",
    "flax>=0.12",
    "grain>=0.2.16",
    "jax>=0.10",
    "jaxtyping>=0.3",
    "matplotlib>=3.11",
    "ml-collections>=1.1",
    "numpy>=2.4",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "pillow>=13.0",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.10",
    "tqdm>=4.70",
]
NOTEBOOKS = ["ipykernel>=7.4", "nbclient>=0.11", "nbformat>=5.11"]
TEXT = ["tiktoken>=0.9"]
TEST = [
    *NOTEBOOKS,
    *TEXT,
    "beartype>=0.23",
    "hypothesis>=6.170",
    "import-linter>=2.16",
    "pytest>=9.2",
    "pytest-xdist>=3.8",
    "ruff>=0.17",
]

setup(
    name="relattn",
    version="0.1.0.dev0",
    description="Relative and linear attention in JAX and Flax.",
    long_description=Path(__file__).with_name("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["relattn", "relattn.*"]),
    package_data={
        "relattn": ["py.typed"],
        "relattn.data": ["embedded/**/*"],
        "relattn.evaluation": ["published/*"],
    },
    install_requires=REQUIREMENTS,
    extras_require={
        "test": TEST,
        "notebooks": NOTEBOOKS,
        "text": TEXT,
        "openwebtext": [*TEXT, "datasets>=3.6"],
        "prepare": ["importlib_resources>=6.0", "tensorflow-cpu>=2.20"],
        "cuda": ["jax[cuda13]>=0.10"],
        "cuda12": ["jax[cuda12]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        "kubernetes": ["jax[k8s]>=0.10"],
    },
)

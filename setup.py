"""Metadata and dependencies of relattn; tool configuration is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# The oldest versions that pass the tests: .github/lower-bounds.txt.
REQUIREMENTS = [
    "flax>=0.12.2",
    "jax>=0.10",
    "jaxtyping>=0.3.6",
    "numpy>=2.0.2",
]
TRAIN = [
    "absl-py>=2.1",
    "array_record>=0.8.1",
    "grain>=0.2.12",
    "matplotlib>=3.8.4",
    "ml-collections>=1.1",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11.40",
    "pillow>=9.5",
    "tensorboardX>=2.6.2.2",
    "tensorflow-datasets>=4.9.10",
    "tqdm>=4.64",
]
NOTEBOOKS = [*TRAIN, "ipykernel>=7.4", "nbclient>=0.11", "nbformat>=5.11"]
TEXT = [*TRAIN, "tiktoken>=0.9"]
TEST = [
    *NOTEBOOKS,
    "beartype>=0.23",
    "chex>=0.1.90",
    "hypothesis>=6.170",
    "import-linter>=2.16",
    "pytest>=9.2",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",
    "ruff>=0.17",
    "safetensors>=0.8",
    "tiktoken>=0.9",
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
        "train": TRAIN,
        "test": TEST,
        "notebooks": NOTEBOOKS,
        "text": TEXT,
        "openwebtext": [*TEXT, "datasets>=3.6"],
        "prepare": [
            *TRAIN,
            "importlib_resources>=6.0",
            "tensorflow-cpu>=2.20",
        ],
        "cuda": ["jax[cuda13]>=0.10"],
        "cuda12": ["jax[cuda12]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        "kubernetes": ["jax[k8s]>=0.10"],
    },
)

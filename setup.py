"""Metadata and dependencies of relattn; tool configuration is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The oldest versions that pass the tests: .github/lower-bounds.txt.
REQUIREMENTS = [
    "flax>=0.12.5",
    "jax>=0.10.1",
    "jaxtyping>=0.3.6",
    "numpy>=2.0.2",
    "safetensors>=0.4.2",
]
TRAIN = [
    "absl-py>=2.1",
    "array_record>=0.8.1",
    "grain>=0.2.15",
    "matplotlib>=3.8.4",
    "ml-collections>=1.1",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.40",
    "pillow>=10.3",
    "tensorboardX>=2.6.2.2",
    "tensorflow-datasets>=4.9.10",
    "tqdm>=4.64",
]
NOTEBOOKS = [*TRAIN, "jupyterlab>=4.6", "nbconvert>=7.17"]
DOCS = [
    *TRAIN,
    "myst-nb>=1.4",
    "sphinx>=9.0",
    "sphinx-book-theme>=1.4",
    "sphinx-copybutton>=0.5.2",
]
TEXT = [*TRAIN, "tiktoken>=0.9"]
TEST = [
    *TRAIN,
    "beartype>=0.23",
    "chex>=0.1.90",
    "flatbuffers>=24.3.25",
    "hypothesis>=6.170",
    "import-linter>=2.16",
    "ipykernel>=7.4",
    "nbclient>=0.11",
    "nbformat>=5.11",
    "pytest>=9.2",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",
    "ruff>=0.17",
    "tiktoken>=0.9",
]

# On a package index, links and pictures of the README need a full address, and headings
# have no anchors.
URL = "https://github.com/relattn/relattn"
README = Path(__file__).with_name("README.md").read_text("utf-8")
README = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\1{URL}/raw/main/", README)
README = re.sub(r"(?<!!)(\[[^]]*\]\()(?!http|#)", rf"\1{URL}/blob/main/", README)
README = re.sub(r"(\[[^]]*\]\()#", rf"\1{URL}#", README)

setup(
    name="relattn",
    version="0.1.0.dev0",
    description="Relative and linear attention in JAX and Flax.",
    long_description=README,
    long_description_content_type="text/markdown",
    url=URL,
    project_urls={
        "Documentation": "https://relattn.github.io/relattn",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[*find_packages(include=["relattn", "relattn.*"]), "relattn.configs"],
    package_dir={"relattn.configs": "configs"},
    entry_points={"console_scripts": ["relattn = relattn.cli:main"]},
    package_data={
        "relattn": ["py.typed"],
        "relattn.data": ["embedded/**/*"],
        "relattn.evaluation": ["page.html"],
    },
    install_requires=REQUIREMENTS,
    extras_require={
        "train": TRAIN,
        "test": TEST,
        "notebooks": NOTEBOOKS,
        "docs": DOCS,
        # Only make test-full needs these: it converts live models.
        "pytorch": ["timm>=1.0.31", "torch>=2.13", "transformers>=5.23"],
        # Only make test-full needs these: pyright, and the Node.js that it runs on.
        "types": ["pyright[nodejs]>=1.1.414"],
        "text": TEXT,
        "openwebtext": [*TEXT, "datasets>=3.6"],
        # Data sets, tokenizers and models of Hugging Face.
        "hf": [
            *TRAIN,
            "datasets>=3.6",
            "huggingface_hub>=0.34",
            "tokenizers>=0.21",
        ],
        # Only make test-full needs these: it builds what PyPI gets.
        "publish": [
            "build>=1.3",
            "pyyaml>=6.0",
            "readme_renderer[md]>=44.0",
            "setuptools>=77",
            "twine>=6.1",
        ],
        "prepare": [
            *TRAIN,
            "importlib_resources>=6.0",
            "tensorflow-cpu>=2.20",
        ],
        # Of relattn export, by the name of its format. jax2onnx asks for an older
        # orbax-checkpoint than the extra train.
        "stablehlo": ["flatbuffers>=24.3.25"],
        "onnx": ["jax2onnx>=0.17.1"],
        "wandb": [*TRAIN, "wandb>=0.31"],
        "cuda": ["jax[cuda13]>=0.10"],
        "cuda12": ["jax[cuda12]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        "kubernetes": ["jax[k8s]>=0.10"],
    },
)

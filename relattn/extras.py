"""The packages of the extra ``train``, and the error if one is missing."""

from importlib.util import find_spec

# Names as imported; setup.py has the names and versions as installed.
TRAIN = (
    "absl",
    "array_record",
    "grain",
    "matplotlib",
    "ml_collections",
    "optax",
    "orbax",
    "PIL",
    "tensorboardX",
    "tensorflow_datasets",
    "tqdm",
)


def require_train(package: str) -> None:
    """Checks that the packages of the extra ``train`` are installed.

    Args:
        package: The package of relattn that needs them, for the message.

    Raises:
        ImportError: If one is missing.

    Example:
        >>> require_train("relattn.training")
    """
    for name in TRAIN:
        if find_spec(name) is None:
            raise ImportError(f"{package} needs {name}: pip install 'relattn[train]'")

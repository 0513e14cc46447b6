"""What others than the superuser, who may read and write everything, cannot do."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def without_privileges():
    user = os.geteuid()
    if user:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@contextlib.contextmanager
def public_folder():
    """Everybody may enter it, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)

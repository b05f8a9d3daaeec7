"""The user's own cache directory, for files that run code when read: only the user writes there.

Knows nothing about what the files hold.
"""

import os
from pathlib import Path


def private_folder(*names):
    """The folder ``names`` in the user's cache directory; it is made where there is none.

    Raises ValueError where anybody else owns or may write the folder or anything in it.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise ValueError("there is no home directory; name a folder in XDG_CACHE_HOME") from None
    for name in ("s2d", *names):
        folder = folder / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign(folder.resolve())
    for path in folder.rglob("*"):
        refuse_foreign(path)
    return folder


def refuse_foreign(path):
    """Raise ValueError where another user owns ``path`` or may write it."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        raise ValueError(f"{path} belongs to another user and could run any code; remove it")
    if found.st_mode & 0o022:
        raise ValueError(f"{path} can be written by other users; remove it, or chmod go-w it")

"""The user's own cache directory: only the user writes there, as some files run code when read.

Knows nothing about what the files hold.
"""

import os
import platform
import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISVTX

import torch


def private_folder(*names):
    """The folder ``names`` in the user's cache directory, by its real path; made if there is none.

    Raises ValueError where anybody else owns or may write the folder, anything in it or a folder
    above it. Root may, who can do everything.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise ValueError("there is no home directory; name a folder in XDG_CACHE_HOME") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("s2d", *names):
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()  # where links lead is checked, and then used
    for part in reversed(folder.parents):
        refuse_foreign(part, allowed=S_ISVTX)  # folders such as /tmp keep what users own apart
    refuse_foreign(folder)
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            with suppress(FileNotFoundError):  # another process has removed it since it was listed
                refuse_foreign(Path(parent, name))
    return folder


def refuse_foreign(path, allowed=0):
    """ValueError where another user owns ``path``, or may write it without the bit ``allowed``."""
    found = path.lstat()
    if found.st_uid not in (os.getuid(), 0):
        how = "remove it, or name a folder of your own in XDG_CACHE_HOME"
        raise ValueError(f"{path} belongs to another user and could run any code; {how}")
    if found.st_mode & 0o022 and not found.st_mode & allowed:  # of a link on Linux 0777
        raise ValueError(f"{path} can be written by other users; remove it, or chmod go-w it")


def key_of(parts):
    return sha256(repr(parts).encode()).hexdigest()


def machine():
    """What costs and compiled code depend on: the processor and PyTorch's version."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:  # not Linux
        first = ""
    kept = r"^(?:vendor_id|cpu family|model|stepping|flags|CPU |Features|isa).*$"
    processor = re.findall(kept, first, flags=re.MULTILINE) or platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    return platform.node(), platform.machine(), processor, capability, torch.__version__

"""A JSON object out of a file, such as config.json."""

import json


def read_json(path, missing=None):
    """The object in the file ``path``, or ``missing`` where there is no file and that is given.

    Raises FileNotFoundError, and ValueError where the file holds no JSON object.
    """
    if not path.is_file():
        if missing is not None:
            return missing
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object")
    return raw

"""Single fields of a JSON object, validated. Knows nothing about what they mean."""

import json
import math
from contextlib import contextmanager

LARGEST = 2**24  # for sizes: far above any Llama, far below what cannot be computed with


@contextmanager
def errors_name(source):
    """A ValueError inside begins with the file, or the object in it, that is wrong."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_json_if_there(path):
    """As ``read_json``; an empty object where there is no file."""
    return read_json(path) if path.is_file() else {}


def read_json(path, kind=dict):
    """A JSON object (or list) from a file; FileNotFoundError or ValueError says what is wrong."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({shown(str(error))[1:-1]})") from None
    if not isinstance(raw, kind):
        expected = "list" if kind is list else "JSON object"
        raise ValueError(f"{path} holds a {type(raw).__name__}, no {expected}")
    return raw


def shown(value):
    """A value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def field(raw, key, default):
    """raw[key], or the default where it is missing or null."""
    value = raw.get(key)
    if value is None and default is None:
        raise ValueError(f"{key} is null; expected a value" if key in raw else f"it has no {key!r}")
    return default if value is None else value


def whole(raw, key, default=None, low=1, high=LARGEST):
    value = field(raw, key, default)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {shown(value)}; expected a whole number within {low}..{high}")
    return value


def number(raw, key, default=None, low=-math.inf, high=1e30):
    value = field(raw, key, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{key} is {shown(value)}; expected a number within {low:g}..{high:g}")
    return float(value)


def flag(raw, key, default):
    value = field(raw, key, default)
    if type(value) is not bool:
        raise ValueError(f"{key} is {shown(value)}; expected true or false")
    return value


def numbers(raw, key, read, default=(), **bounds):
    """A list of numbers, each through ``read``, which is ``whole`` or ``number``."""
    value = field(raw, key, list(default))
    if not isinstance(value, list):
        raise ValueError(f"{key} is {shown(value)}; expected a list of numbers")
    return tuple(read({key: item}, key, **bounds) for item in value)


def refuse_unknown(raw, known, only):
    """Raise ValueError for a key that is not ``known``, or that has not its ``only`` value."""
    for key, plain in only.items():
        if raw.get(key) not in (None, plain):
            raise ValueError(f"{key} is {shown(raw[key])}; only {plain!r} is supported")
    said = {key for key, value in raw.items() if value is not None}
    if unknown := sorted(said - known - only.keys()):
        names = shown(", ".join(unknown))
        raise ValueError(f"{names} is not known here and may change the result; else take it out")


def agreed(raw, name, key):
    """{key: value} from ``raw`` or from the object raw[name]; ValueError where the two disagree."""
    outer, inner = raw.get(key), (raw.get(name) or {}).get(key)
    if None not in (outer, inner) and outer != inner:
        raise ValueError(f"{key} is {shown(outer)}, but {shown(inner)} in {name}")
    return {key: outer if inner is None else inner}

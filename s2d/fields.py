"""Single fields of a JSON object, validated. Knows nothing about what they mean."""

import json
import math
from collections import Counter
from contextlib import contextmanager

LARGEST = 2**24  # for sizes: far above any Llama, far below what cannot be computed with


@contextmanager
def errors_name(source):
    """A ValueError inside begins with the file, or the object in it, that is wrong."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_json(path, kind=dict, missing=None):
    """A JSON object (or list) from a file, ``missing`` if given where there is no file."""
    if not path.is_file():
        if missing is not None:
            return missing
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({shown(str(error))[1:-1]})") from None
    if not isinstance(raw, kind):
        expected = {dict: "JSON object", list: "list"}[kind]
        raise ValueError(f"{path} holds a {type(raw).__name__}, no {expected}")
    return raw


def each_once(pairs):
    """A JSON object; ValueError where a key is there twice: readers differ in which counts."""
    if len(pairs) > len(dict(pairs)):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shown(key)} is there twice")
    return dict(pairs)


def shown(value):
    """A value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def field(raw, key, default, types, expected, low=-math.inf, high=math.inf):
    """raw[key] if it is as expected, the default where it is missing or null."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"it has no {key!r}")
    if type(value) not in types or high < math.inf and not low <= value <= high:
        raise ValueError(f"{key} is {shown(value)}; expected {expected}")
    return value


def whole(raw, key, default=None, low=1, high=LARGEST):
    expected = f"a whole number within {low}..{high}"
    return field(raw, key, default, (int,), expected, low, high)


def number(raw, key, default=None, low=-math.inf, high=1e30):
    expected = f"a number within {low:g}..{high:g}"
    return float(field(raw, key, default, (int, float), expected, low, high))


def flag(raw, key):
    return field(raw, key, False, (bool,), "true or false")


def numbers(raw, key, read, default=(), **bounds):
    """A list of numbers, each through ``read``, which is ``whole`` or ``number``."""
    value = field(raw, key, default, (list, tuple), "a list of numbers")
    return tuple(read({key: item}, key, **bounds) for item in value)


def refuse_unknown(raw, known, only):
    """Raise ValueError for a key that is not ``known``, or that has not its ``only`` value."""
    for key, plain in only.items():
        if raw.get(key) not in (None, plain):
            raise ValueError(f"{key} is {shown(raw[key])}; only {plain!r} is supported")
    said = {key for key, value in raw.items() if value is not None}
    if unknown := sorted(said - set(known) - only.keys()):
        names = shown(", ".join(unknown))
        raise ValueError(f"{names} is not known here and may change the result; else take it out")

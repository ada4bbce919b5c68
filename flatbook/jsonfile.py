"""JSON files that are small, pleasant to compare line by line, and hold what was put in.

JSON has no word for nan and the infinities. A diverged run has them, and losing it for that, or
turning them into null, would be worse than three odd words: they are written as
``{"$float": "nan"}`` and read back as floats.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from flatbook.files import atomic_write

_WIDTH = 100
_TAG = "$float"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any, where: str = "value") -> Any:
    """Return ``value`` built of dicts, lists, strings, numbers, booleans and None only.

    Dataclasses become dicts, tuples and ranges lists, paths strings, and arrays and tensors
    (nested lists of) Python numbers. Floats keep every digit.

    Args:
        value: What to convert. The keys of its mappings must be words without a leading ``$``.
        where: Its name, for the message.

    Raises:
        ValueError: If something inside is of another kind; the message says where.

    Example:
        >>> plain({"loss": (1, 2.5), "seeds": range(3)})
        {'loss': [1, 2.5], 'seeds': [0, 1, 2]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise ValueError(
                    f"{where} must have words without a leading $ as keys; got {key!r}."
                )
        return {key: plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    raise ValueError(
        f"{where} must be made of mappings, sequences, arrays, numbers and strings; "
        f"got {type(value).__name__}."
    )


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write ``value`` as a JSON file, whole or not at all.

    What fits on a line of 100 characters stands on one; mappings that do not are broken by key,
    in their own order, so that a changed number changes one line.

    Args:
        path: The file; missing folders are made.
        value: Anything that :func:`plain` accepts.

    Raises:
        ValueError: If ``value`` holds something JSON cannot.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> write_json(path, {"loss": [0.5, math.inf]})
        >>> path.read_text()
        '{"loss": [0.5, {"$float": "inf"}]}\\n'
        >>> read_json(path)
        {'loss': [0.5, inf]}
    """
    text = _layout(_tagged(plain(value)), 0)
    with atomic_write(path) as file:
        file.write(text + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Return what :func:`write_json` wrote.

    Raises:
        ValueError: If the file is not valid JSON, cut off for instance.
        OSError: If it cannot be read.
    """
    raw = Path(path).read_bytes()
    try:
        return json.loads(raw.decode(), object_hook=_untagged, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON, cut off or damaged ({error}).") from error


def _refuse(word: str):
    raise ValueError(f"{word} is not JSON")


def _tagged(value):
    if isinstance(value, dict):
        return {key: _tagged(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tagged(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: str(value)}
    return value


def _untagged(value: dict):
    if _TAG not in value:
        return value
    word = value[_TAG]
    if len(value) > 1 or not isinstance(word, str) or word not in _NOT_FINITE:
        raise ValueError(f"{_TAG} must stand alone and be one of {', '.join(_NOT_FINITE)}")
    return _NOT_FINITE[word]


def _layout(value, depth: int) -> str:
    """Write ``value``, already plain and tagged, at ``depth`` levels of indentation."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_layout(inner, depth + 1)}"
            for key, inner in value.items()
        ]
        return "{\n" + ",\n".join(parts) + "\n" + " " * depth + "}"
    parts = [_layout(inner, depth + 1) for inner in value]
    widest = max(map(len, parts)) + 2
    # Equal columns: a changed number does not push those after it onto other lines.
    columns = 1 if any("\n" in part for part in parts) else max(1, (_WIDTH - depth) // widest)
    rows = [parts[start : start + columns] for start in range(0, len(parts), columns)]
    return "[\n" + ",\n".join(pad + ", ".join(row) for row in rows) + "\n" + " " * depth + "]"

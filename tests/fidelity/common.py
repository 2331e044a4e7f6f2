"""What the sets of the suite share: errors, their summary, and which of our presets stands for an engine's version."""

from pathlib import Path

import numpy as np

from infersim.config.errors import InputError

PRESETS = {
    # engine, version (as tuple, from here on) -> preset: the nearest that has the same admission and mixing rules, or
    # of another engine the one whose step is most alike
    ("vllm", (0, 0)): "vllm-0",
    ("vllm", (0, 8)): "vllm-0.11",
    ("vllm", (0, 12)): "vllm-0.11",
    ("vllm", (0, 14)): "vllm-0.15",
    ("vllm", (0, 18)): "vllm-0.19",
    ("vllm", (0, 22)): "vllm-0.33",
    ("sglang", (0, 0)): "sglang-0.5",
    ("trtllm", (0, 0)): "trtllm-1.0-no-evict",
}


def preset_of(engine: str, version: str | float) -> str:
    """The preset for an engine's version ("1.0.0rc3", "0.17.0", "nightly-..."): the newest row not newer than it."""
    numbers = []
    for part in str(version).split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    given = tuple(numbers) if len(numbers) == 2 else (99, 0)  # a nightly build, or none named, is newest
    rows = [(since, preset) for (name, since), preset in PRESETS.items() if name == engine and since <= given]
    return max(rows)[1]


def attempt(predict):
    """(what predict() gives, "") or (None, why there is nothing): no row ends the suite."""
    try:
        return predict(), ""
    except KeyError as error:
        return None, f"no counterpart of {error.args[0]}"
    except InputError as error:
        return None, error.problems[0].split(": ", 1)[-1]
    except Exception as error:  # a fault of the product, counted
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def percent(predicted, measured):
    """Signed relative error in percent."""
    return 100.0 * (np.asarray(predicted, float) / np.asarray(measured, float) - 1.0)


def spread(errors) -> dict[str, float]:
    """Median and mean of the absolute errors, and the median of the signed ones, in percent."""
    errors = np.asarray(errors, float)
    if not len(errors):
        return {"median_pct": None, "mape_pct": None, "signed_pct": None}
    absolute = np.abs(errors)
    return {
        "median_pct": round(float(np.median(absolute)), 2),
        "mape_pct": round(float(absolute.mean()), 2),
        "signed_pct": round(float(np.median(errors)), 2),
    }


def read_table(path: Path, columns: str):
    """A table of the data (pandas), CSV or Parquet. InputError in one line if it cannot be read or lacks a column."""
    import pandas

    try:
        table = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    except (OSError, ValueError) as error:  # pandas' own and pyarrow's are ValueErrors
        raise InputError(f"{path}: cannot be read as a table: {str(error).splitlines()[0]}") from None
    if missing := [name for name in columns.split() if name not in table]:
        raise InputError(f"{path}: lacks {', '.join(missing)}; must have the columns of the project's data")
    return table

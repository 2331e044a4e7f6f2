"""Quantities: every accepted spelling means what SI says, and everything else is a one-line error."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infersim.config.units import UNITS, parse_count, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("3.35 TB/s", "B/s", 3.35e12),
        ("80 GB", "B", 80e9),
        ("80GiB", "B", 80 * 2**30),
        ("1 kB", "B", 1000),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("989 TFLOPS", "FLOP/s", 989e12),
        ("500 ms", "s", 0.5),
        ("3 us", "s", 3e-6),
        ("2 min", "s", 120),
        ("0.5 s", "ms", 500),
        (500, "ms", 500),
        ("3.35e12", "B/s", 3.35e12),
        (3.35e12, "B/s", 3.35e12),
        ("10", "1/s", 10),
        ("10 req/s", "1/s", 10),
        ("2.50 USD/h", "USD/h", 2.5),
        ("1.98 GHz", "Hz", 1.98e9),
        ("700 W", "W", 700),
        (".5", "", 0.5),
        (0, "s", 0),
    ],
)
def test_quantity_is_si(text, unit, value):
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "unit"),
    [
        (True, "s"), (None, "s"), ([1], "s"), ({"a": 1}, "s"), (math.nan, "s"), (math.inf, "s"), ("nan", "s"),
        ("inf", "s"), (-1, "s"), ("-1 ms", "s"), ("1e999", "s"), (10**400, "s"), ("", "s"), ("ms", "s"), ("1 2", "s"),
        ("80 GB", "s"), ("80 GHz", "B"), ("80 gb", "B"), ("80 Gb", "B"), ("5 ms", ""), ("1,5 s", "s"), (b"5", "s"),
        ("9" * 5000, "s"), ("5 s\n6 s", "s"),
    ],
)  # fmt: skip
def test_wrong_quantity_says_what_is_right(wrong, unit):
    with pytest.raises(ValueError, match="must be") as error:
        parse_quantity(wrong, unit)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300
    assert UNITS[unit][1] in text


def test_wrong_case_is_guessed():
    with pytest.raises(ValueError, match="did you mean GB/s"):
        parse_quantity("3 gb/s", "B/s")


ANYTHING = st.one_of(st.text(), st.floats(), st.integers(), st.binary(), st.booleans(), st.none())


@given(ANYTHING, st.sampled_from([*UNITS]))
def test_any_value_is_a_finite_quantity_or_a_value_error(value, unit):
    try:
        result, message = parse_quantity(value, unit), ""
    except ValueError as error:
        result, message = 0.0, str(error)
    assert "\n" not in message
    assert math.isfinite(result)
    assert result >= 0


@pytest.mark.parametrize(("value", "count"), [(3, 3), (3.0, 3), ("3", 3), ("1e6", 10**6), (1e6, 10**6)])
def test_count(value, count):
    assert parse_count(value) == count
    assert isinstance(parse_count(value), int)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "2.5", True, math.nan, math.inf, "inf", "x", None, [], 10**400, "1e300"])
def test_wrong_count(wrong):
    with pytest.raises(ValueError, match="must be a whole number"):
        parse_count(wrong)


@pytest.mark.parametrize(("text", "unit"), [("1e300", "s"), ("1e6 h", "s"), (1e13, "ms")])
def test_a_time_is_at_most_what_a_clock_can_tell_microseconds_of(text, unit):
    with pytest.raises(ValueError, match="of at most"):
        parse_quantity(text, unit)

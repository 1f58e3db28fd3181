"""Numbers of machines, within plausible limits: gigabytes given for bytes, or microseconds for seconds, are errors.

The limits are wide (a phone, and ten times the largest machine), since they find slips of units and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from passes.errors import SpecError
from planner.spec.fields import number, whole


def _within(least: float, most: float, unit: str, fix: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not least <= value <= most:
            few = f"less than {least:g}" if value < least else f"more than {most:g}"
            raise SpecError(f"is {value:g} {unit}: no machine has {few}", fix=fix)
        return value

    return check


def _real(least: float, most: float, unit: str, fix: str) -> Any:
    bounds: dict[str, Any] = {"minimum": least, "maximum": most}
    return (
        Field(strict=True, allow_inf_nan=False, json_schema_extra=bounds),
        BeforeValidator(number),
        AfterValidator(_within(least, most, unit, fix)),
    )


def _count(least: int, most: int, unit: str, fix: str) -> Any:
    bounds: dict[str, Any] = {"minimum": least, "maximum": most}
    return (
        Field(strict=True, json_schema_extra=bounds),
        BeforeValidator(whole),
        AfterValidator(_within(least, most, unit, fix)),
    )


Flops = Annotated[float, *_real(1e8, 1e18, "FLOP/s", "write FLOP/s: a TFLOP/s is 1.0e12")]
Bytes = Annotated[int, *_count(10**7, 10**14, "bytes", "write bytes: a GB is 1.0e9")]
Bandwidth = Annotated[float, *_real(1e5, 1e15, "bytes per second", "write bytes per second: a GB/s is 1.0e9")]
Seconds = Annotated[float, *_real(1e-9, 1.0, "seconds", "write seconds: a microsecond is 1.0e-6")]
Devices = Annotated[int, *_count(1, 10**8, "devices", "write the number of devices that it joins")]

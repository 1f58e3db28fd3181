"""The kinds of values that a key may have. The schema, the check and the words of an error follow from these types.

YAML 1.1 readers leave `1e-8` a string, and `3e5` is a float: a number may be written so wherever it has that value.
The JSON schema (draft 2020-12) of a spec or a cluster file is for editors and for the words of an error.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from passes.errors import PlanError, SpecError, Where
from planner.files.named_code import from_directory, is_named
from planner.files.text import LARGEST
from planner.spec.lines import EXPONENT, locate
from planner.spec.messages import spec_error

AUTO = "auto"
LARGEST_SIZE = 1 << 40  # elements, steps, ids: more is a slip of the keyboard, and would overflow later on
MOST_NAMES = 1000  # overrides
MOST_INPUTS = 128
MOST_DIMS = 16
MOST_LENGTHS = 64
Auto = Literal["auto"]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(strict=True, min_length=1)]
NullIsNone = BeforeValidator(lambda value: "none" if value is None else value)
Style = Literal["column", "row", "vocab", "expert", "replicate"]


def number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def whole(value: Any) -> Any:
    value = number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _word(value: Any) -> Any:
    """Return the name of a torch dtype; true is not 1."""
    return value if value is None or type(value) is int else str(value).removeprefix("torch.")


Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIZE), BeforeValidator(whole)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST_SIZE), BeforeValidator(whole)]
Seed = Annotated[int, Field(strict=True, ge=0, le=LARGEST), BeforeValidator(whole)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), BeforeValidator(number)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), BeforeValidator(number)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(number)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False), BeforeValidator(number)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1), BeforeValidator(number)]
Word = BeforeValidator(_word)
Float = Annotated[Literal["float32", "bfloat16", "float16", "float64"], Word]
Dtype = Annotated[Literal["int64", "int32", "int16", "int8", "uint8", "bool"] | Float, Word]


def key(default: Any, description: str, **more: Any) -> Any:
    """Return a key of a section with its default and its meaning; both go into the schema."""
    return Field(default=default, description=description, **more)


def optional_by_like(default: Any, description: str) -> Any:
    """Return a key of an input that is given here, or in the input that this one is like."""
    return key(default, description, json_schema_extra=lambda schema: schema.pop("default", None))


def beside_the_spec(path: str) -> AfterValidator:
    """Look up the file of the function that the key ``path`` names: in the directory of the spec, then in the working
    directory.
    """

    def found(value: str, info: ValidationInfo) -> str:
        file = locate(info.context or {}, path).file
        return from_directory(value, Path(file).parent) if file and is_named(value) else value

    return AfterValidator(found)


def required(description: str, *examples: Any, **more: Any) -> Any:
    """Return a key without a default; the error for a missing key shows ``examples``."""
    return Field(description=description, examples=[*examples], **more)


class Section(BaseModel):
    """Keys of the spec. Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def fill_in(self) -> None:
        """Set the keys that others imply, before conflicts are looked for."""

    def problems(self) -> Iterator[PlanError]:
        """Yield conflicts between keys that are valid alone, each at the dotted path of a key."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        self.fill_in()
        if problems := list(self.problems()):
            raise SpecError.of(problems)
        return self


class File(Section):
    """All keys of a file, with their lines. Files with equal values are equal, from any place."""

    _locations: Mapping[str, Where] = PrivateAttr(default_factory=dict)

    @classmethod
    def checked(cls, value: Any, locations: Mapping[str, Where], what: str = "the spec") -> Self:
        """Return the checked file. Raises SpecError: all errors, each at a line or dotted path, and with a fix."""
        try:
            return cls.model_validate(value, context=locations).located(locations)
        except ValidationError as error:
            raise spec_error(error, value, locations, json_schema(cls), what) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and dict(self) == dict(other)

    def located(self, locations: Mapping[str, Where]) -> Self:
        """Set the line of each key, and return the file itself."""
        self._locations = locations
        return self

    def location(self, path: str) -> Where:
        """Return the place of the key with this dotted path, or of the nearest key around it: "spec.yaml:3"."""
        return locate(self._locations, path)

    def error(self, path: str, what: str, fix: str = "") -> SpecError:
        return SpecError(what, where=self.location(path), fix=fix)


class _Plain(GenerateJsonSchema):
    """Writes keys in the order of the models, and no titles that only repeat a key."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema(model: type[BaseModel], title: str = "The spec of a meshwright plan") -> dict[str, Any]:
    """Return the schema of a file: every key with meaning, type, range and default; nothing else is allowed."""
    schema = model.model_json_schema(schema_generator=_Plain)
    for section in (schema, *schema.get("$defs", {}).values()):
        del section["title"]
        section.pop("description", None)  # the description of a class is for readers of the code
    return {"$schema": _Plain.schema_dialect, "title": title, **schema}

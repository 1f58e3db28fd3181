"""The JSON schema (draft 2020-12) of a spec or a cluster file, for editors and for the words of an error.

The models are its source.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue


class _Plain(GenerateJsonSchema):
    """Keys in the order of the models, and no titles that only repeat a key."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema(model: type[BaseModel], title: str = "The spec of a meshwright plan") -> dict[str, Any]:
    """The schema of a file: every key with its meaning, type, range and default; nothing else is allowed."""
    schema = model.model_json_schema(schema_generator=_Plain)
    for section in (schema, *schema.get("$defs", {}).values()):
        del section["title"]
        section.pop("description", None)  # the description of a class is for readers of the code
    return {"$schema": _Plain.schema_dialect, "title": title, **schema}

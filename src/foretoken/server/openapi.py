"""The OpenAPI document: bodies are read by hand, so the document is told what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from foretoken.server.errors import ErrorReply
from foretoken.server.schema import Body

REFERENCE = "#/components/schemas/{model}"


def operation(body: type[Body]) -> dict[str, Any]:
    """What FastAPI is told about a path that takes this body."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def describe(app: FastAPI, bodies: Sequence[type[Body]]) -> None:
    """Gives an application a document that has these bodies, and the error envelope for whatever is refused."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies_schema = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
            envelope = TypeAdapter(ErrorReply).json_schema(ref_template=REFERENCE)
            schemas = {**bodies_schema["$defs"], **envelope.pop("$defs"), "ErrorReply": envelope}
            found.setdefault("components", {})["schemas"] = schemas
            for path in found["paths"].values():
                for described in path.values():
                    described["responses"] = {"200": {"description": "Done."}, "4XX": _refusal()}
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _refusal() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model="ErrorReply")}}}
    return {"description": "Refused; the message says why.", "content": content}

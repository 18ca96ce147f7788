"""The pages for people, the playground at / and the reference at /docs: files, with headers that keep all else out."""

from __future__ import annotations

from importlib.resources import files

import fastapi_offline  # at once, so that serving without it is refused before a model is loaded
from starlette.responses import Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
OURS = {  # what is asked for, and the file that it is
    "/": "index.html",
    **{f"/playground/{name}": name for name in ("style.css", "app.js", "api.js", "answer.js", "view.js")},
    "/docs": "docs.html",
    "/docs/docs.js": "docs.js",
}
SWAGGER = {f"/docs/{name}": f"static/{name}" for name in ("swagger-ui.css", "swagger-ui-bundle.js")}
PATHS = (*OURS, *SWAGGER)


def file_reply(path: str) -> Response:
    """The file of one of the paths."""
    found = files(__name__) / OURS[path] if path in OURS else files(fastapi_offline) / SWAGGER[path]
    return Response(found.read_bytes(), media_type=KINDS[found.name.rpartition(".")[2]], headers=HEADERS)

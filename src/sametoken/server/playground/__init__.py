"""Web pages: the playground at / and the API reference at /docs, with headers that restrict them to this server."""

from __future__ import annotations

import re
from importlib.resources import files

import fastapi_offline  # imported here, so that its absence is an error before a model is loaded
from starlette.responses import RedirectResponse, Response

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
MODULES = ("answer", "api", "app", "form", "step", "store", "turn", "view")
OURS = {  # files of this package, by path
    "/": "index.html",
    **{f"/playground/{name}": name for name in ("style.css", *(f"{module}.js" for module in MODULES))},
    "/docs": "docs.html",
    "/docs/docs.js": "docs.js",
}
SWAGGER = {f"/docs/{name}": f"static/{name}" for name in ("swagger-ui.css", "swagger-ui-bundle.js")}
PATHS = (*OURS, *SWAGGER)
SLASHED = "/docs/"  # another spelling of /docs, which redirects to it
LINK = re.compile(rb'((?:href|src)=")(?=playground/|docs)')


def is_reference(path: str) -> bool:
    """Return True if a path belongs to the API reference rather than to the playground."""
    return path.startswith("/docs")


def file_reply(path: str, root: str = "") -> Response:
    """Reply with the file at a path of `PATHS`, or redirect `SLASHED`.

    Args:
        root: prefix under which a proxy offers the server. Links of pages begin with it; without it they are relative.
    """
    if path == SLASHED:
        return RedirectResponse("../docs", 307)  # relative, so that it names no host and no prefix
    found = files(__name__) / OURS[path] if path in OURS else files(fastapi_offline) / SWAGGER[path]
    content, kind = found.read_bytes(), KINDS[found.name.rpartition(".")[2]]
    if root and kind == "text/html":
        content = LINK.sub(rf"\1{root}/".encode(), content)
    return Response(content, media_type=kind, headers=HEADERS)

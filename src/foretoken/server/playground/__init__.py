"""The page at /, where a person sees drafts at work: files as they are, with headers that keep everything else out."""

from __future__ import annotations

from importlib.resources import files

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
PATHS = {  # what is asked for, and the file that it is
    "/": "index.html",
    **{f"/playground/{name}": name for name in ("style.css", "app.js", "api.js", "answer.js", "view.js")},
}


def file_reply(name: str) -> Response:
    """One of the files of the page."""
    content = files(__name__).joinpath(name).read_bytes()
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)

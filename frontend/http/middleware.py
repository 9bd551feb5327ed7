"""What surrounds every route: request ids, log lines, errors as JSON, CORS, keys."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from coppice.frontend.errors import BadRequest, EngineStopped, RequestFailed, error_body
from coppice.frontend.http.access import Access, Guest
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.logs import refused
from coppice.frontend.http.routes import ERROR_FORMS, ROOT_PATH, Handler, path_of, without_root

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
CLIENT_IS_GONE = 499  # nginx's number for it; only the log shows it
PREFLIGHT_SECONDS = 600  # for which a browser need not ask again
LONGEST_ID = 128  # characters of a request id that a client chooses


@dataclass(slots=True)
class Note:
    """What is known about a request while it is handled."""

    request_id: str
    guest: Guest | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # for its line in the log
    headers: dict[str, str] = field(default_factory=dict)  # of its answer

    @property
    def tenant(self) -> str | None:
        """Whose cache the request may share; None: everybody's."""
        return None if self.guest is None else self.guest.tenant


NOTE = web.RequestKey("note", Note)


def middlewares(access: Access, cors_origins: tuple[str, ...]) -> list[Middleware]:
    """All of them, the outermost first."""
    return [logged, cross_origin(cors_origins), errors_as_json, admitted(access)]


@web.middleware
async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives each request an id and, when it ends, a line in the log."""
    given = request.headers.get("X-Request-Id", "")
    usable = 0 < len(given) <= LONGEST_ID and _is_plain(given)
    note = request[NOTE] = Note(given if usable else fresh_id())
    begun, status = time.monotonic(), CLIENT_IS_GONE
    try:
        response = await handler(request)
        status = response.status
        if not response.prepared:
            response.headers["X-Request-Id"] = note.request_id
        return response
    finally:
        fields = {
            "request_id": note.request_id,
            "method": request.method,
            "path": request.path,
            "status": status,
            "seconds": round(time.monotonic() - begun, 4),
        }
        if note.guest is not None and note.guest.name:
            fields["key"] = note.guest.name
        level = (
            logging.DEBUG if path_of(request).startswith(("/health", "/-/health")) else logging.INFO
        )
        log.log(level, "request", extra={"fields": fields | note.fields})


def cross_origin(origins: tuple[str, ...]) -> Middleware:
    """Lets the scripts of web pages from these origins use the server; without origins, no script.

    A browser sends some requests of a foreign page without asking first, and only hides the answer
    from the page. On a server without keys such a request could empty the cache, so it is refused.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = cors_headers(request, origins)
        if not headers and request.method not in SAFE_METHODS and _is_foreign(request):
            text = (
                f"pages from {request.headers['Origin'][:200]} may not use this server; "
                f"--cors-origin would allow it"
            )
            body = error_body(text, kind="permission_error", code="forbidden")
            return web.json_response(body, status=403)
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        response = web.Response(status=204) if asks and headers else await handler(request)
        if not response.prepared:  # a stream has sent its headers already
            response.headers.update(headers)
        return response

    return middleware


def _is_foreign(request: web.Request) -> bool:
    """Whether it comes from a web page of another server."""
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


def _is_plain(text: str) -> bool:
    """Whether a client's text may stand in a header of the answer."""
    return text.isascii() and text.isprintable()


def cors_headers(request: web.Request, origins: tuple[str, ...]) -> dict[str, str]:
    """The headers with which a browser hands the answer to the page; {} for other pages."""
    origin = request.headers.get("Origin")
    if origin is None or not ("*" in origins or origin in origins) or not _is_plain(origin):
        return {}
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
        # Clients such as OpenAI's for browsers send headers of their own, which do no harm.
        "Access-Control-Allow-Headers": wanted
        if wanted and _is_plain(wanted)
        else "Authorization, Content-Type, X-Request-Id",
        "Access-Control-Expose-Headers": "X-Request-Id, X-Coppice-Relaxed, Retry-After",
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every failure with the API's error object."""

    def answer(body: dict[str, Any], status: int, headers: dict[str, str]) -> web.Response:
        request[NOTE].fields |= refused(body["error"])
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        path = without_root(path, request.app.get(ROOT_PATH, ""))
        form = request.app[ERROR_FORMS].get(path)
        if form is not None:
            body = form.write(body, status, request[NOTE].request_id)
        return web.json_response(body, status=status, headers=headers)

    try:
        return await handler(request)
    except BadRequest as error:
        headers = {}
        if error.status == 429:
            headers["Retry-After"] = str(error.retry_after or RETRY_AFTER_SECONDS)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return answer(error.body, error.status, headers)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            text = f"the body must have at most {request.client_max_size:,} bytes (max_body_bytes)"
        elif isinstance(error, web.HTTPNotFound):
            text += "; /openapi.json names what there is"
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return answer(error_body(text, kind="invalid_request_error"), error.status, headers)
    except EngineStopped as error:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return answer(error_body(str(error), kind="server_error"), 503, headers)
    except RequestFailed as error:
        return answer(error_body(str(error), kind="server_error"), 500, {})
    except TimeoutError as error:
        return answer(error_body(str(error), kind="timeout_error"), 504, {})
    except (ConnectionError, asyncio.CancelledError):  # the client has disconnected: no answer
        raise
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        text = f"internal error: {type(error).__name__}: {error}"
        return answer(error_body(text, kind="server_error"), 500, {})


def admitted(access: Access) -> Middleware:
    """Refuses users who may not use the server, or have too many requests."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        if authorization is None and (key := request.headers.get("X-Api-Key")) is not None:
            authorization = f"Bearer {key}"  # as Anthropic's clients send it
        path = path_of(request)
        guest = access.guest(path, authorization)
        request[NOTE].guest = guest
        with access.using(guest, path):
            return await handler(request)

    return middleware

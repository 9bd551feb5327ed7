"""How a part of the server declares a route: its handler, and schemas of what it takes and returns.

Each part returns a list of `Route`s, and `add_routes` puts them into an application. Their schemas
make /openapi.json (see openapi.py).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema (draft 2020-12); its own `$defs` may be referred to as `#/$defs/NAME`."""

_VARIABLE = re.compile(r"{(\w+)(?::[^{}]*)?}")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API other than OpenAI's writes its errors.

    Attributes:
        write: makes an error's body of the OpenAI API's, its status and the id of the request.
        schema: of what it makes.
    """

    write: Callable[[Mapping[str, Any], int, str], dict[str, Any]]
    schema: Schema


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the server.

    Attributes:
        method: the HTTP method, in capitals.
        path: as aiohttp spells it, `/v1/models/{model:.+}` for example; variables are strings.
        handler: returns the answer; it raises BadRequest for what it refuses.
        summary: its purpose, in a few words.
        answers: for each status that is not an error, schemas by content type; text has the schema
            `{"type": "string"}`. All errors have the same shape: a status of 400 and above stands
            here only where the answer has another one.
        body: schema of the JSON body; None: it takes none.
        query: schema of each parameter in the query, none of which is required.
        error: how the route's API writes errors; None: as the OpenAI API does.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answers: Mapping[int, Mapping[str, Schema]]
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    error: ErrorForm | None = None

    @property
    def template(self) -> str:
        """The path as OpenAPI spells it: `/v1/models/{model}`."""
        return _VARIABLE.sub(r"{\1}", self.path)

    @property
    def variables(self) -> list[str]:
        """Names of the path's variables, in order."""
        return _VARIABLE.findall(self.path)


ROOT_PATH = web.AppKey("root_path", str)
"""The path below which an application may be asked, too; "": none."""

ERROR_FORMS = web.AppKey("error_forms", dict[str, ErrorForm])
"""Those of an application's paths whose API has errors of its own."""


def json_answer(schema: Schema, status: int = 200) -> dict[int, dict[str, Schema]]:
    """`answers` of a route that answers with JSON of this schema."""
    return {status: {"application/json": schema}}


def path_of(request: web.Request) -> str:
    """The path that was asked for, without the application's root path."""
    return without_root(request.path, request.app.get(ROOT_PATH, ""))


def without_root(path: str, root: str) -> str:
    """The path without the root path, if it begins with that."""
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def add_routes(app: web.Application, routes: Iterable[Route], root: str = "") -> None:
    """Lets the application serve them, also below `root`; GET answers to HEAD too."""
    routes = list(routes)
    for route in routes if root else ():
        if route.path.startswith(f"{root}/"):  # it would be taken for another path below the root
            raise ValueError(
                f"root_path must not be the beginning of a path of this server, such as "
                f"{route.path}, got {root!r}"
            )
    app[ROOT_PATH] = root
    forms = app.setdefault(ERROR_FORMS, {})
    for route in routes:
        if route.error is not None:
            forms[route.template] = route.error
        for path in (route.path, root + route.path) if root else (route.path,):
            if route.method == "GET":
                app.router.add_get(path, route.handler)
            else:
                app.router.add_route(route.method, path, route.handler)

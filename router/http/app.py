"""The HTTP door as one ASGI application, put together from parts.

A part is a function that takes the Host and returns its routes; PARTS are those that every router offers. More of them, such as a
page, are put into that list.
"""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Scope

from router.http import probes
from router.http.guard import NO_ROUTE, Ended, Guard
from router.http.host import Host, Part

#: What every router offers, asked in this order.
PARTS: tuple[Part, ...] = (probes.routes,)


def build_app(host: Host, ended: Ended, parts: Sequence[Part] = PARTS) -> ASGIApp:
    """The application with the routes of all parts. `ended` hears of every call."""
    routes = [route for part in parts for route in part(host)]

    def route_of(scope: Scope) -> str:
        return _route_of(routes, scope)

    # Without Starlette's own middleware, which would answer with errors in a form of its own.
    return Guard(Router(routes, redirect_slashes=False), route_of, ended)


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The path of the route that answers, as it was declared: paths of requests may be anything."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", NO_ROUTE)) or NO_ROUTE
    return NO_ROUTE

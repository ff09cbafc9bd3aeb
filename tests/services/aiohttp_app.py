"""An aiohttp application with a node in its clean-up context."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

from aiohttp import web

from tests.services.lodger import Lodger

LODGER = web.AppKey("lodger", Lodger)


async def lodge(app: web.Application) -> AsyncIterator[None]:
    app[LODGER] = await Lodger.move_in()
    yield
    await app[LODGER].move_out()


async def describe(request: web.Request) -> web.Response:
    return web.json_response(await request.app[LODGER].describe())


def make_app() -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(lodge)
    app.router.add_get("/node", describe)
    return app


if __name__ == "__main__":
    web.run_app(make_app(), path=sys.argv[1], print=None)

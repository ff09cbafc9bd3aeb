"""A FastAPI application with a node in its lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tests.services.lodger import Lodger


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.lodger = await Lodger.move_in()
    yield
    await app.state.lodger.move_out()


app = FastAPI(lifespan=lifespan)


@app.get("/node")
async def describe() -> dict[str, object]:
    lodger: Lodger = app.state.lodger
    return await lodger.describe()

"""A web service that streams what an actor yields, line by line, while it is computed.

python scripts/examples/stream_service.py [PORT]     then: curl -N http://127.0.0.1:8000/words/5
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpar as ap

try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
except ModuleNotFoundError as error:
    sys.exit(f'stream_service: there is no {error.name}: pip install "asyncpar[serve]"')


class Writer(ap.Actor):
    """Stands for a model that takes its time for each word; on another rank, if you like."""

    @ap.endpoint(concurrency=32)
    async def words(self, count: int) -> AsyncIterator[str]:
        for number in range(count):
            await asyncio.sleep(0.05)
            yield f"word {number}"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    node = await ap.Node.start()
    app.state.writer = await node.spawn(Writer, name="writer")
    yield
    await node.stop()


app = FastAPI(lifespan=lifespan)


@app.get("/words/{count}")
async def words(count: int) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for word in app.state.writer.words.stream(count):  # at the pace of the reader
            yield json.dumps({"word": word}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


if __name__ == "__main__":
    port = sys.argv[1] if len(sys.argv) > 1 else "8000"
    if not port.isdecimal() or int(port) > 65535:
        sys.exit(f"stream_service: expected a port, got {port!r}")
    uvicorn.run(app, port=int(port), log_level="warning")

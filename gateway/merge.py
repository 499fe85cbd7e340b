"""Several completions as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
_QUEUED = 16


async def merged(
    streams: Iterable[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items of all streams with their stream's index, as they come; close all at the end.

    The first error of any stream ends it and is raised.
    """
    all_streams = list(streams)
    if len(all_streams) == 1:  # the common case needs neither tasks nor a queue
        async with aclosing(all_streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_QUEUED)
    tasks = [asyncio.create_task(_pump(n, stream, queue)) for n, stream in enumerate(all_streams)]
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one_ahead(streams: Sequence[AsyncGenerator[T, None]]) -> list[AsyncGenerator[T, None]]:
    """Return the streams; all but the first begin once the first has yielded an item."""
    if len(streams) == 1:
        return list(streams)
    begun = asyncio.Event()
    return [_announced(streams[0], begun), *(_begun_after(begun, other) for other in streams[1:])]


async def _announced(
    stream: AsyncGenerator[T, None], begun: asyncio.Event
) -> AsyncGenerator[T, None]:
    async with aclosing(stream):
        async for item in stream:
            begun.set()
            yield item


async def _begun_after(
    begun: asyncio.Event, stream: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    async with aclosing(stream):
        await begun.wait()
        async for item in stream:
            yield item


async def _pump(
    index: int,
    stream: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | BaseException | None],
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)

"""Several asynchronous generators at once, as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

Item = TypeVar("Item")


async def interleaved(
    sources: list[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of all sources as they come, each with the index of its source.

    An error of a source ends everything, ahead of items that have come meanwhile. However it ends,
    every source is closed before this generator is: closing it, or cancelling the task that waits
    for it, frees them all.
    """
    if len(sources) == 1:  # no need for a task
        async with contextlib.aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, Item] | asyncio.Task] = asyncio.Queue()

    async def drain(index: int, source: AsyncGenerator[Item, None]) -> None:
        async with contextlib.aclosing(source):
            async for item in source:
                arrivals.put_nowait((index, item))

    tasks = [asyncio.create_task(drain(index, source)) for index, source in enumerate(sources)]
    for task in tasks:
        task.add_done_callback(arrivals.put_nowait)
    try:
        running = len(tasks)
        while running:
            arrival = await arrivals.get()
            for task in tasks:
                if task.done():
                    task.result()
            if isinstance(arrival, asyncio.Task):
                running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

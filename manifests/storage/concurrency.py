"""One function over many arguments at a time, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from relabel.manifests.storage.run_store_ports import RunStore

ItemT = TypeVar("ItemT")


ResultT = TypeVar("ResultT")


_AT_A_TIME = 1024


def map_concurrent(store: RunStore, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`map`, with as many calls under way as the store deserves; results in the order of the items."""
    if store.readers <= 1:
        yield from map(function, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(store.readers, thread_name_prefix="read") as pool:
        while some := list(itertools.islice(left, _AT_A_TIME)):
            yield from pool.map(function, some)

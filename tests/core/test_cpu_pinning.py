"""Compute threads are kept on the cores that the configuration names."""

from __future__ import annotations

import os
import threading

import pytest

from dflash_core.cpu.pinning import pin, rank_cores

can_pin = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a system that can pin threads"
)


def test_every_rank_has_its_cores() -> None:
    assert rank_cores("0-3,8", 1) == ({0, 1, 2, 3, 8},)
    assert rank_cores("0-1|2-3", 2) == ({0, 1}, {2, 3})


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("0-7", 2, "has cores for 1 ranks, but tensor_parallel_size is 2; separate"),
        ("0|1|2", 2, "has cores for 3 ranks"),
        ("", 1, "neither a core number nor a range"),
        ("0|x", 2, "'x' is neither"),
        ("3-1", 1, "must ascend"),
    ],
)
def test_what_is_no_list_of_cores_says_why(text: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_cores(text, ranks)


@can_pin
def test_threads_that_a_pinned_thread_starts_stay_there_too() -> None:
    core = max(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def child() -> None:
        seen.append(os.sched_getaffinity(0))

    def pinned() -> None:
        pin(frozenset({core}))
        started = threading.Thread(target=child)
        started.start()
        started.join()

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) >= {core}, "other threads are as before"


@can_pin
def test_a_core_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    with pytest.raises(ValueError, match=f"names 99999, but this process may use {allowed};"):
        pin(frozenset({99999}))

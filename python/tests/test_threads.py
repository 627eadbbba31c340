"""Thread counts, the GIL, forks."""

import multiprocessing
import os
import threading
import time

import pytest
import torch
from samples import B, W, X

import volup


def test_thread_counts_agree() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_other_python_threads_go_on() -> None:
    # On one thread, some 10 GFLOP last long enough on any machine for another thread to be seen.
    input, weight = torch.randn(1, 32, 56, 56, 56), torch.randn(32, 32, 3, 3, 3)
    ticks = []
    started, done = threading.Event(), threading.Event()

    def tick() -> None:
        started.set()
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    before = torch.get_num_threads()
    thread = threading.Thread(target=tick)
    try:
        torch.set_num_threads(1)
        thread.start()
        started.wait()
        begin = time.perf_counter()
        volup.conv_transpose3d(input, weight)
        end = time.perf_counter()
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(before)
    # With the GIL held, no tick could lie inside the call but at its very ends.
    inside = [t for t in ticks if begin + 0.2 * (end - begin) < t < begin + 0.8 * (end - begin)]
    assert inside


def test_many_python_threads_at_once() -> None:
    expected = volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3, activation="gelu")
    wrong = []

    def work() -> None:
        for _ in range(20):
            got = volup.conv_transpose3d_block(X, W, B, 2, norm_groups=3, activation="gelu")
            if not torch.equal(got, expected):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def compute_in_child(queue) -> None:
    torch.set_num_threads(2)
    queue.put(volup.conv_transpose3d(X, W, B).sum().item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_computes_after_a_fork() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = volup.conv_transpose3d(X, W, B).sum().item()
    finally:
        torch.set_num_threads(before)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=compute_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(expected, rel=1e-4)
    child.join(timeout=60)
    assert child.exitcode == 0

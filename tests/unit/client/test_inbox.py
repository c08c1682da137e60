"""What a session's thread waits for: what others put, and its socket."""

from __future__ import annotations

import random
import socket
import threading
import time

from kvdepot.client.inbox import Inbox

from tests.rigs.patience import Deadline, patient


def test_an_inbox_wakes_for_what_is_put_and_for_its_socket() -> None:
    inbox: Inbox[int] = Inbox()
    ours, theirs = socket.socketpair()
    assert not inbox.wait(0.0)
    threading.Timer(0.05, inbox.put, (1,)).start()
    limit = Deadline(20)
    assert not inbox.wait(patient(30.0)), "it was no socket"
    assert not limit.is_over()
    assert (inbox.take(), inbox.take()) == (1, None)
    inbox.watch(ours.fileno())
    threading.Timer(0.05, theirs.send, (b"x",)).start()
    assert inbox.wait(patient(30.0))
    inbox.watch(ours.fileno(), writable=True)
    assert ours.recv(1) == b"x" and inbox.wait(patient(30.0)), "writable"
    inbox.unwatch()
    ours.close()
    theirs.close()
    assert not inbox.wait(0.0)


def test_an_inbox_no_longer_waits_for_a_socket_that_it_was_told_to_forget() -> None:
    inbox: Inbox[int] = Inbox()
    pairs = [socket.socketpair() for _ in range(2)]
    inbox.unwatch()  # nothing to forget
    for ours, theirs in pairs:
        inbox.watch(ours.fileno())
        theirs.send(b"x")
        assert inbox.wait(patient(30.0))
        inbox.unwatch()
        assert not inbox.wait(0.0)
    for one in (*pairs[0], *pairs[1]):
        one.close()


def test_nothing_that_many_threads_put_is_slept_through() -> None:
    inbox: Inbox[int] = Inbox()
    count, threads = 2000, 4

    def put() -> None:
        for number in range(count):
            inbox.put(number)
            if random.random() < 0.02:
                time.sleep(0.0005)

    for _ in range(threads):
        threading.Thread(target=put).start()
    taken, until = 0, Deadline(60)
    while taken < count * threads:
        assert not until.is_over(), "it sleeps although something was put"
        inbox.wait(patient(30.0))
        while inbox.take() is not None:
            taken += 1

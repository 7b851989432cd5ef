#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""The broker by its raw ioctls, without libibgda: Python's standard library alone.

    python3 examples/python-ioctl/main.py GPU NIC [--wait SECONDS]

For the author of a runtime that has its own way to queues and only wants /dev/ibgda: what to call, in which order, what
comes back, and what each errno means. abi.py is uapi/ibgda.h, errors.py its tables of errors, broker.py a session,
uverbs.py what is needed of mlx5 to have a UAR at all. The policy must allow the pair (ibgda policy add GPU@NIC).

It binds the pair, allocates queue memory, maps the status page, imports a doorbell, is told of a UAR that is destroyed,
and shows what errors look like. With --wait it then waits for an event from outside, such as the pair's removal from the
policy (ibgda policy remove GPU@NIC). Nothing is rung: a doorbell without a queue behind it is an error to the NIC.

Exit status: 0 all steps done; 1 a step failed, with the reason; 2 wrong arguments.
"""

import argparse
import ctypes
import errno
import os
import sys
import time

import abi
from broker import Session, parse_bdf
from errors import BrokerError
from uverbs import Uverbs

PATIENCE_S = 30


def names(prefix):
    """Constants of abi.py by value: {1: "ready", …}."""
    return {value: name[len(prefix) :].lower() for name, value in vars(abi).items() if name.startswith(prefix)}


PATHS, STATES, REASONS, EVENTS = (
    names(prefix) for prefix in ("IBGDA_PATH_", "IBGDA_STATE_", "IBGDA_REASON_", "IBGDA_EVENT_")
)


def step(text):
    print(text, flush=True)


def refused(what, call, wanted):
    """A call that must fail, and so that one sees what that looks like."""
    try:
        call()
    except BrokerError as error:
        if error.errno != wanted:
            raise
        step(f"{what}: {error}")
        return
    raise RuntimeError(f"{what}: it was not refused")


def describe(event):
    ago = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - event.time_ns) / 1e6
    return (
        f"{EVENTS.get(event.type, event.type)}, reason {REASONS.get(event.reason, event.reason)}, "
        f"generation {event.generation}, handle {event.handle}, {ago:.1f} ms ago"
    )


def show_state(session):
    state = session.state()
    step(
        f"status page: {STATES.get(state.state, state.state)}, generation {state.generation}, "
        f"reason {REASONS.get(state.reason, state.reason)}, port state {state.port_state}, {state.port_mbps} Mb/s"
    )
    return state


def tour(gpu, nic, wait):
    with Session() as session:
        info = session.info()
        step(
            f"ABI {info.abi_version}, features {info.features:#x}; a session may have {info.max_doorbells} doorbells, "
            f"{info.max_queues} queue memories of up to {info.max_queue_bytes} bytes"
        )
        refused("before it is bound", lambda: session.queue(4096), errno.ENOTCONN)

        bound = session.bind(gpu, nic)
        step(
            f"bound: {bound.ibdev_name.decode()}, path {PATHS.get(bound.path, bound.path)} (distance {bound.path_distance}), "
            f"NUMA nodes {bound.gpu_node} and {bound.nic_node}, NIC's link {bound.nic_link.speed} MT/s x{bound.nic_link.width}, "
            f"generation {bound.generation}"
        )
        eventfd = session.eventfd()
        if show_state(session).state != abi.IBGDA_STATE_READY:
            raise RuntimeError("the session is not ready")

        handle, queue = session.queue(64 << 10)
        if any(queue.memory[:]):
            raise RuntimeError("queue memory is not zeroed")
        queue.memory[:5] = b"WQEs."
        step(f"queue memory: handle {handle}, {len(queue.memory)} bytes at {queue.address():#x}")
        refused("a length that is no page's", lambda: session.queue(100), errno.EINVAL)
        refused("a handle of nothing", lambda: session.release(handle + 1000), errno.ENOENT)

        with Uverbs(nic) as uverbs:
            doorbell(session, uverbs, eventfd)
        session.release(handle)

        if wait:
            step(f"waiting up to {wait} s for an event")
            events = session.wait_for_events(eventfd, wait)
            if not events:
                raise RuntimeError(f"no event came within {wait} s")
            for event in events:
                step(f"event: {describe(event)}")
            show_state(session)
            if events[-1].type == abi.IBGDA_EVENT_LOST:
                refused("a lost session", lambda: session.queue(4096), errno.ENOLINK)
    step("all steps done")


def doorbell(session, uverbs, eventfd):
    uar, page_id, offset = uverbs.alloc_uar()
    dmabuf = uverbs.export(offset)
    try:
        refused("the two files in the wrong order", lambda: session.doorbell(uverbs.file, dmabuf), errno.EBADF)
        got, page = session.doorbell(dmabuf, uverbs.file)
    finally:
        # The broker holds what it imported.
        os.close(dmabuf)
    step(
        f"doorbell: UAR {page_id:#x}, handle {got.handle}, BAR0 + {got.bar_offset:#x}, "
        f"{'UC' if got.mem_type == abi.IBGDA_MEM_UC else 'WC'}, at {page.address():#x}: for cuMemHostRegister(IOMEMORY)"
    )

    # What other ways of losing a doorbell look like too: the driver revokes the page, the broker tells.
    uverbs.destroy_uar(uar)
    events = session.wait_for_events(eventfd, PATIENCE_S)
    if [(event.type, event.handle) for event in events] != [(abi.IBGDA_EVENT_DOORBELL, got.handle)]:
        raise RuntimeError(f"the UAR is destroyed, and the events are {[describe(event) for event in events]}")
    step(f"event: {describe(events[0])}")
    # The mapping leads to a private page now: a late store harms nothing.
    ctypes.c_uint64.from_buffer(page.memory, 0x800).value = 0
    session.release(got.handle)


def main():
    parser = argparse.ArgumentParser(description="The broker by its raw ioctls.")
    parser.add_argument("gpu", help="PCI address of the GPU, such as 0000:65:00.0")
    parser.add_argument("nic", help="PCI address of the NIC")
    parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="wait for an event at the end")
    arguments = parser.parse_args()
    try:
        for address in (arguments.gpu, arguments.nic):
            parse_bdf(address)
    except ValueError as error:
        parser.error(str(error))
    try:
        tour(arguments.gpu, arguments.nic, arguments.wait)
    except (BrokerError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

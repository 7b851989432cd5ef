# SPDX-License-Identifier: MIT OR Apache-2.0
"""/dev/ibgda by its ioctls and mappings: all that a runtime needs of the broker, in the order in which it needs it."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import select
from contextlib import ExitStack
from dataclasses import dataclass

import abi
from errors import BrokerError

DEVICE = "/dev/ibgda"
# The broker keeps the last 64 records.
MOST_EVENTS = 64


def parse_bdf(text):
    """0000:65:00.0 as the ABI has it."""
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", text)
    if not found:
        raise ValueError(f"{text!r} is no PCI address: write it as lspci -D does, 0000:65:00.0")
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return abi.ibgda_bdf(domain=domain, bus=bus, device=device, function=function)


@dataclass
class State:
    """What the status page says."""

    state: int
    generation: int
    reason: int
    port_state: int
    port_mbps: int
    changed_ns: int


class Mapping:
    """Memory of the broker. Python's mmap holds the device file open as well, until the mapping is gone."""

    def __init__(self, file, length, protection, offset, what):
        try:
            self.memory = mmap.mmap(file, length, mmap.MAP_SHARED, protection, offset=offset)
        except OSError as error:
            raise BrokerError("mmap", what, error) from None

    def address(self):
        """For drivers that take a pointer, such as cuMemHostRegister; of a writable mapping."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def word(self, index):
        """The 64-bit word at this place, in one load."""
        with memoryview(self.memory) as view, view.cast("Q") as words:
            return words[index]

    def close(self):
        self.memory.close()


class Session:
    """One open file of the broker, which this process alone may use: not a child of it, and not after exec."""

    def __init__(self):
        try:
            self.file = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BrokerError("open", DEVICE, error) from None
        self.open = ExitStack()
        self.open.callback(os.close, self.file)
        self.status = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open.close()

    def call(self, command, argument, values=""):
        """The ioctl of this name. The kernel writes its answer into the argument. Python repeats what a signal cut short."""
        try:
            fcntl.ioctl(self.file, getattr(abi, command), argument)
        except OSError as error:
            raise BrokerError(command, values, error) from None
        return argument

    def info(self):
        info = self.call("IBGDA_IOC_INFO", abi.ibgda_info())
        if (info.abi_version, info.page_size) != (abi.IBGDA_ABI_VERSION, abi.IBGDA_PAGE_SIZE):
            raise RuntimeError(
                f"the module speaks ABI {info.abi_version} with pages of {info.page_size} bytes, this program ABI "
                f"{abi.IBGDA_ABI_VERSION} with {abi.IBGDA_PAGE_SIZE}; load an ibgda.ko that fits"
            )
        return info

    def bind(self, gpu, nic):
        """Joins a GPU and a NIC, for good; maps the status page."""
        argument = abi.ibgda_bind(gpu=parse_bdf(gpu), nic=parse_bdf(nic))
        bound = self.call("IBGDA_IOC_BIND", argument, f"GPU {gpu}, NIC {nic}")
        place = self.call("IBGDA_IOC_STATUS", abi.ibgda_status_map())
        # The kernel alone writes there: a mapping that asks for more is refused.
        self.status = self._map(abi.IBGDA_PAGE_SIZE, mmap.PROT_READ, place.mmap_offset, "status page")
        return bound

    def rebind(self):
        """Joins the NIC again after it was lost and came back. Doorbells of before stay lost."""
        return self.call("IBGDA_IOC_REBIND", abi.ibgda_bind())

    def state(self):
        """Of one moment: the sequence is odd while the kernel writes, and another afterwards."""
        while True:
            before = self.status.word(abi.IBGDA_STATUS_WORD_SEQUENCE)
            words = [self.status.word(index) for index in range(abi.IBGDA_STATUS_WORDS)]
            if before % 2 == 0 and words[abi.IBGDA_STATUS_WORD_SEQUENCE] == before:
                break
        low, high = (lambda word: word & 0xFFFFFFFF), (lambda word: word >> 32)
        state, reason, port = (
            words[abi.IBGDA_STATUS_WORD_STATE],
            words[abi.IBGDA_STATUS_WORD_REASON],
            words[abi.IBGDA_STATUS_WORD_PORT],
        )
        changed = words[abi.IBGDA_STATUS_WORD_TIME]
        return State(low(state), high(state), high(reason), high(port), low(port), changed)

    def queue(self, length, mem_type=abi.IBGDA_MEM_WB, node=-1):
        """Zeroed memory for queues, pinned: a handle, and the mapping."""
        argument = abi.ibgda_queue_alloc(length=length, node=node, mem_type=mem_type)
        made = self.call("IBGDA_IOC_QUEUE_ALLOC", argument, f"{length} bytes")
        both = mmap.PROT_READ | mmap.PROT_WRITE
        return made.handle, self._map(length, both, made.mmap_offset, f"{length} bytes of queue memory")

    def doorbell(self, dmabuf, uverbs, mem_type=abi.IBGDA_MEM_UC):
        """Imports a UAR page; maps it and fills the page-table entry, as drivers that walk page tables need it."""
        argument = abi.ibgda_doorbell_import(dmabuf_fd=dmabuf, uverbs_fd=uverbs, mem_type=mem_type)
        got = self.call("IBGDA_IOC_DOORBELL_IMPORT", argument, f"dma-buf {dmabuf}, uverbs {uverbs}")
        both = mmap.PROT_READ | mmap.PROT_WRITE
        page = self._map(abi.IBGDA_PAGE_SIZE, both, got.mmap_offset, "doorbell page")
        populate = abi.ibgda_populate(handle=got.handle, address=page.address())
        self.call("IBGDA_IOC_POPULATE", populate, f"doorbell {got.handle}")
        return got, page

    def release(self, handle):
        """Gives a doorbell or queue memory back. A doorbell's page stays this process's until that is dead."""
        self.call("IBGDA_IOC_RELEASE", abi.ibgda_release(handle=handle), f"handle {handle}")

    def eventfd(self):
        """An eventfd that counts up at each new record."""
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.open.callback(os.close, fd)
        self.call("IBGDA_IOC_EVENTFD", abi.ibgda_eventfd(fd=fd), f"fd {fd}")
        return fd

    def events(self):
        """The records of what happened, oldest first; none is an empty list."""
        records = (abi.ibgda_event * MOST_EVENTS)()
        argument = abi.ibgda_events(records=ctypes.addressof(records), capacity=MOST_EVENTS)
        try:
            taken = self.call("IBGDA_IOC_EVENTS", argument)
        except BrokerError as error:
            if error.errno == errno.EAGAIN:
                return []
            raise
        return list(records[: taken.count])

    def wait_for_events(self, eventfd, seconds):
        """The records, as soon as there are any; an empty list when the time is over."""
        poll = select.poll()
        poll.register(eventfd, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return []
        os.eventfd_read(eventfd)
        return self.events()

    def _map(self, length, protection, offset, what):
        mapping = Mapping(self.file, length, protection, offset, what)
        self.open.callback(mapping.close)
        return mapping

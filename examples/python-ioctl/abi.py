# SPDX-License-Identifier: MIT OR Apache-2.0
"""uapi/ibgda.h in Python: the structures and numbers of /dev/ibgda, under the names they have there.

That header documents them. layout_test.py compares every structure, field and number with it by a C compiler. All
fields lie on multiples of their size, so that no compiler puts bytes in between, for 32-bit callers either.
"""

import ctypes

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
S32 = ctypes.c_int32

IBGDA_ABI_VERSION = 1
IBGDA_IOC_TYPE = 0xBD
IBGDA_PAGE_SIZE = 4096

# The ioctl numbers are _IO(type, number): they carry no size, which travels in the argument.
IBGDA_IOC_INFO = 0xBD00
IBGDA_IOC_BIND = 0xBD01
IBGDA_IOC_DOORBELL_IMPORT = 0xBD02
IBGDA_IOC_QUEUE_ALLOC = 0xBD03
IBGDA_IOC_POPULATE = 0xBD04
IBGDA_IOC_STATUS = 0xBD05
IBGDA_IOC_RELEASE = 0xBD06
IBGDA_IOC_EVENTFD = 0xBD07
IBGDA_IOC_EVENTS = 0xBD08
IBGDA_IOC_REBIND = 0xBD09

IBGDA_FEATURE_DOORBELL_UC = 1 << 0
IBGDA_FEATURE_DOORBELL_WC = 1 << 1
IBGDA_FEATURE_QUEUE_UC = 1 << 2
IBGDA_FEATURE_QUEUE_WC = 1 << 3
IBGDA_FEATURE_EVENTS = 1 << 4
IBGDA_FEATURE_REBIND = 1 << 5

IBGDA_PATH_SWITCH = 1
IBGDA_PATH_HOST_BRIDGE = 2
IBGDA_PATH_NONE = 3

IBGDA_MEM_WB = 0
IBGDA_MEM_UC = 1
IBGDA_MEM_WC = 2

IBGDA_EVENT_LOST = 1
IBGDA_EVENT_RECOVERED = 2
IBGDA_EVENT_DOORBELL = 3
IBGDA_EVENT_OVERFLOW = 4

IBGDA_STATUS_WORD_STATE = 0
IBGDA_STATUS_WORD_REASON = 1
IBGDA_STATUS_WORD_PORT = 2
IBGDA_STATUS_WORD_TIME = 3
IBGDA_STATUS_WORD_SEQUENCE = 4
IBGDA_STATUS_WORDS = 8

IBGDA_STATE_READY = 1
IBGDA_STATE_LOST = 2
IBGDA_STATE_RECOVERED = 3

IBGDA_REASON_NONE = 0
IBGDA_REASON_NIC_RESET = 1
IBGDA_REASON_NIC_REMOVED = 2
IBGDA_REASON_GPU_REMOVED = 3
IBGDA_REASON_POLICY = 4
IBGDA_REASON_UAR_DESTROYED = 5


class Structure(ctypes.Structure):
    """One of the header's. What is not given is 0, as reserved fields must be."""


class Argument(Structure):
    """One that an ioctl takes: it begins with its own size as the caller knows it."""

    def __init__(self, **values):
        super().__init__(size=ctypes.sizeof(type(self)), **values)


class ibgda_info(Argument):
    _fields_ = [
        ("size", U32),
        ("flags", U32),
        ("abi_version", U32),
        ("page_size", U32),
        ("features", U64),
        ("max_doorbells", U32),
        ("max_queues", U32),
        ("max_queue_bytes", U64),
    ]


class ibgda_bdf(Structure):
    _fields_ = [("domain", U32), ("bus", U8), ("device", U8), ("function", U8), ("reserved", U8)]


class ibgda_link(Structure):
    _fields_ = [("speed", U32), ("speed_max", U32), ("width", U16), ("width_max", U16)]


class ibgda_bind(Argument):
    _fields_ = [
        ("size", U32),
        ("flags", U32),
        ("gpu", ibgda_bdf),
        ("nic", ibgda_bdf),
        ("ibdev_name", ctypes.c_char * 64),
        ("path", U32),
        ("path_distance", S32),
        ("gpu_node", S32),
        ("nic_node", S32),
        ("gpu_link", ibgda_link),
        ("nic_link", ibgda_link),
        ("generation", U32),
        ("reserved", U32),
    ]


class ibgda_doorbell_import(Argument):
    _fields_ = [
        ("size", U32),
        ("flags", U32),
        ("dmabuf_fd", S32),
        ("uverbs_fd", S32),
        ("mem_type", U32),
        ("handle", U32),
        ("mmap_offset", U64),
        ("bar_offset", U64),
    ]


class ibgda_queue_alloc(Argument):
    _fields_ = [
        ("size", U32),
        ("flags", U32),
        ("length", U64),
        ("node", S32),
        ("mem_type", U32),
        ("handle", U32),
        ("reserved", U32),
        ("mmap_offset", U64),
    ]


class ibgda_populate(Argument):
    _fields_ = [("size", U32), ("handle", U32), ("address", U64)]


class ibgda_status_map(Argument):
    _fields_ = [("size", U32), ("flags", U32), ("mmap_offset", U64)]


class ibgda_release(Argument):
    _fields_ = [("size", U32), ("handle", U32)]


class ibgda_eventfd(Argument):
    _fields_ = [("size", U32), ("fd", S32)]


class ibgda_event(Structure):
    _fields_ = [("type", U32), ("reason", U32), ("generation", U32), ("handle", U32), ("time_ns", U64)]


class ibgda_events(Argument):
    _fields_ = [("size", U32), ("flags", U32), ("records", U64), ("capacity", U32), ("count", U32)]

# SPDX-License-Identifier: MIT OR Apache-2.0
"""A UAR of an mlx5 NIC, and its dma-buf, by the ioctls of /dev/infiniband/uverbsN: no libibverbs, no libmlx5.

Numbers and layouts: the kernel's rdma/rdma_user_ioctl_cmds.h, rdma/ib_user_ioctl_cmds.h, rdma/mlx5-abi.h and
rdma/mlx5_user_ioctl_cmds.h. A runtime that links rdma-core has mlx5dv_devx_alloc_uar for the first and, from rdma-core 63
on (MLX5_1.26), mlx5dv_devx_uar_export_dmabuf_fd for the second.
"""

import ctypes
import fcntl
import os
from contextlib import ExitStack

from errors import BrokerError

# _IOWR(RDMA_IOCTL_MAGIC, 1, struct ib_uverbs_ioctl_hdr)
RDMA_VERBS_IOCTL = 0xC0181B01
DRIVER_MLX5 = 1
# 1 << UVERBS_ID_NS_SHIFT: where a driver's own ids begin.
DRIVER = 0x1000
MANDATORY = 1

# Objects, methods and their attributes.
OBJECT_DEVICE, GET_CONTEXT = 0, 3
UHW_IN, UHW_OUT = DRIVER, DRIVER + 1
OBJECT_DMABUF, DMABUF_ALLOC = 18, 0
OBJECT_UAR, UAR_ALLOC, UAR_DESTROY = DRIVER + 8, DRIVER, DRIVER + 1

# MLX5_IB_ALLOC_UCTX_DEVX; MLX5_LIB_CAP_4K_UAR | MLX5_LIB_CAP_DYN_UAR.
ALLOC_UCTX_DEVX = 1
LIB_CAPS = 3
# MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC: a page for doorbells alone, uncached.
UAR_NON_CACHED = 1


class Header(ctypes.Structure):
    """struct ib_uverbs_ioctl_hdr"""

    _fields_ = [
        ("length", ctypes.c_uint16),
        ("object_id", ctypes.c_uint16),
        ("method_id", ctypes.c_uint16),
        ("num_attrs", ctypes.c_uint16),
        ("reserved1", ctypes.c_uint64),
        ("driver_id", ctypes.c_uint32),
        ("reserved2", ctypes.c_uint32),
    ]


class Attribute(ctypes.Structure):
    """struct ib_uverbs_attr"""

    _fields_ = [
        ("attr_id", ctypes.c_uint16),
        ("len", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
        ("reserved", ctypes.c_uint16),
        ("data", ctypes.c_uint64),
    ]


class AllocUcontext(ctypes.Structure):
    """struct mlx5_ib_alloc_ucontext_req_v2"""

    _fields_ = [
        ("total_num_bfregs", ctypes.c_uint32),
        ("num_low_latency_bfregs", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("comp_mask", ctypes.c_uint32),
        ("max_cqe_version", ctypes.c_uint8),
        ("reserved0", ctypes.c_uint8),
        ("reserved1", ctypes.c_uint16),
        ("reserved2", ctypes.c_uint32),
        ("lib_caps", ctypes.c_uint64),
    ]


def pointer(attribute, value):
    """An attribute that lies elsewhere; what has 8 bytes or less goes inline when the kernel only reads it."""
    return Attribute(attribute, ctypes.sizeof(value), MANDATORY, 0, ctypes.addressof(value))


def inline(attribute, length, data):
    return Attribute(attribute, length, MANDATORY, 0, data)


class Uverbs:
    """An open device of a NIC, with a context: what is made through it ends with it."""

    def __init__(self, nic):
        folder = f"/sys/bus/pci/devices/{nic}/infiniband_verbs"
        try:
            self.path = f"/dev/infiniband/{os.listdir(folder)[0]}"
            self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, IndexError) as error:
            raise RuntimeError(f"NIC {nic} has no verbs device: {error}; is it bound to mlx5_ib?") from None
        self.open = ExitStack()
        self.open.callback(os.close, self.file)
        # As many of the driver's own registers as it insists on; they are not used.
        request = AllocUcontext(total_num_bfregs=8, flags=ALLOC_UCTX_DEVX, lib_caps=LIB_CAPS)
        answer = (ctypes.c_uint8 * 64)()
        self._call("GET_CONTEXT", OBJECT_DEVICE, GET_CONTEXT, pointer(UHW_IN, request), pointer(UHW_OUT, answer))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open.close()

    def _call(self, name, object_id, method, *attributes):
        class Request(ctypes.Structure):
            _fields_ = [("header", Header), ("attributes", Attribute * len(attributes))]

        header = Header(ctypes.sizeof(Request), object_id, method, len(attributes), 0, DRIVER_MLX5, 0)
        request = Request(header, (Attribute * len(attributes))(*attributes))
        try:
            fcntl.ioctl(self.file, RDMA_VERBS_IOCTL, request)
        except OSError as error:
            raise BrokerError(name, self.path, error) from None
        return request.attributes

    def alloc_uar(self):
        """A UAR: its handle, firmware's index of the page, and where the page is in this file."""
        offset, length, page = ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint32()
        made = self._call(
            "UAR_OBJ_ALLOC",
            OBJECT_UAR,
            UAR_ALLOC,
            inline(DRIVER, 0, 0),
            inline(DRIVER + 1, 8, UAR_NON_CACHED),
            pointer(DRIVER + 2, offset),
            pointer(DRIVER + 3, length),
            pointer(DRIVER + 4, page),
        )
        return made[0].data, page.value, offset.value

    def destroy_uar(self, handle):
        """Revokes its dma-bufs, at once."""
        self._call("UAR_OBJ_DESTROY", OBJECT_UAR, UAR_DESTROY, inline(DRIVER, 0, handle))

    def export(self, offset):
        """The page's dma-buf, for the caller to close."""
        made = self._call("DMABUF_ALLOC", OBJECT_DMABUF, DMABUF_ALLOC, inline(0, 0, 0), inline(1, 8, offset))
        return made[0].data

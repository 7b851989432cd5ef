# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an errno of an ioctl means, and what to do: the header's tables in words."""

import errno
import os


class BrokerError(OSError):
    """What failed, with which values, why, and what to do."""

    def __init__(self, command, values, error):
        self.command = command
        why, advice = explain(command, error.errno)
        where = f"{command} ({values})" if values else command
        name = errno.errorcode.get(error.errno, str(error.errno))
        text = f"{where}: {name}: {why or os.strerror(error.errno)}"
        super().__init__(error.errno, f"{text}; {advice}" if advice else text)

    def __str__(self):
        return self.strerror


# By command and errno; of any command by errno alone.
WORDS = {
    ("open", "ENOENT"): ("the broker's module is not loaded", "modprobe ibgda"),
    ("open", "EACCES"): ("no permission", "the device file's mode and group decide who may"),
    ("EPERM",): ("this session belongs to another process", "open the device again after fork or exec"),
    ("ENOTTY",): ("the module does not know this command", "load a newer ibgda.ko"),
    ("E2BIG",): ("the module is older than this structure", "load a newer ibgda.ko"),
    ("ENOTCONN",): ("the session is not bound", "IBGDA_IOC_BIND first"),
    ("ENOLINK",): ("the NIC was reset or taken away", "IBGDA_IOC_REBIND, then new doorbells and queues"),
    ("ENOENT",): ("no such handle in this session", "pass the handle that the command gave, once"),
    ("IBGDA_IOC_BIND", "ENODEV"): ("no such PCI function", "see lspci -D for what there is"),
    ("IBGDA_IOC_BIND", "EINVAL"): (
        "the first is no GPU, or the second no RDMA NIC of mlx5_ib",
        "pass the GPU's and the NIC's addresses, in this order",
    ),
    ("IBGDA_IOC_BIND", "EACCES"): (
        "the policy does not allow this pair",
        "as root: mkdir /sys/kernel/config/ibgda/allow/GPU@NIC, or ibgda policy add GPU@NIC",
    ),
    ("IBGDA_IOC_BIND", "EXDEV"): (
        "the GPU cannot reach the NIC peer to peer",
        "put both below one PCIe switch, or write 1 to the policy entry's any_path and let the CPU ring",
    ),
    ("IBGDA_IOC_BIND", "EALREADY"): ("this session is bound already", "open the device again for another pair"),
    ("IBGDA_IOC_BIND", "EHOSTDOWN"): ("the NIC is being reset", "try again in a second"),
    ("IBGDA_IOC_REBIND", "EACCES"): ("the policy no longer allows this pair", "ask the administrator"),
    ("IBGDA_IOC_REBIND", "EAGAIN"): ("the NIC is not back yet", "try again in a second"),
    ("IBGDA_IOC_REBIND", "EHOSTDOWN"): ("the NIC's recovery failed, or it was unplugged", "see the kernel's log"),
    ("IBGDA_IOC_REBIND", "EINVAL"): ("the session is not lost", "there is nothing to rebind"),
    ("IBGDA_IOC_DOORBELL_IMPORT", "EBADF"): ("not a dma-buf, or not a uverbs file", "check the order of the two"),
    ("IBGDA_IOC_DOORBELL_IMPORT", "EINVAL"): (
        "the dma-buf is not one page that this uverbs file exported, or its UAR is gone",
        "export the UAR of the uverbs file that you pass",
    ),
    ("IBGDA_IOC_DOORBELL_IMPORT", "ERANGE"): ("the page is not in the bound NIC's BAR", "export a UAR of that NIC"),
    ("IBGDA_IOC_DOORBELL_IMPORT", "EBUSY"): (
        "another process holds this page, or it has another memory type",
        "allocate another UAR; a page is free when its last owner is dead",
    ),
    ("IBGDA_IOC_DOORBELL_IMPORT", "EDQUOT"): ("too many doorbells", "release some"),
    ("IBGDA_IOC_DOORBELL_IMPORT", "EOPNOTSUPP"): ("no doorbell is write-back", "ask for UC"),
    ("IBGDA_IOC_QUEUE_ALLOC", "EINVAL"): (
        "the length is zero, not a multiple of 4096, or too large",
        "round up to pages, at most IBGDA_IOC_INFO's max_queue_bytes",
    ),
    ("IBGDA_IOC_QUEUE_ALLOC", "EOPNOTSUPP"): ("this memory type is not offered here", "ask for WB"),
    ("IBGDA_IOC_QUEUE_ALLOC", "EDQUOT"): ("more locked memory than allowed", "raise RLIMIT_MEMLOCK (ulimit -l)"),
    ("IBGDA_IOC_POPULATE", "EFAULT"): ("the address is not this doorbell's mapping", "pass what mmap gave"),
    ("IBGDA_IOC_EVENTFD", "EBADF"): ("not an eventfd", "make one with os.eventfd"),
    ("IBGDA_IOC_EVENTS", "EAGAIN"): ("nothing has happened", "poll the eventfd"),
    ("DMABUF_ALLOC", "EOPNOTSUPP"): ("this kernel exports no UAR as a dma-buf", "Linux 7.1 or later has it"),
    ("DMABUF_ALLOC", "EPROTONOSUPPORT"): ("this kernel exports no UAR as a dma-buf", "Linux 7.1 or later has it"),
}


def explain(command, number):
    name = errno.errorcode.get(number, "")
    return WORDS.get((command, name)) or WORDS.get((name,)) or ("", "")

/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * ioctl ABI of /dev/ibgda: the source of truth. Rust definitions, in the
 * module and in user space, are generated from this file by bindgen.
 *
 * Extension rule (as in openat2(2) and iommufd): every argument begins with
 * its own size as the caller knows it. A shorter one is zero-extended by the
 * kernel; a longer one must be zero beyond what the kernel knows, else E2BIG,
 * as is one of more than 4096 bytes; one shorter than the first version,
 * EINVAL. Reserved fields and undefined flag bits must be 0, else EINVAL. The
 * kernel writes back no more than `size` bytes.
 *
 * Errors of every command, in this order and before its own: EPERM from
 * another process than the one that opened the file (after fork, fd passing or
 * exec; mmap too), ENOTTY unknown command, EFAULT the argument cannot be read,
 * EINVAL and E2BIG as above. The errors of each command are in the order in
 * which they are looked for, unless it says otherwise; ENOMEM may come in
 * between. Where nothing else is said, a command that fails has changed
 * nothing.
 *
 * EFAULT when the answer cannot be written comes last, when the command was
 * carried out: DOORBELL_IMPORT and QUEUE_ALLOC then give back what they made;
 * BIND and REBIND leave the session bound, and the others did what they do.
 *
 * All layouts are the same for 32-bit and 64-bit callers.
 */
#ifndef _UAPI_IBGDA_H
#define _UAPI_IBGDA_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define IBGDA_ABI_VERSION	1
#define IBGDA_IOC_TYPE		0xBD
#define IBGDA_PAGE_SIZE		4096

#define IBGDA_CMD_INFO			0x00
#define IBGDA_CMD_BIND			0x01
#define IBGDA_CMD_DOORBELL_IMPORT	0x02
#define IBGDA_CMD_QUEUE_ALLOC		0x03
#define IBGDA_CMD_POPULATE		0x04
#define IBGDA_CMD_STATUS		0x05
#define IBGDA_CMD_RELEASE		0x06
#define IBGDA_CMD_EVENTFD		0x07
#define IBGDA_CMD_EVENTS		0x08
#define IBGDA_CMD_REBIND		0x09

/* The number alone names the command: sizes travel in the argument. */
#define IBGDA_IOC_INFO			_IO(IBGDA_IOC_TYPE, IBGDA_CMD_INFO)
#define IBGDA_IOC_BIND			_IO(IBGDA_IOC_TYPE, IBGDA_CMD_BIND)
#define IBGDA_IOC_DOORBELL_IMPORT	_IO(IBGDA_IOC_TYPE, IBGDA_CMD_DOORBELL_IMPORT)
#define IBGDA_IOC_QUEUE_ALLOC		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_QUEUE_ALLOC)
#define IBGDA_IOC_POPULATE		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_POPULATE)
#define IBGDA_IOC_STATUS		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_STATUS)
#define IBGDA_IOC_RELEASE		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_RELEASE)
#define IBGDA_IOC_EVENTFD		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_EVENTFD)
#define IBGDA_IOC_EVENTS		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_EVENTS)
#define IBGDA_IOC_REBIND		_IO(IBGDA_IOC_TYPE, IBGDA_CMD_REBIND)

/**
 * struct ibgda_info - IBGDA_IOC_INFO: what this module offers
 * @size: sizeof(struct ibgda_info)
 * @flags: must be 0
 * @abi_version: out: IBGDA_ABI_VERSION of the module
 * @page_size: out: bytes of one doorbell page (4096)
 * @features: out: IBGDA_FEATURE_*
 * @max_doorbells: out: doorbells that one session may hold
 * @max_queues: out: queue memories that one session may hold
 * @max_queue_bytes: out: bytes of one queue memory
 *
 * Needs no bound session.
 */
struct ibgda_info {
	__u32 size;
	__u32 flags;
	__u32 abi_version;
	__u32 page_size;
	__aligned_u64 features;
	__u32 max_doorbells;
	__u32 max_queues;
	__aligned_u64 max_queue_bytes;
};

#define IBGDA_FEATURE_DOORBELL_UC	(1ULL << 0)
#define IBGDA_FEATURE_DOORBELL_WC	(1ULL << 1)
#define IBGDA_FEATURE_QUEUE_UC		(1ULL << 2)
#define IBGDA_FEATURE_QUEUE_WC		(1ULL << 3)
#define IBGDA_FEATURE_EVENTS		(1ULL << 4)	/* EVENTFD, EVENTS */
#define IBGDA_FEATURE_REBIND		(1ULL << 5)

/**
 * struct ibgda_bdf - a PCI function, as in "0000:03:00.0"
 * @domain: the domain (segment)
 * @bus: the bus
 * @device: 0..31
 * @function: 0..7
 * @reserved: must be 0
 */
struct ibgda_bdf {
	__u32 domain;
	__u8 bus;
	__u8 device;
	__u8 function;
	__u8 reserved;
};

/**
 * struct ibgda_link - a function's PCIe link
 * @speed: MT/s now (2500, 5000, 8000, ...), 0 when unknown
 * @speed_max: MT/s that the function can do
 * @width: lanes now
 * @width_max: lanes that the function can do
 */
struct ibgda_link {
	__u32 speed;
	__u32 speed_max;
	__u16 width;
	__u16 width_max;
};

/* How the GPU's posted writes reach the NIC. */
#define IBGDA_PATH_SWITCH	1	/* below one PCIe switch, no ACS redirect */
#define IBGDA_PATH_HOST_BRIDGE	2	/* through a host bridge that the kernel allows */
#define IBGDA_PATH_NONE		3	/* not reachable; only with the policy entry's any_path */

/**
 * struct ibgda_bind - IBGDA_IOC_BIND, IBGDA_IOC_REBIND: the pair of the session
 * @size: sizeof(struct ibgda_bind)
 * @flags: must be 0
 * @gpu: in: the GPU (display or 3D controller); REBIND: must be 0
 * @nic: in: the NIC, an RDMA device of mlx5_ib; REBIND: must be 0
 * @ibdev_name: out: name of the NIC's ib_device, NUL-terminated ("mlx5_0")
 * @path: out: IBGDA_PATH_*
 * @path_distance: out: the kernel's p2pdma distance, -1 when not reachable
 * @gpu_node: out: NUMA node, -1 unknown
 * @nic_node: out: NUMA node, -1 unknown
 * @gpu_link: out: the GPU's link
 * @nic_link: out: the NIC's link
 * @generation: out: 1 at BIND, one more at each return
 * @reserved: must be 0
 *
 * BIND: EINVAL a device or function number out of range; EALREADY bound; ENODEV
 * GPU absent, or NIC; EINVAL not a GPU, or not an RDMA NIC known to mlx5_ib;
 * EACCES pair not allowed; EHOSTDOWN NIC in recovery; EXDEV not reachable peer
 * to peer.
 *
 * REBIND: EINVAL functions given; ENOTCONN not bound; EINVAL not lost; ENODEV
 * GPU gone, or another device in its place; EHOSTDOWN the NIC's recovery failed,
 * or it was unplugged; EAGAIN NIC not back yet; EACCES and EXDEV as above.
 * Doorbells of the former generation stay lost.
 */
struct ibgda_bind {
	__u32 size;
	__u32 flags;
	struct ibgda_bdf gpu;
	struct ibgda_bdf nic;
	char ibdev_name[64];
	__u32 path;
	__s32 path_distance;
	__s32 gpu_node;
	__s32 nic_node;
	struct ibgda_link gpu_link;
	struct ibgda_link nic_link;
	__u32 generation;
	__u32 reserved;
};

/* Memory types of mappings. */
#define IBGDA_MEM_WB	0	/* queue memory only */
#define IBGDA_MEM_UC	1
#define IBGDA_MEM_WC	2

/**
 * struct ibgda_doorbell_import - IBGDA_IOC_DOORBELL_IMPORT: one UAR page
 * @size: sizeof(struct ibgda_doorbell_import)
 * @flags: must be 0
 * @dmabuf_fd: in: from UVERBS_METHOD_DMABUF_ALLOC on the UAR
 * @uverbs_fd: in: the uverbs file the dma-buf came from
 * @mem_type: in: IBGDA_MEM_UC or IBGDA_MEM_WC; out: the type in force
 * @handle: out: names the doorbell to POPULATE and RELEASE
 * @mmap_offset: out: for mmap(2) of exactly 4096 bytes, MAP_SHARED, no exec
 * @bar_offset: out: offset of the page in the NIC's BAR0
 *
 * The page becomes this process's, until it is dead and the file released.
 *
 * EOPNOTSUPP IBGDA_MEM_WB; EINVAL undefined mem_type; ENOTCONN not bound;
 * ENOLINK session lost; EBADF not a dma-buf, or not a uverbs file; EINVAL
 * exporter is not uverbs, not the uverbs file given, or not one page; EINVAL UAR
 * destroyed; ERANGE not in BAR0 of the bound NIC; EBUSY the type contradicts the
 * page's, or the page is still held by another owner; EDQUOT 4096 pages of the
 * process or 65536 of all are granted and not ended, or the session has
 * ibgda_info.max_doorbells; ENOLINK lost meanwhile.
 */
struct ibgda_doorbell_import {
	__u32 size;
	__u32 flags;
	__s32 dmabuf_fd;
	__s32 uverbs_fd;
	__u32 mem_type;
	__u32 handle;
	__aligned_u64 mmap_offset;
	__aligned_u64 bar_offset;
};

/**
 * struct ibgda_queue_alloc - IBGDA_IOC_QUEUE_ALLOC: pinned, zeroed host memory
 * @size: sizeof(struct ibgda_queue_alloc)
 * @flags: must be 0
 * @length: in: bytes, a multiple of 4096
 * @node: in: NUMA node, or -1 for the NIC's own
 * @mem_type: in: IBGDA_MEM_WB, _UC or _WC
 * @handle: out: names the memory to RELEASE
 * @reserved: must be 0
 * @mmap_offset: out: for mmap(2) of exactly @length bytes, MAP_SHARED
 *
 * ENOTCONN not bound; ENOLINK session lost; EINVAL length zero, unaligned or
 * larger than ibgda_info.max_queue_bytes; EOPNOTSUPP a mem_type that INFO does
 * not have among the features; EINVAL undefined mem_type; EINVAL node without
 * memory; EDQUOT RLIMIT_MEMLOCK; ENOMEM; ENOLINK lost meanwhile; EDQUOT the
 * session has ibgda_info.max_queues.
 */
struct ibgda_queue_alloc {
	__u32 size;
	__u32 flags;
	__aligned_u64 length;
	__s32 node;
	__u32 mem_type;
	__u32 handle;
	__u32 reserved;
	__aligned_u64 mmap_offset;
};

/**
 * struct ibgda_populate - IBGDA_IOC_POPULATE: fill a doorbell's page-table entry
 * @size: sizeof(struct ibgda_populate)
 * @handle: in: a doorbell
 * @address: in: where the caller mapped it
 *
 * Drivers that walk page tables (nvidia.ko) do not fault pages in. After loss a
 * doorbell's mapping leads to a private page: stores go nowhere, nothing faults.
 * ENOENT no such doorbell; ENOLINK lost, or its UAR destroyed; EFAULT not where
 * this doorbell is mapped; and of a change meanwhile ENOLINK or ENOENT, with the
 * entry made and taken away again.
 */
struct ibgda_populate {
	__u32 size;
	__u32 handle;
	__aligned_u64 address;
};

/**
 * struct ibgda_status_map - IBGDA_IOC_STATUS: where to map the status page
 * @size: sizeof(struct ibgda_status_map)
 * @flags: must be 0
 * @mmap_offset: out: for mmap(2) of 4096 bytes, PROT_READ only, MAP_SHARED
 *
 * ENOTCONN not bound.
 */
struct ibgda_status_map {
	__u32 size;
	__u32 flags;
	__aligned_u64 mmap_offset;
};

/**
 * struct ibgda_release - IBGDA_IOC_RELEASE: give a doorbell or queue memory back
 * @size: sizeof(struct ibgda_release)
 * @handle: in: a doorbell or queue memory
 *
 * The mapping is gone when the call returns. A doorbell's page stays parked for
 * this process until it is dead and the file released; it may import the same
 * page again. ENOENT no such handle.
 */
struct ibgda_release {
	__u32 size;
	__u32 handle;
};

/**
 * struct ibgda_eventfd - IBGDA_IOC_EVENTFD: be told of new event records
 * @size: sizeof(struct ibgda_eventfd)
 * @fd: in: an eventfd, or -1 to stop. EBADF not an eventfd.
 */
struct ibgda_eventfd {
	__u32 size;
	__s32 fd;
};

#define IBGDA_EVENT_LOST	1
#define IBGDA_EVENT_RECOVERED	2
#define IBGDA_EVENT_DOORBELL	3	/* one doorbell revoked: its UAR was destroyed */
#define IBGDA_EVENT_OVERFLOW	4	/* older records were dropped */

/**
 * struct ibgda_event - something that happened to the session
 * @type: IBGDA_EVENT_*
 * @reason: IBGDA_REASON_*; OVERFLOW: 0
 * @generation: the session's then; OVERFLOW: 0
 * @handle: DOORBELL: which; OVERFLOW: how many records were dropped; else 0
 * @time_ns: CLOCK_MONOTONIC; OVERFLOW: when it was taken
 */
struct ibgda_event {
	__u32 type;
	__u32 reason;
	__u32 generation;
	__u32 handle;
	__aligned_u64 time_ns;
};

/**
 * struct ibgda_events - IBGDA_IOC_EVENTS: take event records, oldest first
 * @size: sizeof(struct ibgda_events)
 * @flags: must be 0
 * @records: in: user pointer to struct ibgda_event[]
 * @capacity: in: entries there, 1..64
 * @count: out: entries written
 *
 * Of the last 64 records; when older ones were dropped, OVERFLOW comes first.
 * EINVAL capacity; EAGAIN none; EFAULT, and then no record is taken.
 */
struct ibgda_events {
	__u32 size;
	__u32 flags;
	__aligned_u64 records;
	__u32 capacity;
	__u32 count;
};

/* Status page: 64-bit little-endian words, written by the kernel only. */
#define IBGDA_STATUS_WORD_STATE		0	/* generation << 32 | IBGDA_STATE_* */
#define IBGDA_STATUS_WORD_REASON	1	/* IBGDA_REASON_* << 32 | flags */
#define IBGDA_STATUS_WORD_PORT		2	/* ib_port_state << 32 | link speed, Mb/s (0: not known yet) */
#define IBGDA_STATUS_WORD_TIME		3	/* CLOCK_MONOTONIC of the last change, ns */
#define IBGDA_STATUS_WORD_SEQUENCE	4	/* changes so far; odd while one is being written */
#define IBGDA_STATUS_WORDS		8

#define IBGDA_STATE_READY	1
#define IBGDA_STATE_LOST	2
#define IBGDA_STATE_RECOVERED	3

#define IBGDA_REASON_NONE		0
#define IBGDA_REASON_NIC_RESET		1
#define IBGDA_REASON_NIC_REMOVED	2
#define IBGDA_REASON_GPU_REMOVED	3
#define IBGDA_REASON_POLICY		4
#define IBGDA_REASON_UAR_DESTROYED	5

#endif /* _UAPI_IBGDA_H */

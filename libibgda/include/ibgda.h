/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The C view of libibgda, made by cbindgen from libibgda/src/capi.rs: do not edit. Every function returns 0 or an errno;
 * then ibgda_last_error() has the sentence. Objects may be destroyed in any order.
 */


#ifndef IBGDA_H
#define IBGDA_H

#include <stddef.h>
#include <stdint.h>
/* Device handles, regions and status codes; in the device header's folder. */
#include <ibgda/types.h>


/**
 * Peers may read the memory.
 */
#define IBGDA_ACCESS_READ 1

/**
 * Peers may write it.
 */
#define IBGDA_ACCESS_WRITE 2

/**
 * Peers may use atomics on it.
 */
#define IBGDA_ACCESS_ATOMIC 4

/**
 * Register whole pages around a range that is not aligned, and keep its address and length.
 */
#define IBGDA_MAP_ROUND 256

/**
 * Bytes of a QP's address.
 */
#define IBGDA_ADDRESS_BYTES 64

/**
 * A NIC and a GPU that may drive it.
 */
struct ibgda_context;

/**
 * A completion queue, host side; kernels use its `struct ibgda_cq`.
 */
struct ibgda_host_cq;

/**
 * A queue pair, host side; kernels use its `struct ibgda_qp`.
 */
struct ibgda_host_qp;

/**
 * Memory registered with a NIC.
 */
struct ibgda_mr;

/**
 * What to open.
 */
struct ibgda_open_attr {
  /**
   * sizeof(struct ibgda_open_attr)
   */
  uint32_t size;
  /**
   * The NIC's port, from 1.
   */
  uint32_t port;
  /**
   * The NIC: "mlx5_0", or "0000:03:00.0".
   */
  const char *nic;
  /**
   * The GPU: "0000:65:00.0".
   */
  const char *gpu;
};

/**
 * The broker's word on a NIC.
 */
struct ibgda_session_state {
  /**
   * IBGDA_STATE_* of the ioctl ABI: 1 ready, 2 lost, 3 recovered.
   */
  uint32_t state;
  /**
   * Generation the state is of.
   */
  uint32_t generation;
  /**
   * IBGDA_REASON_* of the last loss.
   */
  uint32_t reason;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * When it last changed, on CLOCK_MONOTONIC.
   */
  uint64_t changed_ns;
};

/**
 * What a queue pair is to be like. Zero in a field with a default means the default.
 */
struct ibgda_qp_attr {
  /**
   * sizeof(struct ibgda_qp_attr)
   */
  uint32_t size;
  /**
   * Send slots, a power of two up to 32768; default 128.
   */
  uint32_t send_depth;
  /**
   * Receive slots, a power of two from 4 to 32768; 0 for no receive queue.
   */
  uint32_t recv_depth;
  /**
   * IBGDA_ACCESS_*: what peers may do through this QP.
   */
  uint32_t access;
  /**
   * How long a kernel's post may wait for room, ns; default 2 s.
   */
  uint64_t post_timeout_ns;
  /**
   * How kernels use it: 0, or IBGDA_SHARED of <ibgda/types.h>.
   */
  uint32_t mode;
  /**
   * 0.
   */
  uint32_t reserved;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The sentence of the calling thread's last error: what failed, why, what to do. Valid until its next error.
 */
const char *ibgda_last_error(void);

/**
 * A device call's status in words, written into `buffer` and terminated, cut to `length`. EINVAL: no buffer.
 *
 * # Safety
 * `buffer` has `length` bytes.
 */
int ibgda_status_text(uint32_t status,
                      char *buffer,
                      size_t length);

/**
 * Binds a NIC and a GPU at the broker and opens the NIC. Errors as IBGDA_IOC_BIND; ENETDOWN: port not active.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_open(const struct ibgda_open_attr *attr,
               struct ibgda_context **context);

/**
 * Closes a context. What was made from it lives on until it is destroyed itself.
 *
 * # Safety
 * The context is null or of this library, and not used again.
 */
int ibgda_close(struct ibgda_context *context);

/**
 * Joins the NIC again after it was lost, waiting for it for at most `patience_ms`. No other thread may use the context.
 * EAGAIN, EHOSTDOWN: not back; EACCES: no longer allowed; EINVAL: not lost.
 *
 * # Safety
 * The context is null or of this library, and no other thread uses it meanwhile.
 */
int ibgda_rebind(struct ibgda_context *context,
                 uint64_t patience_ms);

/**
 * Reads the broker's status page.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_get_state(const struct ibgda_context *context, struct ibgda_session_state *state);

/**
 * Makes memory usable by the NIC. `access`: IBGDA_ACCESS_*, and IBGDA_MAP_ROUND. EINVAL: zero, or not 4 KiB-aligned (the
 * error says how to round); EFAULT: not mapped; ENOMEM: RLIMIT_MEMLOCK.
 *
 * # Safety
 * The memory stays mapped until ibgda_unmap_device; the other arguments are null or valid.
 */
int ibgda_map_device(struct ibgda_context *context,
                     void *ptr,
                     size_t length,
                     uint32_t access,
                     struct ibgda_mr **mr);

/**
 * Takes the NIC's right to the memory back.
 *
 * # Safety
 * The region is null or of this library, and not used again.
 */
int ibgda_unmap_device(struct ibgda_mr *mr);

/**
 * Address, length and keys, for kernels and peers.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_mr_region(const struct ibgda_mr *mr, struct ibgda_region *region);

/**
 * Creates a completion queue of `entries` entries, a power of two up to 32768. It serves one work queue.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_create_cq(struct ibgda_context *context,
                    uint32_t entries,
                    struct ibgda_host_cq **cq);

/**
 * Destroys a completion queue, or lets its QP be the last to hold it.
 *
 * # Safety
 * The queue is null or of this library, and not used again.
 */
int ibgda_destroy_cq(struct ibgda_host_cq *cq);

/**
 * What a kernel polls. Valid as long as the queue, or a QP that uses it.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_cq_device_handle(const struct ibgda_host_cq *cq, struct ibgda_cq **handle);

/**
 * Creates a queue pair with a doorbell page of its own. `recv_cq` is null exactly when attr's recv_depth is 0. EINVAL:
 * depths, or a CQ that is too small; EBUSY: a CQ that serves another queue; also those of IBGDA_IOC_DOORBELL_IMPORT and
 * IBGDA_IOC_QUEUE_ALLOC, and firmware's.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_create_qp(struct ibgda_context *context,
                    const struct ibgda_qp_attr *attr,
                    const struct ibgda_host_cq *send_cq,
                    const struct ibgda_host_cq *recv_cq,
                    struct ibgda_host_qp **qp);

/**
 * Destroys a queue pair.
 *
 * # Safety
 * The QP is null or of this library, and not used again, by a kernel neither.
 */
int ibgda_destroy_qp(struct ibgda_host_qp *qp);

/**
 * What the peer needs to connect to this QP: IBGDA_ADDRESS_BYTES bytes, to carry by any means.
 *
 * # Safety
 * The QP is null or valid, the address null or of IBGDA_ADDRESS_BYTES bytes.
 */
int ibgda_qp_address(const struct ibgda_host_qp *qp, uint8_t *address);

/**
 * Joins a QP to the peer whose address this is. EINVAL: not an address, and why; EISCONN: connected before.
 *
 * # Safety
 * The QP is null or valid, the address null or of `length` bytes.
 */
int ibgda_qp_connect(struct ibgda_host_qp *qp,
                     const void *address,
                     size_t length);

/**
 * Stops a QP: requests under way and later ones are flushed, each with an error completion.
 *
 * # Safety
 * The QP is null or valid.
 */
int ibgda_qp_stop(struct ibgda_host_qp *qp);

/**
 * What a kernel posts with. Valid as long as the QP; one thread at a time may use it.
 *
 * # Safety
 * The arguments are null or valid.
 */
int ibgda_qp_device_handle(const struct ibgda_host_qp *qp, struct ibgda_qp **handle);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* IBGDA_H */
